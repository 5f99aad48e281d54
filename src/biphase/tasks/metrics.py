"""How an example is scored, for each family of tasks: the paper's way and the usual way.

    family   file             the paper's                    the usual
    SC       classification   accuracy                       accuracy, macro_f1, mcc
    TC       tagging          sentence_macro_f1              entity_counts, entity_f1
    QA       answers          token_set_f1                   answer_f1, exact_match
    IR       ranking          paper_ndcg@10                  ndcg@10, mrr@10, recall@100

Every example keeps its own value, so that two models can be compared example by example and a set resampled.
The score of a set is the mean of its examples. Entity F1 is no mean: its examples keep three counts,
and `tagging.entity_f1` turns the counts of any choice of examples into its score. Macro F1 and MCC are no means
either; they are worked out from the labels of a whole set. Arrays of values are float32, as they are kept; take
their mean in float64 (`values.mean(dtype=float)`).

Scores lie between 0 and 1, MCC between -1 and 1. Only numpy is needed here.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nlargest
from math import comb

import numpy as np
from numpy.typing import NDArray

# ---------------------------------------------------------------- classification
# One label for a text: accuracy example by example, and macro F1 and MCC of a whole set.
#
# Macro F1 and Matthews' correlation are computed from a confusion matrix, as scikit-learn defines them; they are no means
# over examples. A model that gives every text the same label has an MCC of 0, whatever its accuracy.


def accuracy(predicted: NDArray[np.integer], gold: NDArray[np.integer]) -> NDArray[np.float32]:
    """1 for each example whose label is right, 0 for each other."""
    if predicted.shape != gold.shape:  # comparing would stretch the shorter one
        raise ValueError(f"{predicted.shape} predicted labels cannot be held against {gold.shape} gold ones")
    return (predicted == gold).astype(np.float32)


def confusion(predicted: NDArray[np.integer], gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """How often each gold label (rows) was predicted as each label (columns)."""
    return np.bincount(gold * labels + predicted, minlength=labels**2).reshape(labels, labels).astype(float)


def confusion_by_chance(gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """The expected confusion of guessing each label equally often, whatever the text."""
    return np.outer(np.bincount(gold, minlength=labels), np.full(labels, 1 / labels))


def label_scores(counts: NDArray[np.float64]) -> dict[str, float]:
    """Every score of a confusion matrix."""
    right = float(np.trace(counts) / counts.sum())
    return {"accuracy": right, "macro_f1": macro_f1(counts), "mcc": mcc(counts)}


def macro_f1(counts: NDArray[np.float64]) -> float:
    """The unweighted mean of each label's F1, over the labels that occur among gold or predicted ones."""
    occurs = counts.sum(axis=0) + counts.sum(axis=1)  # F1 = 2 right / (predicted + gold)
    return float((2 * np.diag(counts)[occurs > 0] / occurs[occurs > 0]).mean())


def mcc(counts: NDArray[np.float64]) -> float:
    """Matthews' correlation of any number of labels, between -1 and 1; 0 where all predicted or all gold are alike."""
    total, predicted, gold = counts.sum(), counts.sum(axis=0), counts.sum(axis=1)
    spread = (total**2 - predicted @ predicted) * (total**2 - gold @ gold)
    return float((np.trace(counts) * total - predicted @ gold) / math.sqrt(spread)) if spread > 0 else 0.0


# ---------------------------------------------------------------- tagging
# One tag for each word: the paper's score of a sentence, and the entities that CoNLL counts.
#
# The paper averages, over sentences, the macro-F1 of the tags of that sentence, with O as a tag like any other:
# a sentence of nothing but O that is tagged so scores 1, and rare tags weigh as much as O. The usual score counts
# whole entities over all sentences, right only if type, first and last word are right.


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


# ---------------------------------------------------------------- answers
# An answer in a context: the paper's overlap of token positions, and the official score of its text.
#
# The paper compares the set of tokens marked as answer with those of the first gold answer. The official score
# (SQuAD 2.0) compares words, after both texts are brought to one form, with every gold answer, and the best counts.
# SQuAD 1.1's script differs from it only where a text consists of nothing but articles and punctuation.


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


# ---------------------------------------------------------------- ranking
# Documents in order for a query: the paper's NDCG of what was retrieved, and the scores trec_eval gives.
#
#     place      1    2    3    …          gain of a place: the grade of its document
#     grade      2    0    1               weight of a place: 1 / log2(1 + place)
#
# NDCG divides the weighted sum of gains by that of the best order. The true one takes the best order of ALL judged
# documents; the paper's asks only whether a document is relevant and reorders the ten that were retrieved, so that a
# relevant document which is missing costs nothing, unless all are: of two, one found and placed first scores 1, not 0.61.
#
# The order is taken as given. Our search gives a total one, by score and then by the document's number, the lower
# first; trec_eval sorts again by itself and puts the larger id first among equal scores.


Floats = NDArray[np.float64]


