"""Metrics against scikit-learn, seqeval, pytrec_eval and a second writing of SQuAD's definition."""

import itertools
import string
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
import pytrec_eval
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import pearsonr, spearmanr
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.metrics.sequence_labeling import get_entities
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef, ndcg_score

from biphase.tasks.metrics import (
    accuracy,
    answer_f1,
    confusion,
    confusion_by_chance,
    correlation,
    correlations,
    entities,
    entity_counts,
    entity_f1,
    exact_match,
    expected_at_random,
    label_scores,
    ndcg_of_retrieved,
    normalise,
    score_rankings,
    sentence_macro_f1,
    token_set_f1,
    word_votes,
)

LABEL_PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1)


@pytest.mark.filterwarnings("ignore:A single label was found:UserWarning")
@given(LABEL_PAIRS)
def test_the_scores_of_a_set_are_those_of_sklearn(pairs):
    predicted, gold = np.array(pairs).T
    scores = label_scores(confusion(predicted, gold, 5))
    assert scores["accuracy"] == pytest.approx(accuracy_score(gold, predicted))
    assert accuracy(predicted, gold).mean(dtype=float) == pytest.approx(scores["accuracy"])
    assert scores["macro_f1"] == pytest.approx(f1_score(gold, predicted, average="macro", zero_division=0))
    assert scores["mcc"] == pytest.approx(matthews_corrcoef(gold, predicted), abs=1e-9)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=30))
def test_the_confusion_of_chance_is_the_mean_over_every_guess(labels):
    gold = np.array(labels)
    guesses = [confusion(np.full_like(gold, guess), gold, 3) for guess in range(3)]
    np.testing.assert_allclose(confusion_by_chance(gold, 3), np.mean(guesses, axis=0))


# Types that are beginnings of one another, and one with a hyphen of its own.
TAGS = st.sampled_from(["O", "B-PER", "I-PER", "B-P", "I-P", "B-A-B", "I-A-B", "B-B", "I-B"])
TAG_PAIRS = st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12)


def split(pairs):
    predicted, gold = zip(*pairs, strict=True)
    return list(predicted), list(gold)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 4)), max_size=30))
def test_no_label_has_more_votes_than_the_chosen_one(tokens):
    chosen = word_votes([label for label, _ in tokens], [word for _, word in tokens], words=5, outside=99)
    for word, label in enumerate(chosen):
        said = [one for one, its in tokens if its == word]
        most = Counter(said).most_common()
        winners = [one for one, count in most if count == most[0][1]]
        assert label == (min(winners, key=said.index) if said else 99)


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_macro_f1_is_that_of_sklearn(pairs):
    predicted, gold = split(pairs)
    assert sentence_macro_f1(predicted, gold) == pytest.approx(f1_score(gold, predicted, average="macro"))
    assert sentence_macro_f1([], []) == 1, "a sentence without words has nothing wrong"


@given(st.lists(TAGS, max_size=15))
def test_entities_are_those_of_seqeval(tags):
    assert entities(tags) == set(get_entities(tags))


# seqeval warns where it says 0 for want of entities; that it says 0 is what is compared.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@given(st.lists(TAG_PAIRS, min_size=1, max_size=6))
@example([[("O", "O")]])
@example([[("O", "O")], [("B-P", "O")]])
@example([[("O", "I-P")]])
def test_entity_f1_is_that_of_seqeval(sentences):
    both = [split(pairs) for pairs in sentences]
    counts = np.array([entity_counts(predicted, gold) for predicted, gold in both])
    theirs = seqeval_f1([gold for _, gold in both], [predicted for predicted, _ in both])
    assert entity_f1(counts) == pytest.approx(theirs)


