"""Accuracy is 1 for a right label and 0 for a wrong one, example by example."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score

from biphase.tasks.metrics.classification import accuracy


def test_each_example_has_its_own_value():
    values = accuracy(np.array([2, 0, 1, 1]), np.array([2, 1, 1, 0]))
    assert values.dtype == np.float32
    assert values.tolist() == [1, 0, 1, 0]


def test_no_examples_give_no_values():
    assert accuracy(np.array([], dtype=int), np.array([], dtype=int)).shape == (0,)


def test_one_gold_label_is_not_stretched_over_many_predictions():
    with pytest.raises(ValueError, match="predicted"):
        accuracy(np.array([1, 1, 1]), np.array([1]))


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1))
def test_the_mean_is_the_accuracy_of_sklearn(pairs):
    predicted, gold = np.array(pairs).T
    assert accuracy(predicted, gold).mean(dtype=float) == pytest.approx(accuracy_score(gold, predicted))
