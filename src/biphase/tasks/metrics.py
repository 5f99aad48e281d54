"""Metrics of each family of tasks: the paper's and the usual ones. Only numpy is needed.

    family                the paper's          the usual
    SC  classification    accuracy             accuracy, macro_f1, mcc
    TC  tagging           sentence_macro_f1    entity_counts, entity_f1
    QA  answers           token_set_f1         answer_f1, exact_match
    IR  ranking           paper_ndcg@10        ndcg@10, mrr@10, recall@100
    SR  regression        –                    pearson, spearman, pearson_spearman
    ML  multilabel        –                    micro_f1, macro_f1
    MC  multiple choice   –                    accuracy

Values are computed per example, so that two models can be compared example by example and a test set resampled. The
score of a set is the mean of its examples, with these exceptions: entity F1 and micro F1 are computed from three
counts per example, a correlation from the pairs of predicted and true number, macro F1 and MCC from the labels of the
whole set. Values are stored as float32; take their mean in float64 (`values.mean(dtype=float)`).

Scores are between 0 and 1, MCC and correlations between -1 and 1.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from heapq import nlargest
from math import comb

import numpy as np
from numpy.typing import NDArray

# ---------------------------------------------------------------- classification
# Macro F1 and MCC follow scikit-learn's definitions. A model that predicts one label for every text has an MCC of 0,
# whatever its accuracy.


def accuracy(predicted: NDArray[np.integer], gold: NDArray[np.integer]) -> NDArray[np.float32]:
    """Return 1 for each correct label and 0 for each wrong one."""
    if predicted.shape != gold.shape:  # comparing would broadcast
        raise ValueError(f"{predicted.shape} predicted labels cannot be held against {gold.shape} gold ones")
    return (predicted == gold).astype(np.float32)


def confusion(predicted: NDArray[np.integer], gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """Count how often each gold label (rows) was predicted as each label (columns)."""
    return np.bincount(gold * labels + predicted, minlength=labels**2).reshape(labels, labels).astype(float)


def confusion_by_chance(gold: NDArray[np.integer], labels: int) -> NDArray[np.float64]:
    """Return the expected confusion matrix of uniformly random labels."""
    return np.outer(np.bincount(gold, minlength=labels), np.full(labels, 1 / labels))


def label_scores(counts: NDArray[np.float64]) -> dict[str, float]:
    """Return all scores of a confusion matrix."""
    right = float(np.trace(counts) / counts.sum())
    return {"accuracy": right, "macro_f1": macro_f1(counts), "mcc": mcc(counts)}


def macro_f1(counts: NDArray[np.float64]) -> float:
    """Return the unweighted mean F1 over the labels that occur among gold or predicted ones."""
    occurs = counts.sum(axis=0) + counts.sum(axis=1)  # F1 = 2 right / (predicted + gold)
    return float((2 * np.diag(counts)[occurs > 0] / occurs[occurs > 0]).mean())


def multilabel_scores(predicted: NDArray[np.bool_], gold: NDArray[np.bool_]) -> dict[str, float]:
    """Return micro and macro F1 of the labels (n, labels) of texts; macro over labels that occur, as `macro_f1`."""
    right, occurs = (predicted & gold).sum(axis=0), predicted.sum(axis=0) + gold.sum(axis=0)
    known = occurs > 0
    each = 2 * right[known] / occurs[known]
    micro = 2 * right.sum() / max(1, occurs.sum())  # 0 if nothing is right, also if there was nothing to find
    return {"micro_f1": float(micro), "macro_f1": float(each.mean()) if known.any() else 0.0}


def label_counts(predicted: NDArray[np.bool_], gold: NDArray[np.bool_]) -> NDArray[np.int32]:
    """Return the numbers of correct, predicted and true labels of each text: (n, 3)."""
    return np.stack([one.sum(axis=1) for one in (predicted & gold, predicted, gold)], -1).astype(np.int32)


def mcc(counts: NDArray[np.float64]) -> float:
    """Return Matthews' correlation for any number of labels; 0 if all predicted or all gold labels are equal."""
    total, predicted, gold = counts.sum(), counts.sum(axis=0), counts.sum(axis=1)
    spread = (total**2 - predicted @ predicted) * (total**2 - gold @ gold)
    return float((np.trace(counts) * total - predicted @ gold) / math.sqrt(spread)) if spread > 0 else 0.0


# ---------------------------------------------------------------- regression
# Correlations of predicted and true numbers. GLUE's metric of STS-B is the mean of Pearson's and Spearman's. With
# `weights`, example i occurs `weights[…, i]` times, as in resamples of a test set: Spearman's ranks are those of the
# resample. A correlation is 0 where all predicted or all true numbers are equal.