# Words that meet articles, punctuation of either kind, case and odd spaces, so that overlaps are common.
PIECES = [
    "the", "The", "A", "an", "cat", "Cat", "cats", "a.b", "a–b", "'s", "-", "…", "é", "ǅ", "3rd", "theatre", "_",
]  # fmt: skip
TEXTS = st.one_of(
    st.lists(st.sampled_from(PIECES), max_size=6).flatmap(
        lambda parts: st.sampled_from([" ", "  ", "", "\u00a0", "\n"]).map(lambda gap: gap.join(parts))
    ),
    st.text(max_size=12),
)
POSITIONS = st.sets(st.integers(0, 12))


def official_words(text):
    """The definition, letter by letter: what is a word by itself and an article leaves a space."""
    letters = [letter for letter in text.lower() if letter not in string.punctuation]
    runs = (
        "".join(run) for _, run in itertools.groupby(letters, key=lambda one: one.isalnum() or one == "_")
    )
    return "".join(" " if run in ("a", "an", "the") else run for run in runs).split()


def official_f1(said, gold):
    """The definition by precision and recall."""
    if not said or not gold:
        return float(said == gold)
    shared = sum(min(said.count(word), gold.count(word)) for word in set(said))
    precision, recall = shared / len(said), shared / len(gold)
    return 2 * precision * recall / (precision + recall) if shared else 0.0


@given(POSITIONS, POSITIONS)
def test_overlap_is_the_harmonic_mean_of_precision_and_recall(predicted, gold):
    one, two = predicted or {0}, gold or {0}
    precision, recall = len(one & two) / len(one), len(one & two) / len(two)
    harmonic = 2 * precision * recall / (precision + recall) if precision else 0.0
    assert token_set_f1(predicted, gold) == pytest.approx(harmonic)


@given(TEXTS)
@example("A\u0301")
@example("\u0130 the")
def test_normalised_forms_are_the_official_ones(text):
    assert normalise(text) == " ".join(official_words(text))
    assert normalise(normalise(text)).split() == official_words(normalise(text))


@given(TEXTS, st.lists(TEXTS, max_size=4))
def test_scores_are_the_official_ones(prediction, answers):
    said, golds = (
        official_words(prediction),
        [words for one in answers if (words := official_words(one))] or [[]],
    )
    assert exact_match(prediction, answers) == max(float(said == gold) for gold in golds)
    assert answer_f1(prediction, answers) == pytest.approx(max(official_f1(said, gold) for gold in golds))


NAMES = {"ndcg@10", "paper_ndcg@10", "mrr@10", "recall@100"}


@st.composite
def searches(draw, documents=130):
    """Several queries of a small collection, each with judgments and an order of some length of it."""
    places = draw(st.sampled_from([1, 2, 9, 10, 11, 40, 100, 130]))
    queries = draw(st.integers(1, 4))
    judged = [
        draw(st.dictionaries(st.integers(0, documents + 20), st.integers(-1, 3), min_size=1, max_size=30))
        for _ in range(queries)
    ]
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    retrieved = np.stack([random.permutation(documents) for _ in range(queries)])
    for row, known in zip(retrieved, judged, strict=True):
        if draw(st.booleans()):  # what was judged comes early, good and bad, as after a real search
            row[:] = sorted(
                row, key=lambda one, known=known: random.random() * (1 if int(one) in known else 9)
            )
    return retrieved[:, :places], judged


def trec_eval(retrieved, judged, measure, cut, level=1):
    """pytrec_eval on the order given, one value for each query: scores fall strictly, so it sorts the same way."""
    qrels = {
        str(query): {f"d{one}": grade for one, grade in known.items()} for query, known in enumerate(judged)
    }
    run = {
        str(query): {f"d{one}": float(len(row) - place) for place, one in enumerate(row[:cut].tolist())}
        for query, row in enumerate(retrieved)
    }
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {measure}, relevance_level=level)
    results = evaluator.evaluate(run)
    return [results[str(query)][measure.replace(".", "_")] for query in range(len(judged))]


