"""What the page tells of each run: a row of numbers, and the facts and pieces that open below it."""

from __future__ import annotations

from typing import Any

from biphase.report.content import Content
from biphase.report.numerals import MISSING, fixed, plain
from biphase.report.pretraining import Piece
from biphase.report.runs import Run
from biphase.wording import duration, short


def runs(content: Content) -> list[dict[str, Any]]:
    tuned = bool(content.evidence.tasks)
    return [_run(one, tuned=tuned) for one in content.runs]


def _run(one: Run, *, tuned: bool) -> dict[str, Any]:
    cells = [
        _count(one.recipe.tokens),
        _flops(one.flops),
        _time(one.seconds, one.devices),
        *(_fixed(one.heldout.get(name), 3) for name in ("clm", "mlm40")),
        _fixed(one.epochs, 2),
    ]
    done, of = one.leaves
    return {
        "name": one.name,
        "recipe": one.recipe.words(),
        "cells": cells + ([(str(done), f"{done:,}/{of:,}")] if tuned else []),
        "standing": one.standing,
        "facts": _facts(one),
        "way": [_piece(piece) for piece in one.way],
    }


def _facts(one: Run) -> list[tuple[str, str]]:
    recipe = one.recipe
    facts = [("Recipe", recipe.words()), ("Key", one.key), ("Pretraining seed", str(one.seed))]
    if recipe.parameters:
        facts.append(("Parameters", f"{recipe.parameters:,}"))
    if recipe.steps:
        facts.append(("Steps", f"{recipe.steps:,} of {recipe.tokens // recipe.steps:,} tokens each"))
    if one.device:
        facts.append(("Device", f"{one.devices} × {one.device}" if one.devices > 1 else one.device))
    if one.heldout:
        losses = [f"{name} {loss:.3f}" for name, loss in one.heldout.items()]
        facts.append(("Held-out loss, nats", ", ".join(losses)))
    if one.wrong:
        facts.append(("Cannot be read", one.wrong))
    if one.joules:
        facts.append(("Energy", f"{one.joules / 3.6e6:,.3f} kWh"))
    return facts


def _piece(piece: Piece) -> tuple[str, ...]:
    return (
        piece.title + (" ↘" if piece.decaying else ""),
        piece.key[:12],
        _count(piece.tokens)[1],
        _flops(piece.flops)[1],
        _time(piece.seconds, piece.devices)[1],
        piece.device,
        piece.standing,
    )


def _count(number: int) -> tuple[str, str]:
    return str(number), short(number) if number else MISSING


def _flops(number: float | None) -> tuple[str, str]:
    return ("", MISSING) if not number else (f"{number:.6g}", f"{number:.2e}".replace("e+", "e"))


def _time(seconds: float | None, devices: int) -> tuple[str, str]:
    return ("", MISSING) if seconds is None else (plain(seconds * devices, 1), duration(seconds * devices))


def _fixed(value: float | None, digits: int) -> tuple[str, str]:
    return ("", MISSING) if value is None else (plain(value, 6), fixed(value, digits))
