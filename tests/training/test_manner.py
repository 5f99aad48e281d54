"""How a run is computed, as it is typed."""

import pytest

from biphase.errors import SpecError
from biphase.training.options import RuntimeOptions, Sharding


@pytest.mark.parametrize(
    ("text", "made"),
    [
        ("none", Sharding()),
        ("full", Sharding("full")),
        ("hybrid", Sharding("hybrid")),
        ("hybrid:4", Sharding("hybrid", 4)),
    ],
)
def test_shardings_have_names(text, made):
    assert Sharding.named(text) == made
    assert str(made) == text


@pytest.mark.parametrize("text", ["", "half", "full:2", "hybrid:0", "hybrid:x", "none:1"])
def test_other_names_are_refused(text):
    with pytest.raises(SpecError, match="type none, full, hybrid"):
        Sharding.named(text)


def test_groups_divide_the_processes():
    assert Sharding("none").groups_of(8, 8) == 1
    assert Sharding("full").groups_of(8, 4) == 8
    assert Sharding("hybrid").groups_of(8, 4) == 4
    assert Sharding("hybrid", 2).groups_of(8, 4) == 2
    with pytest.raises(SpecError, match="type --shard hybrid:2"):
        Sharding("hybrid", 3).groups_of(8, 8)
    with pytest.raises(SpecError, match="type --shard full, or say how many"):
        Sharding("hybrid").groups_of(8, 8)


def test_what_forbids_our_own_kernels_is_said():
    assert RuntimeOptions().slower_path == ""
    assert RuntimeOptions(sharding=Sharding("full"), recompute=True).slower_path.startswith(
        "--shard full: layers are"
    )
    assert RuntimeOptions(recompute=True).slower_path.startswith("--recompute: layers are")