def correlations(predicted: NDArray, gold: NDArray) -> dict[str, float]:
    """Return Pearson's and Spearman's correlation, and their mean."""
    once = np.ones(len(gold))
    return {name: float(correlation(name, predicted, gold, once)) for name in CORRELATIONS}


def correlation(name: str, predicted: NDArray, gold: NDArray, weights: NDArray) -> Floats:
    """Return a correlation of numbers (n) under weights (…, n); NaN if a number is."""
    return correlation_with(name, gold, weights)(predicted)


def correlation_with(name: str, gold: NDArray, weights: NDArray) -> Callable[[NDArray], Floats]:
    """Return `correlation` as a function of the predicted numbers; the ranks of the true ones are computed once."""
    y, counts = np.asarray(gold, np.float64), np.asarray(weights, np.float64)
    known = bool(np.isfinite(y).all())
    scales = [of for kind, of in (("pearson", _as_they_are), ("spearman", _ranks)) if known and kind in name]
    of_gold = [_centred(of(y, counts), counts) for of in scales]

    def scored(predicted: NDArray) -> Floats:
        x = np.asarray(predicted, np.float64)
        if not (known and np.isfinite(x).all()):
            return np.full(counts.shape[:-1], np.nan)
        of_predicted = (_centred(scale(x, counts), counts) for scale in scales)
        return np.mean([_pearson(*pair, counts) for pair in zip(of_predicted, of_gold, strict=True)], axis=0)

    return scored


CORRELATIONS = ("pearson_spearman", "pearson", "spearman")


def _centred(values: NDArray, counts: NDArray) -> tuple[NDArray, Floats]:
    """Return values minus their mean, and their sum of squares; 0 where rounding alone makes it positive."""
    values = values - (values * counts).sum(-1, keepdims=True) / counts.sum(-1, keepdims=True)
    spread, least = (values * values * counts).sum(-1), 1e-20 * (1 + np.square(values).max(-1))
    return values, np.where(spread > least, spread, 0.0)


def _pearson(one: tuple[NDArray, Floats], other: tuple[NDArray, Floats], counts: NDArray) -> Floats:
    """Return the correlation of two columns of numbers that `_centred` prepared."""
    shared = (one[0] * other[0] * counts).sum(-1)
    known = np.logical_and(one[1] > 0, other[1] > 0)
    return np.divide(shared, np.sqrt(one[1] * other[1]), out=np.zeros(shared.shape), where=known)


def _as_they_are(values: NDArray, counts: NDArray) -> NDArray:
    return values


def _ranks(values: NDArray, counts: NDArray) -> Floats:
    """Return the rank of each value among the counted ones; equal values share their mean rank."""
    _, which = np.unique(values, return_inverse=True)
    order = np.argsort(which, kind="stable")
    starts = np.searchsorted(which[order], np.arange(which.max() + 1))
    of_each = np.add.reduceat(counts[..., order], starts, axis=-1)
    return (of_each.cumsum(-1) - (of_each - 1) / 2)[..., which]


# ---------------------------------------------------------------- tagging
# The paper averages over sentences the macro F1 of the sentence's tags, with O as a tag like any other: a sentence
# of only O that is predicted so scores 1, and rare tags weigh as much as O. The usual score (CoNLL) counts whole
# entities over all sentences, correct only if type, first and last word are.


Entity = tuple[str, int, int]  # (type, first word, last word)


def word_votes(
    token_labels: Sequence[int], word_of_token: Sequence[int], words: int, outside: int
) -> list[int]:
    """Return the label of each word by majority of its tokens; ties go to the label that came first.

    A token with a negative word index belongs to no word. A word without tokens was truncated and gets `outside`,
    the number of O.
    """
    votes: list[Counter[int]] = [Counter() for _ in range(words)]
    for label, word in zip(token_labels, word_of_token, strict=True):
        if word >= 0:
            votes[word][label] += 1
    # A Counter keeps insertion order, and `max` returns the first of equals.
    return [max(count, key=count.__getitem__) if count else outside for count in votes]


def sentence_macro_f1(predicted: Sequence[int], gold: Sequence[int]) -> float:
    """Return the mean F1 over the labels that occur in one sentence, predicted or gold.

    As sklearn's macro F1 without a list of labels, except that an empty sentence, which sklearn refuses, scores 1.
    """
    right = Counter(one for one, other in zip(predicted, gold, strict=True) if one == other)
    occurs = Counter(predicted)
    occurs.update(gold)
    if not occurs:
        return 1.0
    # F1 = 2 right / (predicted + gold); labels that occur in neither are not part of the mean.
    return sum(2 * right[label] / count for label, count in occurs.items()) / len(occurs)


