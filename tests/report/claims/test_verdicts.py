"""The rules from numbers to verdicts, case by case, on both sides of every boundary."""

import itertools
import math

import pytest

from biphase.report.verdicts import ALPHA, WORTH_FINDING, claim_p, level_of_parts, sought, supports, verdict

NAN = math.nan

PARTS = {
    # excess, p, detectable, effect → what it says, at a level of 0.01
    "clear": (0.4, 0.001, 0.1, 0.5, "yes"),
    "clear, just": (0.4, 0.01, 0.1, 0.5, "yes"),
    "clear though it could not be hoped for": (0.4, 0.001, 9.0, 0.5, "yes"),
    "clearly wrong": (-0.4, 0.001, 0.1, 0.5, "against"),
    "clearly wrong though weak": (-0.4, 0.01, 9.0, 0.5, "against"),
    "not clear": (0.4, 0.0101, 0.1, 0.5, "direction"),
    "not clear, and wrong": (-0.4, 0.0101, 0.1, 0.5, "against"),
    "exactly nothing": (0.0, 1.0, 0.1, 0.5, "against"),
    "weak": (0.4, 0.02, 0.6, 0.5, "underpowered"),
    "weak, and wrong": (-0.4, 0.02, 0.6, 0.5, "underpowered"),
    "just strong enough": (0.4, 0.02, 0.5, 0.5, "direction"),
    "not there": (NAN, NAN, NAN, 0.5, "missing"),
    "one seed": (0.4, NAN, NAN, 0.5, "missing"),
}


@pytest.mark.parametrize("case", PARTS)
def test_what_a_part_says(case):
    excess, p, detectable, effect, said = PARTS[case]
    assert supports(excess, p, level=0.01, detectable=detectable, effect=effect) == said


CLAIMS = [
    (("yes", "yes"), 0.05, "reproduced"),
    (("yes", "missing"), 0.01, "reproduced"),
    (("yes", "direction"), 0.0501, "direction only"),
    (("direction",), 0.3, "direction only"),
    (("yes", "direction", "underpowered"), 0.3, "underpowered"),
    (("underpowered", "against"), 1.0, "not reproduced"),
    (("yes", "against"), 1.0, "not reproduced"),
    (("missing", "direction"), 0.3, "direction only"),
    (("missing", "missing"), NAN, "not tested"),
    ((), NAN, "not tested"),
]


@pytest.mark.parametrize(("parts", "p_holm", "expected"), CLAIMS)
def test_what_a_claim_is(parts, p_holm, expected):
    assert verdict(parts, p_holm) == expected


def test_every_part_must_hold_so_the_weakest_counts():
    assert claim_p([(0.5, 0.001), (0.2, 0.04), (0.3, 0.02)]) == 0.04


def test_a_wrong_sign_counts_as_no_evidence_however_clear():
    assert claim_p([(0.5, 0.001), (-0.2, 1e-9)]) == 1.0
    assert claim_p([(0.0, 0.5)]) == 1.0


def test_missing_parts_are_left_out():
    assert claim_p([(0.5, 0.001), (NAN, NAN)]) == 0.001
    assert math.isnan(claim_p([(NAN, NAN)]))
    assert math.isnan(claim_p([]))


def test_what_should_be_found_is_the_papers_effect_beyond_the_margin():
    assert sought(0.33, 0.0) == 0.33
    assert sought(0.05, -0.5) == pytest.approx(0.55)
    assert sought(-0.05, -0.5) == pytest.approx(0.45)
    assert sought(None, -0.5) == WORTH_FINDING == 0.5


def test_the_level_of_parts_is_that_of_the_step_where_holm_stopped():
    assert level_of_parts([0.01, 0.2, 0.3, 1.0]) == ALPHA / 3
    assert level_of_parts([0.01, 0.02]) == ALPHA
    assert level_of_parts([]) == ALPHA


def holm(ps):
    """Written anew from its definition: step down, never less than the step before."""
    order, adjusted, so_far = sorted(range(len(ps)), key=lambda at: ps[at]), [0.0] * len(ps), 0.0
    for rank, at in enumerate(order):
        so_far = max(so_far, min(1.0, ps[at] * (len(ps) - rank)))
        adjusted[at] = so_far
    return adjusted


def test_parts_and_claims_never_contradict_each_other():
    """All parts of a claim say yes exactly where it is reproduced."""
    ps = (0.0001, 0.004, 0.0124, 0.0126, 0.02, 0.03, 0.04, 0.6)
    for chosen in itertools.product(ps, repeat=4):
        adjusted = holm(chosen)
        stopped = level_of_parts(adjusted)
        for p, p_holm in zip(chosen, adjusted, strict=True):
            level = ALPHA if p_holm <= ALPHA else stopped
            (said,) = [supports(0.1, p, level=level, detectable=0.0, effect=1.0)]
            assert (said == "yes") == (verdict([said], p_holm) == "reproduced")
