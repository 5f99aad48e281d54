"""How often the best split of simulated studies is where `biphase split` says that it may be."""

import math

import numpy as np

from biphase.report.splits import split_curve


def hidden(chance, seeds=3, points=5, loss=1.0):
    """One simulated sweep with a random optimum, inside or outside of the region.

    Whether the optimum is covered, and whether nothing that is called nearly best loses more than `loss`.
    """
    x, grid = np.linspace(0.0, 0.8, points), np.linspace(0.0, 0.8, 801)
    bend, top = chance.uniform(0, 15), chance.uniform(-0.3, 1.1)
    tilts = chance.normal(size=(2, seeds, 1))

    def truth(at):
        return 80 - bend * np.square(at - top)

    shapes = 0.5 * (tilts[0] * (x - 0.5) + 2 * tilts[1] * np.square(x - 0.5))
    scores = truth(x) + shapes + chance.normal(size=(seeds, 1)) + 0.5 * chance.normal(size=(seeds, points))
    tuned = [
        {seed: scores[seed, at] + 0.2 * chance.normal(size=3) for seed in range(seeds)}
        for at in range(points)
    ]
    answer = split_curve("SC", x, tuned, loss)
    peak = float(grid[np.argmax(truth(grid))])
    held = any(low - 2e-3 <= peak <= high + 2e-3 for low, high in answer.where.pieces)
    ends = [end for piece in answer.nearly for end in piece]
    return held, all(truth(peak) - truth(end) <= loss + 0.02 for end in ends)


def test_hidden_optima_are_covered():
    chance, studies = np.random.default_rng(8), 120
    shares = np.mean([hidden(chance) for _ in range(studies)], axis=0)
    assert min(shares) > 0.95 - 3 * math.sqrt(0.05 * 0.95 / studies)