def ndcg(ranked_grades: NDArray, ideal_grades: NDArray, k: int = 10) -> Floats:
    """NDCG@k with linear gains: grades (…, K) of the retrieved, best first, and (…, J) of all that were judged.

    The judged stand in any order, filled up with 0. Negative grades count as 0; without a relevant document it is 0.
    """
    gains, best = np.maximum(ranked_grades, 0), np.maximum(ideal_grades, 0)
    return _share(_dcg(gains, k), _dcg(np.sort(best, axis=-1)[..., ::-1], k))


def ndcg_of_retrieved(ranked_relevance: NDArray, k: int = 10) -> Floats:
    """The paper's NDCG@k: yes or no (…, K), and the best order of the same first k; 0 where none is relevant."""
    first = np.asarray(ranked_relevance, dtype=bool)[..., :k]
    return ndcg(first, first, k)


def reciprocal_rank(ranked_relevance: NDArray, k: int = 10) -> Floats:
    """1 / the place of the first relevant document among the first k of (…, K); 0 where there is none."""
    first = np.asarray(ranked_relevance, dtype=bool)[..., :k]
    if not first.shape[-1]:
        return np.zeros(first.shape[:-1])
    return np.where(first.any(axis=-1), 1 / (1 + first.argmax(axis=-1)), 0.0)


def recall(ranked_relevance: NDArray, relevant: NDArray, k: int = 100) -> Floats:
    """The share of all `relevant` documents (…) that are among the first k of (…, K); 0 where there are none."""
    return _share(np.asarray(ranked_relevance, dtype=bool)[..., :k].sum(axis=-1), relevant)


def score_rankings(
    retrieved: NDArray[np.integer], judged: Sequence[Mapping[int, int]], relevant: int
) -> dict[str, NDArray[np.float32]]:
    """Every score of each query, from the documents (Q, K) retrieved for it, best first and none of them twice.

    `judged` says, for each query, the grade of each document that was judged; others have grade 0, and so has a
    place without a document (−1). A grade of `relevant` or more means relevant: all scores but ndcg@10, which
    weighs the grades themselves, ask only that. Where there is nothing to find, the score is 0.
    """
    grades = np.zeros(retrieved.shape, dtype=np.int64)
    best = np.zeros((len(retrieved), 10), dtype=np.int64)
    to_find = np.zeros(len(retrieved), dtype=np.int64)
    for row, (documents, known) in enumerate(zip(retrieved.tolist(), judged, strict=True)):
        grades[row] = [known.get(document, 0) for document in documents]
        highest = nlargest(10, known.values())
        best[row, : len(highest)] = highest
        to_find[row] = sum(grade >= relevant for grade in known.values())
    found = grades >= relevant
    scores = {
        "ndcg@10": ndcg(grades, best, 10),
        "paper_ndcg@10": ndcg_of_retrieved(found, 10),
        "mrr@10": reciprocal_rank(found, 10),
        "recall@100": recall(found, to_find, 100),
    }
    return {name: values.astype(np.float32) for name, values in scores.items()}


def expected_at_random(
    judged: Sequence[Mapping[int, int]], relevant: int, documents: int
) -> dict[str, NDArray[np.float32]]:
    """What `score_rankings` gives each query on average, where so many documents are ranked at random."""
    first, weights = min(10, documents), 1 / np.log2(np.arange(2, min(10, documents) + 2))
    scores = {name: np.zeros(len(judged)) for name in ("ndcg@10", "paper_ndcg@10", "mrr@10", "recall@100")}
    for row, known in enumerate(judged):
        gains = np.array(sorted((max(grade, 0) for grade in known.values()), reverse=True), dtype=float)
        to_find = sum(grade >= relevant for grade in known.values())
        if gains.sum():
            scores["ndcg@10"][row] = gains.sum() / documents * weights.sum() / _dcg(gains, 10)
        if not to_find:
            continue
        scores["recall@100"][row] = min(100, documents) / documents
        # The chance that no relevant document stands before a place, and that one stands there.
        others = documents - to_find - np.arange(first)
        missed = np.concatenate(([1.0], np.cumprod(others / (documents - np.arange(first)))))
        scores["mrr@10"][row] = ((missed[:-1] - missed[1:]) / np.arange(1, first + 1)).sum()
        # Of n relevant documents among the first, each place holds one with the same chance.
        for n in range(1, min(to_find, first) + 1):
            ways = comb(to_find, n) * comb(documents - to_find, first - n) / comb(documents, first)
            scores["paper_ndcg@10"][row] += ways * n / first * weights.sum() / weights[:n].sum()
    return {name: values.astype(np.float32) for name, values in scores.items()}


def _dcg(gains: NDArray, k: int) -> Floats:
    first = gains[..., :k]
    return (first / np.log2(np.arange(2, first.shape[-1] + 2))).sum(axis=-1)


def _share(part: NDArray, whole: NDArray) -> Floats:
    """part / whole, and 0 where there is no whole."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=whole > 0)
