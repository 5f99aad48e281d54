"""Many GPUs, as far as one GPU and two processes can check it."""

import pytest

from biphase import SIZES
from biphase.study.costs import shape_of_size
from biphase.study.scaling import (
    GIB,
    INTERCONNECTS,
    Load,
    Way,
    collectives,
    memory,
    outlook,
    ways,
)

VOCAB = 128_256
ALONE = Way("none", 1)


def load(size="210m", rows=24, micro=24, **more):
    return Load(shape_of_size(SIZES[size], VOCAB), "bf16", rows, micro, 2048, 0.4, **more)


@pytest.mark.parametrize(("rows", "measured"), [(12, 11.3), (24, 22.7), (64, 50.1)])
def test_memory_is_what_was_measured_on_one_h200(rows, measured):
    """docs/performance.md: 210M, MLM 40% on rows or chunks of 2,048, bf16, one micro-batch a step."""
    assert sum(memory(load(rows=rows, micro=rows), ALONE).values()) / GIB == pytest.approx(measured, rel=0.05)


def test_what_is_cut_is_cut_by_those_who_share_it():
    one, eight = memory(load(), ALONE), memory(load(), Way("full", 8))
    for what in ("weights", "gradients", "optimizer state"):
        assert eight[what] == one[what] / 8
    assert eight["fetched"] > 0
    assert "copies" not in eight
    several = memory(load(rows=24, micro=12), Way("full", 8))
    assert several["gradients"] == one["gradients"] / 8 + one["gradients"], "whole until the last micro-batch"


def test_recomputing_keeps_an_input_a_layer():
    kept, again = (memory(load(), Way("full", 8, recompute=one))["activations"] for one in (False, True))
    assert again < kept / 4


def test_bytes_of_a_plain_sum_and_of_groups():
    numbers = load().shape.parameters
    (plain,) = collectives(load(), ALONE, 16)
    assert plain.sent == 2 * 15 / 16 * 4 * numbers
    weights, gradients, copies = collectives(load(), Way("hybrid", 8), 16)
    assert gradients.sent == 7 / 8 * 4 * numbers
    assert copies.sent == 2 * 1 / 2 * 4 * numbers / 8
    assert (copies.members, copies.stride) == (2, 8)
    twice = next(collectives(load(rows=48), Way("hybrid", 8), 16))
    assert twice.sent == 2 * weights.sent, "weights are fetched for every micro-batch"


def test_groups_inside_a_machine_are_faster_than_those_between():
    joined = INTERCONNECTS["h100"]
    assert joined.rate(8, 1) == joined.rate(4, 2) == joined.inside * 0.75
    assert joined.rate(16, 1) == 8 * joined.between * 0.75, "a ring leaves a machine by all of its ways"
    assert joined.rate(2, 8) == joined.between * 0.75


def test_a_step_is_never_shorter_than_its_parts_and_efficiency_falls():
    joined, before = INTERCONNECTS["h100"], 2.0
    for gpus in (1, 8, 64, 192):
        rows = 1152 // gpus
        way = ways(gpus, 8)[0]
        one = outlook(load(rows=rows, micro=min(rows, 12)), way, gpus, joined, rows * 0.005, 1152 * 0.005)
        assert one.seconds >= one.computing
        assert one.efficiency <= before
        before = one.efficiency
    assert before < 1


def test_a_model_without_kernels_of_ours_is_compiled_either_way():
    joined = INTERCONNECTS["h100"]
    ours, other = (outlook(load(own=own), ALONE, 1, joined, 1.0, 1.0) for own in (True, False))
    assert other.computing > ours.computing
    assert other.efficiency == ours.efficiency == 1
    assert other.bytes > ours.bytes - memory(load(), ALONE)["copies"]
