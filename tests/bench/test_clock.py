"""The clock counts what it should, and a measurement leaves nothing behind."""

import statistics
import sys
import time
import warnings

import pytest
import torch

from biphase.bench import measure
from biphase.bench.measure import StepClock, Timing
from biphase.errors import BiphaseError

CPU = torch.device("cpu")


def took(*seconds, warm=1):
    """A clock whose steps took so long."""
    made = StepClock(CPU)
    at = made.began
    for each in seconds:
        at += each
        made.marks.append(at)
    return made.measured(warm, tokens=100)


def test_warm_up_is_not_counted_and_one_slow_step_does_not_move_the_median():
    measured = took(60.0, 60.0, 1.0, 1.0, 7.0, warm=2)
    assert measured.seconds == pytest.approx(1.0)
    assert measured.mean_seconds == pytest.approx(3.0)
    assert measured.tokens_per_second == pytest.approx(100.0)


def test_the_time_until_the_third_step_is_that_of_the_wall():
    made = StepClock(CPU)
    for _ in range(4):
        assert (made.ready is None) == (len(made.marks) < measure.READY)
        time.sleep(0.01)
        made.mark()
    assert 0.03 <= made.ready < made.marks[-1] - made.began


def test_waiting_for_data_is_what_a_step_takes_less_without():
    measured = Timing(2.0, 2.0, 10.0)
    assert measure.with_idle(measured, 1.5).idle == pytest.approx(0.25)
    assert measure.with_idle(measured, 2.5).idle == 0


def test_a_peer_that_fails_is_a_finding_and_what_it_says_goes_to_stderr(capsys):
    def fail():
        print("chatter")
        warnings.warn("more chatter", UserWarning, stacklevel=1)
        raise ValueError("no\nway")

    measured = measure.theirs(CPU, fail)
    assert measured.failed == "ValueError: no way"
    assert measured.facts() == {"failed": "ValueError: no way"}
    said = capsys.readouterr()
    assert said.out == ""
    assert "chatter" in said.err


def test_a_refusal_of_our_own_is_no_finding_about_a_peer():
    def refuse():
        raise BiphaseError("ours")

    with pytest.raises(BiphaseError, match="ours"):
        measure.theirs(CPU, refuse)


def test_what_does_not_fit_is_said_with_what_to_type():
    def too_large():
        raise torch.OutOfMemoryError("CUDA out of memory")

    assert measure.theirs(CPU, too_large).failed == "out of memory"
    assert measure.ours(CPU, "type fewer --rows", too_large).failed == "out of memory; type fewer --rows"


def test_tokens_that_nobody_counted_are_left_out():
    facts = Timing(2.0, 2.0, float("nan")).facts()
    assert facts["seconds"] == 2.0
    assert not {"tokens", "tokens_per_second"} & facts.keys()


def test_limits_of_the_compiler_are_put_back():
    dynamo = torch._dynamo.config
    before = dynamo.recompile_limit

    def change():
        dynamo.recompile_limit = before + 7
        return Timing(1.0, 1.0, 1.0)

    measure.ours(CPU, "it", change)
    assert "torch._dynamo" in sys.modules
    assert dynamo.recompile_limit == before


def test_compiled_graphs_are_counted_and_forgotten():
    measure.free(CPU)
    made = StepClock(CPU)
    double = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for size in (2, 2, 2, 3):
        double(torch.ones(size))
        made.mark()
    measured = made.measured(1, tokens=1)
    assert (measured.graphs, measured.recompilations) == (2, 1)
    measure.free(CPU)
    assert measure.compiled_graphs() == 0
    assert statistics.median(made.seconds(1)) == measured.seconds