def entities(tags: Sequence[str]) -> set[Entity]:
    """Return the entities of a sentence tagged with O, B-… and I-…, read leniently as conlleval and seqeval do.

    An entity begins at B-, or at an I- after O or after another type.
    """
    found: set[Entity] = set()
    kind, start = "", 0  # the open entity; "": none
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
    """Return the numbers of correct, predicted and gold entities of one sentence."""
    if len(predicted_tags) != len(gold_tags):
        raise ValueError(f"{len(predicted_tags)} predicted tags for {len(gold_tags)} words")
    predicted, gold = entities(predicted_tags), entities(gold_tags)
    return len(predicted & gold), len(predicted), len(gold)


def entity_f1(counts: NDArray[np.integer]) -> float:
    """Return the micro-averaged entity F1 over sentences, from their counts (n, 3).

    It is 0 if no entity is correct, also if there was none to find, as in seqeval.
    """
    right, predicted, gold = counts.reshape(-1, 3).sum(axis=0).tolist()
    return 2 * right / (predicted + gold) if right else 0.0


# ---------------------------------------------------------------- answers
# The paper compares the set of tokens marked as answer with those of the first gold answer. The official score
# (SQuAD 2.0) compares normalized words with every gold answer and takes the best. SQuAD 1.1's script differs from
# it only for texts that consist of articles and punctuation alone.


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLE = re.compile(r"\b(?:a|an|the)\b")


def token_set_f1(predicted: AbstractSet[int], gold: AbstractSet[int]) -> float:
    """Return the F1 of two sets of token positions; an empty set counts as {0}, so two empty sets score 1."""
    predicted, gold = predicted or {0}, gold or {0}
    return 2 * len(predicted & gold) / (len(predicted) + len(gold))


def normalise(text: str) -> str:
    """Normalize as SQuAD does: lower case, no ASCII punctuation, then no English articles, single spaces.

    The order matters: "a.b" becomes "ab" and keeps its a; "A–B", whose dash is not ASCII, loses it.
    """
    return " ".join(_ARTICLE.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Sequence[str]) -> float:
    """Return 1 if the prediction equals an answer after `normalise`; without answers, if the prediction is empty."""
    return float(normalise(prediction) in _forms(answers))


def answer_f1(prediction: str, answers: Sequence[str]) -> float:
    """Return the best word F1 with any of the answers; without answers, 1 if the prediction is empty."""
    predicted = normalise(prediction).split()
    return max(_word_f1(predicted, form.split()) for form in _forms(answers))


def _forms(answers: Sequence[str]) -> list[str]:
    """Return the normalized answers that are not empty; if none is left, [""], so that an empty prediction is right."""
    return [form for form in map(normalise, answers) if form] or [""]


def _word_f1(predicted: list[str], gold: list[str]) -> float:
    """Return the F1 of two bags of words; if one is empty, 1 if both are."""
    if not predicted or not gold:
        return float(predicted == gold)
    shared = (Counter(predicted) & Counter(gold)).total()
    return 2 * shared / (len(predicted) + len(gold))


# ---------------------------------------------------------------- ranking
#     rank       1    2    3    …          gain of a rank: the grade of its document
#     grade      2    0    1               weight of a rank: 1 / log2(1 + rank)
#
# NDCG divides the weighted sum of gains by that of the best order. The true one (trec_eval) uses the best order of
# ALL judged documents; the paper's uses binary relevance and the best order of the ten retrieved ones, so that
# missing relevant documents cost nothing unless all are missing: of two, one found and ranked first scores 1, not
# 0.61.
#
# The order is taken as given. `finetune.families.search` returns a total one, by score and then by lower index;
# trec_eval sorts again and puts the larger id first among equal scores.


Floats = NDArray[np.float64]


def ndcg(ranked_grades: NDArray, ideal_grades: NDArray, k: int = 10) -> Floats:
    """Return NDCG@k with linear gains.

    `ranked_grades` (…, K) are the grades of the retrieved documents, best first; `ideal_grades` (…, J) those of all
    judged documents. The judged grades are in any order, padded with 0. Negative grades count as 0; without a
    relevant document the score is 0.
    """
    gains, best = np.maximum(ranked_grades, 0), np.maximum(ideal_grades, 0)
    return _share(_dcg(gains, k), _dcg(np.sort(best, axis=-1)[..., ::-1], k))