def test_where_nothing_is_relevant_or_retrieved_every_score_is_zero():
    scores = score_rankings(np.array([[0, 1, 2]] * 3), [{}, {0: 0, 1: 0}, {2: -1}], relevant=1)
    assert set(scores) == NAMES
    assert all(values.tolist() == [0, 0, 0] for values in scores.values())
    none = score_rankings(np.zeros((1, 0), dtype=int), [{3: 1}], relevant=1)
    assert all(values.tolist() == [0] for values in none.values())
    full, short = (score_rankings(np.array([row]), [{3: 1, 4: 1}], 1) for row in ([3, 9, 8], [3, -1, -1]))
    assert full == short, "an empty rank counts for nothing"


@settings(deadline=None)
@given(searches(), st.integers(1, 3))
def test_usual_scores_are_those_of_trec_eval(search, relevant):
    retrieved, judged = search
    scores = score_rankings(retrieved, judged, relevant)
    assert all(values.dtype == np.float32 and values.shape == (len(judged),) for values in scores.values())
    close = {"rel": 1e-6, "abs": 1e-7}
    ours = {name: values.tolist() for name, values in scores.items()}
    assert ours["ndcg@10"] == pytest.approx(trec_eval(retrieved, judged, "ndcg_cut.10", 1000), **close)
    assert ours["mrr@10"] == pytest.approx(trec_eval(retrieved, judged, "recip_rank", 10, relevant), **close)
    assert ours["recall@100"] == pytest.approx(
        trec_eval(retrieved, judged, "recall.100", 1000, relevant), **close
    )


@given(st.lists(st.booleans(), min_size=2, max_size=10))
@example([False, False])
@example([True] * 10)
def test_the_papers_ndcg_is_sklearns_over_the_ten_retrieved(found):
    labels, scores = np.array([found], dtype=int), np.arange(len(found), 0, -1)[None]
    assert ndcg_of_retrieved(labels[0]) == pytest.approx(ndcg_score(labels, scores, k=10))


# ---------------------------------------------------------------- at random


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 6).flatmap(
        lambda n: st.tuples(
            st.just(n), st.dictionaries(st.integers(0, n - 1), st.integers(-1, 3), min_size=1, max_size=n)
        )
    ),
    st.integers(1, 2),
)
def test_the_expectation_at_random_is_the_mean_over_every_order(case, relevant):
    documents, judged = case
    orders = np.array(list(permutations(range(documents))))
    every = score_rankings(orders, [judged] * len(orders), relevant)
    expected = expected_at_random([judged], relevant, documents)
    assert expected.keys() == NAMES
    for name, values in every.items():
        assert expected[name][0] == pytest.approx(values.mean(dtype=float), abs=1e-6), name


# ---------------------------------------------------------------- correlations


NUMBER_PAIRS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 5)), min_size=2, max_size=30)


@given(NUMBER_PAIRS, st.data())
@pytest.mark.filterwarnings("ignore:An input array is constant")
def test_correlations_are_those_of_scipy_also_where_examples_occur_several_times(pairs, data):
    predicted, gold = (np.array(side) / 4 for side in zip(*pairs, strict=True))
    times = np.array(data.draw(st.lists(st.integers(0, 3), min_size=len(gold), max_size=len(gold))))
    times[0] += 1
    once = correlations(predicted.astype(np.float32), gold.astype(np.float32))
    for counts, of in ((np.ones(len(gold), int), once.__getitem__), (times, None)):
        said, true = np.repeat(predicted, counts), np.repeat(gold, counts)
        alike = len(set(said)) == 1 or len(set(true)) == 1
        theirs = [0.0 if alike else of_scipy(said, true)[0] for of_scipy in (pearsonr, spearmanr)]
        expected = dict(zip(("pearson", "spearman"), theirs, strict=True))
        expected["pearson_spearman"] = sum(theirs) / 2
        for name, wanted in expected.items():
            ours = of(name) if of else correlation(name, predicted, gold, counts[None])[0]
            assert ours == pytest.approx(wanted, abs=1e-6)
