"""Choices that depend on the machine."""

import pytest
import torch

from biphase.errors import TrainingError
from biphase.protocol import GIB, micro_rows
from biphase.training import distributed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_one_process_needs_no_group():
    ranks = distributed.Ranks(0, 1, CPU)
    assert ranks.first
    assert ranks.sum(3, 4) == [3, 4]
    assert ranks.share({"do": "end"}) == {"do": "end"}
    assert ranks.gather("own") == ["own"]


@pytest.mark.parametrize(
    ("gib", "rows", "length", "expected"),
    [(0, 64, 256, 32), (0, 4, 256, 4), (0, 64, 16_384, 1), (80, 1152, 2048, 12), (140, 1152, 2048, 24), (140, 23, 2048, 23)],
)  # fmt: skip
def test_micro_batches_fit_the_batch_and_the_device(gib, rows, length, expected):
    assert micro_rows(gib * GIB, rows, length) == expected


def test_a_machine_that_is_poor_at_bf16_says_which_line_to_change(monkeypatch):
    monkeypatch.setattr(distributed, "_cpu_has_bf16", lambda: False)
    for precision in ("bf16", "pure-bf16"):
        said = distributed.poor_precision(CPU, precision, "Finetune(…)")
        assert said.endswith("say precision='fp32' in Finetune(…)")
        assert not distributed.poor_precision(CUDA, precision, "here")
    assert not distributed.poor_precision(CPU, "fp32", "here")
    monkeypatch.setattr(distributed, "_cpu_has_bf16", lambda: True)
    assert not distributed.poor_precision(CPU, "bf16", "here")


def test_an_unknown_precision_is_refused():
    with pytest.raises(TrainingError, match="precision='bf16'"):
        distributed.autocast(CPU, "fp4")


def test_what_is_drawn_follows_from_the_seed_as_with_torch():
    torch.manual_seed(2**40 + 3)
    theirs = torch.rand(5)
    distributed.seed_device(2**40 + 3, torch.device("cpu"))
    ours = torch.rand(5)
    assert torch.equal(ours, theirs)
    assert not torch.equal(torch.rand(5), theirs)
