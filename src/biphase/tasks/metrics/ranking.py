"""Documents in order for a query: the paper's NDCG of what was retrieved, and the scores trec_eval gives.

    place      1    2    3    …          gain of a place: the grade of its document
    grade      2    0    1               weight of a place: 1 / log2(1 + place)

NDCG divides the weighted sum of gains by that of the best order. The true one takes the best order of ALL judged
documents; the paper's asks only whether a document is relevant and reorders the ten that were retrieved, so that a
relevant document which is missing costs nothing, unless all are: of two, one found and placed first scores 1, not 0.61.

The order is taken as given. Our search gives a total one, by score and then by the document's number, the lower
first; trec_eval sorts again by itself and puts the larger id first among equal scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nlargest
from math import comb

import numpy as np
from numpy.typing import NDArray

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
