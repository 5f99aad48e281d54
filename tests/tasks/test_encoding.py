"""Texts and words become the tokens a model reads; each token knows its word."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Model

from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, SpecError
from biphase.objectives import IGNORE
from biphase.tasks.encode import BLOCK, Ragged, Tokenization, by_length, encode_texts, encode_words
from biphase.tasks.load import TaggedSentence

SPEECH = ["the old house sees a small boat", "every student paints the naïve garden", "中文 字 👩 café 123"]


def word_pieces() -> Model:
    """Lower case without accents, cut at white space and signs, as BERT's."""
    model = Model(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=120, special_tokens=["[UNK]", "[CLS]", "[SEP]"], show_progress=False
    )
    model.train_from_iterator(SPEECH, trainer)
    return model


def pieces_with_marks() -> Model:
    """Spaces are pieces of words, and a text begins with one it does not have, as SentencePiece's."""
    model = Model(models.Unigram([("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("a", -3.0), ("ca", -4.0)], 0))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    return model


@pytest.fixture(scope="module")
def tokenizers(shards):
    plain, trimmed = (load_saved(shards / "tokenizer").model for _ in range(2))
    trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
    return {"bytes": plain, "trimmed": trimmed, "pieces": word_pieces(), "marks": pieces_with_marks()}


KINDS = ["bytes", "trimmed", "pieces", "marks"]
CHARACTERS = "abthe 12.é👩中ß\u0301\u00a0\u200d-'"


def reading(model, before=(1,), after=(0,), length=64):
    return Tokenization(model, before, after, length, "test")


# ---------------------------------------------------------------- ragged


@given(st.lists(st.lists(st.integers(-5, 5), max_size=6), max_size=6))
def test_arrays_end_to_end_come_back(lists):
    made = Ragged.from_lists(lists, np.int32)
    assert made.flat.dtype == np.int32
    assert [one.tolist() for one in made] == lists
    assert [made[at].tolist() for at in range(-len(lists), 0)] == lists
    assert made.lengths.tolist() == [len(one) for one in lists]
    with pytest.raises(IndexError):
        made[len(lists)]


def test_arrays_keep_their_type_and_their_memory():
    made = Ragged.from_lists([np.ones(2, np.int8), np.zeros(1, np.int8)])
    assert made.flat.dtype == np.int8
    assert np.shares_memory(made[1], made.flat)


def test_entries_may_be_pairs_also_where_there_are_none():
    made = Ragged.from_lists([[], [(1, 2), (3, 4)]], np.int32, item=(2,))
    assert made[0].shape == (0, 2)
    assert made[1].tolist() == [[1, 2], [3, 4]]
    assert Ragged.from_lists([], np.int32, item=(2,)).flat.shape == (0, 2)


# ---------------------------------------------------------------- texts


def test_a_text_stands_between_what_the_model_expects_and_is_cut_to_fit(tokenizers):
    model = tokenizers["bytes"]
    ids = model.encode("the cat sees a dog", add_special_tokens=False).ids
    whole, cut = (
        encode_texts(reading(model, length=length), ["the cat sees a dog"])[0] for length in (64, 5)
    )
    assert whole.tolist() == [1, *ids, 0]
    assert cut.tolist() == [1, *ids[:3], 0]
    assert whole.dtype == np.int32


def test_more_texts_than_a_block_keep_their_order(tokenizers):
    model = tokenizers["bytes"]
    texts = [f"the cat {number}" for number in range(2 * BLOCK + 7)]
    made = encode_texts(reading(model), texts)
    assert len(made) == len(texts)
    for number in (0, BLOCK - 1, BLOCK, 2 * BLOCK, len(texts) - 1):
        assert model.decode(made[number][1:-1].tolist()) == texts[number]


def test_the_literal_text_of_a_special_token_stays_text(tokenizers):
    model = tokenizers["bytes"]
    made = encode_texts(reading(model), ["so <|end_of_text|> it <|mask|> ends"])[0]
    assert Counter(made.tolist())[0] == Counter(made.tolist())[1] == 1
    assert model.decode(made[1:-1].tolist()) == "so <|end_of_text|> it <|mask|> ends"


def test_no_texts_make_no_inputs(tokenizers):
    assert len(encode_texts(reading(tokenizers["bytes"]), [])) == 0
    assert len(encode_words(reading(tokenizers["bytes"]), []).ids) == 0


def test_a_text_that_cannot_be_encoded_is_named(tokenizers):
    texts = ["fine"] * (BLOCK + 2) + ["half a \ud83d pair"]
    with pytest.raises(DataError, match=f"^text {BLOCK + 3} .*half a .*; correct that row") as caught:
        encode_texts(reading(tokenizers["bytes"]), texts)
    assert "\n" not in str(caught.value)
    with pytest.raises(DataError, match=r"^sentence 2 "):
        encode_words(
            reading(tokenizers["bytes"]), [TaggedSentence(("a",), (0,)), TaggedSentence(("\udc00",), (0,))]
        )


def test_an_input_without_any_token_is_refused(tokenizers):
    bare = reading(tokenizers["bytes"], before=(), after=())
    with pytest.raises(DataError, match=r"^text 2 has no tokens; "):
        encode_texts(bare, ["a", ""])
    assert encode_texts(reading(tokenizers["bytes"]), [""])[0].tolist() == [1, 0]


def test_a_reading_must_have_room_for_text(tokenizers):
    with pytest.raises(SpecError, match=r"an input of 2 tokens, 2 of them special.* 4 or more"):
        reading(tokenizers["bytes"], length=2)


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
    how = reading(tokenizers[kind], length=length)
    rows = [TaggedSentence(tuple(words), tuple(n % 3 for n in range(len(words)))) for words in sentences]
    made = encode_words(how, rows)
    texts = encode_texts(how, [" ".join(words) for words in sentences])
    assert np.array_equal(made.ids.flat, texts.flat)
    assert made.words.tolist() == [len(words) for words in sentences]
    for number, row in enumerate(rows):
        spans = how.tokenizer.encode(" ".join(row.words), add_special_tokens=False).offsets[: how.room]
        expected = [-1, *(first_overlap(row.words, *span) for span in spans), -1]
        assert made.word_of[number].tolist() == expected
        assert made.labels[number].tolist() == [IGNORE if at < 0 else row.tags[at] for at in expected]
        assert tuple(made.gold[number]) == row.tags


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text("abé👩中12", min_size=1, max_size=5), min_size=1, max_size=7))
def test_every_word_has_a_token_and_trimmed_offsets_change_nothing(tokenizers, words):
    row = TaggedSentence(tuple(words), tuple(range(len(words))))
    plain, trimmed = (
        encode_words(reading(tokenizers[kind], length=300), [row]) for kind in ("bytes", "trimmed")
    )
    assert np.array_equal(plain.word_of.flat, trimmed.word_of.flat)
    found = plain.word_of.flat[plain.word_of.flat >= 0]
    assert (np.diff(found) >= 0).all()
    assert set(found.tolist()) == set(range(len(words)))


def test_all_bytes_of_a_character_carry_its_words_tag(tokenizers):
    made = encode_words(reading(tokenizers["bytes"]), [TaggedSentence(("the", "👩", "sees"), (0, 1, 2))])
    assert Counter(made.word_of[0].tolist())[1] >= 4  # four bytes that its training text never had
    assert Counter(made.labels[0].tolist())[1] == Counter(made.word_of[0].tolist())[1]


def test_white_space_around_an_empty_word_is_not_that_word():
    model = Model(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, "[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "isolated")
    made = encode_words(reading(model), [TaggedSentence(("a", "", "b"), (3, 4, 5))])
    assert made.ids[0].tolist() == [1, 1, 0, 2, 0]  # a, two spaces, b
    assert made.word_of[0].tolist() == [-1, 0, -1, 2, -1]
    assert made.words.tolist() == [3]


def test_words_that_are_cut_off_are_still_counted(tokenizers):
    row = TaggedSentence(("the", "cat", "sees", "it"), (0, 1, 2, 1))
    made = encode_words(reading(tokenizers["bytes"], length=4), [row])
    assert set(made.word_of[0].tolist()) < {-1, 0, 1, 2, 3}
    assert made.words.tolist() == [4]
    assert made.gold[0].tolist() == [0, 1, 2, 1]


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
