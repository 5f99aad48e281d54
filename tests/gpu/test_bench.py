"""On a CUDA device: what only a GPU can tell of a step, and both Trainers beside ours."""

import pytest
import torch

from biphase.bench import measure, peers
from biphase.bench.cases import LIKE, FinetuneCase, PretrainCase, RetrievalCase
from biphase.bench.measure import BLOCKS, HEAD, StepClock
from biphase.bench.peers import (
    RetrievalTexts,
    read_ours,
    read_sentences,
    train_ours,
    train_sentences,
    write_folder,
)

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def case_of(objective="mlm", packing="chunks"):
    return PretrainCase("30m", 32_000, objective, 0.4, packing, 512, 8, 6, 5, "bf16")


def test_events_count_the_time_of_the_device_not_of_the_host():
    large = torch.randn(8192, 8192, device=CUDA)
    made = StepClock(CUDA)
    for _ in range(6):
        for _ in range(10):
            large @ large
        made.mark()
    steps = made.seconds(4)
    assert len(steps) == 2
    assert min(steps) > 10 * 2 * 8192**3 / 990e12 * 0.1  # launching ten takes far less


@pytest.mark.parametrize("objective", ["mlm", "clm"])
@pytest.mark.parametrize("packing", ["chunks", "rows", "documents"])
def test_pretraining_is_measured_with_memory_idle_time_and_no_recompilation(objective, packing):
    measured = measure.ours(
        CUDA, "it", lambda: measure.measure_pretraining(case_of(objective, packing), CUDA)
    )
    assert measured.path in ("fused", "compiled")
    assert measured.peak_bytes > 2**28
    assert 0 <= measured.idle < 1
    assert measured.recompilations == 0


def test_a_profile_tells_blocks_head_and_attention_apart_and_adds_up_to_the_step():
    found = []
    measured = measure.ours(
        CUDA, "it", lambda: measure.measure_pretraining(case_of(), CUDA, profile=found.append)
    )
    (one,) = found
    assert {BLOCKS, HEAD, "attention", "optimizer"} <= set(one.by_kind)
    assert one.total < 1.3e3 * measured.seconds


@pytest.mark.parametrize("peer", ["trainer", "trainer-compiled"])
@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_the_trainer_pretrains(peer, objective):
    measured = measure.theirs(CUDA, lambda: peers.pretrain(case_of(objective), CUDA, peer=peer, rows=4))
    assert not measured.failed
    assert measured.peak_bytes > 0
    assert (measured.graphs > 0) == (peer == "trainer-compiled")


@pytest.mark.parametrize("lengths", LIKE, ids=lambda one: one.name)
def test_both_finetune(lengths):
    case = FinetuneCase("30m", 32_000, lengths, 32, 8, 5, "bf16")
    ours = measure.ours(CUDA, "it", lambda: measure.measure_finetuning(case, CUDA))
    rate, length = measure.TUNING_RATE, measure.CONTEXT
    theirs = measure.theirs(
        CUDA, lambda: peers.finetune(case, CUDA, peer="trainer", rate=rate, length=length)
    )
    assert not theirs.failed
    assert ours.tokens == theirs.tokens


def test_both_retrieve(tmp_path):
    texts = RetrievalTexts(RetrievalCase("30m", 32_000, 32, 6, 5, "bf16", 512))
    write_folder(texts, tmp_path)
    for mine, other in ((train_ours, train_sentences), (read_ours, read_sentences)):
        ours = measure.ours(CUDA, "it", lambda mine=mine: mine(texts, tmp_path, CUDA))
        theirs = measure.theirs(
            CUDA, lambda other=other, ours=ours: other(texts, tmp_path, CUDA, tokens=ours.tokens)
        )
        assert not theirs.failed


def test_memory_is_given_back_between_measurements():
    measure.free(CUDA)
    before = torch.cuda.memory_allocated(CUDA)
    measure.ours(CUDA, "it", lambda: measure.measure_pretraining(case_of(), CUDA, idle=False))
    assert torch.cuda.memory_allocated(CUDA) < before + 2**26
