"""An answer in a context: the paper's overlap of token positions, and the official score of its text.

The paper compares the set of tokens marked as answer with those of the first gold answer. The official score
(SQuAD 2.0) compares words, after both texts are brought to one form, with every gold answer, and the best counts.
SQuAD 1.1's script differs from it only where a text consists of nothing but articles and punctuation.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def token_set_f1(predicted: AbstractSet[int], gold: AbstractSet[int]) -> float:
    """F1 of two sets of token positions; a set without any stands for {0}, so silence about nothing scores 1."""
    predicted, gold = predicted or {0}, gold or {0}
    return 2 * len(predicted & gold) / (len(predicted) + len(gold))


def normalise(text: str) -> str:
    """Lower case, without ASCII punctuation, then without English articles, with single spaces between words.

    The order matters: "a.b" becomes "ab" and keeps its a; "A–B", whose dash is not ASCII, loses it.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """1 where the prediction is one of the answers after `normalise`; no answers: where nothing was said."""
    return float(normalise(prediction) in _forms(answers))


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """The best F1 of words with any of the answers; no answers: 1 where nothing was said."""
    said = normalise(prediction).split()
    return max(_word_f1(said, form.split()) for form in _forms(answers))


def _forms(answers: Sequence[str]) -> list[str]:
    """The answers in one form. Those of which nothing is left do not count; if none is left, saying nothing is right."""
    return [form for form in map(normalise, answers) if form] or [""]


def _word_f1(said: list[str], gold: list[str]) -> float:
    """F1 of words, each as often as it occurs; where a side has none, 1 if both have none."""
    if not said or not gold:
        return float(said == gold)
    shared = (Counter(said) & Counter(gold)).total()
    return 2 * shared / (len(said) + len(gold))
