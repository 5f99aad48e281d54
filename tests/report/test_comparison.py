"""Models side by side: differences, verdicts and the table of `biphase compare`."""

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from biphase.report.comparison import AVERAGE, compare, render
from biphase.report.evidence import gather
from biphase.specs import CLM, MLM, Stage, Study

TASKS = ("sst2", "conll2003", "squad", "msmarco")


@pytest.fixture
def differences(run, grid, invent, tmp_path):
    """The differences of models with these true means in percent, and their evidence."""

    def made(means, **options):
        study = Study(
            "compared",
            tuple(
                run(name, Stage(MLM(0.1 + 0.1 * at) if at else CLM(), 20)) for at, name in enumerate(means)
            ),
            grid(*TASKS, **options.pop("fields", {})),
        )
        evidence = gather(*invent(study, tmp_path / "store", means=means, **options))
        return evidence, compare(evidence)

    return made


def test_verdicts_follow_the_truth(differences):
    """Ten points are found on every task in both directions, and models of one mean differ nowhere."""
    evidence, found = differences({"first": 70.0, "better": 80.0, "worse": 60.0, "alike": 70.0})
    verdicts = {
        name: {one.verdict for one in found if one.other == name} for name in ("better", "worse", "alike")
    }
    # Over the few invented queries of msmarco a difference of 10 points is not clear.
    assert verdicts == {"better": {"better", "open"}, "worse": {"worse", "open"}, "alike": {"equal", "open"}}
    for one in found:
        assert one.verdict in ("equal", "open") or one.on != "msmarco"
        assert "test examples" in one.note or one.verdict != "open" or one.other == "alike"
    for one in found:
        assert one.scores[1] - one.scores[0] == pytest.approx(one.estimate.mean)
        assert one.estimate.low < one.estimate.mean < one.estimate.high
    for name in verdicts:
        own = {one.on: one for one in found if one.other == name}
        families = [
            np.mean([own[task].estimate.mean for task in tasks]) for tasks in evidence.families.values()
        ]
        assert own[AVERAGE].estimate.mean == pytest.approx(np.mean(families))
    lines = render(evidence, found)
    assert any(line.split()[:1] == ["squad"] and "better" in line for line in lines)


def test_equal_needs_the_interval_within_the_effect(differences):
    evidence, _ = differences({"first": 70.0, "alike": 70.0})
    generous = replace(evidence.plan.study, effect=50.0)
    evidence = replace(evidence, plan=replace(evidence.plan, study=generous))
    assert {one.verdict for one in compare(evidence)} == {"equal"}


def test_p_values_are_corrected_for_their_number(differences):
    """Against the t-test of each row: the smallest p is multiplied by the number of rows, the next by one less."""
    _, found = differences({"first": 70.0, "other": 71.0})
    raw = [2 * stats.t.sf(abs(one.estimate.mean / one.estimate.se), one.estimate.df) for one in found]
    order = np.argsort(raw)
    expected = np.minimum(1.0, np.maximum.accumulate(np.sort(raw) * np.arange(len(raw), 0, -1)))
    assert [found[at].p for at in order] == pytest.approx(list(expected), rel=0.1)
    assert len(found) == len(TASKS) + 1


def test_incomplete_scores_are_said(differences):
    evidence, found = differences({"first": 70.0, "other": 80.0}, results=("first",))
    assert {one.verdict for one in found} == {"missing"}
    assert all(math.isnan(one.p) for one in found)
    assert all("scores done" in one.note for one in found)
    assert found[0].to_json()["difference"] is None
    assert any("not yet" in line for line in render(evidence, found))
