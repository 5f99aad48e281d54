"""Lexical baselines: what word counts alone achieve on a task, without any pretrained model.

    SC   TF-IDF of words and word pairs, and logistic regression
    TC   the most frequent tag of each word in the training sentences; of an unknown word, the most frequent tag of all
    IR   BM25 over the words of documents

A model that does not score above them has learnt nothing that its task can show. They are deterministic, take seconds
for the datasets of the catalog, and are left out where a dataset is too large for that.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

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
    characters, classes = sum(map(len, texts)), len(set(labels))
    if len(texts) > MOST_TEXTS or characters > MOST_CHARACTERS or classes < 2:
        return None
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression

    words = TfidfVectorizer(
        token_pattern=WORDS,
        ngram_range=(1, 2 if characters < MOST_CHARACTERS / 10 else 1),
        max_features=MOST_WEIGHTS // classes,
        sublinear_tf=True,
        dtype=np.float32,
    )
    try:
        counts = words.fit_transform(texts)
    except ValueError:  # no text has a word
        return None
    model = LogisticRegression(C=4.0, max_iter=300).fit(counts, labels)
    return [model.predict(words.transform(part)) for part in parts]


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
