"""The scores of every model on resampled test examples: computed once for a task, asked for by whoever needs them.

Values by example are read task by task and let go; only their resampled scores stay. All models of a task are scored
on the same resamples, so the draws of two models may be subtracted.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from biphase.report.evidence import Evidence, Floats
from biphase.report.recipes import Model
from biphase.report.statistics.resampling import DRAWS, resample

Tables = dict[str, Floats]  # model → (draws, pretraining seeds, fine-tuning seeds)


class Draws:
    """The resampled scores of a ledger."""

    def __init__(self, evidence: Evidence, draws: int = DRAWS) -> None:
        self._evidence = evidence
        self._draws = draws
        self._known: dict[tuple[str, str], Tables] = {}

    def of(self, model: Model, task: str, metric: str = "") -> Floats | None:
        """(draws, pretraining seeds, fine-tuning seeds), each seed at its chosen rate. NaN: that seed is missing.

        None: no seed of the model has values by example.
        """
        if (task, metric) not in self._known:
            self._known[task, metric] = self._task(task, metric)
        return self._known[task, metric].get(model.name)

    def _task(self, task: str, metric: str) -> Tables:
        values = {
            model.name: found
            for model in self._evidence.models.values()
            if (found := self._evidence.values(model, task, metric)) is not None
        }
        tables: Tables = {}
        # As many examples and counts in each row; rows that differ in these cannot share resamples.
        for shape in sorted({one.shape[2:] for one in values.values()}):
            alike = {name: one for name, one in values.items() if one.shape[2:] == shape}
            rows = np.concatenate([one.reshape(-1, *shape) for one in alike.values()])
            drawn = resample(rows, seed=task, draws=self._draws)
            tables |= dict(zip(alike, _split(drawn, alike.values()), strict=True))
        return tables


def _split(drawn: Floats, values: Iterable[NDArray[np.float32]]) -> Iterable[Floats]:
    first = 0
    for one in values:
        seeds = one.shape[:2]
        until = first + seeds[0] * seeds[1]
        yield drawn[:, first:until].reshape(-1, *seeds)
        first = until


def shared_draws(evidence: Evidence) -> Draws:
    """The draws of this evidence: the same object for all who ask, so that nothing is resampled twice."""
    # Kept beside its fields, as a cached property would be, and so let go with it.
    return vars(evidence).setdefault("draws", Draws(evidence))
