"""What stands below a plan's tree: sums, what they cost, what is done and what to type next.

On a measured device hours are predicted, fine-tunings included; on another they are FLOPs at a share of its peak.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from biphase.files import Store
from biphase.presets import DEVICES
from biphase.study.costs import Costs, costs
from biphase.study.machines import MEASURE, machine_named
from biphase.study.plan import Plan
from biphase.study.prices import Grid, Prices, left_of, price, prices_json
from biphase.wording import counted, short, si

PAGE = 110
EFFICIENCY = 0.4  # of a device's peak is good for training


@dataclass(frozen=True)
class Bill:
    """How a plan is priced: by measured speeds, or by FLOPs at a share of the device's peak."""

    device: str
    efficiency: float | None  # None: by measured speeds
    prices: Prices | None = None
    tunings_left: dict[Grid, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def bill(
    plan: Plan, store: Store, device: str, efficiency: float | None, *, tuned: int, measure: str = MEASURE
) -> Bill:
    """Prices on a named device. A stated efficiency asks for FLOPs, also where speeds were measured.

    `measure`: what to type to measure a device into this store.
    """
    machine = machine_named(device, store, measure=measure)
    if efficiency is not None:
        return Bill(device, efficiency)
    if machine is None:
        without = ", without fine-tunings" if plan.study.finetune else ""
        why = f"{device} was not measured: hours are FLOPs at a share of its peak{without}. There, type: {measure}"
        return Bill(device, EFFICIENCY, notes=(why,))
    made = price(plan, machine, measure=measure)
    nothing = plan.states and not made.pieces and not made.tunings
    if nothing and made.unmeasured and device in DEVICES and costs(plan).flops is not None:
        why = f"hours are FLOPs at a share of the peak: steps like these were not measured on {device}"
        others = (note for note in made.notes if note not in made.unmeasured)
        return Bill(device, EFFICIENCY, notes=(why, *others))
    return Bill(device, None, made, left_of(plan, store) if tuned else made.grids, made.notes)


def bill_json(plan: Plan, made: Bill, left: Collection[str]) -> dict[str, Any]:
    """What everything costs, and what is left, for a program."""
    every, rest = costs(plan), costs(plan, left)

    def numbers(some: Costs, keys: Collection[str] | None) -> dict[str, Any]:
        hours = _pretraining_hours(made, some, keys)
        return {"tokens": some.tokens, "flops": some.flops, "device_hours": hours, "disk_bytes": some.disk}

    return {
        "device": made.device,
        "efficiency": made.efficiency,
        "costs": numbers(every, None),
        "costs_left": numbers(rest, left),
        "prices": prices_json(made.prices, left, made.tunings_left) if made.prices else None,
        "notes": [*every.notes, *made.notes],
    }


def summary(plan: Plan, done: Collection[str], tuned: int, made: Bill, command_path: str) -> list[str]:
    """The lines below the tree."""
    every, left = costs(plan), plan.left(done)
    trainings, scores = leaves(plan)
    written, to_compute = plan.steps_written, plan.steps_to_compute
    shared = f" ({written:,} as written, {written - to_compute:,} shared)" if written > to_compute else ""
    parts = [counted(len(plan.study.runs), "run")]
    if plan.states:
        parts += [
            counted(plan.pieces, "piece"),
            f"{counted(to_compute, 'step')} to compute{shared}",
            f"{short(every.tokens)} tokens",
        ]
    parts += [f"{every.flops:.2e} FLOPs"] if plan.states and every.flops is not None else []
    parts += _hours_parts(plan, made, every)
    parts += [f"{si(every.disk)}B of disk"] if plan.states and every.disk is not None else []
    if trainings:
        parts += [counted(trainings, "fine-tuning"), counted(scores, "score")]
    return [*_flow(parts), *every.notes, *made.notes, _next(plan, left, tuned, made, command_path)]


def _hours_parts(plan: Plan, made: Bill, every: Costs) -> list[str]:
    """What the plan takes, as parts of the summary."""
    device = made.device
    if made.prices is None:
        hours = _pretraining_hours(made, every, None)
        if not plan.states or hours is None:
            return []
        return [f"{_hours(hours, device)} on {device} at {made.efficiency:.0%}"]
    parts = []
    if made.prices.pieces:
        parts.append(f"pretraining {_hours(made.prices.pretraining() / 3600, device)}")
    if made.prices.tunings:
        parts.append(f"fine-tuning {_hours(made.prices.finetuning() / 3600, device)}")
    return (
        [f"{' and '.join(parts)} on {device} ({made.prices.machine.when(made.prices.precisions)})"]
        if parts
        else []
    )


def _pretraining_hours(made: Bill, some: Costs, keys: Collection[str] | None) -> float | None:
    """None: of some of these pieces it is not known."""
    if made.prices is None:
        return some.device_hours(made.device, made.efficiency or EFFICIENCY)
    every = made.prices.priced if keys is None else set(keys) <= made.prices.pieces.keys()
    return made.prices.pretraining(keys) / 3600 if every else None


def _next(plan: Plan, left: list[str], tuned: int, made: Bill, command_path: str) -> str:
    trainings, _ = leaves(plan)
    if not plan.states and not trainings:
        return "nothing to train."
    if not left and tuned == trainings:
        every = [counted(plan.pieces, "piece")] if plan.states else []
        every += [counted(trainings, "fine-tuning")] if trainings else []
        return f"all {' and '.join(every)} computed. See: biphase report {command_path}"
    if len(left) == plan.pieces and not tuned:
        return f"nothing computed yet. Next: biphase run {command_path}"
    steps = sum(plan.states[key].steps for key in left)
    hours = _pretraining_hours(made, costs(plan, left), left)
    if made.prices and hours is not None:
        hours += made.prices.finetuning(made.tunings_left) / 3600
    time = _hours(hours, made.device) if hours else ""
    done = [f"{plan.pieces - len(left):,} of {counted(plan.pieces, 'piece')}"] if plan.states else []
    done += [f"{tuned:,} of {counted(trainings, 'fine-tuning')}"] if trainings else []
    to_go = ", ".join(one for one in (f"{steps:,} steps left" if left else "", time) if one)
    return f"{' and '.join(done)} done{', ' + to_go if to_go else ''}. Next: biphase run {command_path}"


def leaves(plan: Plan) -> tuple[int, int]:
    """Fine-tunings and scores: two names of one state share theirs."""
    parts = plan.tuned.values()
    return sum(part.trainings for part in parts), sum(part.scores for part in parts)


def _flow(parts: list[str]) -> list[str]:
    """Parts joined by dots, broken between them where the page ends."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > PAGE:
            lines.append(part)
        else:
            lines[-1] += f" · {part}"
    return lines


def _hours(hours: float, device: str) -> str:
    word = "hours" if device == "cpu" else "GPU-hours"
    if hours >= 10:
        return f"{hours:,.0f} {word}"
    return f"{hours:.1f} {word}" if hours >= 1 else f"{max(1, round(hours * 60))} min"
