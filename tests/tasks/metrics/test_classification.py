"""Accuracy is 1 for a right label and 0 for a wrong one; macro F1 and MCC are scikit-learn's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, f1_score, matthews_corrcoef

from biphase.tasks.metrics import accuracy, confusion, confusion_by_chance, label_scores


def test_each_example_has_its_own_value():
    values = accuracy(np.array([2, 0, 1, 1]), np.array([2, 1, 1, 0]))
    assert values.dtype == np.float32
    assert values.tolist() == [1, 0, 1, 0]


def test_no_examples_give_no_values():
    assert accuracy(np.array([], dtype=int), np.array([], dtype=int)).shape == (0,)


def test_one_gold_label_is_not_stretched_over_many_predictions():
    with pytest.raises(ValueError, match="predicted"):
        accuracy(np.array([1, 1, 1]), np.array([1]))


PAIRS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1)


@given(PAIRS)
def test_the_mean_is_the_accuracy_of_sklearn(pairs):
    predicted, gold = np.array(pairs).T
    assert accuracy(predicted, gold).mean(dtype=float) == pytest.approx(accuracy_score(gold, predicted))


@pytest.mark.filterwarnings("ignore:A single label was found:UserWarning")
@given(PAIRS)
def test_the_scores_of_a_set_are_those_of_sklearn(pairs):
    predicted, gold = np.array(pairs).T
    scores = label_scores(confusion(predicted, gold, 5))
    assert scores["accuracy"] == pytest.approx(accuracy_score(gold, predicted))
    assert scores["macro_f1"] == pytest.approx(f1_score(gold, predicted, average="macro", zero_division=0))
    assert scores["mcc"] == pytest.approx(matthews_corrcoef(gold, predicted), abs=1e-9)


def test_one_label_for_every_text_has_an_accuracy_and_no_correlation():
    gold = np.array([0, 0, 1, 0])
    scores = label_scores(confusion(np.zeros(4, int), gold, 2))
    assert scores == {"accuracy": 0.75, "macro_f1": pytest.approx(3 / 7), "mcc": 0.0}


def test_the_confusion_of_chance_is_what_guesses_come_to_on_average():
    gold, chance = np.array([0] * 70 + [1] * 20 + [2] * 10), np.random.default_rng(0)
    guessed = np.mean([confusion(chance.integers(0, 3, 100), gold, 3) for _ in range(20_000)], axis=0)
    assert np.abs(guessed - confusion_by_chance(gold, 3)).max() < 0.15
    scores = label_scores(confusion_by_chance(gold, 3))
    assert (scores["accuracy"], scores["mcc"]) == (pytest.approx(1 / 3), pytest.approx(0, abs=1e-9))
