"""Votes of sub-tokens, macro-F1 of a sentence against sklearn, entities and their F1 against seqeval."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from seqeval.metrics import f1_score as seqeval_f1
from seqeval.metrics.sequence_labeling import get_entities
from sklearn.metrics import f1_score as sklearn_f1

from biphase.tasks.metrics import entities, entity_counts, entity_f1, sentence_macro_f1, word_votes

# Types that are beginnings of one another, and one with a hyphen of its own.
TAGS = st.sampled_from(["O", "B-PER", "I-PER", "B-P", "I-P", "B-A-B", "I-A-B", "B-B", "I-B"])
PAIRS = st.lists(st.tuples(TAGS, TAGS), min_size=1, max_size=12)


def split(pairs):
    predicted, gold = zip(*pairs, strict=True)
    return list(predicted), list(gold)


# The votes of sub-tokens


def test_the_majority_of_its_tokens_names_a_word():
    assert word_votes([3, 5, 5, 1], [0, 0, 0, 1], words=2, outside=0) == [5, 1]


def test_of_equal_votes_the_label_seen_first_in_the_word_wins():
    assert word_votes([7, 2, 2, 7], [0, 0, 1, 1], words=2, outside=0) == [7, 2]
    assert word_votes([1, 9, 4, 4, 9], [0] * 5, words=1, outside=0) == [9]


def test_words_that_were_cut_off_are_outside():
    assert word_votes([4, 4], [0, 2], words=5, outside=8) == [4, 8, 4, 8, 8]
    assert word_votes([], [], words=2, outside=8) == [8, 8]


def test_tokens_of_no_word_have_no_vote():
    assert word_votes([6, 1, 6, 6], [-1, 0, -1, -1], words=1, outside=0) == [1]


def test_a_label_for_each_token_is_needed():
    with pytest.raises(ValueError):
        word_votes([1, 1], [0], words=1, outside=0)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 4)), max_size=30))
def test_no_label_has_more_votes_than_the_chosen_one(tokens):
    chosen = word_votes([label for label, _ in tokens], [word for _, word in tokens], words=5, outside=99)
    for word, label in enumerate(chosen):
        said = [one for one, its in tokens if its == word]
        most = Counter(said).most_common()
        winners = [one for one, count in most if count == most[0][1]]
        assert label == (min(winners, key=said.index) if said else 99)


# The paper's score of a sentence


def test_one_missed_entity_of_eleven_words_is_what_the_reference_stores():
    gold = [0, 0, 3] + [0] * 8
    assert sentence_macro_f1([0] * 11, gold) == pytest.approx((20 / 21) / 2)
    assert sentence_macro_f1([0] * 11, gold) == pytest.approx(0.476190, abs=1e-6)


def test_a_sentence_of_nothing_but_one_label_scores_one_if_tagged_so():
    assert sentence_macro_f1([0] * 7, [0] * 7) == 1
    assert sentence_macro_f1([4], [4]) == 1


def test_a_label_that_was_only_predicted_is_in_the_mean():
    assert sentence_macro_f1([0, 0, 2], [0, 0, 0]) == pytest.approx((4 / 5 + 0) / 2)


def test_a_sentence_all_wrong_scores_zero():
    assert sentence_macro_f1([1, 1], [0, 0]) == 0


def test_a_sentence_without_words_has_nothing_wrong():
    assert sentence_macro_f1([], []) == 1


def test_a_prediction_for_each_word_is_needed():
    with pytest.raises(ValueError):
        sentence_macro_f1([0], [0, 0])


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), min_size=1, max_size=40))
def test_macro_f1_is_that_of_sklearn(pairs):
    predicted, gold = split(pairs)
    assert sentence_macro_f1(predicted, gold) == pytest.approx(sklearn_f1(gold, predicted, average="macro"))


# Entities


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("", set()),
        ("O O O", set()),
        ("B-PER I-PER O B-LOC", {("PER", 0, 1), ("LOC", 3, 3)}),
        ("B-PER B-PER", {("PER", 0, 0), ("PER", 1, 1)}),
        ("I-PER I-PER", {("PER", 0, 1)}),
        ("O I-PER O I-PER", {("PER", 1, 1), ("PER", 3, 3)}),
        ("B-PER I-LOC I-LOC", {("PER", 0, 0), ("LOC", 1, 2)}),
        ("I-PER B-PER I-PER", {("PER", 0, 0), ("PER", 1, 2)}),
        ("O B-ORG I-ORG", {("ORG", 1, 2)}),
    ],
)
def test_entities_are_read_leniently(tags, found):
    assert entities(tags.split()) == found
    assert set(get_entities(tags.split())) == found


@given(st.lists(TAGS, max_size=15))
def test_entities_are_those_of_seqeval(tags):
    assert entities(tags) == set(get_entities(tags))


def test_counts_are_right_predicted_and_gold():
    gold = ["B-PER", "I-PER", "O", "B-LOC", "O"]
    assert entity_counts(["B-PER", "I-PER", "O", "B-ORG", "B-LOC"], gold) == (1, 3, 2)
    assert entity_counts(["B-PER", "O", "O", "O", "O"], gold) == (0, 1, 2)
    assert entity_counts(["O"] * 5, gold) == (0, 0, 2)
    assert entity_counts([], []) == (0, 0, 0)


def test_tags_of_another_length_are_refused():
    with pytest.raises(ValueError, match="1 predicted tags for 2 words"):
        entity_counts(["O"], ["O", "O"])


def test_entity_f1_weighs_entities_not_sentences():
    assert entity_f1(np.array([[1, 1, 1], [0, 2, 5], [1, 1, 0]])) == pytest.approx(2 * 2 / (4 + 6))


def test_entity_f1_of_no_entity_or_no_sentence_is_zero():
    assert entity_f1(np.zeros((3, 3), dtype=int)) == 0
    assert entity_f1(np.zeros((0, 3), dtype=int)) == 0
    assert entity_f1(np.array([[0, 0, 4]])) == 0
    assert entity_f1(np.array([[0, 4, 0]])) == 0


# seqeval warns where it says 0 for want of entities; that it says 0 is what is compared.
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.UndefinedMetricWarning")
@given(st.lists(PAIRS, min_size=1, max_size=6))
@example([[("O", "O")]])
@example([[("O", "O")], [("B-P", "O")]])
@example([[("O", "I-P")]])
def test_entity_f1_is_that_of_seqeval(sentences):
    both = [split(pairs) for pairs in sentences]
    counts = np.array([entity_counts(predicted, gold) for predicted, gold in both])
    theirs = seqeval_f1([gold for _, gold in both], [predicted for predicted, _ in both])
    assert entity_f1(counts) == pytest.approx(theirs)
