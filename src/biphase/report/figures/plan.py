"""The figure of the plan (which checkpoint is trained from which, over steps) and the figure of its costs.

────────────┬──────────●╌╌╌╌ result      a row for each path to an end; the longest continuation
            │   ┌──────●╌╌╌╌ result      stays on its parent's row, and later branches lie nearer
            └───●╌╌╌╌╌╌╌╌╌╌╌ result      to it, so that no line crosses another
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np

from biphase.report.evidence import Evidence
from biphase.report.figures.description import (
    NAMES,
    Axis,
    Figure,
    Panel,
    Series,
    Side,
    Style,
    from_zero,
    role_of_way,
    thousands,
)
from biphase.report.pretraining import JobCost
from biphase.report.recipes import named
from biphase.specs import Pretrain
from biphase.study.describe import titles
from biphase.study.plan import Plan, TrainingJob
from biphase.text import counted, short

CHECKPOINT_ROOM = 0.7  # of a row, above one that has checkpoint labels
CHECKPOINT_ABOVE = 0.18  # of a row: distance of a label from its line
CHECKPOINT_APART = 0.08  # share of the steps: nearer checkpoint labels are left out


@dataclass(frozen=True)
class _Placed:
    job: TrainingJob
    row: float
    trials: float  # the row of its parent
    goes_on: bool  # its row continues after it


def tree_figure(evidence: Evidence) -> Figure | None:
    """Which checkpoint is trained from which, over steps, and where the results lie."""
    plan = evidence.plan
    if not plan.jobs:
        return None
    placed, heads, rows = _places(plan)
    standing = {cost.key: cost.standing for cost in evidence.job_costs}
    done = sum(one == "done" for one in standing.values())
    last = max(one.job.span[1] for one in placed)
    series = [
        _joints(placed),
        *_jobs(plan, placed, standing),
        *_results(placed, standing),
        *_labels(placed, last),
        _heads(heads),
    ]
    ticks = from_zero(last)
    room = max(len(_names(one.job)) for one in placed if not one.goes_on) + 3
    panel = Panel(
        "",
        Axis("step", ticks=ticks, labels=tuple(map(short, ticks)), range=(-0.01 * last, 1.01 * last)),
        Axis(range=(rows - 0.4, -0.7), shown=False, grid=False),
        tuple(one for one in series if one.x),
        rows=math.ceil(rows) + 1,
        label_room=room,
    )
    caption = (
        f"{counted(len(plan.study.runs), 'run')} as {counted(plan.job_count, 'training job')}: what begins alike is trained once "
        f"({plan.steps_to_compute:,} steps instead of {plan.steps_written:,}). Thin: the learning rate comes down. "
        f"Filled marks are computed: {done} of {plan.job_count}."
    )
    return Figure("tree", "What is trained from what", caption, (panel,))


# ---------------------------------------------------------------- rows


def _places(plan: Plan) -> tuple[list[_Placed], list[tuple[float, str]], float]:
    """Assign training jobs to rows. Returns them, the rows with the names of starts, and the number of rows."""
    below: dict[str, list[TrainingJob]] = {}
    for job in plan.jobs.values():
        below.setdefault(job.parent or job.root, []).append(job)
    onward = _onward(plan, below)
    names = titles(list(plan.roots.values()), trained=set(below))
    placed: list[_Placed] = []
    heads: list[tuple[float, str]] = []
    row = 0.0
    for root in plan.roots:
        if root not in below:
            continue  # a published model without further training
        heads.append((row, names[root]))
        row += 1
        for first in below[root]:
            row = _way(first, row, None, below, onward, placed)
    return placed, heads, row


def _onward(plan: Plan, below: dict[str, list[TrainingJob]]) -> dict[str, TrainingJob]:
    """Job key → the child that continues on its row: the one that reaches furthest without starting a new run."""
    reach: dict[str, tuple[int, int]] = {}
    onward: dict[str, TrainingJob] = {}
    for key, job in reversed(plan.jobs.items()):  # children come before their parents
        same = [child for child in below.get(key, []) if child.first > 0]
        if same:
            onward[key] = max(same, key=lambda child: reach[child.key])
        end, job_costs = reach[onward[key].key] if same else (job.span[1], 0)
        reach[key] = end, job_costs + 1
    return onward


def _way(
    first: TrainingJob,
    row: float,
    trials: float | None,
    below: dict[str, list[TrainingJob]],
    onward: dict[str, TrainingJob],
    placed: list[_Placed],
) -> float:
    """Place a job and its descendants on rows from `row` on; returns the next free row."""
    trunk = [first]
    while trunk[-1].key in onward:
        trunk.append(onward[trunk[-1].key])
    goes_on = {job.key for job in trunk[:-1]}
    if any(job.results for job in trunk[:-1]):
        row += CHECKPOINT_ROOM
    placed += [
        _Placed(one, row, trials if one is first and trials is not None else row, one.key in goes_on)
        for one in trunk
    ]
    free = row + 1
    for job in reversed(trunk):  # the last branch lies nearest
        for child in below.get(job.key, []):
            if child is not onward.get(job.key):
                free = _way(child, free, row, below, onward, placed)
    return free


# ---------------------------------------------------------------- series


def _jobs(plan: Plan, placed: list[_Placed], standing: dict[str, str]) -> list[Series]:
    """One series for each role, and one for its decays: bars broken between training jobs."""
    groups: dict[tuple[str, bool], list[_Placed]] = {}
    for one in placed:
        role = role_of_way(job.objective for job in plan.path(one.job.key))
        groups.setdefault((role, one.job.decaying), []).append(one)
    made = []
    for (role, decaying), some in sorted(groups.items()):
        x: list[float] = []
        y: list[float] = []
        hover: list[str] = []
        for one in some:
            first, until = one.job.span
            x += [first, (first + until) / 2, until, float("nan")]
            y += [one.row] * 3 + [float("nan")]
            hover += [_about(one.job, standing)] * 3 + [""]
        look = Style(role, "-soft" if decaying else "", width=1.3 if decaying else 2.6)
        name = f"{NAMES[role]}{', decay' if decaying else ''}"
        made.append(Series(name, look, tuple(x), tuple(y), draws="line", hover=tuple(hover)))
    return made


def _about(job: TrainingJob, standing: dict[str, str]) -> str:
    first, until = job.span
    lines = [f"{job.objective.label} {first:,} → {until:,}{', decaying' if job.decaying else ''}"]
    lines += job.results
    lines += [f"{job.key[:8]}, {standing[job.key]}"]
    return "\n".join(lines)


def _joints(placed: list[_Placed]) -> Series:
    """Thin vertical lines from a row to its branches."""
    x: list[float] = []
    y: list[float] = []
    for one in placed:
        if one.row != one.trials:
            at = one.job.span[0]
            x += [at, at, float("nan")]
            y += [one.trials, one.row, float("nan")]
    return Series("joints", Style("muted", width=0.6), tuple(x), tuple(y), draws="line", legend=False)


def _results(placed: list[_Placed], standing: dict[str, str]) -> list[Series]:
    """A marker at each result; filled if it is computed."""
    made = []
    for there in (True, False):
        some = [one for one in placed if one.job.results and (standing[one.job.key] == "done") is there]
        made.append(
            Series(
                "results",
                Style("other", hollow=not there, size=0.65),
                tuple(float(one.job.span[1]) for one in some),
                tuple(float(one.row) for one in some),
                draws="points",
                hover=tuple(_about(one.job, standing) for one in some),
                legend=False,
            )
        )
    return made


def _labels(placed: list[_Placed], last: int) -> list[Series]:
    """Result names right of the ends of rows; above a row, the steps of its intermediate checkpoints."""
    ends = [one for one in placed if one.job.results and not one.goes_on]
    on_the_way: list[_Placed] = []
    for one in placed:
        if one.job.results and one.goes_on:
            before = [other for other in on_the_way if other.row == one.row]
            if not before or one.job.span[1] - before[-1].job.span[1] >= CHECKPOINT_APART * last:
                on_the_way.append(one)
    return [
        _texts([(one, _names(one.job)) for one in ends], "right"),
        _texts([(one, _short(one.job)) for one in on_the_way], "above"),
    ]


def _texts(some: list[tuple[_Placed, str]], side: Side) -> Series:
    return Series(
        "labels",
        Style("text"),
        tuple(float(one.job.span[1]) for one, _ in some),
        tuple(one.row - (CHECKPOINT_ABOVE if side == "above" else 0.0) for one, _ in some),
        draws="text",
        labels=tuple(text for _, text in some),
        side=side,
        legend=False,
    )


def _names(job: TrainingJob) -> str:
    return ", ".join(job.results)


def _short(job: TrainingJob) -> str:
    """A kept checkpoint by its step; the end of a run by its name."""
    kept = all(name.endswith(f"-{job.step}") for name in job.results)
    return thousands(job.step) if kept else _names(job)


def _heads(heads: list[tuple[float, str]]) -> Series:
    return Series(
        "starts",
        Style("muted"),
        tuple(0.0 for _ in heads),
        tuple(float(row) for row, _ in heads),
        draws="text",
        labels=tuple(text for _, text in heads),
        legend=False,
    )


# ---------------------------------------------------------------- costs
# Time is seconds × devices on the machine that computed each training job: GPU-hours on GPUs, hours on a CPU. Jobs that
# were imported without their times are not counted, and the caption says so.


# The names that Python gives to CPUs; a GPU reports its own name.
PROCESSOR = re.compile(r"(x86|i\d86|amd64|intel64|arm|aarch64|ppc|power|riscv|s390)", re.IGNORECASE)


@dataclass(frozen=True)
class _Bar:
    """One bar: seconds × devices, with the decay counted separately."""

    name: str
    role: str
    plain: float
    decays: float
    about: str

    @property
    def whole(self) -> float:
        return self.plain + self.decays


def costs_figure(evidence: Evidence) -> Figure | None:
    """The time of pretraining by objective and of fine-tuning by task."""
    work = evidence.job_costs
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


def _caption(evidence: Evidence, work: list[JobCost], totals: list[str], unit: str) -> str:
    said = [
        f"{' and '.join(totals).capitalize()} {unit}; the time of all processes added up; those that share a device count it each."
    ]
    untimed = sum(one.seconds is None for one in work)
    if untimed:
        said.append(f"{counted(untimed, 'training job')} of {len(work)} not computed, or without times.")
    done, of = evidence.count
    if done < of:
        said.append(f"{of - done:,} of {counted(of, 'fine-tuning')} not computed.")
    return " ".join(said)


def _pretraining(plan: Plan, work: list[JobCost]) -> list[_Bar]:
    """The time by objective: CLM, MLM at each ratio, MLM after CLM, and continued training."""
    found: dict[tuple[str, str], list[JobCost]] = {}
    for cost in work:
        if cost.seconds is not None:
            found.setdefault(_what(plan, cost), []).append(cost)
    bars = []
    for (role, name), some in sorted(
        found.items(), key=lambda one: (list(NAMES).index(one[0][0]), one[0][1])
    ):
        took = [(cost.decaying, (cost.seconds or 0.0) * cost.devices) for cost in some]
        steps = sum(cost.steps[1] - cost.steps[0] for cost in some)
        about = f"{counted(len(some), 'training job')}, {steps:,} steps, {short(sum(cost.tokens for cost in some))} tokens"
        plain, decays = (sum(took for decaying, took in took if decaying is which) for which in (False, True))
        bars.append(_Bar(name, role, plain, decays, about))
    return bars


def _what(plan: Plan, cost: JobCost) -> tuple[str, str]:
    """The role and the name of what a training job trains."""
    job = plan.jobs[cost.key]
    name = named(job.objective.label)
    way = [one.objective for one in plan.path(job.key)]
    before = [one for one in way if one != job.objective]
    after = f" after {named(before[-1].label)}" if before else ""
    continued = ", continued" if isinstance(job.run.start, Pretrain) else ""
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
                        Style(role, shade),
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
        Style("text"),
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
    """The unit of time in which the longest bar is at least 1."""
    name, seconds = next(
        one
        for one in (("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0))
        if longest >= one[1] or one[1] == 1
    )
    return (f"GPU-{name}" if on_gpu else name), seconds


def _amount(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.3g}"


def _on_gpu(evidence: Evidence, work: list[JobCost]) -> bool:
    """Whether every known device is a GPU, judged by its name."""
    machines = [machine for grid in evidence.grids.values() for machine in grid.machines]
    devices = {cost.device for cost in work} | {str(machine.get("device", "")) for machine in machines}
    return not any(PROCESSOR.match(one) for one in devices) and bool(devices - {""})
