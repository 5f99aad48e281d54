"""Training objectives: causal (CLM), masked (MLM) and masked next-token (MNTP) language modeling.

An objective is a record that answers what planning, training and reports ask of it, so that they need not know which
one it is:

    name             clm, mlm, mntp
    label            for people: clm, mlm 40%, mntp 40→20%
    column           for the held-out losses on disk: clm, mlm40
    causal           the direction of attention
    shifted          a token is predicted at the position before it
    rule             shares of masked tokens that become the mask token, become random, stay: 100/0/0
    plain            masked tokens, if any, all become the mask token
    restarts         two neighbouring phases of this objective differ from one long phase
    highest_ratio    the largest share of tokens that are predicted
    ratio_at(step)   the masking ratio `step` steps into its phase; None if nothing is masked
    at(step)         the objective as it is at that step, with a constant ratio
    labelled_share   the share of positions with a label, for costs

To add an objective, e.g. one that mixes CLM and MLM by row, change at most four files: its record and the union
`Objective` here, its name in `specs/__init__.py`, its model inputs and labels in `objectives.apply`, and, if rows of one
batch differ in attention direction, the pattern in `attention.pattern_of`. docs/extending.md shows an example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from biphase.errors import SpecError
from biphase.records import record
from biphase.specs.sources import Packing

ALL_MASKED = (1.0, 0.0, 0.0)  # every masked token becomes the mask token


@record
class CLM:
    """Causal language modeling: predict the next token from the tokens before it."""

    name: ClassVar[str] = "clm"
    label: ClassVar[str] = "clm"
    column: ClassVar[str] = "clm"
    causal: ClassVar[bool] = True
    shifted: ClassVar[bool] = True
    rule: ClassVar[str] = ""
    plain: ClassVar[bool] = True
    restarts: ClassVar[bool] = False
    highest_ratio: ClassVar[float] = 1.0
    constant_ratio: ClassVar[None] = None

    def ratio_at(self, step: int) -> None:
        """Return the masking ratio: none."""

    def at(self, step: int) -> CLM:
        return self

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        return packing.share_with_neighbour


def _check_ratio(where: str, value: float) -> None:
    if not 0 < value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 <= value < 100 else ""
        raise SpecError(f"{where}: a masking ratio lies between 0 and 1, not {value:g}{hint}")


@dataclass(frozen=True)
class RatioSchedule:
    """A masking ratio that changes from `first` to `last` over `steps` steps, then stays constant."""

    first: float
    last: float
    steps: int

    def check(self) -> None:
        kind = type(self).__name__
        _check_ratio(kind, self.first)
        _check_ratio(kind, self.last)
        if self.steps < 1:
            raise SpecError(f"{kind}.steps must be at least 1, it is {self.steps}")

    def at(self, step: int) -> float:
        raise NotImplementedError

    def mean(self, first: int, until: int) -> float:
        """Return the mean ratio from step `first` to `until`."""
        moving = sum(self.at(step) for step in range(first, min(until, self.steps)))
        still = max(0, until - max(first, self.steps))
        return (moving + still * self.last) / (until - first)


@record
class Linear(RatioSchedule):
    """A masking ratio that changes linearly from `first` to `last` over `steps` steps, then stays constant."""

    def at(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(step / self.steps, 1.0)


@record
class Cosine(RatioSchedule):
    """A masking ratio that follows half a cosine from `first` to `last` over `steps` steps, then stays constant."""

    def at(self, step: int) -> float:
        left = (1 + math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        return self.last + (self.first - self.last) * left


@record
class MLM:
    """Masked language modeling: mask a share `ratio` of the tokens and predict them with bidirectional attention.

    `replace` gives the shares of masked tokens that become the mask token, become a random token, or stay unchanged.
    EuroBERT uses (1, 0, 0), BERT (0.8, 0.1, 0.1).
    """

    ratio: float | Linear | Cosine
    replace: tuple[float, float, float] = ALL_MASKED

    causal: ClassVar[bool] = False
    shifted: ClassVar[bool] = False

    def check(self) -> None:
        kind = type(self).__name__
        if isinstance(self.ratio, float):
            _check_ratio(kind, self.ratio)
        if min(self.replace) < 0 or abs(sum(self.replace) - 1) > 1e-9:
            raise SpecError(f"{kind}.replace must be three shares that sum to 1, not {self.replace}")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def label(self) -> str:
        if isinstance(self.ratio, RatioSchedule):
            percent = f"{self.ratio.first * 100:g}→{self.ratio.last * 100:g}%"
        else:
            percent = f"{self.ratio * 100:.6g}%"
        return f"{self.name} {percent}" if self.plain else f"{self.name} {percent} {self.rule}"

    @property
    def column(self) -> str:
        return self.label.replace(" ", "").replace("%", "") if self.plain else self.label

    @property
    def rule(self) -> str:
        return "/".join(f"{share * 100:g}" for share in self.replace)

    @property
    def plain(self) -> bool:
        return self.replace == ALL_MASKED

    @property
    def restarts(self) -> bool:
        """Whether the ratio follows a schedule, which is counted from the start of the phase."""
        return isinstance(self.ratio, RatioSchedule)

    @property
    def constant_ratio(self) -> float | None:
        return None if isinstance(self.ratio, RatioSchedule) else self.ratio

    @property
    def highest_ratio(self) -> float:
        return max(self.ratio.first, self.ratio.last) if isinstance(self.ratio, RatioSchedule) else self.ratio

    def ratio_at(self, step: int) -> float:
        """Return the masking ratio `step` steps after the start of the phase."""
        return self.ratio.at(step) if isinstance(self.ratio, RatioSchedule) else self.ratio

    def at(self, step: int) -> MLM:
        return type(self)(self.ratio_at(step), self.replace)

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        """Return the share of positions with a label, from step `first` to `until` of the objective's phase."""
        share = self.ratio.mean(first, until) if isinstance(self.ratio, RatioSchedule) else self.ratio
        return share * packing.share_with_neighbour if self.shifted else share


@record
class MNTP(MLM):
    """Masked next-token prediction: MLM that predicts each masked token at the position before it.

    That is where a decoder's head predicts it.
    """

    shifted: ClassVar[bool] = True


Objective = CLM | MLM | MNTP