def ndcg_of_retrieved(ranked_relevance: NDArray, k: int = 10) -> Floats:
    """Return the paper's NDCG@k of binary relevance (…, K), relative to the best order of the same k documents."""
    first = np.asarray(ranked_relevance, dtype=bool)[..., :k]
    return ndcg(first, first, k)


def reciprocal_rank(ranked_relevance: NDArray, k: int = 10) -> Floats:
    """Return 1 / rank of the first relevant document among the first k of (…, K), or 0."""
    first = np.asarray(ranked_relevance, dtype=bool)[..., :k]
    if not first.shape[-1]:
        return np.zeros(first.shape[:-1])
    return np.where(first.any(axis=-1), 1 / (1 + first.argmax(axis=-1)), 0.0)


def recall(ranked_relevance: NDArray, relevant: NDArray, k: int = 100) -> Floats:
    """Return the share of all `relevant` documents (…) among the first k of (…, K); 0 if there are none."""
    return _share(np.asarray(ranked_relevance, dtype=bool)[..., :k].sum(axis=-1), relevant)


def score_rankings(
    retrieved: NDArray[np.integer], judged: Sequence[Mapping[int, int]], relevant: int
) -> dict[str, NDArray[np.float32]]:
    """Return all scores of each query, from the distinct documents (Q, K) retrieved for it, best first.

    `judged` maps, for each query, documents to grades; other documents, and an empty rank (−1), have grade 0. A
    grade of at least `relevant` means relevant; ndcg@10 uses the grades themselves, all other scores only
    relevance. A query without relevant documents scores 0.
    """
    grades = np.zeros(retrieved.shape, dtype=np.int64)
    best = np.zeros((len(retrieved), 10), dtype=np.int64)
    to_find = np.zeros(len(retrieved), dtype=np.int64)
    for row, (documents, graded) in enumerate(zip(retrieved.tolist(), judged, strict=True)):
        grades[row] = [graded.get(document, 0) for document in documents]
        highest = nlargest(10, graded.values())
        best[row, : len(highest)] = highest
        to_find[row] = sum(grade >= relevant for grade in graded.values())
    hits = grades >= relevant
    scores = {
        "ndcg@10": ndcg(grades, best, 10),
        "paper_ndcg@10": ndcg_of_retrieved(hits, 10),
        "mrr@10": reciprocal_rank(hits, 10),
        "recall@100": recall(hits, to_find, 100),
    }
    return {name: values.astype(np.float32) for name, values in scores.items()}


def expected_at_random(
    judged: Sequence[Mapping[int, int]], relevant: int, documents: int
) -> dict[str, NDArray[np.float32]]:
    """Return the expected value of `score_rankings` for each query if `documents` documents are ranked at random."""
    first, weights = min(10, documents), 1 / np.log2(np.arange(2, min(10, documents) + 2))
    scores = {name: np.zeros(len(judged)) for name in ("ndcg@10", "paper_ndcg@10", "mrr@10", "recall@100")}
    for row, graded in enumerate(judged):
        gains = np.array(sorted((max(grade, 0) for grade in graded.values()), reverse=True), dtype=float)
        to_find = sum(grade >= relevant for grade in graded.values())
        if gains.sum():
            scores["ndcg@10"][row] = gains.sum() / documents * weights.sum() / _dcg(gains, 10)
        if not to_find:
            continue
        scores["recall@100"][row] = min(100, documents) / documents
        # Probability that no relevant document is before a rank; its differences are those that the first one is there.
        others = documents - to_find - np.arange(first)
        missed = np.concatenate(([1.0], np.cumprod(others / (documents - np.arange(first)))))
        scores["mrr@10"][row] = ((missed[:-1] - missed[1:]) / np.arange(1, first + 1)).sum()
        # Given n relevant documents among the first, each rank holds one with equal probability.
        for n in range(1, min(to_find, first) + 1):
            ways = comb(to_find, n) * comb(documents - to_find, first - n) / comb(documents, first)
            scores["paper_ndcg@10"][row] += ways * n / first * weights.sum() / weights[:n].sum()
    return {name: values.astype(np.float32) for name, values in scores.items()}


def _dcg(gains: NDArray, k: int) -> Floats:
    first = gains[..., :k]
    return (first / np.log2(np.arange(2, first.shape[-1] + 2))).sum(axis=-1)


def _share(part: NDArray, whole: NDArray) -> Floats:
    """Return part / whole, or 0 where whole is 0."""
    whole = np.asarray(whole, dtype=np.float64)
    return np.divide(part, whole, out=np.zeros(np.shape(part)), where=whole > 0)
