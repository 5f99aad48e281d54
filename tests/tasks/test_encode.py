"""Texts, words and questions become tokens, and the outputs for each token become answers."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import models, normalizers, pre_tokenizers, trainers

from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, SpecError
from biphase.objectives import IGNORE
from biphase.specs.tasks import AnswerSpan, Question, TaggedSentence
from biphase.tasks.encode import (
    LEAST_CONTEXT,
    NOTHING,
    Decoded,
    Ragged,
    Tokenization,
    by_length,
    decode_spans,
    decode_tagged,
    encode_questions,
    encode_texts,
    encode_words,
)

SPEECH = ["the old house sees a small boat", "every student paints the naïve garden", "中文 字 👩 café 123"]
CONTEXT = "the cat sees a small boat. every student paints the garden,  the river crosses two birds"


def word_pieces() -> Model:
    """Lower case without accents, cut at white space and signs, as BERT's."""
    model = Model(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model.train_from_iterator([*SPEECH, CONTEXT], trainer)
    return model


def letters() -> Model:
    """Each letter or sign is a token, white space is none."""
    model = Model(models.WordLevel({"[UNK]": 0, **{one: n for n, one in enumerate("abcdefgh?", 3)}}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split("", "isolated")]
    )
    return model


@pytest.fixture(scope="module")
def tokenizers(shards):
    return {"bytes": load_saved(shards / "tokenizer").model, "pieces": word_pieces()}


KINDS = ["bytes", "pieces"]
CHARACTERS = "abthe 12.é👩中ß\u0301\u00a0\u200d-'"


def tokenized_by(model, length=64, before=(1,), after=(0,)):
    return Tokenization(model, before, after, length, "test")


# ---------------------------------------------------------------- texts


def test_a_text_stands_between_what_the_model_expects_and_is_cut_to_fit(tokenizers):
    model = tokenizers["bytes"]
    ids = model.encode("the cat sees a dog", add_special_tokens=False).ids
    whole, cut = (
        encode_texts(tokenized_by(model, length=length), ["the cat sees a dog"])[0] for length in (64, 5)
    )
    assert whole.tolist() == [1, *ids, 0]
    assert cut.tolist() == [1, *ids[:3], 0]
    assert whole.dtype == np.int32


# ---------------------------------------------------------------- words


def first_overlap(words, start, end):
    """The same, found one by one."""
    place = 0
    for number, word in enumerate(words):
        if max(start, place) < min(end, place + len(word)):
            return number
        if start == end and place < start < place + len(word):
            return number
        place += len(word) + 1
    return -1


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.lists(st.lists(st.text(CHARACTERS, max_size=6), min_size=1, max_size=7), min_size=1, max_size=3),
    st.integers(3, 40),
)
def test_each_token_belongs_to_the_first_word_it_overlaps(tokenizers, kind, sentences, length):
    how = tokenized_by(tokenizers[kind], length=length)
    rows = [TaggedSentence(tuple(words), tuple(n % 3 for n in range(len(words)))) for words in sentences]
    made = encode_words(how, rows)
    texts = encode_texts(how, [" ".join(words) for words in sentences])
    assert np.array_equal(made.ids.flat, texts.flat)
    for number, row in enumerate(rows):
        spans = how.tokenizer.encode(" ".join(row.words), add_special_tokens=False).offsets[: how.room]
        expected = [-1, *(first_overlap(row.words, *span) for span in spans), -1]
        assert made.word_of[number].tolist() == expected
        assert made.labels[number].tolist() == [IGNORE if at < 0 else row.tags[at] for at in expected]
        assert tuple(made.gold[number]) == row.tags


# ---------------------------------------------------------------- groups


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(1, 60))
def test_groups_hold_like_lengths_within_the_budget_and_no_fewer_than_fit(lengths, budget):
    lengths = np.array(lengths, np.int64)
    groups = by_length(lengths, budget)
    together = np.concatenate([np.empty(0, np.int64), *groups])
    assert together.tolist() == sorted(range(len(lengths)), key=lambda number: (lengths[number], number))
    assert all(len(group) == 1 or lengths[group].sum() <= budget for group in groups)
    for group, following in pairwise(groups):
        assert lengths[group].sum() + lengths[following[0]] > budget


