"""Pretraining steps of ours: the real stream, the real loop, the paper's AdamW."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from biphase.batch import Batch
from biphase.bench.cases import PretrainCase
from biphase.bench.clock import Measured, StepClock, with_idle
from biphase.bench.kernels import PROFILED, Breakdown, breakdown
from biphase.bench.tokens import MASK, stream_of
from biphase.data.stream import load_ahead
from biphase.models.attention import sight_of, varlen_works
from biphase.models.backbone import LanguageModel, from_scratch
from biphase.presets import SIZES
from biphase.slices import words_of_a_row
from biphase.specs import CLM, MLM, AdamW, Objective
from biphase.training import devices, optimizer
from biphase.training.devices import Ranks
from biphase.training.loop import train

RATE = 5e-4
SETTLING = 2  # steps after which those with data at hand are like each other


def objective_of(case: PretrainCase) -> Objective:
    return MLM(case.ratio) if case.objective == "mlm" else CLM()


def model_of(case: PretrainCase, device: torch.device) -> LanguageModel:
    size = SIZES[case.size]
    model = from_scratch(size, vocab=case.vocab, mask_id=MASK, length=case.length, seed=0)
    return model.to(device).train()


@dataclass(frozen=True)
class Kept:
    """A batch that is on the device already and stays there."""

    batch: Batch

    @property
    def count(self) -> int:
        return self.batch.count

    def to(self, device: torch.device) -> Self:
        return self


class Side:
    """A model and its optimizer, ready to take steps of a case."""

    def __init__(self, case: PretrainCase, device: torch.device, model: LanguageModel) -> None:
        self.case, self.device, self.model = case, device, model
        self.path = model.prepare(device, case.precision)
        self.adam = optimizer.build(model, AdamW())
        self.stream, self.objective = stream_of(case), objective_of(case)
        self.varlen = varlen_works(device, case.precision)

    def batches(self, step: int) -> list[Batch]:
        """The micro-batches of a step."""
        case = self.case
        draws = torch.arange(case.rows * case.micro_batches) + step * case.rows * case.micro_batches
        return [
            self.stream.batch(self.objective, some, step=step, fixed=self.path == "compiled").ready_for(
                self.device
            )
            for some in draws.split(case.rows)
        ]

    def loss_sum(self, batch: Batch) -> Tensor:
        return self.model.loss_sum(batch, sight_of(batch, varlen=self.varlen))

    def streamed(self, steps: int, after: Callable[[], None]) -> None:
        """Steps as a run takes them."""
        batches = load_ahead(self.batches, 0, steps, loaders=1)
        self._train(self.loss_sum, batches, after)

    def kept(self, steps: int, after: Callable[[], None]) -> None:
        """The same step again and again, its data at hand."""
        same = [Kept(batch.to(self.device)) for batch in self.batches(0)]
        self._train(lambda batch: self.loss_sum(batch.batch), (same for _ in range(steps)), after)

    def _train(
        self, loss_sum: Callable[[Any], Tensor], batches: Iterable[Any], after: Callable[[], None]
    ) -> None:
        train(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            self.adam,
            loss_sum,
            batches,
            first=0,
            rate=lambda step: RATE,
            clip=AdamW().clip,
            ranks=Ranks(0, 1, self.device),
            autocast=lambda: devices.autocast(self.device, self.case.precision),
            after=(lambda done: after(),),
            copies=self.model.copies,
            refresh=self.model.refresh,
        )


def measure(
    case: PretrainCase,
    device: torch.device,
    *,
    idle: bool = True,
    profile: Callable[[Breakdown], None] | None = None,
) -> Measured:
    """Steps of ours; with `idle`, how long they wait for data; with `profile`, where the time of one goes."""
    with devices.repeatable(enabled=case.deterministic):
        model = model_of(case, device)
        clock = StepClock(device)
        side = Side(case, device, model)
        side.streamed(case.warm + case.steps, clock.mark)
        measured = clock.measured(case.warm, tokens=case.tokens, path=side.path)
        if idle:
            again = StepClock(device, ready_at=0)
            side.kept(SETTLING + case.steps, again.mark)
            measured = with_idle(measured, statistics.median(again.seconds(SETTLING)))
        if profile is not None:
            profile(
                breakdown(
                    lambda: side.kept(PROFILED, lambda: None),
                    device,
                    vocab=words_of_a_row(case.vocab, device.type),
                )
            )
    return measured
