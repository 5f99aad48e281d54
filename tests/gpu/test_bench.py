"""On a CUDA device: what only a GPU can tell of a step, and both Trainers beside ours."""

import pytest
import torch

from biphase.bench import measure
from biphase.bench.cases import LIKE, FinetuneCase, PretrainCase, ScoreCase
from biphase.bench.measure import StepClock

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
COMMON = {"size": "30m", "vocab": 32_000, "precision": "bf16"}


def case_of(objective="mlm", packing="chunks"):
    return PretrainCase(
        **COMMON, ratio=0.4, length=512, rows=8, steps=6, warm=5, objective=objective, packing=packing
    )


def test_events_count_the_time_of_the_device_not_of_the_host():
    large = torch.randn(8192, 8192, device=CUDA)
    made = StepClock(CUDA)
    for _ in range(6):
        for _ in range(10):
            large @ large
        made.mark()
    assert (
        made.measured(4, tokens=1).seconds > 10 * 2 * 8192**3 / 990e12 * 0.1
    )  # launching ten takes far less


@pytest.mark.parametrize("objective", ["mlm", "clm"])
@pytest.mark.parametrize("packing", ["chunks", "rows", "documents"])
def test_pretraining_is_measured_with_memory(objective, packing):
    measured = measure.ours(
        CUDA, "it", lambda: measure.measure_pretraining(case_of(objective, packing), CUDA)
    )
    assert measured.path in ("fused", "compiled")
    assert measured.peak_bytes > 2**28


def test_a_profile_tells_kinds_of_kernels_apart_and_adds_up_to_the_step():
    found = []
    measured = measure.ours(
        CUDA, "it", lambda: measure.measure_pretraining(case_of(), CUDA, profile=found.append)
    )
    (one,) = found
    assert {"GEMMs", "attention", "optimizer"} <= set(one)
    assert sum(one.values()) < 1.3e3 * measured.seconds


@pytest.mark.parametrize("peer", ["trainer", "trainer-compiled"])
@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_the_trainer_pretrains(peer, objective):
    measured = measure.theirs(
        CUDA, lambda: measure.pretrain_with_trainer(case_of(objective), CUDA, peer=peer)
    )
    assert not measured.failed
    assert measured.peak_bytes > 0


@pytest.mark.parametrize("lengths", LIKE, ids=lambda one: one.name)
def test_both_finetune(lengths):
    case = FinetuneCase(**COMMON, lengths=lengths, batch=32, steps=8, warm=5)
    ours = measure.ours(CUDA, "it", lambda: measure.measure_finetuning(case, CUDA))
    theirs = measure.theirs(CUDA, lambda: measure.finetune_with_trainer(case, CUDA, peer="trainer"))
    assert not theirs.failed
    assert ours.tokens == theirs.tokens


def test_texts_are_scored():
    case = ScoreCase(**COMMON, passages=512)
    measured = measure.ours(CUDA, "it", lambda: measure.measure_encoding(case, CUDA))
    assert (measured.path, measured.tokens_per_second > 0) == ("fused", True)


def test_memory_is_given_back_between_measurements():
    held = []  # the first measurement leaves what torch keeps for a stream
    for _ in range(3):
        measure.ours(CUDA, "it", lambda: measure.measure_pretraining(case_of(), CUDA))
        held.append(torch.cuda.memory_allocated(CUDA))
    assert held[1] == held[2], held
