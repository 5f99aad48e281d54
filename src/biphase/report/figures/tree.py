"""The plan as a drawing: what is trained from what, over steps, and which results lie where.

────────────┬──────────●╌╌╌╌ result      a row for each way to an end; a trunk stays on its row,
            │   ┌──────●╌╌╌╌ result      what leaves it later lies nearer to it, so that no line
            └───●╌╌╌╌╌╌╌╌╌╌╌ result      crosses another
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from biphase.keys import label
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import thousands
from biphase.report.figures.description import Axis, Figure, Look, Panel, Series, Side
from biphase.report.figures.palette import NAMES, role_of_way
from biphase.report.figures.ticks import from_zero
from biphase.study.plan import Plan, State
from biphase.study.tree import titles
from biphase.wording import counted, short

CHECKPOINT_ROOM = 0.7  # of a row, above one that has labels of checkpoints on it
CHECKPOINT_ABOVE = 0.18  # of a row: clear of the line below
CHECKPOINT_APART = 0.08  # of the steps: labels of checkpoints nearer to each other are left out


@dataclass(frozen=True)
class _Placed:
    state: State
    row: float
    leaves: float  # the row of what it begins from
    goes_on: bool  # its row does not end here


def figure(evidence: Evidence) -> Figure | None:
    plan = evidence.plan
    if not plan.states:
        return None
    placed, heads, rows = _places(plan)
    standing = {piece.key: piece.standing for piece in evidence.pieces}
    done = sum(one == "done" for one in standing.values())
    last = max(one.state.span[1] for one in placed)
    series = [
        _joints(placed),
        *_pieces(plan, placed, standing),
        *_results(placed, standing),
        *_labels(placed, last),
        _heads(heads),
    ]
    ticks = from_zero(last)
    room = max(len(_names(one.state)) for one in placed if not one.goes_on) + 3
    panel = Panel(
        "",
        Axis("step", ticks=ticks, labels=tuple(map(short, ticks)), range=(-0.01 * last, 1.01 * last)),
        Axis(range=(rows - 0.4, -0.7), shown=False, grid=False),
        tuple(one for one in series if one.x),
        rows=math.ceil(rows) + 1,
        label_room=room,
    )
    caption = (
        f"{counted(len(plan.study.runs), 'run')} as {counted(plan.pieces, 'piece')}: what begins alike is trained once "
        f"({plan.steps_to_compute:,} steps instead of {plan.steps_written:,}). Thin: the learning rate comes down. "
        f"Filled marks are computed: {done} of {plan.pieces}."
    )
    return Figure("tree", "What is trained from what", caption, (panel,))


# ---------------------------------------------------------------- rows


def _places(plan: Plan) -> tuple[list[_Placed], list[tuple[float, str]], float]:
    """Every state on a row, the rows with the names of starts, and how many rows there are."""
    below: dict[str, list[State]] = {}
    for state in plan.states.values():
        below.setdefault(state.parent or state.root, []).append(state)
    onward = _onward(plan, below)
    names = titles(list(plan.roots.values()), trained=set(below))
    placed: list[_Placed] = []
    heads: list[tuple[float, str]] = []
    row = 0.0
    for root in plan.roots:
        if root not in below:
            continue  # a model as it is: nothing is trained from it
        heads.append((row, names[root]))
        row += 1
        for first in below[root]:
            row = _way(first, row, None, below, onward, placed)
    return placed, heads, row


def _onward(plan: Plan, below: dict[str, list[State]]) -> dict[str, State]:
    """State → the child that goes on beside it on its row: the one that reaches furthest without a new run."""
    reach: dict[str, tuple[int, int]] = {}
    onward: dict[str, State] = {}
    for key, state in reversed(plan.states.items()):  # children come before their parents
        same = [child for child in below.get(key, []) if child.first > 0]
        if same:
            onward[key] = max(same, key=lambda child: reach[child.key])
        end, pieces = reach[onward[key].key] if same else (state.span[1], 0)
        reach[key] = end, pieces + 1
    return onward


def _way(
    first: State,
    row: float,
    leaves: float | None,
    below: dict[str, list[State]],
    onward: dict[str, State],
    placed: list[_Placed],
) -> float:
    """Put a state and all that comes from it on rows from `row` on; the next free row."""
    trunk = [first]
    while trunk[-1].key in onward:
        trunk.append(onward[trunk[-1].key])
    goes_on = {state.key for state in trunk[:-1]}
    if any(state.results for state in trunk[:-1]):
        row += CHECKPOINT_ROOM
    placed += [
        _Placed(one, row, leaves if one is first and leaves is not None else row, one.key in goes_on)
        for one in trunk
    ]
    free = row + 1
    for state in reversed(trunk):  # what leaves last lies nearest
        for child in below.get(state.key, []):
            if child is not onward.get(state.key):
                free = _way(child, free, row, below, onward, placed)
    return free


# ---------------------------------------------------------------- series


def _pieces(plan: Plan, placed: list[_Placed], standing: dict[str, str]) -> list[Series]:
    """One series for each hue and for its decays: bars broken between pieces."""
    groups: dict[tuple[str, bool], list[_Placed]] = {}
    for one in placed:
        role = role_of_way(state.objective for state in plan.path(one.state.key))
        groups.setdefault((role, one.state.decaying), []).append(one)
    made = []
    for (role, decaying), some in sorted(groups.items()):
        x: list[float] = []
        y: list[float] = []
        hover: list[str] = []
        for one in some:
            first, until = one.state.span
            x += [first, (first + until) / 2, until, float("nan")]
            y += [one.row] * 3 + [float("nan")]
            hover += [_about(one.state, standing)] * 3 + [""]
        look = Look(role, "-soft" if decaying else "", width=1.3 if decaying else 2.6)
        name = f"{NAMES[role]}{', decay' if decaying else ''}"
        made.append(Series(name, look, tuple(x), tuple(y), draws="line", hover=tuple(hover)))
    return made


def _about(state: State, standing: dict[str, str]) -> str:
    first, until = state.span
    lines = [f"{label(state.objective)} {first:,} → {until:,}{', decaying' if state.decaying else ''}"]
    lines += state.results
    lines += [f"{state.key[:8]}, {standing[state.key]}"]
    return "\n".join(lines)


def _joints(placed: list[_Placed]) -> Series:
    """Thin uprights from a trunk to what leaves it."""
    x: list[float] = []
    y: list[float] = []
    for one in placed:
        if one.row != one.leaves:
            at = one.state.span[0]
            x += [at, at, float("nan")]
            y += [one.leaves, one.row, float("nan")]
    return Series("joints", Look("muted", width=0.6), tuple(x), tuple(y), draws="line", legend=False)


def _results(placed: list[_Placed], standing: dict[str, str]) -> list[Series]:
    """A mark at each result: filled where it is computed."""
    made = []
    for there in (True, False):
        some = [one for one in placed if one.state.results and (standing[one.state.key] == "done") is there]
        made.append(
            Series(
                "results",
                Look("other", hollow=not there, size=0.65),
                tuple(float(one.state.span[1]) for one in some),
                tuple(float(one.row) for one in some),
                draws="points",
                hover=tuple(_about(one.state, standing) for one in some),
                legend=False,
            )
        )
    return made


def _labels(placed: list[_Placed], last: int) -> list[Series]:
    """Names right of the ends of rows; above a row, the steps of checkpoints that lie on it."""
    ends = [one for one in placed if one.state.results and not one.goes_on]
    on_the_way: list[_Placed] = []
    for one in placed:
        if one.state.results and one.goes_on:
            before = [other for other in on_the_way if other.row == one.row]
            if not before or one.state.span[1] - before[-1].state.span[1] >= CHECKPOINT_APART * last:
                on_the_way.append(one)
    return [
        _texts([(one, _names(one.state)) for one in ends], "right"),
        _texts([(one, _short(one.state)) for one in on_the_way], "above"),
    ]


def _texts(some: list[tuple[_Placed, str]], side: Side) -> Series:
    return Series(
        "labels",
        Look("text"),
        tuple(float(one.state.span[1]) for one, _ in some),
        tuple(one.row - (CHECKPOINT_ABOVE if side == "above" else 0.0) for one, _ in some),
        draws="text",
        labels=tuple(text for _, text in some),
        side=side,
        legend=False,
    )


def _names(state: State) -> str:
    return ", ".join(state.results)


def _short(state: State) -> str:
    """A checkpoint by its step; a run that ends here by its name."""
    kept = all(name.endswith(f"-{state.step}") for name in state.results)
    return thousands(state.step) if kept else _names(state)


def _heads(heads: list[tuple[float, str]]) -> Series:
    return Series(
        "starts",
        Look("muted"),
        tuple(0.0 for _ in heads),
        tuple(float(row) for row, _ in heads),
        draws="text",
        labels=tuple(text for _, text in heads),
        legend=False,
    )