# ---------------------------------------------------------------- questions


def asked(context, *answers, question="who?", name="q1"):
    spans = tuple(AnswerSpan(text, context.index(text)) for text in answers)
    return Question(name, f"Question: {question}\nContext: ", context, spans)


@st.composite
def questions(draw, longest_question=8):
    """Contexts of words in several scripts, with a piece of them as the answer, or none."""
    words = st.text("abcehst.é👩中ß12", min_size=1, max_size=6)
    context = draw(st.lists(words, min_size=1, max_size=25).map(" ".join))
    question = draw(st.lists(words, max_size=longest_question).map(" ".join))
    start = draw(st.integers(0, len(context) - 1))
    text = context[start : draw(st.integers(start + 1, min(len(context), start + 20)))]
    answers = (AnswerSpan(text, start),) if draw(st.integers(0, 4)) else ()
    return Question("q", f"Question: {question}\nContext: ", context, answers)


MANY = st.lists(questions(), min_size=1, max_size=3)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(KINDS), questions(), st.integers(40, 80), st.integers(0, 15))
def test_windows_are_those_of_the_tokenizers_library(tokenizers, kind, row, length, stride):
    # Long inputs and short strides: what gives way when room is scarce is another test's business.
    model = Model.from_str(tokenizers[kind].to_str())
    part = len(model.encode(row.before, add_special_tokens=False).ids)
    length = max(length, part + 2 * LEAST_CONTEXT + 2)
    made = encode_questions(tokenized_by(tokenizers[kind], length), [row], stride=stride)
    model.enable_truncation(length - 2, stride=stride, strategy="only_second")
    theirs = model.encode(row.before, row.context, add_special_tokens=False)
    expected = [[1, *one.ids, 0] for one in (theirs, *theirs.overflowing)]
    assert [ids.tolist() for ids in made.ids] == expected
    model.enable_truncation(length - 2, strategy="only_second")
    single = model.encode(row.before, row.context, add_special_tokens=False).ids
    one = encode_questions(tokenized_by(tokenizers[kind], length), [row], stride=None)
    assert one.ids[0].tolist() == [1, *single, 0]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KINDS), MANY, st.integers(4, 80), st.none() | st.integers(0, 60))
def test_the_answer_is_where_the_labels_say(tokenizers, kind, rows, length, stride):
    made = encode_questions(tokenized_by(tokenizers[kind], length), rows, stride=stride)
    whole = encode_questions(tokenized_by(tokenizers[kind], 10_000), rows, stride=None)
    for number, row in enumerate(rows):
        windows = np.flatnonzero(made.question_of == number)
        head, spans = made.head[number], whole.spans[number]
        tokens = {place - whole.head[number] for place in whole.gold[number]}
        if row.answers:
            # Exact up to the tokens at both ends: those overlap the answer, their neighbours do not.
            text, start = row.answers[0].text, row.answers[0].start
            end, start = start + len(text.rstrip()), start + len(text) - len(text.lstrip())
            overlapping = {at for at, (low, high) in enumerate(spans) if low < end and high > start}
            assert tokens == (overlapping if text.strip() else set())
            assert not tokens or text.strip() in whole.answer(number, min(tokens), max(tokens)).text
        for window in windows:
            here = set((np.flatnonzero(made.inside[window]) - head + made.first[window]).tolist())
            held = range(made.first[window], made.first[window] + made.ids.lengths[window] - 1 - head)
            assert here == tokens & set(held)
            shift = head - made.first[window]
            full = bool(tokens) and here == tokens
            expected = (min(here) + shift, max(here) + shift) if full else (0, 0)
            assert tuple(made.bounds[window]) == expected
        assert made.gold[number] == {head + at for at in tokens if at < len(made.spans[number])}


