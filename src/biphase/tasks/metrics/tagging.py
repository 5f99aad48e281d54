"""One tag for each word: the paper's score of a sentence, and the entities that CoNLL counts.

The paper averages, over sentences, the macro-F1 of the tags of that sentence, with O as a tag like any other:
a sentence of nothing but O that is tagged so scores 1, and rare tags weigh as much as O. The usual score counts
whole entities over all sentences, right only if type, first and last word are right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Entity = tuple[str, int, int]  # its type, its first word, its last word


def word_votes(
    token_labels: Sequence[int], word_of_token: Sequence[int], words: int, outside: int
) -> list[int]:
    """The label of each word: what most of its tokens say, and of several such labels the one said first.

    A token whose word is negative belongs to none. A word without tokens was cut off: it gets `outside`, the
    number of O.
    """
    votes: list[Counter[int]] = [Counter() for _ in range(words)]
    for label, word in zip(token_labels, word_of_token, strict=True):
        if word >= 0:
            votes[word][label] += 1
    # A counter keeps its labels in the order they came, and `max` takes the first of equals.
    return [max(count, key=count.__getitem__) if count else outside for count in votes]


def sentence_macro_f1(predicted: Sequence[int], gold: Sequence[int]) -> float:
    """The mean, over the labels that occur in either, of each label's F1 over the words of one sentence.

    As sklearn's macro-F1 without a list of labels, except that a sentence without words, which sklearn refuses,
    scores 1: nothing in it is wrong.
    """
    right = Counter(one for one, other in zip(predicted, gold, strict=True) if one == other)
    occurs = Counter(predicted)
    occurs.update(gold)
    if not occurs:
        return 1.0
    # F1 = 2 right / (predicted + gold); a label in neither has no place in the mean.
    return sum(2 * right[label] / count for label, count in occurs.items()) / len(occurs)


def entities(tags: Sequence[str]) -> set[Entity]:
    """The entities of a sentence tagged O, B-… and I-…, read leniently, as conlleval and seqeval do by default.

    An entity begins at B-, or at an I- that continues nothing: after O, or after another type.
    """
    found: set[Entity] = set()
    kind, start = "", 0  # the entity that is open; no kind: none is
    for place, tag in enumerate(tags):
        if tag[0] == "I" and tag[2:] == kind:
            continue
        if kind:
            found.add((kind, start, place - 1))
        kind, start = tag[2:], place
    if kind:
        found.add((kind, start, len(tags) - 1))
    return found


def entity_counts(predicted_tags: Sequence[str], gold_tags: Sequence[str]) -> tuple[int, int, int]:
    """Of one sentence: how many entities were found rightly, how many were predicted, how many there are."""
    if len(predicted_tags) != len(gold_tags):
        raise ValueError(f"{len(predicted_tags)} predicted tags for {len(gold_tags)} words")
    predicted, gold = entities(predicted_tags), entities(gold_tags)
    return len(predicted & gold), len(predicted), len(gold)


def entity_f1(counts: NDArray[np.integer]) -> float:
    """Entity F1 over sentences, from the counts (n, 3) of each: every entity weighs the same (micro).

    Where nothing is found rightly it is 0, also where there was nothing to find: seqeval says so too.
    """
    right, predicted, gold = counts.reshape(-1, 3).sum(axis=0).tolist()
    return 2 * right / (predicted + gold) if right else 0.0
