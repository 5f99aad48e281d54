"""The learning rate at its corners."""

import pytest

from biphase import CLM, MLM, SIZES, WSD, Pretrain, Stage
from biphase.training.optimizer import rate


def run(steps=100, **fields):
    return Pretrain("r", start=SIZES["1m"], corpus="builtin", stages=(Stage(CLM(), steps),), **fields)


@pytest.mark.parametrize(
    ("step", "value"), [(0, 0.1), (9, 1.0), (10, 1.0), (50, 1.0), (89, 1.0), (90, 1.0), (95, 0.5), (99, 0.1)]
)
def test_up_level_down(step, value):
    assert rate(run(schedule=WSD(0.5, 10, 10)), step) == pytest.approx(0.5 * value)


def test_the_papers_schedule():
    paper = run(42_000)
    assert rate(paper, 0) == pytest.approx(5e-4 / 2_000)
    assert rate(paper, 1_999) == rate(paper, 39_999) == rate(paper, 40_000) == pytest.approx(5e-4)
    assert rate(paper, 41_999) == pytest.approx(5e-4 / 2_000)


def test_a_run_that_goes_on_starts_at_the_peak_and_may_be_all_decay():
    base = run(42_000)
    on = Pretrain("on", start=base, stages=(Stage(MLM(0.4), 2_000),))
    assert rate(on, 0) == pytest.approx(5e-4)
    assert rate(on, 1_000) == pytest.approx(2.5e-4)


def test_no_warmup_and_no_decay_is_level():
    level = run(schedule=WSD(0.1, 0, 0))
    assert {rate(level, step) for step in (0, 50, 99)} == {0.1}


def test_the_decay_may_span_stages():
    two = Pretrain(
        "two",
        start=SIZES["1m"],
        corpus="builtin",
        stages=(Stage(CLM(), 95), Stage(MLM(0.4), 5)),
        schedule=WSD(0.1, 0, 10),
    )
    assert [rate(two, step) for step in (90, 94, 95, 99)] == pytest.approx([0.1, 0.06, 0.05, 0.01])
