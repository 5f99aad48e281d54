"""Fine-tuning steps of ours, as a study takes them; and how fast a model only reads."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from biphase.bench.cases import PASSAGES, FinetuneCase, ScoreCase
from biphase.bench.clock import Measured, StepClock, peak_bytes, wait
from biphase.bench.kernels import Breakdown, breakdown
from biphase.bench.tokens import MASK, Dataset, drawn_ids, reading_of
from biphase.finetune.families import Family, family_of
from biphase.finetune.leaf import Bench
from biphase.finetune.model import Setting, Tuned, per_text
from biphase.models.attention import varlen_works
from biphase.models.backbone import from_scratch
from biphase.models.encoder import Encoder
from biphase.models.heads import EmbeddingHead
from biphase.presets import SIZES
from biphase.specs import Finetune
from biphase.tasks.encoding import Ragged

RATE, SEED = 5e-5, 0
CONTEXT = 2_048
READINGS = 3  # of all texts; the median counts


def bench_of(case: Any, device: torch.device) -> Bench:
    """A new model on which fine-tunings are made."""
    model = from_scratch(SIZES[case.size], vocab=case.vocab, mask_id=MASK, length=CONTEXT, seed=0)
    return bench_on(Encoder(model.model.base_model, context=CONTEXT), case.precision, device)


def bench_on(encoder: Encoder, precision: str, device: torch.device) -> Bench:
    varlen = varlen_works(device, precision)
    return Bench(encoder, Setting.of(device, precision, varlen=varlen, encoder=encoder))


def measure(
    case: FinetuneCase, device: torch.device, *, profile: Callable[[Breakdown], None] | None = None
) -> Measured:
    data = Dataset(case)
    reading = reading_of(case.vocab, CONTEXT)
    family = family_of(data.task(), data.examples(), reading, protocol="standard")
    bench = bench_of(case, device)
    measured = tuned(bench, family, case, tokens=data.tokens)
    if profile is not None:
        steps = family.steps
        once = breakdown(
            lambda: train_once(bench, family, case, lambda: None), device, vocab=case.vocab, steps=steps
        )
        profile(once)
    return measured


def tuned(bench: Bench, family: Family, case: Any, *, tokens: float) -> Measured:
    """Two fine-tunings: the first pays for what a grid needs once, the second is what all others cost."""
    device = bench.setting.device
    first = StepClock(device)
    train_once(bench, family, case, first.mark)
    second = StepClock(device)
    train_once(bench, family, case, second.mark)
    steps = second.measured(case.warm, tokens=tokens, path=path_of(bench))
    return replace(steps, ready_seconds=first.ready)


def path_of(bench: Bench) -> str:
    return "fused" if bench.encoder.graphable else "plain"


def train_once(bench: Bench, family: Family, case: Any, after: Callable[[], None]) -> Tuned:
    spec = Finetune((family.task,), lrs=(RATE,), seeds=(SEED,), protocol="standard", precision=case.precision)
    model, _ = bench.finetune(
        family,
        spec,
        lr=RATE,
        seed=SEED,
        loaders=1 if bench.setting.device.type == "cuda" else 0,
        tell=lambda step, steps: after(),
    )
    return model


# ---------------------------------------------------------------- reading


def score(case: ScoreCase, device: torch.device) -> Measured:
    """Texts through the encoder, without gradients; seconds are those of all texts."""
    bench = bench_of(case, device)
    texts = Ragged.from_lists(drawn_ids(PASSAGES, case.passages, case.vocab))
    model = Tuned(bench.encoder, EmbeddingHead()).eval()
    return read(
        lambda: per_text(model, texts, bench.setting), device, tokens=len(texts.flat), path=path_of(bench)
    )


def read(once: Callable[[], Any], device: torch.device, *, tokens: float, path: str) -> Measured:
    """Do it once unmeasured, then a few times."""
    once()
    wait(device)
    seconds = []
    for _ in range(READINGS):
        began = time.perf_counter()
        once()
        wait(device)
        seconds.append(time.perf_counter() - began)
    middle, mean = statistics.median(seconds), statistics.fmean(seconds)
    return Measured(middle, mean, tokens, peak_bytes=peak_bytes(device), path=path)
