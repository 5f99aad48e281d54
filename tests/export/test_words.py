"""The tokenizer of an exported model: whatever stands around a text, transformers puts it there too."""

import json
from dataclasses import replace

import pytest
from tokenizers import AddedToken
from transformers import AutoTokenizer

from biphase.data.tokenizer import Special, Tokenizer, load_saved
from biphase.errors import ModelError
from biphase.export.writing import TEXTS, check_tokenizer, tokenizer_of, write_tokenizer


@pytest.fixture
def saved(shards):
    """The tokenizer of the tiny corpus, with a beginning token whose name means something in a template."""
    made = load_saved(shards / "tokenizer")
    made.model.add_special_tokens([AddedToken("$A:1 <bos>", normalized=False, special=True)])
    special = made.special
    ids = (*special.ids, 320)
    return Tokenizer(made.model, Special(special.eos, special.mask, special.pad, 320, ids, "own"), 321)


@pytest.mark.parametrize("bos", [False, True])
def test_a_text_stands_between_what_it_was_trained_between(bos, saved, tmp_path):
    words = tokenizer_of(saved, bos=bos, context=16)
    write_tokenizer(words, tmp_path)
    check_tokenizer(words, tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in TEXTS:
        inner = saved.model.encode(text, add_special_tokens=False).ids
        assert loaded(text)["input_ids"] == [*([320] if bos else []), *inner, saved.special.eos]
    assert loaded.bos_token == "$A:1 <bos>"
    cut = loaded("the cat sees the river. " * 9, truncation=True)["input_ids"]
    assert (len(cut), cut[-1]) == (16, saved.special.eos)
    pair = loaded("the cat", "the river")
    assert pair["input_ids"].count(saved.special.eos) == 2
    assert "token_type_ids" not in pair


def test_special_tokens_may_be_spelled_there_as_transformers_has_it(saved, tmp_path):
    write_tokenizer(tokenizer_of(saved, bos=False, context=16), tmp_path)
    assert saved.special.mask in AutoTokenizer.from_pretrained(tmp_path)("the <|mask|>")["input_ids"]


def test_our_own_reader_takes_it_back_with_a_mask_token_that_is_known(saved, tmp_path):
    words = tokenizer_of(
        replace(saved, special=replace(saved.special, mask_rule="added")), bos=False, context=16
    )
    write_tokenizer(words, tmp_path)
    back = load_saved(tmp_path)
    assert back.special == saved.special  # its own now: the model has learnt it
    assert back.vocab == saved.vocab


def test_files_that_read_otherwise_are_refused(saved, tmp_path):
    words = tokenizer_of(saved, bos=False, context=16)
    write_tokenizer(words, tmp_path)
    with pytest.raises(ModelError, match="and the model was trained with"):
        check_tokenizer(replace(words, before=(320,)), tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"pad_token": "<|mask|>"}))
    with pytest.raises(ModelError, match="for special tokens, which are"):
        check_tokenizer(words, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match="transformers cannot load the tokenizer"):
        check_tokenizer(words, tmp_path)


@pytest.mark.parametrize("rule", ["own", "added"])
def test_a_hidden_word_takes_its_space_along_as_in_training(rule, saved, tmp_path):
    words = tokenizer_of(
        replace(saved, special=replace(saved.special, mask_rule=rule)),
        bos=False,
        context=16,
        trained_here=rule == "own",
    )
    write_tokenizer(words, tmp_path)
    check_tokenizer(words, tmp_path, fills=True)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    whole = loaded("the cat sees the river", add_special_tokens=False)["input_ids"]
    masked = loaded("the cat <|mask|> the river", add_special_tokens=False)["input_ids"]
    start, end = (loaded(text, add_special_tokens=False)["input_ids"] for text in ("the cat", " the river"))
    assert whole[: len(start)] == start
    assert masked == [*start, saved.special.mask, *end]


def test_a_stray_token_before_a_hidden_word_is_refused_where_words_are_filled_in(saved, tmp_path):
    words = tokenizer_of(saved, bos=False, context=16)
    write_tokenizer(words, tmp_path)
    check_tokenizer(replace(words, mask_is_ours=True), tmp_path)
    with pytest.raises(ModelError, match="a stray token before the mask token"):
        check_tokenizer(replace(words, mask_is_ours=True), tmp_path, fills=True)


def test_a_mask_token_that_is_anothers_is_left_as_it_came(saved, tmp_path):
    write_tokenizer(tokenizer_of(saved, bos=False, context=16), tmp_path)
    tokens = json.loads((tmp_path / "tokenizer.json").read_text())["added_tokens"]
    assert [one["lstrip"] for one in tokens if one["id"] == saved.special.mask] == [False]


def test_eurobert_gets_a_mask_token_even_where_there_is_none(saved):
    words = tokenizer_of(saved, bos=False, context=16)
    without = replace(words, named={name: one for name, one in words.named.items() if name != "mask_token"})
    assert without.token_ids["mask_token_id"] is None
    assert without.native_ids["mask_token_id"] == words.pad
    assert words.native_ids == words.token_ids
