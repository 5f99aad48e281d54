"""What stands below a plan's tree: sums, what they cost, what is done and what to type next.

On a measured device hours are predicted, fine-tunings included; on another they are FLOPs at a share of its peak. Where
no device is named, it is the one at hand.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from textwrap import wrap
from typing import Any

from biphase.files import Store
from biphase.presets import DEVICES
from biphase.study.corpora import Text, texts_of
from biphase.study.costs import Costs, costs, flops_of, peak_of
from biphase.study.elapsed import Elapsed, elapsed
from biphase.study.machines import MEASURE, USUAL, at_hand, is_known, machine_named
from biphase.study.plan import Plan
from biphase.study.prices import Grid, Prices, left_of, price, prices_json
from biphase.wording import counted, duration, short, si

PAGE = 110
LONG = 24.0  # hours on a processor, from which on a GPU is worth a word
EFFICIENCY = 0.4  # of a device's peak is good for training


@dataclass(frozen=True)
class Bill:
    """How a plan is priced: by measured speeds, or by FLOPs at a share of the device's peak."""

    device: str
    efficiency: float | None  # None: by measured speeds, or not at all
    prices: Prices | None = None
    tunings_left: dict[Grid, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    texts: tuple[Text, ...] = ()  # what the plan reads
    workers: int = 1  # each on a device of its own


def bill(
    plan: Plan,
    store: Store,
    device: str,
    efficiency: float | None,
    *,
    tuned: int,
    measure: str = MEASURE,
    workers: int = 1,
) -> Bill:
    """Prices on a device: a named one, or without a name the one at hand.

    A stated efficiency asks for FLOPs, also where speeds were measured. `measure`: what to type to measure a device into
    this store.
    """
    here = "" if device else at_hand()
    if here and not is_known(here, store):
        why = f"{here}, the GPU here, was not measured, so there are no hours. Type: {measure}. Or: --device {USUAL}"
        made = Bill(here, None, notes=(why,))
    else:
        made = _bill(plan, store, device or here, efficiency, tuned, measure)
    if here == "cpu" and (_pretraining_hours(made, costs(plan), None) or 0.0) > LONG:
        note = f"these are hours of the processor here; of a GPU: --device {USUAL}"
        made = replace(made, notes=(*made.notes, note))
    return replace(made, texts=tuple(texts_of(plan, store)), workers=max(1, workers))


def _bill(plan: Plan, store: Store, device: str, efficiency: float | None, tuned: int, measure: str) -> Bill:
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

    took = _elapsed(plan, made, left)
    return {
        "device": made.device,
        "efficiency": made.efficiency,
        "costs": numbers(every, None),
        "costs_left": numbers(rest, left),
        "prices": prices_json(made.prices, left, made.tunings_left) if made.prices else None,
        "elapsed": asdict(took) if took else None,
        "corpora": [
            {"name": one.corpus.name, "tokens": one.tokens, "counted": one.exact, "shard_bytes": one.bytes}
            for one in made.texts
        ],
        "notes": [*every.notes, *made.notes, *_text_notes(made)],
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
    parts += [_disk(every.disk, made)] if plan.states and every.disk is not None else []
    if trainings:
        parts += [counted(trainings, "fine-tuning"), counted(scores, "score")]
    below = [*_elapsed_line(plan, made, left), *_basis(plan, made), *_text_notes(made)]
    wrapped = [line for one in below for line in wrap(one, PAGE, subsequent_indent="  ")]
    return [*_flow(parts), *wrapped, *every.notes, *made.notes, _next(plan, left, tuned, made, command_path)]


def _disk(states: int, made: Bill) -> str:
    shards = sum(one.bytes or 0 for one in made.texts)
    of_it = f", {si(shards)}B of it token shards" if shards else ""
    return f"{si(states + shards)}B of disk{of_it}"


def _text_notes(made: Bill) -> list[str]:
    unknown = [one.corpus.name for one in made.texts if one.tokens is None]
    notes = [note for one in made.texts if (note := one.repeats())]
    if unknown:
        notes.append(
            f"not in the disk sum: token shards of {', '.join(unknown)}, whose tokens are not counted yet"
        )
    return notes


def _elapsed(plan: Plan, made: Bill, left: Collection[str]) -> Elapsed | None:
    """Of what is left; None where a job has no price."""
    if made.prices is not None:
        pieces = {key: made.prices.pieces.get(key) for key in left}
        tunings = made.prices.tunings
    elif made.efficiency:
        rate = peak_of(made.device) * made.efficiency
        flops = {key: flops_of(plan.states[key]) for key in left}
        pieces = {key: None if some is None else some / rate for key, some in flops.items()}
        tunings = {}
    else:
        return None
    known = {key: seconds for key, seconds in pieces.items() if seconds is not None}
    if len(known) < len(pieces) or not (known or made.tunings_left):
        return None
    return elapsed(plan, known, tunings, made.tunings_left, made.workers)


def _elapsed_line(plan: Plan, made: Bill, left: Collection[str]) -> list[str]:
    took = _elapsed(plan, made, left)
    if took is None:
        return []
    without = ", fine-tunings not counted" if plan.tuned and made.prices is None else ""
    by = f"{took.workers:,} {made.device}, a job on each" if took.workers > 1 else f"one {made.device}"
    chain = f"; the longest chain of jobs takes {duration(took.chain)} ({took.ends})" if took.ends else ""
    return [f"elapsed: {duration(took.seconds)} on {by}{without}{chain}"]


def _basis(plan: Plan, made: Bill) -> list[str]:
    """The measured steps behind the hours, and which sizes are beyond them."""
    if made.prices is None or not made.prices.precisions:
        return []
    machine, precisions = made.prices.machine, made.prices.precisions
    sizes = dict.fromkeys(getattr(root.run.start, "name", "") for root in plan.roots.values())
    beyond = machine.not_measured([one for one in sizes if one])
    extrapolated = f"; extrapolated to {', '.join(beyond)}" if beyond else ""
    return [f"{machine.steps_behind(precisions)}{extrapolated}"]


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
        return some.device_hours(made.device, made.efficiency) if made.efficiency else None
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
    return f"{hours:.1f} {word}" if hours >= 1 else duration(hours * 3600)
