"""Answers are read from what a model says of each token; a model that is right is seen to be right."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import models, pre_tokenizers

from biphase.data.tokenizer import load_saved
from biphase.errors import SpecError
from biphase.tasks.encode import (
    NOTHING,
    Decoded,
    Ragged,
    Tokenization,
    decode_spans,
    decode_tagged,
    encode_questions,
)
from biphase.tasks.load import AnswerSpan, Question


def letters() -> Model:
    """Each letter or sign is a token, white space is none."""
    model = Model(models.WordLevel({"[UNK]": 0, **{one: n for n, one in enumerate("abcdefgh?", 3)}}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    return model


@pytest.fixture(scope="module")
def tokenizers(shards):
    return {"bytes": load_saved(shards / "tokenizer").model, "letters": letters()}


def encoded(model, questions, *, length=64, stride=None):
    return encode_questions(Tokenization(model, (1,), (2,), length, "test"), questions, stride=stride)


def letters_of(text="a b c d e f", *, length=64, stride=None):
    """One question, `?`, whose context begins at place 2 of each window."""
    return encoded(letters(), [Question("q", "?", text, ())], length=length, stride=stride)


def said(made, *windows):
    """Values for the tokens of each window; what is not said is -9."""
    rows = [np.full(length, -9.0, np.float32) for length in made.ids.lengths]
    for row, values in zip(rows, windows, strict=True):
        for place, value in values.items():
            row[place] = value
    return Ragged.from_lists(rows)


@st.composite
def questions(draw):
    words = st.text("abcehst.é👩中ß12", min_size=1, max_size=6)
    context = draw(st.lists(words, min_size=1, max_size=25).map(" ".join))
    start = draw(st.integers(0, len(context) - 1))
    text = context[start : draw(st.integers(start + 1, min(len(context), start + 12)))]
    answers = (AnswerSpan(text, start),) if text.strip() and draw(st.integers(0, 4)) else ()
    return Question("q", "Question: who?\nContext: ", context, answers)


MANY = st.lists(questions(), min_size=1, max_size=3)


# ---------------------------------------------------------------- a model that is right


@settings(deadline=None, max_examples=60)
@given(MANY, st.integers(40, 120), st.none() | st.integers(0, 60))
def test_right_margins_give_the_right_positions_and_a_text_with_the_answer(tokenizers, rows, length, stride):
    made = encoded(tokenizers["bytes"], rows, length=length, stride=stride)
    margins = Ragged(np.where(made.inside.flat, 2.0, -2.0), made.ids.starts)
    for number, (row, answer) in enumerate(zip(rows, decode_tagged(made, margins), strict=True)):
        assert answer.tokens == made.gold[number]
        if stride is not None and row.answers:
            assert row.answers[0].text.strip() in answer.text
        if not made.gold[number]:
            assert answer.text == ""


@settings(deadline=None, max_examples=60)
@given(MANY, st.integers(100, 140))
def test_right_bounds_give_the_right_positions_and_a_text_with_the_answer(tokenizers, rows, length):
    # The overlap is wider than any answer here, so that some window holds it wholly.
    made = encoded(tokenizers["bytes"], rows, length=length, stride=60)
    starts, ends = (np.full(len(made.ids.flat), -5.0) for _ in range(2))
    starts[made.ids.starts[:-1] + made.bounds[:, 0]] = 5.0
    ends[made.ids.starts[:-1] + made.bounds[:, 1]] = 5.0
    both = (Ragged(one, made.ids.starts) for one in (starts, ends))
    for number, answer in enumerate(decode_spans(made, *both, unanswerable=True, longest=60)):
        assert answer.tokens == made.gold[number]
        expected = rows[number].answers[0].text.strip() if rows[number].answers else ""
        assert expected in answer.text
        assert bool(answer.text) == bool(expected)
        start, end = answer.span
        assert answer.text == (made.contexts[number][start:end] if start >= 0 else "")


# ---------------------------------------------------------------- taggers


def test_the_text_is_the_run_with_the_highest_sum_and_the_positions_are_all():
    made = letters_of()
    margins = said(made, {2: 3.0, 4: 2.0, 5: 2.0, 7: 3.5})
    assert decode_tagged(made, margins) == [Decoded("c d", frozenset({2, 4, 5, 7}), (4, 7))]


def test_of_equal_runs_the_first_is_taken():
    made = letters_of()
    assert decode_tagged(made, said(made, {3: 2.0, 5: 1.0, 6: 1.0}))[0].text == "b"


def test_tokens_outside_the_context_count_as_positions_but_give_no_text():
    made = letters_of()
    last = int(made.ids.lengths[0]) - 1
    answer = decode_tagged(made, said(made, {0: 8.0, 1: 8.0, 3: 1.0, last: 8.0}))[0]
    assert answer == Decoded("b", frozenset({0, 1, 3, last}), (2, 3))


def test_a_margin_of_zero_and_what_is_not_a_number_say_nothing():
    made = letters_of()
    assert decode_tagged(made, said(made, {2: 0.0, 3: np.nan, 4: -np.inf})) == [NOTHING]
    assert decode_tagged(made, said(made, {3: np.inf, 4: np.nan, 5: 1.0}))[0].text == "b"


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(6, 12), st.integers(0, 6), st.integers(0, 2**32 - 1))
def test_a_token_of_several_windows_counts_with_its_highest_margin(count, length, stride, seed):
    text = " ".join("abcdefgh"[number % 8] for number in range(count))
    made = letters_of(text, length=length, stride=stride)
    margins = Ragged(np.random.default_rng(seed).normal(-1, 1, len(made.ids.flat)), made.ids.starts)
    expected = set()
    for window, first in enumerate(made.first):
        for place, margin in enumerate(margins[window]):
            if margin > 0:
                at_end = place == made.ids.lengths[window] - 1
                expected.add(2 + count if at_end else place + (first if place >= 2 else 0))
    assert decode_tagged(made, margins)[0].tokens == expected


# ---------------------------------------------------------------- spans


def best_span(made, starts, ends, question, longest):
    """The same, found by trying all: the score, the positions."""
    best, found = -np.inf, frozenset()
    for window in np.flatnonzero(made.question_of == question):
        low, high, shift = made.context_from[window], made.context_to[window], made.first[window]
        for left in range(low, high):
            for right in range(left, min(high, left + longest)):
                score = starts[window][left] + ends[window][right]
                if score > best:
                    best, found = score, frozenset(range(left + shift, right + shift + 1))
    null = min(starts[w][0] + ends[w][0] for w in np.flatnonzero(made.question_of == question))
    return best, null, found


@settings(deadline=None, max_examples=60)
@given(MANY, st.integers(40, 70), st.integers(0, 12), st.integers(0, 2**32 - 1), st.booleans())
def test_the_best_span_is_found(tokenizers, rows, length, longest, seed, unanswerable):
    made = encoded(tokenizers["bytes"], rows, length=length, stride=8)
    draw = np.random.default_rng(seed)
    # Small whole numbers, so that many spans are equally good.
    starts, ends = (
        Ragged(draw.integers(-2, 3, len(made.ids.flat)).astype(np.float32), made.ids.starts) for _ in range(2)
    )
    answers = decode_spans(made, starts, ends, unanswerable=unanswerable, longest=longest + 1)
    for number, answer in enumerate(answers):
        best, null, found = best_span(made, starts, ends, number, longest + 1)
        assert answer.tokens == (frozenset() if unanswerable and null > best else found)


def test_the_text_of_a_span_is_what_the_context_says_there():
    made = letters_of("a  b c\nd e f")
    spans = decode_spans(made, said(made, {2: 1.0}), said(made, {5: 1.0, 1: 9.0}), unanswerable=False)
    assert spans == [Decoded("a  b c\nd", frozenset({2, 3, 4, 5}), (0, 8))]


def test_a_span_is_never_longer_than_allowed_nor_backwards():
    made = letters_of()
    starts, ends = said(made, {4: 5.0, 2: 4.0}), said(made, {2: 5.0, 6: 4.5, 3: 0.0})
    assert decode_spans(made, starts, ends, unanswerable=False)[0].text == "c d e"
    assert decode_spans(made, starts, ends, unanswerable=False, longest=2)[0].text == "a"


def test_a_span_does_not_end_beyond_the_context():
    made = letters_of()
    starts, ends = said(made, {2: 0.0, 7: 2.0}), said(made, {2: -1.0, 8: 50.0})
    assert (
        decode_spans(made, starts, ends, unanswerable=False)[0].text == "a"
    )  # -1 against -7 at its last letter


def test_no_answer_needs_every_window_to_say_so():
    made = letters_of("a b c d e f", length=6, stride=0)
    assert len(made.ids) == 2
    span = ({3: 3.0, 0: 5.0}, {0: 2.0})
    unsure = said(made, *span)
    assert decode_spans(made, unsure, unsure, unanswerable=True)[0].text == "b"  # 6 against the smaller, 4
    sure = said(made, span[0], {0: 3.5})
    assert decode_spans(made, sure, sure, unanswerable=True) == [NOTHING]
    assert decode_spans(made, sure, sure, unanswerable=False)[0].text == "b"
    equal = said(made, span[0], {0: 3.0})
    assert decode_spans(made, equal, equal, unanswerable=True)[0].text == "b"


def test_what_is_not_a_number_is_never_an_answer():
    made = letters_of()
    broken = Ragged(np.full(len(made.ids.flat), np.nan), made.ids.starts)
    assert decode_spans(made, broken, broken, unanswerable=False) == [NOTHING]
    starts = said(made, {3: np.nan, 4: np.inf, 2: -np.inf})
    assert decode_spans(made, starts, said(made, {5: np.inf}), unanswerable=False)[0].text == "c d"


def test_a_context_without_tokens_has_no_answer():
    made = letters_of(" ")
    flat = said(made, {})
    assert decode_spans(made, flat, flat, unanswerable=False) == [NOTHING]
    assert decode_tagged(made, flat) == [NOTHING]


def test_an_answer_of_no_tokens_cannot_be_asked_for():
    made = letters_of()
    with pytest.raises(SpecError, match="set longest to 1 or more"):
        decode_spans(made, said(made, {}), said(made, {}), unanswerable=False, longest=0)


def test_no_questions_have_no_answers(tokenizers):
    made = encoded(tokenizers["letters"], [])
    none = Ragged.from_lists([], np.float32)
    assert decode_tagged(made, none) == decode_spans(made, none, none, unanswerable=True) == []
