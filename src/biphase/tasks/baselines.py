"""Lexical baselines: what word counts alone achieve on a task, without any pretrained model.

    SC   TF-IDF of words and word pairs, and logistic regression
    TC   the most frequent tag of each word in the training sentences; of an unknown word, the most frequent tag of all
    ML   TF-IDF of words and word pairs, and a logistic regression for each label
    IR   BM25 over the words of documents
    SR   TF-IDF of words and word pairs, and ridge regression; of text pairs, the cosine of their TF-IDF vectors

A model that does not score above them has learnt nothing that its task can show. They are deterministic, take seconds
for the datasets of the catalog, and are left out where a dataset is too large for that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np

# Raised when a method changes: a store keeps what it computed by each.
METHOD = 1
MOST_TEXTS = 100_000  # training texts, or documents to search; beyond it there is no baseline
MOST_CHARACTERS = 10**8  # of training texts; from a tenth of it on, only single words are counted
MOST_WEIGHTS = 2**22  # of a logistic regression: words × labels
K1, B = 0.9, 0.4  # BM25's parameters, Anserini's defaults
SCORES = 2**25  # scores held at a time
WORDS = r"(?u)\b\w+\b"


def tfidf_labels(
    texts: Sequence[str], labels: Sequence[int], *parts: Sequence[str]
) -> list[np.ndarray] | None:
    """Return the labels that a logistic regression on `texts` predicts for each of `parts`; None: too many texts."""
    classes = len(set(labels))
    counted = None if classes < 2 else _tfidf(texts, features=MOST_WEIGHTS // classes)
    if counted is None:
        return None
    words, counts = counted
    model = _logistic_regression(counts, labels)
    return [model.predict(words.transform(part)) for part in parts]


def _logistic_regression(counts: Any, labels: Any) -> Any:
    """Fit with one thread: with one for each core, six workers that fitted MNLI at once on 16 cores took 270 s."""
    from sklearn.linear_model import LogisticRegression
    from threadpoolctl import threadpool_limits

    with threadpool_limits(1):
        return LogisticRegression(C=4.0, max_iter=300).fit(counts, labels)


def tfidf_label_sets(
    texts: Sequence[str], labels: np.ndarray, *parts: Sequence[str]
) -> list[np.ndarray] | None:
    """Return which labels (n, labels) a logistic regression for each label predicts; None: too many texts."""
    counted = _tfidf(texts, features=MOST_WEIGHTS // labels.shape[1])
    if counted is None:
        return None
    words, counts = counted
    read = [words.transform(part) for part in parts]
    found = [np.zeros((len(part), labels.shape[1]), bool) for part in parts]
    for label, marks in enumerate(labels.T):
        model = _logistic_regression(counts, marks) if len(set(marks)) > 1 else None
        for said, part in zip(found, read, strict=True):
            said[:, label] = model.predict(part) if model else marks[0]
    return found


def tfidf_numbers(
    texts: Sequence[str], numbers: np.ndarray, *parts: Sequence[str]
) -> list[np.ndarray] | None:
    """Return the numbers that a ridge regression on `texts` predicts for each of `parts`; None: too many texts."""
    counted = _tfidf(texts, features=MOST_WEIGHTS)
    if counted is None:
        return None
    from sklearn.linear_model import Ridge

    words, counts = counted
    model = Ridge(alpha=1.0).fit(counts, numbers.astype(np.float64))
    return [model.predict(words.transform(part)) for part in parts]


def tfidf_cosines(
    pairs: Sequence[tuple[str, str]], *parts: Sequence[tuple[str, str]]
) -> list[np.ndarray] | None:
    """Return the cosine of the two texts of each pair of `parts`; words are weighted by their frequency in `pairs`."""
    counted = _tfidf([text for pair in pairs for text in pair], features=MOST_WEIGHTS)
    if counted is None:
        return None
    words, found = counted[0], []
    for part in parts:
        one, other = (words.transform([pair[side] for pair in part]) for side in (0, 1))
        found.append(np.asarray(one.multiply(other).sum(axis=1)).ravel())
    return found


def _tfidf(texts: Sequence[str], *, features: int) -> tuple[Any, Any] | None:
    """Return TF-IDF of words and word pairs, fitted to texts, and the texts by it; None: too many, or without a word."""
    characters = sum(map(len, texts))
    if len(texts) > MOST_TEXTS or characters > MOST_CHARACTERS:
        return None
    from sklearn.feature_extraction.text import TfidfVectorizer

    words = TfidfVectorizer(
        token_pattern=WORDS,
        ngram_range=(1, 2 if characters < MOST_CHARACTERS / 10 else 1),
        max_features=features,
        sublinear_tf=True,
        dtype=np.float32,
    )
    try:
        return words, words.fit_transform(texts)
    except ValueError:  # no text has a word
        return None


def word_tags(
    sentences: Sequence[tuple[Sequence[str], Sequence[int]]], *parts: Sequence[Sequence[str]]
) -> list[list[list[int]]]:
    """Return the tags of the sentences of each of `parts` by the most frequent tag of each word in `sentences`."""
    counts: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for words, tags in sentences:
        for word, tag in zip(words, tags, strict=True):
            counts[word][tag] += 1
    every = sum(counts.values(), Counter())
    default = every.most_common(1)[0][0] if every else 0
    known = {word: tags.most_common(1)[0][0] for word, tags in counts.items()}
    return [[[known.get(word, default) for word in words] for words in part] for part in parts]


def bm25_rankings(documents: Sequence[str], queries: Sequence[str], *, kept: int) -> np.ndarray | None:
    """Return the indices of the best `kept` documents of each query, best first; None: too many documents.

    Equal scores rank by index.
    """
    if len(documents) > MOST_TEXTS:
        return None
    from scipy.sparse import csr_array, diags_array
    from sklearn.feature_extraction.text import CountVectorizer

    words = CountVectorizer(token_pattern=WORDS, dtype=np.float32)
    try:
        counts = csr_array(words.fit_transform(documents))
    except ValueError:  # no document has a word
        return None
    lengths = counts.sum(1)
    present = np.bincount(counts.indices, minlength=counts.shape[1])
    inverse = np.log1p((len(documents) - present + 0.5) / (present + 0.5)).astype(np.float32)
    norm = K1 * (1 - B + B * lengths / lengths.mean())
    counts.data *= (K1 + 1) / (counts.data + np.repeat(norm, np.diff(counts.indptr)))
    weights = (counts @ diags_array(inverse)).T.tocsr()  # words × documents
    kept = min(kept, len(documents))
    asked = csr_array(words.transform(queries))
    ranked = []
    for first in range(0, len(queries), rows := max(1, SCORES // len(documents))):
        scores = (asked[first : first + rows] @ weights).toarray()
        ranked.append(np.argsort(-scores, axis=1, kind="stable")[:, :kept])
    return np.concatenate(ranked) if ranked else np.zeros((0, kept), int)