def test_a_long_question_loses_its_front_and_leaves_room_for_context(tokenizers):
    how = tokenized_by(tokenizers["bytes"], 50)
    row = asked(CONTEXT, "two birds", question="which of all the many birds " * 10)
    part = how.tokenizer.encode(row.before, add_special_tokens=False).ids
    context = how.tokenizer.encode(CONTEXT, add_special_tokens=False).ids
    for stride in (None, 4, 128):
        made = encode_questions(how, [row], stride=stride)
        kept = 50 - 2 - LEAST_CONTEXT
        assert made.ids[0].tolist() == [1, *part[-kept:], *context[:LEAST_CONTEXT], 0]
        assert made.head.tolist() == [1 + kept]
    assert set(np.diff(made.first).tolist()) == {LEAST_CONTEXT // 4}, "a stride without room for it"


def test_a_context_without_tokens_has_a_window_and_no_answer(tokenizers):
    row = Question("q", "who? ", " \n ", ())
    made = encode_questions(tokenized_by(tokenizers["pieces"]), [row], stride=4)
    assert len(made.ids) == 1
    assert (made.ids.lengths - made.after).tolist() == made.head.tolist()
    assert made.gold == [frozenset()]
    flat = said(made, {})
    assert decode_spans(made, flat, flat, unanswerable=False) == decode_tagged(made, flat) == [NOTHING]


@pytest.mark.parametrize(
    ("error", "words", "call"),
    [
        (DataError, "cannot be written in tokens .*;", lambda how: encode_texts(how, ["fine", "half a \ud83d pair"])),
        (DataError, "^text 2.*no tokens;", lambda how: encode_texts(replace(how, before=(), after=()), ["a", ""])),
        (DataError, "^question 'q2'.*no tokens",
         lambda how: encode_questions(replace(how, before=(), after=()), [Question("q2", "", "", ())], stride=None)),
        (SpecError, "input of 2 tokens, 2 of them special.* 4 or more", lambda how: replace(how, length=2)),
        (SpecError, "context; set.*4 or more", lambda how: encode_questions(replace(how, length=3), [], stride=None)),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_is_named_in_one_line(error, words, call, tokenizers):
    with pytest.raises(error, match=words) as caught:
        call(tokenized_by(tokenizers["bytes"]))
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- answers


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


@pytest.mark.parametrize(
    ("margins", "text", "tokens", "span"),
    [
        ({2: 3.0, 4: 2.0, 5: 2.0, 7: 3.5}, "c d", {2, 4, 5, 7}, (4, 7)),
        ({0: 8.0, 1: 8.0, 3: 1.0, 8: 8.0}, "b", {0, 1, 3, 8}, (2, 3)),
        ({2: 0.0}, "", set(), (-1, -1)),
    ],
    ids=["the run with the highest sum", "tokens outside the context", "a margin of zero"],
)
def test_the_text_is_one_run_in_the_context_and_the_positions_are_all(margins, text, tokens, span):
    made = letters_of()
    assert decode_tagged(made, said(made, margins)) == [Decoded(text, frozenset(tokens), span)]


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


def best_span(made, starts, ends, question, longest):
    """The same, found by trying all: the score, the positions."""
    best, found = -np.inf, frozenset()
    for window in np.flatnonzero(made.question_of == question):
        low, high, shift = made.head[question], made.ids.lengths[window] - made.after, made.first[window]
        for left in range(low, high):
            for right in range(left, min(high, left + longest)):
                score = starts[window][left] + ends[window][right]
                if score > best:
                    best, found = score, frozenset(range(left + shift, right + shift + 1))
    null = min(starts[w][0] + ends[w][0] for w in np.flatnonzero(made.question_of == question))
    return best, null, found


SHORT = st.lists(questions(longest_question=1), min_size=1, max_size=3)


@settings(deadline=None, max_examples=60)
@given(SHORT, st.integers(40, 70), st.integers(0, 12), st.integers(0, 2**32 - 1), st.booleans())
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
