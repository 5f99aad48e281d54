"""The pretraining of a plan on many GPUs, for `biphase plan --gpus`."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from biphase.errors import SpecError
from biphase.files import Store
from biphase.keys import act_at, label
from biphase.specs import CLM, Hub, Pretrain, Size
from biphase.study.costs import Shape, flops_per_token, labelled_share, peak_of, shape_of
from biphase.study.interconnect import INTERCONNECTS, REACHED, interconnect_of
from biphase.study.machines import USUAL, at_hand, machine_named
from biphase.study.measured import Speeds, speeds_of
from biphase.study.plan import Plan, State
from biphase.study.scaling import GIB, Load, Outlook, micro_rows, outlook, ways
from biphase.study.totals import EFFICIENCY
from biphase.wording import short, si


@dataclass(frozen=True)
class Scaled:
    """One model of a plan."""

    title: str
    rows: int  # of a step
    load: Load
    outlooks: list[Outlook]
    hours: list[float]  # of its pretraining, on all GPUs at once, for each of these
    measured: bool


class ManyGpus:
    """Every model that a plan trains, on `gpus` GPUs of one kind."""

    def __init__(self, plan: Plan, store: Store, gpus: int, device: str) -> None:
        self.gpus, self.device, self.joined = gpus, device, interconnect_of(device)
        machine = machine_named(device, store)
        groups: dict[Any, list[State]] = {}
        for state in plan.states.values():
            run = state.run
            groups.setdefault((state.root, run.precision, run.batch_tokens, run.packing), []).append(state)
        self.models: list[Scaled] = []
        for states in groups.values():
            run, shape = states[0].run, shape_of(states[0].run)
            if shape is None or shape.vocab is None:
                continue
            if run.rows_per_step < gpus:
                raise SpecError(
                    f"--gpus {gpus}: run {run.name!r} has {run.rows_per_step} rows a step, one for each at most; "
                    f"type --gpus {run.rows_per_step}"
                )
            speeds = speeds_of(machine.model, run.precision) if machine else None
            self.models.append(self._scaled(states, shape, speeds if speeds and speeds.pretrain else None))

    def _scaled(self, states: list[State], shape: Shape, speeds: Speeds | None) -> Scaled:
        run = states[0].run
        longest = max(states, key=lambda state: state.steps)  # the step and the memory shown are its
        rows, length = math.ceil(run.rows_per_step / self.gpus), run.packing.length
        micro = micro_rows(self.joined.memory, rows, length)
        own = self.joined.own_kernels and run.precision != "fp32" and _known(root_start(run))
        outlooks, hours = [], []
        for way in ways(self.gpus, self.joined.gpus):
            total = 0.0
            for state in states:
                load = Load(shape, run.precision, rows, micro, length, _labelled(state), own)
                here, alone = (
                    computing(state, shape, some, speeds, self.device) for some in (rows, run.rows_per_step)
                )
                one = outlook(load, way, self.gpus, self.joined, here, alone)
                total += state.steps * one.seconds / 3600
                if state is longest:
                    outlooks.append(one)
            hours.append(total)
        title = f"{getattr(root_start(run), 'name', '') or run.name}, {label(longest.objective)}"
        load = Load(shape, run.precision, rows, micro, length, _labelled(longest), own)
        return Scaled(title, run.rows_per_step, load, outlooks, hours, speeds is not None)

    def render(self) -> list[str]:
        """The lines that stand below a plan."""
        if not self.models:
            return ["", "--gpus: no model whose shape is known here is pretrained"]
        lines: list[str] = []
        for one in self.models:
            lines += [
                "",
                f"{one.title} ({short(one.load.shape.parameters)} parameters) on {self.gpus} {self.device}: "
                f"{one.rows:,} rows of {one.load.length:,} a step, {one.load.rows} a GPU, "
                f"micro-batch {one.load.micro_rows}",
                f"  {'--shard':<18}{'GiB a GPU':>10}{'sent a step':>13}{'a step':>10}{'efficiency':>12}{'hours':>9}",
                *(f"  {_line(way, hours)}" for way, hours in zip(one.outlooks, one.hours, strict=True)),
            ]
        return [*lines, *self.basis()]

    def basis(self) -> list[str]:
        """Where these numbers come from."""
        by_flops = f"FLOPs at {EFFICIENCY:.0%} of its peak"
        kinds = {"as measured on one" if one.measured else by_flops for one in self.models}
        return [
            f"planned, not measured: computing {' or '.join(sorted(kinds))}; {REACHED:.0%} of what links are said to "
            f"carry ({self.joined.source})"
        ]

    def as_json(self) -> dict[str, Any]:
        """The same for a program."""
        models = [asdict(one) for one in self.models]
        return {
            "gpus": self.gpus,
            "interconnect": asdict(self.joined),
            "models": models,
            "notes": self.basis(),
        }


def gpus_at_hand() -> str:
    """The kind of GPU that --gpus means without --device: the one here, or else the usual one."""
    here = at_hand()
    return here if here in INTERCONNECTS else USUAL


def computing(state: State, shape: Shape, rows: int, speeds: Speeds | None, device: str) -> float:
    """Seconds that one GPU computes for so many rows of a step, with our own kernels."""
    packing, share, causal = state.run.packing, _labelled(state), isinstance(state.objective, CLM)
    tokens = rows * packing.length
    if speeds is not None:
        return speeds.step(shape, packing, tokens, causal=causal, labelled=share)
    flops = flops_per_token(shape, packing, causal=causal, labelled=share) * tokens
    return flops / (peak_of(device) * EFFICIENCY)


def root_start(run: Pretrain) -> Size | Hub:
    return root_start(run.start) if isinstance(run.start, Pretrain) else run.start


def _known(start: Size | Hub) -> bool:
    """Do our kernels know such a model? As `models.fused.refusal` says, as far as it can be known without one."""
    if isinstance(start, Hub):
        return False
    width = start.hidden // start.heads
    return width % 16 == 0 and 16 <= width <= 128


def _labelled(state: State) -> float:
    act = act_at(state.run, state.first)
    return labelled_share(act.objective, state.run.packing, state.first - act.first, state.step - act.first)


def _line(one: Outlook, hours: float) -> str:
    step = f"{one.seconds:.2f} s" if one.seconds >= 1 else f"{one.seconds * 1000:.1f} ms"
    text = f"{one.way:<18}{one.bytes / GIB:>10.1f}{si(one.sent) + 'B':>13}{step:>10}{one.efficiency:>12.0%}{hours:>9,.1f}"
    return text if one.fits else f"{text}   does not fit"
