"""How often the best split of simulated studies is where `biphase split` says that it may be."""

import math

import numpy as np
import pytest
from page_tables import percent, show

from biphase.report.splits import split_curve


def hidden(chance, seeds, points, shapes=0.5, skew=0.0, loss=1.0):
    """One simulated sweep with a random optimum.

    Whether the optimum is covered, the length of its set, whether nothing that is called nearly best loses more,
    whether anything is, whether the best measured split is among the contenders, and their number. With fewer than
    three seeds the truth is that of these trunks.
    """
    x, grid = np.linspace(0.0, 0.8, points), np.linspace(0.0, 0.8, 801)
    bend, top = chance.uniform(0, 15), chance.uniform(-0.3, 1.1)
    tilts = chance.normal(size=(2, seeds, 1))

    def mean(at):
        return 80 - bend * np.square(at - top) + skew * (at - top) ** 3

    def own(at):
        return shapes * (tilts[0] * (at - 0.5) + 2 * tilts[1] * np.square(at - 0.5))

    def truth(at):
        return mean(at) + (own(at).mean(axis=0) if seeds < 3 else 0)

    scores = mean(x) + own(x) + chance.normal(size=(seeds, 1)) + 0.5 * chance.normal(size=(seeds, points))
    tuned = [
        {seed: scores[seed, at] + 0.2 * chance.normal(size=3) for seed in range(seeds)}
        for at in range(points)
    ]
    answer = split_curve("SC", x, tuned, loss)
    peak = float(grid[np.argmax(truth(grid))])
    held = any(low - 2e-3 <= peak <= high + 2e-3 for low, high in answer.where.pieces)
    length = sum(high - low for low, high in answer.where.pieces)
    ends = [np.array([end]) for piece in answer.nearly for end in piece]
    right = all(truth(np.array([peak])) - truth(end) <= loss + 0.02 for end in ends)
    best = x[np.argmax(truth(x))]
    return held, length, right, bool(answer.nearly), best in answer.contenders, len(answer.contenders)


def test_hidden_optima_are_covered():
    """Optima chosen at random, inside and outside of the region."""
    chance, held, right, studies = np.random.default_rng(8), 0, 0, 120
    for _ in range(studies):
        held_here, _, right_here, *_ = hidden(chance, seeds=3, points=5)
        held, right = held + held_here, right + right_here
    assert min(held, right) / studies > 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)


@pytest.mark.campaign
def test_hidden_optima():
    rows = []
    designs = [
        ("one trunk", 1, 5, 0.5, 0.0),
        ("one trunk", 1, 7, 0.5, 0.0),
        ("two trunks", 2, 4, 0.5, 0.0),
        ("two trunks", 2, 5, 0.5, 0.0),
        ("three seeds", 3, 4, 0.5, 0.0),
        ("three seeds", 3, 5, 0.5, 0.0),
        ("three seeds, shapes differ much", 3, 5, 2.0, 0.0),
        ("three seeds, a cubic", 3, 5, 0.5, 10.0),
        ("five seeds", 5, 5, 0.5, 0.0),
        ("five seeds, shapes differ much", 5, 5, 2.0, 0.0),
        ("five seeds, a cubic", 5, 5, 0.5, 10.0),
    ]
    for name, seeds, points, shapes, skew in designs:
        chance = np.random.default_rng([seeds, points])
        tally = [hidden(chance, seeds, points, shapes, skew) for _ in range(1000)]
        held, length, right, said, among, count = np.mean(tally, axis=0)
        rows.append(
            (name, f"{points}", percent(held), f"{length:.2f}", percent(right), percent(said))
            + ((percent(among), f"{count:.1f}") if seeds > 1 else ("—", "—"))
        )
    header = (
        "design", "splits", "covered", "mean length", "nearly best is right", "says nearly best", "best among Hsu's",
        "of them",
    )  # fmt: skip
    show(header, rows, error=4.0)
