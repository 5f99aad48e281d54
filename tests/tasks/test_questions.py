"""Windows cover the context, hold the answer where they say, and are those the tokenizers library would cut."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Model
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, SpecError
from biphase.tasks.encode import LEAST_CONTEXT, Tokenization, encode_questions
from biphase.tasks.load import AnswerSpan, Question

KINDS = ["bytes", "trimmed", "pieces"]
CONTEXT = "the cat sees a small boat. every student paints the garden,  the river crosses two birds"


@pytest.fixture(scope="module")
def tokenizers(shards):
    plain, trimmed = (load_saved(shards / "tokenizer").model for _ in range(2))
    trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
    jobs = Model(models.WordPiece(unk_token="[UNK]"))
    jobs.normalizer = normalizers.BertNormalizer()
    jobs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    jobs.train_from_iterator([CONTEXT, "中文 👩 naïve"], trainer)
    return {"bytes": plain, "trimmed": trimmed, "pieces": jobs}


def reading(model, length=64, before=(1,), after=(0,)):
    return Tokenization(model, before, after, length, "test")


def asked(context, *answers, question="who?", name="q1"):
    spans = tuple(AnswerSpan(text, context.index(text)) for text in answers)
    return Question(name, f"Question: {question}\nContext: ", context, spans)


@st.composite
def questions(draw):
    """Contexts of words in several scripts, with a piece of them as the answer, or none."""
    words = st.text("abcehst.é👩中ß12", min_size=1, max_size=6)
    context = draw(st.lists(words, min_size=1, max_size=25).map(" ".join))
    question = draw(st.lists(words, max_size=8).map(" ".join))
    start = draw(st.integers(0, len(context) - 1))
    text = context[start : draw(st.integers(start + 1, min(len(context), start + 20)))]
    answers = (AnswerSpan(text, start),) if draw(st.integers(0, 4)) else ()
    return Question("q", f"Question: {question}\nContext: ", context, answers)


MANY = st.lists(questions(), min_size=1, max_size=3)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(KINDS), MANY, st.integers(4, 80), st.integers(0, 60))
def test_windows_fit_overlap_and_restore_the_context(tokenizers, kind, rows, length, stride):
    how = reading(tokenizers[kind], length)
    made = encode_questions(how, rows, stride=stride)
    assert made.ids.lengths.max() <= length
    assert sorted(set(made.question_of.tolist())) == list(range(len(rows)))
    for number, row in enumerate(rows):
        context = how.tokenizer.encode(row.context, add_special_tokens=False).ids
        restored: list[int] = []
        for window in np.flatnonzero(made.question_of == number):
            ids, first = made.ids[window].tolist(), made.first[window]
            assert ids[0] == 1
            assert ids[-1] == 0
            assert first <= len(restored)  # no gap
            job = ids[made.context_from[window] : made.context_to[window]]
            assert restored[first:] == job[: len(restored) - first]
            assert first == 0 or len(job) > len(restored) - first  # something new
            restored = restored[:first] + job
        assert restored == context
        assert len(made.spans[number]) == len(context)


@settings(deadline=None, max_examples=80)
@given(st.sampled_from(KINDS), questions(), st.integers(40, 80), st.integers(0, 15))
def test_windows_are_those_of_the_tokenizers_library(tokenizers, kind, row, length, stride):
    # Long inputs and short strides: what gives way when room is scarce is another test's business.
    model = Model.from_str(tokenizers[kind].to_str())
    part = len(model.encode(row.before, add_special_tokens=False).ids)
    length = max(length, part + 2 * LEAST_CONTEXT + 2)
    made = encode_questions(reading(tokenizers[kind], length), [row], stride=stride)
    model.enable_truncation(length - 2, stride=stride, strategy="only_second")
    theirs = model.encode(row.before, row.context, add_special_tokens=False)
    expected = [[1, *one.ids, 0] for one in (theirs, *theirs.overflowing)]
    assert [ids.tolist() for ids in made.ids] == expected
    model.enable_truncation(length - 2, strategy="only_second")
    single = model.encode(row.before, row.context, add_special_tokens=False).ids
    assert encode_questions(reading(tokenizers[kind], length), [row], stride=None).ids[0].tolist() == [
        1,
        *single,
        0,
    ]


@settings(deadline=None, max_examples=100)
@given(st.sampled_from(KINDS), MANY, st.integers(4, 80), st.none() | st.integers(0, 60))
def test_the_answer_is_where_the_labels_say(tokenizers, kind, rows, length, stride):
    made = encode_questions(reading(tokenizers[kind], length), rows, stride=stride)
    whole = encode_questions(reading(tokenizers[kind], 10_000), rows, stride=None)
    for number, row in enumerate(rows):
        windows = np.flatnonzero(made.question_of == number)
        head, spans = made.context_from[windows[0]], whole.spans[number]
        tokens = {place - whole.context_from[number] for place in whole.gold[number]}
        if row.answers:
            # Exact up to the tokens at both ends: those overlap the answer, their neighbours do not.
            text, start = row.answers[0].text, row.answers[0].start
            end, start = start + len(text.rstrip()), start + len(text) - len(text.lstrip())
            overlapping = {at for at, (low, high) in enumerate(spans) if low < end and high > start}
            assert tokens == (overlapping if text.strip() else set())
            assert not tokens or text.strip() in whole.text(number, min(tokens), max(tokens))
        for window in windows:
            here = set((np.flatnonzero(made.inside[window]) - head + made.first[window]).tolist())
            held = range(made.first[window], made.first[window] + made.context_to[window] - head)
            assert here == tokens & set(held)
            shift = head - made.first[window]
            full = bool(tokens) and here == tokens
            expected = (min(here) + shift, max(here) + shift) if full else (0, 0)
            assert tuple(made.bounds[window]) == expected
        assert made.gold[number] == {head + at for at in tokens if at < len(made.spans[number])}


def test_positions_count_from_the_beginning_of_the_whole_input(tokenizers):
    how = reading(tokenizers["bytes"], 40)
    row = asked(CONTEXT, "two birds")
    strided, whole = (
        encode_questions(reading, [row], stride=stride)
        for reading, stride in ((how, 8), (reading(tokenizers["bytes"], 400), None))
    )
    assert len(strided.ids) > 1
    assert strided.gold == whole.gold
    ids = whole.ids[0][sorted(whole.gold[0])].tolist()
    assert how.tokenizer.decode(ids).strip() == "two birds"


def test_an_answer_beyond_the_cut_is_nowhere_and_one_across_it_is_partly_there(tokenizers):
    how = reading(tokenizers["bytes"], 50)
    beyond = encode_questions(how, [asked(CONTEXT, "two birds")], stride=None)
    assert len(beyond.ids) == 1
    assert beyond.ids.lengths.tolist() == [50]
    assert beyond.gold == [frozenset()]
    assert beyond.bounds.tolist() == [[0, 0]]
    assert not beyond.inside.flat.any()
    kept = beyond.text(0, 0, len(beyond.spans[0]) - 1)
    across = encode_questions(how, [asked(CONTEXT, CONTEXT[len(kept) - 6 : len(kept) + 6])], stride=None)
    assert across.gold[0]
    assert across.inside[0][-2]
    assert across.bounds.tolist() == [[0, 0]]


def test_a_long_question_loses_its_front_and_leaves_room_for_context(tokenizers):
    how = reading(tokenizers["bytes"], 50)
    row = asked(CONTEXT, "two birds", question="which of all the many birds " * 10)
    part = how.tokenizer.encode(row.before, add_special_tokens=False).ids
    context = how.tokenizer.encode(CONTEXT, add_special_tokens=False).ids
    for stride in (None, 4):
        made = encode_questions(how, [row], stride=stride)
        kept = 50 - 2 - LEAST_CONTEXT
        assert made.ids[0].tolist() == [1, *part[-kept:], *context[:LEAST_CONTEXT], 0]
        assert set((made.context_from - 1).tolist()) == {kept}


def test_a_stride_without_room_for_it_still_brings_a_quarter_of_new_tokens(tokenizers):
    how = reading(tokenizers["bytes"], 50)
    row = asked(CONTEXT, "two birds", question="which of all the many birds " * 10)
    made = encode_questions(how, [row], stride=128)
    assert set(np.diff(made.first).tolist()) == {LEAST_CONTEXT // 4}


def test_white_space_around_an_answer_is_none_of_it(tokenizers):
    made = [
        encode_questions(reading(tokenizers["bytes"]), [asked(CONTEXT, text)], stride=None)
        for text in ("small boat", " small boat", "a small"[1:] + " boat")
    ]
    assert made[0].gold[0]
    assert {one.gold[0] for one in made} == {made[0].gold[0]}


def test_an_answer_of_white_space_only_is_no_answer(tokenizers):
    # The token " student" begins with that space.
    row = Question("q", "who? ", CONTEXT, (AnswerSpan(" ", CONTEXT.index(" student")),))
    made = encode_questions(reading(tokenizers["bytes"], 400), [row], stride=None)
    assert made.gold == [frozenset()]
    assert made.bounds.tolist() == [[0, 0]]


def test_a_token_without_characters_within_the_answer_is_part_of_it(tokenizers):
    row = asked(CONTEXT, "garden,  the")
    made = encode_questions(reading(tokenizers["trimmed"], 400), [row], stride=None)
    spans = made.spans[0]
    assert (spans[:, 0] == spans[:, 1]).any()  # the first of the two spaces
    positions = sorted(made.gold[0])
    assert positions == list(range(positions[0], positions[-1] + 1))


def test_a_context_without_tokens_still_has_a_window(tokenizers):
    row = Question("q", "who? ", " \n ", ())
    made = encode_questions(reading(tokenizers["pieces"]), [row], stride=4)
    assert len(made.ids) == 1
    assert made.context_from.tolist() == made.context_to.tolist()
    assert made.gold == [frozenset()]


def test_only_the_first_answer_counts_and_others_share_the_context(tokenizers):
    rows = [asked(CONTEXT, "small boat", "two birds"), asked(CONTEXT, "small boat"), asked("a dog", "dog")]
    made = encode_questions(reading(tokenizers["bytes"], 400), rows, stride=None)
    assert made.gold[0] == made.gold[1] != made.gold[2]
    assert np.array_equal(made.ids[0], made.ids[1])
    assert len(made.spans[2]) < len(made.spans[1])


def test_no_questions_make_no_windows(tokenizers):
    made = encode_questions(reading(tokenizers["bytes"]), [], stride=4)
    assert len(made) == len(made.ids) == 0
    assert made.bounds.shape == (0, 2)


def test_wrong_questions_are_named(tokenizers):
    how = reading(tokenizers["bytes"])
    with pytest.raises(DataError, match=r"^the context of question 'q8' "):
        encode_questions(
            how, [asked(CONTEXT), *(asked("bad \ud800", name=name) for name in ("q8", "q9"))], stride=None
        )
    with pytest.raises(DataError, match=r"^question 'q9' "):
        encode_questions(how, [asked(CONTEXT, question="bad \ud800", name="q9")], stride=None)
    with pytest.raises(DataError, match=r"^question 'q2' has no tokens"):
        encode_questions(
            reading(how.tokenizer, before=(), after=()), [Question("q2", "", "", ())], stride=None
        )


def test_what_cannot_be_asked_is_refused(tokenizers):
    with pytest.raises(SpecError, match="the stride is -1; "):
        encode_questions(reading(tokenizers["bytes"]), [], stride=-1)
    with pytest.raises(
        SpecError, match="no room for a question and its context; set the length to 4 or more"
    ):
        encode_questions(reading(tokenizers["bytes"], 3), [], stride=None)
