"""Where the hours went: pretraining by what was trained, fine-tuning by task.

Hours are seconds × devices, on the machine that computed each piece: GPU-hours on GPUs, plain hours on a CPU. What was
computed elsewhere and came without its times is not counted, and the caption says so.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from biphase.keys import label
from biphase.report.evidence import Evidence
from biphase.report.figures.description import Axis, Figure, Look, Panel, Series
from biphase.report.figures.palette import NAMES, role_of_way
from biphase.report.pretraining import Piece
from biphase.report.recipes import named
from biphase.specs import Pretrain
from biphase.study.plan import Plan
from biphase.wording import counted, short

# What Python calls a processor; a GPU has a name of its own.
PROCESSOR = re.compile(r"(x86|i\d86|amd64|intel64|arm|aarch64|ppc|power|riscv|s390)", re.IGNORECASE)


@dataclass(frozen=True)
class _Bar:
    """A row of a panel: seconds × devices, those of decays apart."""

    name: str
    role: str
    plain: float
    decays: float
    about: str

    @property
    def whole(self) -> float:
        return self.plain + self.decays


def figure(evidence: Evidence) -> Figure | None:
    work = evidence.pieces
    trained, tuned = _pretraining(evidence.plan, work), _finetuning(evidence)
    bars = [*trained, *tuned]
    if not bars:
        return None
    unit, seconds = _unit(max(one.whole for one in bars), _on_gpu(evidence, work))
    panels = [
        _panel(title, some, unit, seconds)
        for title, some in (("Pretraining", trained), ("Fine-tuning", tuned))
        if some
    ]
    totals = [
        f"{title} {_amount(sum(one.whole for one in some) / seconds)}"
        for title, some in (("pretraining", trained), ("fine-tuning", tuned))
        if some
    ]
    return Figure("costs", "Where the time went", _caption(evidence, work, totals, unit), tuple(panels))


def _caption(evidence: Evidence, work: list[Piece], totals: list[str], unit: str) -> str:
    said = [
        f"{' and '.join(totals).capitalize()} {unit}; the time of all processes added up; those that share a device count it each."
    ]
    untimed = sum(one.seconds is None for one in work)
    if untimed:
        said.append(f"{counted(untimed, 'piece')} of {len(work)} not computed, or without times.")
    done, of = evidence.count
    if done < of:
        said.append(f"{of - done:,} of {counted(of, 'fine-tuning')} not computed.")
    return " ".join(said)


def _pretraining(plan: Plan, work: list[Piece]) -> list[_Bar]:
    """Seconds × devices of what was trained: CLM, MLM at each ratio, MLM after CLM, and continued."""
    found: dict[tuple[str, str], list[Piece]] = {}
    for piece in work:
        if piece.seconds is not None:
            found.setdefault(_what(plan, piece), []).append(piece)
    bars = []
    for (role, name), some in sorted(
        found.items(), key=lambda one: (list(NAMES).index(one[0][0]), one[0][1])
    ):
        took = [(piece.decaying, (piece.seconds or 0.0) * piece.devices) for piece in some]
        steps = sum(piece.steps[1] - piece.steps[0] for piece in some)
        about = f"{counted(len(some), 'piece')}, {steps:,} steps, {short(sum(piece.tokens for piece in some))} tokens"
        plain, decays = (sum(took for decaying, took in took if decaying is which) for which in (False, True))
        bars.append(_Bar(name, role, plain, decays, about))
    return bars


def _what(plan: Plan, piece: Piece) -> tuple[str, str]:
    """The role and the name of what a piece trains."""
    state = plan.states[piece.key]
    name = named(label(state.objective))
    way = [one.objective for one in plan.path(state.key)]
    before = [one for one in way if one != state.objective]
    after = f" after {named(label(before[-1]))}" if before else ""
    continued = ", continued" if isinstance(state.run.start, Pretrain) else ""
    return role_of_way(way), f"{name}{after}{continued}"


def _finetuning(evidence: Evidence) -> list[_Bar]:
    bars = []
    for task in evidence.tasks:
        grids = [grid for (_, name), grid in evidence.grids.items() if name == task]
        done = sum(grid.done for grid in grids)
        if done:
            seconds = float(sum(np.nansum(grid.seconds) for grid in grids))
            bars.append(
                _Bar(
                    task,
                    "finetune",
                    seconds,
                    0.0,
                    f"{done:,} of {counted(sum(g.of for g in grids), 'score')}",
                )
            )
    return bars


def _panel(title: str, bars: list[_Bar], unit: str, seconds: float) -> Panel:
    series = []
    for ending, part, shade in (("", "plain", ""), (", decay", "decays", "-soft")):
        for role in dict.fromkeys(one.role for one in bars):
            some = [(row, one) for row, one in enumerate(bars) if one.role == role and getattr(one, part) > 0]
            if some:
                series.append(
                    Series(
                        f"{NAMES.get(role, role)}{ending}",
                        Look(role, shade),
                        tuple(getattr(one, part) / seconds for _, one in some),
                        tuple(float(row) for row, _ in some),
                        draws="bars",
                        hover=tuple(
                            f"{one.name}{ending}\n{_amount(getattr(one, part) / seconds)} {unit}\n{one.about}"
                            for _, one in some
                        ),
                        legend=role in NAMES,
                    )
                )
    ends = Series(
        "amounts",
        Look("text"),
        tuple(one.whole / seconds for one in bars),
        tuple(float(row) for row in range(len(bars))),
        draws="text",
        labels=tuple(_amount(one.whole / seconds) for one in bars),
        legend=False,
    )
    longest = max(one.whole for one in bars) / seconds
    return Panel(
        title,
        Axis(unit, range=(0, longest)),
        Axis(
            "",
            ticks=tuple(range(len(bars))),
            labels=tuple(one.name for one in bars),
            range=(len(bars) - 0.5, -0.5),
            grid=False,
        ),
        (*series, ends),
        rows=max(4, len(bars)),
        label_room=8,
    )


def _unit(longest: float, on_gpu: bool) -> tuple[str, float]:
    """What to count in, so that the longest bar is a number a person reads."""
    name, seconds = next(
        one
        for one in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if longest >= one[1] or one[1] == 1
    )
    return (f"GPU-{name}" if on_gpu else name), seconds


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _on_gpu(evidence: Evidence, work: list[Piece]) -> bool:
    """Did every device that is known to have worked here bear the name of a GPU?"""
    machines = [machine for grid in evidence.grids.values() for machine in grid.machines]
    devices = {piece.device for piece in work} | {str(machine.get("device", "")) for machine in machines}
    return not any(PROCESSOR.match(one) for one in devices) and bool(devices - {""})
