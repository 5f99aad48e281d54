"""Training objectives: causal (CLM), masked (MLM) and masked next-token (MNTP) language modeling."""

from __future__ import annotations

from biphase.errors import SpecError
from biphase.records import record
from biphase.specs.checks import positive, ratio_between_0_and_1


@record
class CLM:
    """Causal language modeling: predict the next token from the tokens before it."""


@record
class Linear:
    """A masking ratio that changes linearly from `first` to `last` over `steps` steps, then stays constant."""

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
    """A masking ratio that follows half a cosine from `first` to `last` over `steps` steps, then stays constant."""

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
    """Masked language modeling: mask a share `ratio` of the tokens and predict them with bidirectional attention.

    `replace` gives the shares of masked tokens that become the mask token, become a random token, or stay unchanged.
    The paper uses (1, 0, 0); BERT uses (0.8, 0.1, 0.1).
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
    """Masked next-token prediction: MLM that predicts each masked token at the position before it.

    That is where a decoder's head predicts it.
    """

    ratio: float | Linear | Cosine
    replace: tuple[float, float, float] = (1.0, 0.0, 0.0)


Objective = CLM | MLM | MNTP
