"""Scores of rankings: values by hand, pytrec_eval for the usual ones, sklearn for the paper's NDCG."""

from itertools import permutations
from math import log2

import numpy as np
import pytest
import pytrec_eval
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sklearn.metrics import ndcg_score

from biphase.tasks.metrics import (
    expected_at_random,
    ndcg,
    ndcg_of_retrieved,
    recall,
    reciprocal_rank,
    score_rankings,
)

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


def test_ndcg_by_hand():
    grades, judged = np.array([2, 0, 1]), np.array([1, 3, 2])
    gained, best = 2 + 1 / log2(4), 3 + 2 / log2(3) + 1 / log2(4)
    assert ndcg(grades, judged) == pytest.approx(gained / best)


def test_a_missing_relevant_document_costs_the_true_ndcg_only():
    one_of_two = np.array([1, 0, 0, 0])
    assert ndcg(one_of_two, np.array([1, 1])) == pytest.approx(0.6131, abs=1e-4)
    assert ndcg_of_retrieved(one_of_two) == 1


@pytest.mark.parametrize(("places", "value"), [((1, 3), 0.9197), ((1, 4), 0.8772), ((2, 3), 0.6934)])
def test_values_that_the_reference_stores_for_two_relevant_documents(places, value):
    found = np.isin(np.arange(1, 11), places)
    assert ndcg_of_retrieved(found) == pytest.approx(value, abs=1e-4)


def test_a_grade_below_zero_takes_nothing_away():
    assert ndcg(np.array([-2, 1]), np.array([-2, 1])) == pytest.approx(1 / log2(3))


def test_more_relevant_documents_than_places_can_still_score_one():
    assert ndcg(np.ones((1, 10)), np.ones((1, 25))).tolist() == [1]
    assert recall(np.ones((1, 200)), np.array([160])).tolist() == [100 / 160]


def test_where_nothing_is_relevant_every_score_is_zero():
    scores = score_rankings(np.array([[0, 1, 2]] * 3), [{}, {0: 0, 1: 0}, {2: -1}], relevant=1)
    assert set(scores) == NAMES
    assert all(values.tolist() == [0, 0, 0] for values in scores.values())


def test_where_nothing_relevant_is_retrieved_every_score_is_zero():
    scores = score_rankings(np.array([[0, 1, 2]]), [{7: 2, 8: 1}], relevant=1)
    assert all(values.tolist() == [0] for values in scores.values())


def test_places_count_up_to_ten_and_up_to_a_hundred():
    late = np.arange(120)[None]
    scores = score_rankings(np.repeat(late, 4, axis=0), [{9: 1}, {10: 1}, {99: 1}, {100: 1}], relevant=1)
    assert scores["mrr@10"].tolist() == pytest.approx([0.1, 0, 0, 0])
    assert scores["ndcg@10"].tolist() == pytest.approx([1 / log2(11), 0, 0, 0])
    assert scores["paper_ndcg@10"].tolist() == pytest.approx([1 / log2(11), 0, 0, 0])
    assert scores["recall@100"].tolist() == [1, 1, 1, 0]


def test_the_lowest_relevant_grade_does_not_touch_the_true_ndcg():
    retrieved, judged = np.array([[5, 6, 7]]), [{5: 1, 6: 2, 7: 0}]
    low, high = score_rankings(retrieved, judged, relevant=1), score_rankings(retrieved, judged, relevant=2)
    assert low["ndcg@10"] == high["ndcg@10"]
    assert (low["mrr@10"], high["mrr@10"]) == (1, 0.5)
    assert (low["paper_ndcg@10"], high["paper_ndcg@10"]) == (1, np.float32(1 / log2(3)))


def test_a_place_without_a_document_counts_for_nothing():
    full = score_rankings(np.array([[3, 9, 8]]), [{3: 1, 4: 1}], relevant=1)
    short = score_rankings(np.array([[3, -1, -1]]), [{3: 1, 4: 1}], relevant=1)
    none = score_rankings(np.zeros((1, 0), dtype=int), [{3: 1}], relevant=1)
    assert {name: values.tolist() for name, values in full.items()} == {
        name: values.tolist() for name, values in short.items()
    }
    assert all(values.tolist() == [0] for values in none.values())


def test_no_queries_give_no_values():
    scores = score_rankings(np.zeros((0, 100), dtype=int), [], relevant=1)
    assert {name: values.shape for name, values in scores.items()} == dict.fromkeys(NAMES, (0,))


def test_judgments_of_another_number_of_queries_are_refused():
    with pytest.raises(ValueError):
        score_rankings(np.zeros((2, 3), dtype=int), [{0: 1}], relevant=1)


def test_single_rankings_and_many_of_them_give_the_same():
    random = np.random.default_rng(0)
    many = random.integers(0, 2, size=(3, 4, 12))
    for score in (ndcg_of_retrieved, reciprocal_rank):
        assert score(many).shape == (3, 4)
        assert score(many)[2, 1] == score(many[2, 1])
    assert recall(many, np.full((3, 4), 12))[2, 1] == recall(many[2, 1], np.array(12))
    assert ndcg(many, many)[2, 1] == ndcg(many[2, 1], many[2, 1])


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


@settings(deadline=None)
@given(searches())
def test_the_papers_ndcg_sees_the_first_ten_and_is_never_below_the_true_one(search):
    retrieved, judged = search
    binary = [{one: int(grade > 0) for one, grade in known.items()} for known in judged]
    scores = score_rankings(retrieved, binary, relevant=1)
    assert np.all(scores["paper_ndcg@10"] >= scores["ndcg@10"] - 1e-6)
    cut = score_rankings(retrieved[:, :10], binary, relevant=1)
    assert cut["paper_ndcg@10"].tolist() == scores["paper_ndcg@10"].tolist()


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


def test_the_expectation_at_random_holds_beyond_ten_and_a_hundred_documents():
    chance, documents = np.random.default_rng(0), 150
    judged = {number: 1 + number % 2 for number in range(12)}
    orders = np.stack([chance.permutation(documents)[:100] for _ in range(20_000)])
    every = score_rankings(orders, [judged] * len(orders), 1)
    for name, value in expected_at_random([judged], 1, documents).items():
        assert value[0] == pytest.approx(every[name].mean(dtype=float), abs=0.006), name
