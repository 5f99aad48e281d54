"""Lexical baselines against their definitions, worked out word by word."""

import math
import re

import numpy as np
import pytest

from biphase.tasks import baselines
from biphase.tasks.baselines import K1, B, bm25_rankings, tfidf_labels, word_tags

DOCUMENTS = [
    "the cat sat on the mat",
    "a dog and a cat and a bird",
    "birds fly over the sea",
    "the sea is deep, the Sea is blue",
    "",
]
QUERIES = ["cat", "the sea", "the the sea", "a bird and a dog", "nothing known"]


def words(text):
    return re.findall(r"\w+", text.lower())


def bm25(query, document):
    mean = sum(len(words(text)) for text in DOCUMENTS) / len(DOCUMENTS)
    own, total = words(document), 0.0
    for word in words(query):
        present = sum(word in words(text) for text in DOCUMENTS)
        count = own.count(word)
        inverse = math.log(1 + (len(DOCUMENTS) - present + 0.5) / (present + 0.5))
        total += inverse * count * (K1 + 1) / (count + K1 * (1 - B + B * len(own) / mean))
    return total


@pytest.mark.parametrize("scores_at_a_time", [1, 2**25])
def test_bm25_ranks_by_its_definition_and_equal_scores_by_index(monkeypatch, scores_at_a_time):
    monkeypatch.setattr(baselines, "SCORES", scores_at_a_time)
    ranked = bm25_rankings(DOCUMENTS, QUERIES, kept=4)
    expected = [
        sorted(range(len(DOCUMENTS)), key=lambda index: (-round(bm25(query, DOCUMENTS[index]), 5), index))[:4]
        for query in QUERIES
    ]
    assert ranked.tolist() == expected
    assert ranked[-1].tolist() == [0, 1, 2, 3]


def test_logistic_regression_learns_words_and_word_pairs():
    texts = ["good film", "not bad", "bad film", "not good"] * 5
    labels = [1, 1, 0, 0] * 5  # only the pairs tell
    validation, test = tfidf_labels(texts, labels, ["so not bad"], ["not good at all", "good film"])
    assert validation.tolist() == [1]
    assert test.tolist() == [0, 1]


def test_a_word_gets_its_most_frequent_tag_and_an_unknown_word_the_most_frequent_of_all():
    train = [(("Anna", "lives", "in", "Rome"), (1, 0, 0, 2)), (("Rome", "is", "Rome"), (2, 0, 1))]
    [tags] = word_tags(train, [("Rome", "is", "big"), ("Anna",)])
    assert [one.tolist() for one in tags] == [[2, 0, 0], [1]]


def test_datasets_that_are_too_large_or_empty_have_no_baseline(monkeypatch):
    assert tfidf_labels(["", "…"], [0, 1], ["x"]) is None
    assert tfidf_labels(["one", "two"], [1, 1], ["x"]) is None
    assert bm25_rankings(["", "…"], ["x"], kept=3) is None
    assert bm25_rankings(["one"], [], kept=3).shape == (0, 1)
    monkeypatch.setattr(baselines, "MOST_TEXTS", 1)
    assert tfidf_labels(["one", "two"], [0, 1], ["x"]) is None
    assert bm25_rankings(["one", "two"], ["one"], kept=3) is None
    assert np.array_equal(bm25_rankings(["one"], ["one"], kept=3), [[0]])
