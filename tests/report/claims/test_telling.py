"""Why, in words: the numbers that decide, the paper's beside them, and what is missing."""

import math
from dataclasses import replace

import pytest

from biphase.report.statistics.intervals import Estimate
from biphase.report.verdicts import ClaimPart, why

PART = ClaimPart(
    title="610m · SC",
    models=("a", "b"),
    estimate=Estimate(3.416, 0.1, 5, 3.266, 3.566, 1e-6, "fine-tuning seeds", 0.05, 4),
    margin=0.0,
    paper=3.42,
    detectable=0.4,
    examples=None,
    supports="yes",
    note="",
    says="MLM 40% scores 3.42 ± 0.15 points above CLM on SC at 610m",
)
MISSING = replace(PART, title="1b · SC", supports="missing", note="not yet: 13 of 60 leaves done", says="")


def part(mean=0.2, half=0.3, title="610m · SC", se=0.1, p=0.2, **fields):
    estimate = Estimate(mean, 0.2, 5, mean - half, mean + half, p, "fine-tuning seeds", se, 4)
    way = "above" if mean >= 0 else "below"
    says = f"A scores {abs(mean):.2f} ± {half:.2f} points {way} B"
    return replace(PART, **({"title": title, "estimate": estimate, "says": says, "paper": None} | fields))


def test_an_effect_in_the_claimed_direction_never_points_the_other_way():
    short = part(mean=0.5, half=0.2, margin=1.0, supports="underpowered")
    assert not short.contrary
    assert part(mean=-0.5, half=0.2, margin=1.0, supports="underpowered").contrary
    assert not part(mean=-0.5, half=0.2, margin=-1.0, supports="underpowered").contrary


CASES = {
    "one part": (
        ("reproduced", [PART], 0.001),
        "MLM 40% scores 3.42 ± 0.15 points above CLM on SC at 610m (paper: +3.42).",
    ),
    "no paper": (
        ("reproduced", [replace(PART, paper=None)], 0.001),
        "MLM 40% scores 3.42 ± 0.15 points above CLM on SC at 610m.",
    ),
    "several": (
        ("reproduced", [PART, part(title="1b · SC", paper=-0.05)], 0.001),
        "A minus B, in points: +3.42 ± 0.15 (610m · SC; paper +3.42), +0.20 ± 0.30 (1b · SC; paper −0.05).",
    ),
    "many": (
        ("reproduced", [PART] * 4 + [part(title="weak", p=0.01)], 0.001),
        "A minus B: 5 parts, the least clear +0.20 ± 0.30 (weak).",
    ),
    "direction": (
        ("direction only", [part(supports="direction")], 0.234),
        "A scores 0.20 ± 0.30 points above B: the claimed sign, but chance is not ruled out (p = 0.23 corrected).",
    ),
    "direction, and far from the paper": (
        ("direction only", [part(supports="direction", paper=0.51)], 0.234),
        "A scores 0.20 ± 0.30 points above B (paper: +0.51): the claimed sign, but chance is not ruled out (p = 0.23 "
        "corrected), and an effect as large as the paper's is.",
    ),
    "direction, and the paper within reach": (
        ("direction only", [part(supports="direction", paper=0.5)], 0.234),
        "A scores 0.20 ± 0.30 points above B (paper: +0.50): the claimed sign, but chance is not ruled out (p = 0.23 "
        "corrected).",
    ),
    "direction in part": (
        (
            "direction only",
            [PART, part(supports="direction", title="x"), part(supports="direction", title="y")],
            1.0,
        ),
        "A minus B, in points: +0.20 ± 0.30 (x), +0.20 ± 0.30 (y): the claimed sign, but chance is not ruled out "
        "(p = 1.00 corrected); of 3 parts 1 is clear.",
    ),
    "against": (
        (
            "not reproduced",
            [PART, part(-0.1, supports="against"), part(-0.3, supports="against", paper=0.5)],
            1.0,
        ),
        "A scores 0.30 ± 0.30 points below B (paper: +0.50); 2 of 3 parts speak against the claim.",
    ),
    "against a margin": (
        ("not reproduced", [part(-0.6, supports="against", margin=-0.5, paper=0.48)], 1.0),
        "A scores 0.60 ± 0.30 points below B (paper: +0.48), below the margin of −0.50.",
    ),
    "underpowered": (
        ("underpowered", [PART, part(supports="underpowered", detectable=0.9, paper=0.33)], 0.6),
        "A scores 0.20 ± 0.30 points above B, but with the noise of these seeds only an effect of 0.90 points would be "
        "found, and the paper's is 0.33; of 2 parts 1 is clear.",
    ),
    "underpowered beyond a margin": (
        ("underpowered", [part(supports="underpowered", detectable=0.9, margin=-0.5)], 0.6),
        "A scores 0.20 ± 0.30 points above B, but with the noise of these seeds only an effect of 0.90 points beyond "
        "−0.50 would be found, and 0.50 should be found.",
    ),
    "underpowered, and clearly the other way before correction": (
        (
            "underpowered",
            [part(-24.0, 10.5, p=0.011, se=2.4, supports="underpowered", detectable=563.0)],
            0.2,
        ),
        "A scores 24.00 ± 10.50 points below B: it points the other way (p = 0.011), and is not clear after correction "
        "for the number of claims.",
    ),
    "one part of several the other way": (
        (
            "underpowered",
            [
                PART,
                part(-2.0, 0.5, margin=-1.0, p=0.03, supports="underpowered"),
                part(supports="underpowered"),
            ],
            0.2,
        ),
        "A scores 2.00 ± 0.50 points below B, below the margin of −1.00: it points the other way (p = 0.030), and is not "
        "clear after correction for the number of claims; 1 of 3 parts does.",
    ),
    "hopeless": (
        (
            "underpowered",
            [part(supports="underpowered", detectable=400.0), part(supports="underpowered")],
            1.0,
        ),
        "A scores 0.20 ± 0.30 points above B, but with the noise of these seeds no effect that scores can have would be "
        "found; of 2 parts none is clear.",
    ),
    "one missing": (
        ("reproduced", [PART, MISSING], 0.001),
        "MLM 40% scores 3.42 ± 0.15 points above CLM on SC at 610m (paper: +3.42). "
        "Missing: 1b · SC (not yet: 13 of 60 leaves done).",
    ),
    "two missing alike": (
        ("not tested", [MISSING, MISSING], math.nan),
        "2 parts (not yet: 13 of 60 leaves done).",
    ),
    "two missing differently": (
        ("not tested", [MISSING, replace(MISSING, title="x", note="one seed")], math.nan),
        "1b · SC (not yet: 13 of 60 leaves done), x (one seed).",
    ),
    "no runs": (("not tested", [], math.nan), "Needs something."),
}


@pytest.mark.parametrize("case", CASES)
def test_why(case):
    (verdict, parts, p_holm), expected = CASES[case]
    assert why("A minus B", verdict, parts, p_holm, "needs something") == expected
