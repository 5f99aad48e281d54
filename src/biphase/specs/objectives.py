"""Training objectives: causal (CLM), masked (MLM) and masked next-token (MNTP) language modeling, and mixtures of them;
and contrastive learning on text pairs, whose steps read no rows of the corpus.

An objective is a record that answers what planning, training and reports ask of it, so that they need not know which
one it is:

    name             clm, mlm, mntp, mix
    label            for people: clm, mlm 40%, mntp 40→20%
    column           for the held-out losses on disk: clm, mlm40
    causal           the direction of attention
    shifted          a token is predicted at the position before it
    rule             shares of masked tokens that become the mask token, become random, stay: 100/0/0
    plain            masked tokens, if any, all become the mask token
    static           masks depend on the row of the corpus alone, so they repeat in every epoch
    restarts         two neighbouring phases of this objective differ from one long phase
    highest_ratio    of one row: the largest share of tokens that are predicted

and the methods of `BaseObjective`.

To add an objective, change at most four files: its record and the union `RowObjective` here, its name in
`specs/__init__.py`, its model inputs and labels in `objectives.apply`, and, if it needs another attention pattern,
`attention.pattern_of`. docs/extending.md shows an example. `Mix` then mixes it with the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, cast

from biphase.errors import SpecError
from biphase.records import added, ranged, record
from biphase.specs.sources import Packing, Pairs
from biphase.specs.tasks import Retrieve, Task

ALL_MASKED = (1.0, 0.0, 0.0)  # every masked token becomes the mask token
LONG_WORD = 8.0  # tokens, for the spread of the number of labels


@dataclass(frozen=True)
class Part:
    """The rows of a step that have one objective: their share, and the weight of their loss."""

    objective: RowObjective
    share: float = 1.0
    weight: float = 1.0


class BaseObjective:
    """What every objective answers at each step; by default it masks nothing and stays the same."""

    def ratio_at(self, step: int) -> float | None:
        """Return the masking ratio `step` steps into its phase; None if nothing is masked or rows differ."""
        return None

    def at(self, step: int) -> Any:
        """Return the objective of a row as it is at that step: a constant ratio, on text that is read once."""
        return self

    def parts_at(self, step: int) -> tuple[Part, ...]:
        """Return the objectives of the rows of that step, each with its share; itself alone, if it is no mixture."""
        return (Part(cast("RowObjective", self)),)

    def label_variance(self, tokens: int) -> float:
        """Return the variance of the number of labels in a row of `tokens` tokens, at the highest ratio."""
        return 0.0

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        """Return the share of positions with a label, from step `first` to `until` of the phase."""
        return 0.0

    def causal_share(self, first: int, until: int) -> float:
        """Return the share of rows with causal attention, from step `first` to `until` of the phase."""
        return 0.0


@record
class CLM(BaseObjective):
    """Causal language modeling: predict the next token from the tokens before it."""

    name: ClassVar[str] = "clm"
    label: ClassVar[str] = "clm"
    column: ClassVar[str] = "clm"
    causal: ClassVar[bool] = True
    shifted: ClassVar[bool] = True
    rule: ClassVar[str] = ""
    plain: ClassVar[bool] = True
    static: ClassVar[bool] = False
    restarts: ClassVar[bool] = False
    highest_ratio: ClassVar[float] = 1.0
    constant_ratio: ClassVar[None] = None

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        return packing.share_with_neighbour

    def causal_share(self, first: int, until: int) -> float:
        return 1.0


def _check_ratio(where: str, value: float) -> None:
    if not 0 < value < 1:
        hint = f"; did you mean {value / 100:g}?" if 1 <= value < 100 else ""
        raise SpecError(f"{where}: a masking ratio or share lies between 0 and 1, not {value:g}{hint}")


@dataclass(frozen=True)
class RatioSchedule:
    """A masking ratio, or a share of rows, that changes from `first` to `last` over `steps` steps, then stays."""

    first: float
    last: float
    steps: int = ranged(least=1)

    def check(self) -> None:
        kind = type(self).__name__
        for value in (self.first, self.last):
            if not 0 <= value <= 1:
                _check_ratio(kind, value)

    def at(self, step: int) -> float:
        raise NotImplementedError

    def mean(self, first: int, until: int) -> float:
        """Return the mean ratio from step `first` to `until`."""
        moving = sum(self.at(step) for step in range(first, min(until, self.steps)))
        still = max(0, until - max(first, self.steps))
        return (moving + still * self.last) / (until - first)


@record
class Linear(RatioSchedule):
    """A ratio or share that changes linearly from `first` to `last` over `steps` steps, then stays constant."""

    def at(self, step: int) -> float:
        return self.first + (self.last - self.first) * min(step / self.steps, 1.0)


@record
class Cosine(RatioSchedule):
    """A ratio or share that follows half a cosine from `first` to `last` over `steps` steps, then stays constant."""

    def at(self, step: int) -> float:
        left = (1 + math.cos(math.pi * min(step / self.steps, 1.0))) / 2
        return self.last + (self.first - self.last) * left


@record
class Uniform:
    """A masking ratio drawn for each row, uniform between `low` and `high`, as in masked diffusion."""

    low: float
    high: float

    def check(self) -> None:
        if not 0 <= self.low < self.high <= 1:
            raise SpecError(
                f"Uniform(low, high) draws ratios between 0 and 1, low below high, not {self.low:g} and "
                f"{self.high:g}; masked diffusion uses Uniform(0, 1)"
            )

    @property
    def mean(self) -> float:
        return (self.low + self.high) / 2

    @property
    def variance(self) -> float:
        return (self.high - self.low) ** 2 / 12


@record
class MLM(BaseObjective):
    """Masked language modeling: mask a share `ratio` of the tokens and predict them with bidirectional attention.

    `replace` gives the shares of masked tokens that become the mask token, become a random token, or stay unchanged.
    EuroBERT uses (1, 0, 0), BERT (0.8, 0.1, 0.1). With `weight` "1/ratio" the loss of a row is weighted by the inverse
    of its masking ratio, and all rows weigh the same however much of them is masked. `unit` is what is masked as a
    whole: single tokens, words, or spans of random lengths with a mean of `mean_span` tokens. `masks` are drawn anew each
    time a row is read ("dynamic"), or once for all epochs ("static").
    """

    ratio: float | Linear | Cosine | Uniform
    replace: tuple[float, float, float] = ALL_MASKED
    weight: Literal["1", "1/ratio"] = added("1")
    unit: Literal["token", "word", "span"] = added("token")
    mean_span: float = ranged(3.0, least=1, added=True)
    masks: Literal["dynamic", "static"] = added("dynamic")

    causal: ClassVar[bool] = False
    shifted: ClassVar[bool] = False

    def check(self) -> None:
        kind = type(self).__name__
        if isinstance(self.ratio, float):
            _check_ratio(kind, self.ratio)
        if isinstance(self.ratio, RatioSchedule):
            _check_ratio(type(self.ratio).__name__, self.ratio.first)
            _check_ratio(type(self.ratio).__name__, self.ratio.last)
        if min(self.replace) < 0 or abs(sum(self.replace) - 1) > 1e-9:
            raise SpecError(f"{kind}.replace must be three shares that sum to 1, not {self.replace}")
        if self.mean_span != 3 and self.unit != "span":
            raise SpecError(f"{kind}.mean_span is for unit='span'; it is {self.mean_span:g}")

    @property
    def name(self) -> str:
        return type(self).__name__.lower()

    @property
    def label(self) -> str:
        ratio = self.ratio
        if isinstance(ratio, RatioSchedule):
            percent = f"{ratio.first * 100:g}→{ratio.last * 100:g}%"
        elif isinstance(ratio, Uniform):
            percent = f"{ratio.low * 100:g}–{ratio.high * 100:g}%"
        else:
            percent = f"{ratio * 100:.6g}%"
        return " ".join([self.name, percent, *self.variants])

    @property
    def variants(self) -> list[str]:
        """What differs from masking single tokens, all by the mask token, with labels of equal weight."""
        unit = {"token": "", "word": "words", "span": f"spans of {self.mean_span:g}"}[self.unit]
        rule, weight = "" if self.plain else self.rule, "" if self.weight == "1" else "weighted 1/ratio"
        masks = "static masks" if self.static else ""
        return [variant for variant in (unit, rule, weight, masks) if variant]

    @property
    def column(self) -> str:
        usual = not self.variants and not isinstance(self.ratio, Uniform)
        return self.label.replace(" ", "").replace("%", "") if usual else self.label

    @property
    def rule(self) -> str:
        return "/".join(f"{share * 100:g}" for share in self.replace)

    @property
    def plain(self) -> bool:
        return self.replace == ALL_MASKED

    @property
    def static(self) -> bool:
        return self.masks == "static"

    @property
    def restarts(self) -> bool:
        """Whether the ratio follows a schedule, which is counted from the start of the phase."""
        return isinstance(self.ratio, RatioSchedule)

    @property
    def constant_ratio(self) -> float | None:
        usual = (self.weight, self.unit, self.masks) == ("1", "token", "dynamic")
        return self.ratio if isinstance(self.ratio, float) and usual else None

    @property
    def highest_ratio(self) -> float:
        """The highest masking ratio; of drawn ones the mean, since a step has many rows."""
        if isinstance(self.ratio, RatioSchedule):
            return max(self.ratio.first, self.ratio.last)
        return self.ratio.mean if isinstance(self.ratio, Uniform) else self.ratio

    def ratio_at(self, step: int) -> float | None:
        if isinstance(self.ratio, RatioSchedule):
            return self.ratio.at(step)
        return None if isinstance(self.ratio, Uniform) else self.ratio

    def at(self, step: int) -> MLM:
        moves = isinstance(self.ratio, RatioSchedule)
        return replace(self, ratio=self.ratio.at(step) if moves else self.ratio, masks="dynamic")

    def label_variance(self, tokens: int) -> float:
        ratio = self.highest_ratio
        drawn = self.ratio.variance if isinstance(self.ratio, Uniform) else 0.0
        # Tokens that are masked together: E[length²] / E[length] of geometric lengths, more than of common words.
        together = {"token": 1.0, "word": LONG_WORD, "span": 2 * self.mean_span - 1}[self.unit]
        return together * tokens * (ratio * (1 - ratio) - drawn) + tokens**2 * drawn

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        moves = isinstance(self.ratio, RatioSchedule)
        share = self.ratio.mean(first, until) if moves else self.highest_ratio
        return share * packing.share_with_neighbour if self.shifted else share


@record
class MNTP(MLM):
    """Masked next-token prediction: MLM that predicts each masked token at the position before it.

    That is where a decoder's head predicts it.
    """

    shifted: ClassVar[bool] = True


RowObjective = CLM | MLM | MNTP

# ---------------------------------------------------------------- mixtures


@record
class Mix(BaseObjective):
    """Several objectives in every step, each for a share of its rows: Mix({CLM(): 3, MNTP(0.3): 1}).

    Shares are relative and may follow a schedule. `weights` multiply the losses of objectives; 1 for those not named.
    `mean_over` says how the loss of a step is formed. "objective": each objective's loss is the mean over its own
    labels, and counts by its share of the rows. "labels": the mean over the labels of all objectives.
    """

    shares: tuple[tuple[RowObjective, float | Linear | Cosine], ...]
    weights: tuple[tuple[RowObjective, float], ...] = ()
    mean_over: Literal["objective", "labels"] = "objective"

    name: ClassVar[str] = "mix"
    rule: ClassVar[str] = ""
    constant_ratio: ClassVar[None] = None

    def settle(self) -> None:
        """Bring equal mixtures into one form: sorted, constant shares that sum to 1, no weight of 1."""
        if self.shares is None or self.weights is None:
            return  # refused when the types of fields are checked
        # Different schedules may have one label, so the whole record decides.
        shares = sorted(self.shares, key=lambda item: (not item[0].causal, item[0].label, repr(item[0])))
        constant = [(objective, share) for objective, share in shares if isinstance(share, float)]
        total = sum(share for _, share in constant)
        # Shares that are normalised already stay as they are: divided again, they could differ in the last bit.
        if total > 0 and abs(total - 1) > 1e-9 and len(constant) == len(shares):
            shares = [(objective, share / total) for objective, share in constant]
        given: dict[Any, float] = dict(self.weights)
        unknown = next((one for one in given if one not in dict(shares)), None)
        if unknown is not None:
            raise SpecError(
                f"Mix.weights has {unknown.label}, which is not mixed; give it a share of the rows"
            )
        weights = tuple((one, given[one]) for one, _ in shares if given.get(one, 1.0) != 1)
        object.__setattr__(self, "shares", tuple(shares))
        object.__setattr__(self, "weights", weights)

    def check(self) -> None:
        if len({objective for objective, _ in self.shares}) < max(2, len(self.shares)):
            raise SpecError("Mix needs two or more different objectives: Mix({CLM(): 3, MNTP(0.3): 1})")
        ends = [
            [share.at(step) if isinstance(share, RatioSchedule) else share for _, share in self.shares]
            for step in (0, self._moving_steps)
        ]
        if (
            min(map(min, ends)) < 0
            or min(map(max, zip(*ends, strict=True))) <= 0
            or min(map(sum, ends)) < 1e-6
        ):
            raise SpecError(
                "Mix: every objective needs a share of the rows above 0, and the shares of a step may not all be 0"
            )
        if any(weight <= 0 for _, weight in self.weights):
            raise SpecError("Mix.weights must be above 0; leave out an objective that is not to be learned")

    @property
    def objectives(self) -> tuple[RowObjective, ...]:
        return tuple(objective for objective, _ in self.shares)

    @property
    def label(self) -> str:
        """The shares and objectives, as "mix 75% clm + 25% mntp 30%"."""
        weights = dict(self.weights)
        parts = []
        for part, last in zip(self.parts_at(0), self.parts_at(self._moving_steps), strict=True):
            weight = f" ×{part.weight:g}" if part.objective in weights else ""
            to = f"→{last.share * 100:.6g}" if last.share != part.share else ""
            parts.append(f"{part.share * 100:.6g}{to}% {part.objective.label}{weight}")
        return f"mix {' + '.join(parts)}{', mean over labels' if self.mean_over == 'labels' else ''}"

    @property
    def column(self) -> str:
        return self.label

    @property
    def causal(self) -> bool:
        return all(objective.causal for objective in self.objectives)

    @property
    def shifted(self) -> bool:
        return all(objective.shifted for objective in self.objectives)

    @property
    def plain(self) -> bool:
        return all(objective.plain for objective in self.objectives)

    @property
    def restarts(self) -> bool:
        """Whether a ratio or a share follows a schedule, which is counted from the start of the phase."""
        return self._moving_steps > 0 or any(objective.restarts for objective in self.objectives)

    @property
    def _moving_steps(self) -> int:
        """The steps after which all shares are constant."""
        return max(share.steps if isinstance(share, RatioSchedule) else 0 for _, share in self.shares)

    def parts_at(self, step: int) -> tuple[Part, ...]:
        """Return the objectives with their shares at `step`; a share may be 0 there."""
        weights = dict(self.weights)
        shares = [share.at(step) if isinstance(share, RatioSchedule) else share for _, share in self.shares]
        total = sum(shares)
        return tuple(
            Part(objective, share / total, weights.get(objective, 1.0))
            for objective, share in zip(self.objectives, shares, strict=True)
        )

    def labelled_share(self, packing: Packing, first: int, until: int) -> float:
        return self._mean(first, until, lambda one, *steps: one.labelled_share(packing, *steps))

    def causal_share(self, first: int, until: int) -> float:
        return self._mean(first, until, lambda one, *steps: one.causal_share(*steps))

    def _mean(self, first: int, until: int, value: Callable[[RowObjective, int, int], float]) -> float:
        """Return the mean over rows of `value`, which gets an objective and the steps it is a mean over."""
        spans = [(first, until)]
        if self.restarts:  # the mean of at most about a thousand steps, evenly spaced
            spans = [(step, step + 1) for step in range(first, until, max(1, (until - first) // 1_000))]
        sums = (
            part.share * value(part.objective, *span) for span in spans for part in self.parts_at(span[0])
        )
        return sum(sums) / len(spans)


# ---------------------------------------------------------------- pairs


@record
class Contrastive(BaseObjective):
    """Contrastive learning on text pairs: InfoNCE with the other pairs of the step as negatives.

    A text's embedding is the mean of its hidden states, normalized, with bidirectional attention. The loss of a query is
    the cross-entropy of its cosines with all positives of the step, divided by `temperature`; its own positive is the
    right one. A positive whose text equals its own, or that belongs to the same query, is no negative.

    `pairs` are `Pairs`, or retrieval tasks, of which the training pairs are read. `batch` is the number of pairs of a
    step, whatever the number of processes and micro-batches. `heldout` is the share of queries that are not trained on.
    """

    pairs: tuple[Pairs | Task, ...]
    temperature: float = ranged(0.05, above=0, most=1, hint="0.05 is usual")
    batch: int = ranged(256, least=2)
    length: int = ranged(128, least=4)  # longest text, in tokens
    heldout: float = ranged(0.02, least=0, most=0.5, hint="try 0.02")

    name: ClassVar[str] = "contrastive"
    column: ClassVar[str] = "contrastive"
    causal: ClassVar[bool] = False
    shifted: ClassVar[bool] = False
    rule: ClassVar[str] = ""
    plain: ClassVar[bool] = True
    restarts: ClassVar[bool] = False
    constant_ratio: ClassVar[None] = None

    def settle(self) -> None:
        # How long a task is fine-tuned has no influence on its pairs, so it must not change the key.
        pairs = tuple(
            replace(one, steps=1, epochs=0, batch=1, trained_on="") if _has_pairs(one) else one
            for one in self.pairs or ()
        )
        object.__setattr__(self, "pairs", pairs)

    def check(self) -> None:
        if not self.pairs:
            raise SpecError("Contrastive needs pairs: Contrastive(Pairs('./pairs.jsonl'))")
        for one in self.pairs:
            if isinstance(one, Task) and not _has_pairs(one):
                raise SpecError(
                    f"Contrastive: task {one.name!r} has no training pairs; give a retrieval task with a train part, or "
                    "Pairs('./pairs.jsonl', query='…', positive='…')"
                )

    @property
    def label(self) -> str:
        return (
            f"contrastive {self.batch} pairs{'' if self.temperature == 0.05 else f' at {self.temperature:g}'}"
        )

    @property
    def most_tokens(self) -> int:
        """The most tokens that a step reads."""
        return 2 * self.batch * self.length

    def parts_at(self, step: int) -> tuple[Part, ...]:
        """Return the objectives of the rows of a step: it has no rows."""
        return ()


def _has_pairs(pairs: Pairs | Task) -> bool:
    return isinstance(pairs, Task) and isinstance(pairs.form, Retrieve) and pairs.trains


Objective = RowObjective | Mix | Contrastive
