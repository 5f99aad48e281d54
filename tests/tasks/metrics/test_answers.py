"""Overlap of token positions, and the official SQuAD scores against a second writing of their definition."""

import itertools
import string

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from biphase.tasks.metrics import answer_f1, exact_match, normalise, token_set_f1

# Words that meet articles, punctuation of either kind, case and odd spaces, so that overlaps are common.
PIECES = [
    "the",
    "The",
    "A",
    "an",
    "cat",
    "Cat",
    "cats",
    "a.b",
    "a–b",
    "'s",
    "-",
    "…",
    "é",
    "ǅ",
    "3rd",
    "theatre",
    "_",
]
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
    """The definition by precision and recall, with the shared words counted by merging two sorted lists."""
    one, two, shared = sorted(said), sorted(gold), 0
    if not one or not two:
        return 1.0 if one == two else 0.0
    while one and two:
        if one[-1] == two[-1]:
            shared += 1
            one.pop()
            two.pop()
        elif one[-1] > two[-1]:
            one.pop()
        else:
            two.pop()
    if shared == 0:
        return 0.0
    precision, recall = shared / len(said), shared / len(gold)
    return 2 * precision * recall / (precision + recall)


def official_golds(answers):
    golds = [official_words(answer) for answer in answers]
    golds = [words for words in golds if words]
    return golds if golds else [[]]


# The paper's overlap of positions


def test_overlap_of_positions_by_hand():
    assert token_set_f1({4, 5, 6}, {5, 6, 7, 8}) == pytest.approx(4 / 7)
    assert token_set_f1({4, 5}, {4, 5}) == 1
    assert token_set_f1({4, 5}, {6}) == 0


def test_no_positions_stand_for_position_zero():
    assert token_set_f1(set(), set()) == 1
    assert token_set_f1(set(), {0}) == 1
    assert token_set_f1(set(), {7}) == 0
    assert token_set_f1({7}, set()) == 0
    assert token_set_f1({0, 7}, set()) == pytest.approx(2 / 3)


@given(POSITIONS, POSITIONS)
def test_overlap_is_the_harmonic_mean_of_precision_and_recall(predicted, gold):
    one, two = predicted or {0}, gold or {0}
    precision, recall = len(one & two) / len(one), len(one & two) / len(two)
    harmonic = 2 * precision * recall / (precision + recall) if precision else 0.0
    assert token_set_f1(predicted, gold) == pytest.approx(harmonic)
    assert token_set_f1(gold, predicted) == token_set_f1(predicted, gold)


# The official scores


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("The  Quick, brown\tfox!", "quick brown fox"),
        ("a.b", "ab"),
        ("A–B", "–b"),
        ("x–a–y", "x– –y"),
        ("theatre and another an", "theatre and another"),
        ("U.S.A.", "usa"),
        ("the", ""),
        (" .,! ", ""),
        ("", ""),
        ("$1,000,000", "1000000"),
    ],
)
def test_normalised_forms_by_hand(text, form):
    assert normalise(text) == form


def test_words_count_as_often_as_they_occur():
    assert answer_f1("new new york", ["new york york"]) == pytest.approx(2 / 3)
    assert answer_f1("in the city of Paris", ["Paris"]) == pytest.approx(2 / 5)


def test_the_best_of_the_answers_counts():
    answers = ["Denver Broncos", "The Broncos", "Carolina"]
    assert exact_match("broncos!", answers) == 1
    assert exact_match("Denver", answers) == 0
    assert answer_f1("Denver", answers) == pytest.approx(2 / 3)


def test_no_answer_is_right_only_where_there_is_none():
    assert exact_match("", []) == answer_f1("", []) == 1
    assert exact_match("Paris", []) == answer_f1("Paris", []) == 0
    assert exact_match("", ["Paris"]) == answer_f1("", ["Paris"]) == 0


def test_an_article_alone_says_nothing():
    assert exact_match("the", []) == answer_f1("The.", []) == 1
    assert exact_match("", ["a"]) == answer_f1("", ["a"]) == 1
    assert exact_match("", ["a", "Paris"]) == answer_f1("", ["a", "Paris"]) == 0


@given(TEXTS)
@example("A\u0301")
@example("\u0130 the")
def test_normalised_forms_are_the_official_ones(text):
    assert normalise(text) == " ".join(official_words(text))
    assert normalise(normalise(text)).split() == official_words(normalise(text))


@given(TEXTS, st.lists(TEXTS, max_size=4))
def test_scores_are_the_official_ones(prediction, answers):
    said, golds = official_words(prediction), official_golds(answers)
    assert exact_match(prediction, answers) == max(float(said == gold) for gold in golds)
    assert answer_f1(prediction, answers) == pytest.approx(max(official_f1(said, gold) for gold in golds))


@given(TEXTS, st.lists(TEXTS, max_size=4))
def test_an_exact_match_has_f1_one_and_order_of_answers_is_nothing(prediction, answers):
    f1 = answer_f1(prediction, answers)
    assert exact_match(prediction, answers) <= f1 <= 1
    assert answer_f1(prediction, answers[::-1]) == f1
