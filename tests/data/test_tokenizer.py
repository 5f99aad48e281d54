"""Tokenizers: which tokens end, begin and mask; what is saved; and that tiktoken gives the ids of `tokenizers`."""

import json
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from biphase.data import tokenizer as tokenizer_module
from biphase.data.corpus import resolve
from biphase.data.documents import texts_of
from biphase.data.tokenizer import (
    SPLIT,
    TextEncoder,
    continues_word,
    fastest,
    load,
    read,
    train,
)
from biphase.errors import DataError
from biphase.presets import CORPORA
from biphase.specs import BPE, Corpus, Pretrained


def texts(count=120):
    builtin = CORPORA["builtin"]
    return list(islice(texts_of(builtin, resolve(builtin).train), count))


def silent(_):
    pass


def trained(vocab=600, **fields):
    return train(Corpus("mine", "./x", BPE(vocab), **fields), texts(), silent)


LLAMA3 = [pre_tokenizers.Split(Regex(SPLIT), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
FAST = {
    "gpt2": pre_tokenizers.ByteLevel(False),
    "llama3": pre_tokenizers.Sequence(LLAMA3),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "digit runs": pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False)]),
}


def byte_bpe(split=FAST["llama3"], *, special=("<|endoftext|>",), normalizer=None, alphabet=None, **options):
    """A byte-level BPE as published ones are made."""
    model = Model(models.BPE(**options))
    model.pre_tokenizer = split
    model.decoder = decoders.ByteLevel()
    if normalizer:
        model.normalizer = normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet() if alphabet is None else alphabet
    trainer = trainers.BpeTrainer(
        vocab_size=900, special_tokens=list(special), initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(texts(), trainer)
    return model


def opened(tmp_path, model, **config):
    model.save(str(tmp_path / "tokenizer.json"))
    paths = {"tokenizer.json": tmp_path / "tokenizer.json"}
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        paths["tokenizer_config.json"] = tmp_path / "tokenizer_config.json"
    return read(paths, "mine")


# ---------------------------------------------------------------- special tokens


def test_a_trained_tokenizer_has_its_special_tokens_first():
    tokenizer = trained()
    assert tokenizer.vocab == 600
    tokens = [tokenizer.model.id_to_token(number) for number in range(3)]
    assert tokens == ["<|end_of_text|>", "<|mask|>", "<|pad|>"]
    special = tokenizer.special
    assert (special.eos, special.mask, special.pad, special.ids) == (0, 1, 2, (0, 1, 2))
    with pytest.raises(DataError, match="bos=False"):
        trained(bos=True)
    messages = []
    small = train(Corpus("mine", "./x", BPE(5_000)), ["a few words"], messages.append)
    assert small.vocab < 300
    assert f"{small.vocab} of 5000" in messages[0]


def test_training_gives_the_same_bytes_with_any_number_of_threads():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_tokenizer as t; print(t.trained(900).model.to_str())"
    outputs = set()
    for threads, parallel in (("1", "false"), ("4", "true")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        command = [sys.executable, "-c", code, str(Path(__file__).parent)]
        outputs.add(subprocess.check_output(command, env=environment))
    assert len(outputs) == 1


@pytest.mark.parametrize(
    ("special", "config", "expected"),
    [
        (("</s>", "<mask>", "<hide>"), {}, (1, "own", 0, None, 900)),
        (("</s>", "<mask>", "<hide>"), {"mask_token": {"content": "<hide>"}, "pad_token": "<mask>", "bos_token": "</s>"},
         (2, "own", 1, 0, 900)),
        (("<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>"), {},
         (1, "reserved", 0, None, 900)),
        (("<|endoftext|>",), {}, (900, "added", 0, None, 901)),
        (("</s>", "<mask>"), {"pad_token": "<no>", "bos_token": "<no>"}, (1, "own", 0, None, 900)),
    ],
)  # fmt: skip
def test_special_tokens_are_those_of_the_configuration_else_of_well_known_names(
    tmp_path, special, config, expected
):
    tokenizer = opened(tmp_path, byte_bpe(special=special), **config)
    found = tokenizer.special
    assert (found.mask, found.mask_rule, found.pad, found.bos, tokenizer.vocab) == expected
    assert found.ids == tuple(sorted({*range(len(special)), found.mask}))
    assert found.eos == 0


@pytest.mark.parametrize(
    ("special", "config", "facts"),
    [
        (("<stop>",), {}, ['{"eos_token"']),
        (("</s>", "<mask>"), {"eos_token": "<nowhere>"}, ["eos_token", "<nowhere>", "tokenizer_config.json"]),
        (("</s>",), {"eos_token": {"content": 7}}, ["eos_token", "7"]),
        (("</s>",), {"eos_token": "Ċ"}, ["'Ċ'", "only way"]),  # a newline as the end
    ],
)
def test_bad_special_tokens_are_refused(tmp_path, special, config, facts):
    with pytest.raises(DataError) as caught:
        opened(tmp_path, byte_bpe(special=special), **config)
    assert all(fact in str(caught.value) for fact in facts)


def test_a_damaged_tokenizer_and_a_wrong_size_are_refused(tmp_path):
    def loaded(bos=False, **fields):
        return load(Corpus("mine", "./x", Pretrained(str(tmp_path), **fields), bos=bos))

    byte_bpe().save(str(tmp_path / "tokenizer.json"))
    assert loaded(vocab=901).vocab == 901
    with pytest.raises(DataError, match="type vocab=901"):
        loaded(vocab=900)
    with pytest.raises(DataError, match="bos=False"):
        loaded(bos=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json"):
        loaded()


# ---------------------------------------------------------------- text → ids


HARD = [
    "", " ", "\n\n\n", "x" * 5000, " " * 3000 + "1", "1" * 3001, "  12  34\t\t56\n\n78 ",
    "literal <|endoftext|> and <|mask|> stay text",
    "\x00<|biphase never|>\x00 not even this one",
    "".join(map(chr, range(0x300))),
    "much " + " " * 1_000_000 + "white space",
    "\n" * 1_000_000,
    "recent \U0001fae8 \U0001f6dc and unassigned \U000e0fff \u0378 characters",
]  # fmt: skip


@pytest.mark.parametrize("split", FAST.values(), ids=FAST.keys())
def test_tiktoken_gives_the_ids_of_tokenizers(tmp_path, split):
    messages = []
    fast = fastest(opened(tmp_path, byte_bpe(split)), [], messages.append)
    assert (fast.name, messages) == ("tiktoken", [])
    rng = np.random.default_rng(0)
    noise = [
        "".join(map(chr, rng.choice([*range(9, 127), *range(0xA0, 0x600), 0x2009, 0x4E2D], 400)))
        for _ in range(60)
    ]
    assert fast.agrees([*HARD, *noise, *texts(60)])
    text = "a<|endoftext|>b<|mask|>c"
    ids = fast.encode([text])[0]
    assert not np.isin(ids, fast.tokenizer.special.ids).any()
    assert fast.tokenizer.model.decode(ids.tolist(), skip_special_tokens=False) == text


def unigram():
    """Pieces as XLM-R has them: the special tokens are among them."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    pieces = (
        [(name, 0.0) for name in special] + [(name, -3.0) for name in "▁abcdemstak/<>"] + [("▁the", -2.0)]
    )
    model = Model(models.Unigram([*pieces, ("<mask>", 0.0)], unk_id=3))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.add_special_tokens([*special, AddedToken("<mask>", lstrip=True, special=True)])
    return model


def word_level(unknown="[UNK]"):
    words = ["</s>", "[MASK]", "some", "words"] + ([unknown] if unknown else [])
    model = Model(models.WordLevel({word: rank for rank, word in enumerate(words)}, unk_token=unknown))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>", "[MASK]"])
    return model


def word_piece():
    vocabulary = ["[UNK]", "[SEP]", "[MASK]", "[PAD]", *".,—'", *(c for c in map(chr, range(97, 123)))]
    vocabulary += [f"##{letter}" for letter in vocabulary[8:]] + ["the", "##ing", "un", "##fold"]
    model = Model(models.WordPiece({text: n for n, text in enumerate(vocabulary)}, unk_token="[UNK]"))
    model.pre_tokenizer, model.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return model


def sentence_piece():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<mask>", 0.0), ("▁", -3.0)]
    pieces += [(f"▁{word}", -2.0) for word in ("the", "un")]
    pieces += [(text, -4.0) for text in (*map(chr, range(97, 123)), *".,—'é", "fold", "ing")]
    model = Model(models.Unigram(pieces, unk_id=0))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return model


@pytest.mark.parametrize("make", [byte_bpe, word_piece, sentence_piece])
def test_words_begin_where_the_text_says(make, tmp_path):
    """Letters after letters continue a word; a space or a sign of punctuation ends it."""
    special = {word_piece: {"eos_token": "[SEP]"}, sentence_piece: {"eos_token": "</s>"}}.get(make, {})
    made = opened(tmp_path, make(), **special)
    table = continues_word(made)
    text = "the unfolding, the unfold. sea, the thing'."
    encoded = made.model.encode(text, add_special_tokens=False)
    assert len(encoded.ids) > 12, "words of several tokens"
    words = []
    for number, (start, end) in zip(encoded.ids, encoded.offsets, strict=True):
        if words and table[number]:
            words[-1] += text[start:end]
        else:  # the first token of a row begins a word whatever it is
            words.append(text[start:end])
    assert [word.strip() for word in words] == re.findall(r"\w+|[^\w\s]", text)
    assert not any(table[number] for number in made.special.ids)


def test_pieces_that_are_special_tokens_are_not_produced_from_text(tmp_path):
    tokenizer = opened(tmp_path, unigram())
    assert (tokenizer.special.eos, tokenizer.special.mask, tokenizer.special.ids) == (2, 19, (0, 1, 2, 3, 19))
    text = "the </s> seat<mask> <s>at the <pad>"
    ids = TextEncoder(tokenizer, tiktoken=False).encode([text, "the seat ☃"])
    assert not np.isin(ids[0], (0, 2, 19)).any()
    assert tokenizer.model.decode(ids[0].tolist(), skip_special_tokens=False).replace("<unk>", "p") == text
    assert ids[1].tolist() == tokenizer.model.encode("the seat ☃", add_special_tokens=False).ids
    assert ids[1][-1] == 3, "what is unknown stays unknown"
    tokenizer.save(tmp_path / "saved")
    again = TextEncoder(tmp_path / "saved", tiktoken=False).encode([text])
    np.testing.assert_array_equal(again[0], ids[0])
    words = TextEncoder(opened(tmp_path, word_level()), tiktoken=False)
    assert words.encode(["some </s> words [MASK]"])[0].tolist() == [2, 4, 3, 4]


def changed(change):
    spec = json.loads(byte_bpe(FAST["gpt2"]).to_str())
    change(spec["model"])
    return Model.from_str(json.dumps(spec))


def add_merges(model, *merges):
    for left, right in merges:
        for token in (left, right, left + right):
            model["vocab"].setdefault(token, len(model["vocab"]))
        model["merges"].append([left, right])


def shadow(model):
    """Add a token that never results: of qzxjw, zxj + w is merged before qzxj + w."""
    add_merges(model, ("x", "j"), ("z", "xj"), ("zxj", "w"), ("q", "zxj"), ("qzxj", "w"))


def look_up_whole_words(model):
    shadow(model)
    model["ignore_merges"] = True  # as tiktoken does


def add_whole_word(model):
    look_up_whole_words(model)
    model["vocab"]["Ġneverwhere"] = len(model["vocab"])


def with_ordinary_added_token():
    model = byte_bpe(FAST["gpt2"])
    model.add_tokens([AddedToken("<think>", special=False)])
    return model


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: byte_bpe(FAST["gpt2"], normalizer=normalizers.NFC()), "normalizes"),
        (lambda: byte_bpe(pre_tokenizers.ByteLevel(True)), "plain bytes"),
        (
            lambda: byte_bpe(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), *LLAMA3])),
            "regular expression",
        ),
        (lambda: byte_bpe(FAST["gpt2"], dropout=0.1), "byte-level BPE"),
        (lambda: byte_bpe(pre_tokenizers.Sequence([]), alphabet=list("abc")), "plain bytes"),
        (lambda: changed(lambda model: add_merges(model, ("中", "a"))), "no byte"),
        (with_ordinary_added_token, "added tokens"),
        (lambda: changed(shadow), "qzxjw"),
        (lambda: changed(add_whole_word), "no merge"),
    ],
)
def test_what_tiktoken_cannot_do_is_encoded_by_tokenizers_with_a_message(tmp_path, model, reason):
    messages = []
    encoder = fastest(opened(tmp_path, model()), [], messages.append)
    assert encoder.name == "tokenizers"
    assert reason in messages[0]
    assert len(encoder.encode(["some words"])[0])


@pytest.mark.parametrize("pattern", [r"\w+|\s+|[^\w\s]+", None])
def test_other_ids_on_the_sample_or_on_the_documents_fall_back_to_tokenizers(tmp_path, monkeypatch, pattern):
    tokenizer, messages = opened(tmp_path, byte_bpe(FAST["gpt2"])), []
    # A wrong conversion, as a bug would be: of all text, or of one document only.
    monkeypatch.setattr(
        tokenizer_module, "_GPT2", pattern or tokenizer_module._GPT2.replace("[sdmt]", "[dmt]")
    )
    if pattern is None:
        monkeypatch.setattr(tokenizer_module, "SAMPLE", "plain words")
    assert fastest(tokenizer, ["it's a test"], messages.append).name == "tokenizers"
    assert "other ids" in messages[0]
