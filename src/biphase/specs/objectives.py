"""What a model is asked: the next token, hidden tokens, or hidden tokens from the position before."""

from __future__ import annotations

from biphase.errors import SpecError
from biphase.records import record
from biphase.specs.checks import positive, ratio_between_0_and_1


@record
class CLM:
    """Predict the next token, seeing only what came before."""


@record
class Linear:
    """A masking ratio that goes from `first` to `last` in a line over `steps`, then stays."""

    first: float
    last: float
    steps: int

    def check(self) -> None:
        (
            ratio_between_0_and_1("Linear", self.first),
            ratio_between_0_and_1("Linear", self.last),
            positive(self, "steps"),
        )


@record
class Cosine:
    """A masking ratio that goes from `first` to `last` in half a cosine over `steps`, then stays."""

    first: float
    last: float
    steps: int

    def check(self) -> None:
        (
            ratio_between_0_and_1("Cosine", self.first),
            ratio_between_0_and_1("Cosine", self.last),
            positive(self, "steps"),
        )


@record
class MLM:
    """Hide a share of the tokens and ask for them back, seeing both sides.

    `replace` says what becomes of a hidden token: (mask token, random token, itself), as shares.
    The paper's is (1, 0, 0); BERT's is (0.8, 0.1, 0.1).
    """

    ratio: float | Linear | Cosine
    replace: tuple[float, float, float] = (1.0, 0.0, 0.0)

    def check(self) -> None:
        if isinstance(self.ratio, float):
            ratio_between_0_and_1(type(self).__name__, self.ratio)
        if min(self.replace) < 0 or abs(sum(self.replace) - 1) > 1e-9:
            raise SpecError(
                f"{type(self).__name__}.replace must be three shares that sum to 1, not {self.replace}"
            )


@record
class MNTP(MLM):
    """MLM whose hidden token is asked for at the position before it, where a decoder's head expects it."""

    ratio: float | Linear | Cosine
    replace: tuple[float, float, float] = (1.0, 0.0, 0.0)


Objective = CLM | MLM | MNTP
