"""A plan on many GPUs, as it is printed."""

import json

import pytest

from biphase import Size
from biphase.fast.trunk import refusal
from biphase.models.backbone import from_scratch
from biphase.study.prices import has_own_kernels

PAPER = "studies/paper.py"


@pytest.fixture
def planned(verb, tmp_path):
    def typed(*words):
        return verb("plan", PAPER, "--store", tmp_path / "store", *words)

    return typed


@pytest.mark.parametrize("number", [8, 64, 192])
def test_the_papers_models_on_many_gpus(planned, number):
    code, out, _ = planned("--gpus", number, "--device", "h100", "--json")
    told = json.loads(out)["gpus"]
    assert code == 0
    models = told["models"]
    assert [one["title"].split(",")[0] for one in models] == ["210m", "610m", "1b"]
    for one in models:
        ways = {way["way"]: way for way in one["outlooks"]}
        assert set(ways) >= {"none", "full"}
        assert all(way["fits"] for way in ways.values())
        assert ways["full"]["memory"]["optimizer state"] == ways["none"]["memory"]["optimizer state"] / number
        assert 0.4 < ways["full"]["efficiency"] <= 1
    plain, *_, least = (sum(way["memory"].values()) for way in models[-1]["outlooks"])
    assert least < plain / 2, "sharded, and layers computed again"
    assert [one["load"]["own"] for one in models] == [True, True, True]


@pytest.mark.parametrize("width", [8, 16, 24, 48, 64, 96, 128, 144])
def test_a_plan_knows_which_heads_our_kernels_take(width):
    size = Size("s", layers=1, hidden=2 * width, heads=2, kv_heads=1, ffn=32)
    trunk = from_scratch(size, vocab=40, mask_id=3, length=16, seed=0).model.base_model
    assert has_own_kernels(size) == (refusal(trunk) == "")


def test_it_stands_below_the_tree_and_says_that_it_was_not_measured(planned):
    code, out, _ = planned("--gpus", 192, "--device", "h200")
    assert code == 0
    assert (
        "610m, mlm 20% (756M parameters) on 192 h200: 1,152 rows of 2,048 a step, 6 a GPU, micro-batch 6"
        in out
    )
    assert out.strip().splitlines()[-1].startswith("planned, not measured: computing as measured on one; 75%")


def test_what_does_not_fit_is_marked(planned):
    _, out, _ = planned("--gpus", 8, "--device", "l40s")
    marked = [one.split()[0] for one in out.splitlines() if "does not fit" in one]
    assert marked
    assert len(marked) < 9


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", 2000, "--device", "h100"), "type --gpus 1152"),
        (("--gpus", 8, "--device", "rtx4090"), "is not known"),
        (("--gpus", 8, "--device", "h1000"), "there is no device"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(planned, words, said):
    code, out, err = planned(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1
