"""Tokenizers: which tokens end, begin and hide; what is saved; and that the fast encoder never differs."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from huggingface_hub.errors import EntryNotFoundError
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Model

from biphase.data import corpus as corpus_module
from biphase.data import documents, encode, tokenizer
from biphase.data.corpus import resolve
from biphase.data.encode import SAMPLE, TextEncoder, confirmed, fastest
from biphase.data.tokenizer import WORDS, load, load_saved, read, train
from biphase.errors import DataError
from biphase.presets import CORPORA
from biphase.specs import BPE, Corpus, Pretrained


def texts(count=120):
    builtin = CORPORA["builtin"]
    block = next(documents.blocks(builtin, corpus_module.local(resolve(builtin).train)))
    return [text for text, _ in documents.parse(block, "text", documents.Tally())][:count]


def silent(_):
    pass


def trained(vocab=600, **fields):
    return train(Corpus("mine", "./x", BPE(vocab), **fields), texts(), silent)


SPLIT = [pre_tokenizers.Split(Regex(WORDS), "isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]


def bytes_bpe(words, *, special=("<|endoftext|>",), normalizer=None, alphabet=None, **options):
    """A byte-level BPE as published ones are made."""
    model = Model(models.BPE(**options))
    model.pre_tokenizer = words
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
    made = trained()
    assert made.vocab == 600
    assert [made.model.id_to_token(number) for number in range(3)] == [
        "<|end_of_text|>",
        "<|mask|>",
        "<|pad|>",
    ]
    assert (made.special.eos, made.special.mask, made.special.pad, made.special.ids) == (0, 1, 2, (0, 1, 2))
    with pytest.raises(DataError, match="type bos=False"):
        trained(bos=True)


def test_a_corpus_too_small_for_its_vocabulary_is_said():
    said = []
    made = train(Corpus("mine", "./x", BPE(5_000)), ["a few words"], said.append)
    assert made.vocab < 300
    assert f"only {made.vocab} of 5000" in said[0]


def test_training_gives_the_same_bytes_whatever_the_threads():
    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_tokenizer as t; print(t.trained(900).model.to_str())"
    found = set()
    for threads, parallel in (("1", "false"), ("2", "true"), ("4", "true")):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": parallel}
        command = [sys.executable, "-c", code, os.path.dirname(__file__)]  # noqa: PTH120
        found.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1


def test_the_mask_is_the_tokenizers_own_by_name_or_by_configuration(tmp_path):
    model = bytes_bpe(pre_tokenizers.Sequence(SPLIT), special=("</s>", "<mask>", "<hide>"))
    assert opened(tmp_path, model).special.mask == 1
    made = opened(tmp_path, model, mask_token={"content": "<hide>"}, pad_token="<mask>", bos_token="</s>")
    assert (made.special.mask, made.special.mask_rule, made.special.pad, made.special.bos) == (2, "own", 1, 0)


def test_a_reserved_slot_becomes_the_mask_without_moving_an_id(tmp_path):
    reserved = ("<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>")
    made = opened(tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT), special=reserved))
    assert (made.special.mask, made.special.mask_rule, made.vocab) == (1, "reserved", 900)
    assert made.special.ids == (0, 1, 2)


def test_else_a_mask_is_added_at_the_end(tmp_path):
    made = opened(tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT)))
    assert (made.special.mask, made.special.mask_rule, made.vocab) == (900, "added", 901)
    assert made.model.id_to_token(900) == "<|mask|>"


def test_a_tokenizer_that_does_not_say_how_a_text_ends_is_refused(tmp_path):
    with pytest.raises(DataError, match=r'does not say .* put \{"eos_token"'):
        opened(tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT), special=("<stop>",)))
    assert opened(
        tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT), special=("<stop>",)), eos_token="<stop>"
    )


@pytest.mark.parametrize("name", ["eos_token", "mask_token"])
def test_a_token_that_the_configuration_names_but_the_vocabulary_lacks_is_refused(tmp_path, name):
    model = bytes_bpe(pre_tokenizers.Sequence(SPLIT), special=("</s>", "<mask>"))
    with pytest.raises(DataError, match=rf"{name} is '<nowhere>', which its tokenizer.json lacks; correct"):
        opened(tmp_path, model, **{name: "<nowhere>"})
    for none in (None, ""):
        assert opened(tmp_path, model, **{name: none}).special.ids == (0, 1)
    assert opened(tmp_path, model, pad_token="<nowhere>", bos_token="<nowhere>").special.bos is None


@pytest.mark.parametrize("said", [7, ["</s>"], {"content": 7}])
def test_a_token_that_is_named_by_something_other_than_text_is_refused(tmp_path, said):
    with pytest.raises(
        DataError, match=r"eos_token in its tokenizer_config.json is .*, not text; correct it"
    ):
        opened(tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT)), eos_token=said)


def test_endless_words_do_not_make_training_endless():
    endless = ["ab" * 500_000, "word " * 50, " \n" * 500_000, "word " * 50]
    began = time.monotonic()
    made = train(Corpus("mine", "./x", BPE(300)), endless, silent)
    assert time.monotonic() - began < 5
    assert made.model.encode("word").tokens == ["word"]
    runs = ["x" * 1000, "a b " * 1000, " " * 1000]  # short enough to be learned from as they are
    assert [tokenizer._without_long_runs(run) for run in runs] == runs
    for before in (0, 1, 499, 500, 750):
        words = "w " * before
        long = f"{words}{'x' * 1001} b{' ' * 1001}c"
        assert tokenizer._without_long_runs(long) == f"{words}{'x' * 1000} b{' ' * 1000}c"


def test_a_damaged_tokenizer_and_a_wrong_size_are_refused(tmp_path):
    bytes_bpe(pre_tokenizers.Sequence(SPLIT)).save(str(tmp_path / "tokenizer.json"))
    load(Corpus("mine", "./x", Pretrained(str(tmp_path), vocab=901)))
    with pytest.raises(DataError, match=r"has 901 tokens, mask token \(added\) included; type vocab=901"):
        load(Corpus("mine", "./x", Pretrained(str(tmp_path), vocab=900)))
    with pytest.raises(DataError, match="no token that begins a document"):
        load(Corpus("mine", "./x", Pretrained(str(tmp_path)), bos=True))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="cannot be read"):
        load(Corpus("mine", "./x", Pretrained(str(tmp_path))))


def test_a_hub_tokenizer_needs_only_its_tokenizer_file(tmp_path, monkeypatch):
    bytes_bpe(pre_tokenizers.Sequence(SPLIT)).save(str(tmp_path / "tokenizer.json"))
    asked = []

    def hub(source, name, *, revision):
        asked.append((source, name, revision))
        if not (tmp_path / name).is_file():
            raise EntryNotFoundError(f"404: {name}")
        return str(tmp_path / name)

    monkeypatch.setattr("huggingface_hub.hf_hub_download", hub)
    corpus = Corpus("mine", "./x", Pretrained("owner/name", revision="abc"))
    assert load(corpus).vocab == 901
    assert ("owner/name", "tokenizer_config.json", "abc") in asked
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(
        DataError, match=r"owner/name@abc cannot be had .*404.* type Pretrained\('./folder'\)"
    ):
        load(corpus)


def test_transformers_loads_what_is_saved(tmp_path):
    from transformers import AutoTokenizer

    made = opened(tmp_path, bytes_bpe(pre_tokenizers.Sequence(SPLIT)))
    made.save(tmp_path / "saved")
    loaded = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (loaded.eos_token_id, loaded.mask_token_id, loaded.pad_token_id) == (0, 900, 0)
    assert loaded("hello <|mask|> world")["input_ids"].count(900) == 1
    ordinary = "plain words, 1234 of them"
    assert loaded(ordinary)["input_ids"] == TextEncoder(made, tiktoken=False).plain([ordinary])[0].tolist()
    again = load_saved(tmp_path / "saved")
    assert (again.special, again.vocab) == (made.special, made.vocab)


# ---------------------------------------------------------------- ids


FAST = {
    "gpt2": pre_tokenizers.ByteLevel(False),
    "llama3": pre_tokenizers.Sequence(SPLIT),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(False)]
    ),
    "digit runs": pre_tokenizers.Sequence([pre_tokenizers.Digits(False), pre_tokenizers.ByteLevel(False)]),
}

HARD = [
    "",
    " ",
    "\n\n\n",
    "x" * 5000,
    " " * 3000 + "1",
    "1" * 3001,
    "  12  34\t\t56\n\n78 ",
    "literal <|endoftext|> and <|mask|> stay text",
    "\x00<|biphase never|>\x00 not even this one",
    "".join(map(chr, range(0x300))),
    "much " + " " * 1_000_000 + "white space",
    "\n" * 1_000_000,
    "young \U0001fae8 \U0001f6dc and unassigned \U000e0fff \u0378 characters",
]


@pytest.mark.parametrize("words", FAST.values(), ids=FAST.keys())
def test_tiktoken_gives_the_ids_of_tokenizers(tmp_path, words):
    said = []
    fast = fastest(opened(tmp_path, bytes_bpe(words)), said.append)
    assert (fast.name, said) == ("tiktoken", [])
    rng = np.random.default_rng(0)
    noise = [
        "".join(map(chr, rng.choice([*range(9, 127), *range(0xA0, 0x600), 0x2009, 0x4E2D], 400)))
        for _ in range(60)
    ]
    assert fast.agrees([*HARD, *noise, *texts(60)])


def test_literal_special_text_never_becomes_a_special_token(tmp_path):
    made = opened(tmp_path, bytes_bpe(FAST["gpt2"]))
    text = ["a<|endoftext|>b<|mask|>c"]
    for tiktoken in (True, False):
        ids = TextEncoder(made, tiktoken=tiktoken).encode(text)[0]
        assert not np.isin(ids, made.special.ids).any()
        assert made.model.decode(ids.tolist(), skip_special_tokens=False) == text[0]


def unigram():
    """Pieces as XLM-R has them: the special tokens are among them."""
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    jobs = [(one, 0.0) for one in special] + [(one, -3.0) for one in "▁abcdemstak/<>"] + [("▁the", -2.0)]
    model = Model(models.Unigram([*jobs, ("<mask>", 0.0)], unk_id=3))
    model.pre_tokenizer, model.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    model.add_special_tokens([*special, AddedToken("<mask>", lstrip=True, special=True)])
    return model


def word_list(unknown="[UNK]"):
    words = ["</s>", "[MASK]", "some", "words"] + ([unknown] if unknown else [])
    model = Model(models.WordLevel({word: rank for rank, word in enumerate(words)}, unk_token=unknown))
    model.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["</s>", "[MASK]"])
    return model


def test_pieces_that_are_special_tokens_are_not_found_in_text(tmp_path):
    made = opened(tmp_path, unigram())
    assert (made.special.eos, made.special.mask, made.special.ids) == (2, 19, (0, 1, 2, 3, 19))
    text = "the </s> seat<mask> <s>at the <pad>"
    encoder = TextEncoder(made, tiktoken=False)
    ids = encoder.encode([text, "the seat ☃"])
    assert not np.isin(ids[0], (0, 2, 19)).any()
    assert made.model.decode(ids[0].tolist(), skip_special_tokens=False).replace("<unk>", "p") == text
    assert ids[1].tolist() == made.model.encode("the seat ☃", add_special_tokens=False).ids
    assert ids[1][-1] == 3, "what is unknown stays unknown"
    made.save(tmp_path / "saved")
    again = TextEncoder(tmp_path / "saved", tiktoken=False).encode([text])
    np.testing.assert_array_equal(again[0], ids[0])


def test_words_that_are_special_tokens_are_unknown_in_text(tmp_path):
    encoder = TextEncoder(opened(tmp_path, word_list()), tiktoken=False)
    assert encoder.encode(["some </s> words [MASK]"])[0].tolist() == [2, 4, 3, 4]


def test_a_tokenizer_that_cannot_write_text_without_a_special_token_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"special token '</s>' is also the only way to write that text"):
        opened(tmp_path, word_list(unknown=None))
    with pytest.raises(DataError, match=r"special token 'Ċ' is also the only way"):  # a newline as the end
        opened(tmp_path, bytes_bpe(FAST["gpt2"]), eos_token="Ċ")
    with pytest.raises(DataError, match=r"special token '.*' is also the only way"):
        opened(tmp_path, word_list(unknown="</s>"))


def test_an_ordinary_piece_named_as_special_is_spelled_otherwise(tmp_path):
    said = []
    made = fastest(opened(tmp_path, bytes_bpe(FAST["gpt2"]), eos_token="Ġthe"), said.append)
    assert "text can spell its special tokens" in said[0]
    ids = made.encode(["to the end"])[0]
    assert made.tokenizer.special.eos not in ids
    assert made.tokenizer.model.decode(ids.tolist()) == "to the end"


def test_a_text_that_cannot_be_encoded_at_all_is_an_error_that_says_so(tmp_path):
    model = Model(models.WordLevel({"<eos>": 0, "word": 1}, unk_token="[UNK]"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    model.add_special_tokens(["<eos>"])
    with pytest.raises(DataError, match="use one with an unknown token"):
        TextEncoder(opened(tmp_path, model), tiktoken=False).encode(["another"])


def test_a_byte_the_vocabulary_lacks_leaves_the_decision_to_tokenizers(tmp_path):
    alphabet = [letter for letter in pre_tokenizers.ByteLevel.alphabet() if letter != "Ć"]  # byte 6
    fast = fastest(opened(tmp_path, bytes_bpe(FAST["gpt2"], alphabet=alphabet)), silent)
    assert fast.name == "tiktoken"
    assert fast.fast.encode("a\x06b") is None
    assert fast.agrees(["a\x06b", "plain", "the\x06re"])


def test_a_character_newer_than_our_tables_leaves_the_decision_to_tokenizers(tmp_path):
    fast = fastest(opened(tmp_path, bytes_bpe(FAST["gpt2"])), silent)
    assert fast.fast.encode("é中👍") is not None
    assert fast.fast.encode("\u0378") is None


def with_odd_merge():
    spec = json.loads(bytes_bpe(FAST["gpt2"]).to_str())
    vocab = spec["model"]["vocab"]
    vocab["中"], vocab["中a"] = len(vocab), len(vocab) + 1
    spec["model"]["merges"].append(["中", "a"])
    return Model.from_str(json.dumps(spec))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: bytes_bpe(FAST["gpt2"], normalizer=normalizers.NFC()), "normalizes"),
        (lambda: bytes_bpe(pre_tokenizers.ByteLevel(True)), "not plain bytes"),
        (
            lambda: bytes_bpe(pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), *SPLIT])),
            "one regular expression",
        ),
        (lambda: bytes_bpe(FAST["gpt2"], dropout=0.1), "plain byte-level BPE"),
        (lambda: bytes_bpe(pre_tokenizers.Sequence([]), alphabet=list("abc")), "not plain bytes"),
        (lambda: with_odd_merge(), "letters that stand for no byte"),
    ],
)
def test_what_tiktoken_cannot_say_is_encoded_by_tokenizers_with_a_message(tmp_path, model, reason):
    said = []
    made = fastest(opened(tmp_path, model()), said.append)
    assert made.name == "tokenizers"
    assert reason in said[0]
    assert len(made.encode(["some words"])[0])


def test_ordinary_added_tokens_and_unreachable_words_are_not_left_to_tiktoken(tmp_path):
    model = bytes_bpe(FAST["gpt2"])
    model.add_tokens([AddedToken("<think>", special=False)])
    assert fastest(opened(tmp_path, model), silent).name == "tokenizers"

    spec = json.loads(bytes_bpe(FAST["gpt2"]).to_str())
    vocab = spec["model"]["vocab"]
    for token in ("zxj", "qzxj", "qzxjw"):  # qzxj + w never comes out: zxj + w is merged before
        vocab[token] = len(vocab)
    vocab["zxjw"], vocab["xj"] = len(vocab), len(vocab) + 1
    rare = [["x", "j"], ["z", "xj"], ["zxj", "w"], ["q", "zxj"], ["qzxj", "w"]]
    spec["model"]["merges"] += rare
    said = []
    made = fastest(opened(tmp_path, Model.from_str(json.dumps(spec))), said.append)
    assert made.name == "tokenizers"
    assert "merging does not lead to" in said[0]

    spec["model"]["ignore_merges"] = True  # whole words are looked up first, as tiktoken does
    assert fastest(opened(tmp_path, Model.from_str(json.dumps(spec))), silent).agrees([SAMPLE])
    vocab["Ġneverwhere"] = max(vocab.values()) + 1
    said.clear()
    assert fastest(opened(tmp_path, Model.from_str(json.dumps(spec))), said.append).name == "tokenizers"
    assert "no merge makes" in said[0]


def test_a_difference_on_the_documents_themselves_falls_back_with_a_message(tmp_path, monkeypatch):
    made = opened(tmp_path, bytes_bpe(FAST["gpt2"]))
    monkeypatch.setattr(encode, "_GPT2", r"\w+|\s+|[^\w\s]+")  # a wrong conversion, as a bug would be
    wrong, said = TextEncoder(made, tiktoken=True), []
    assert not wrong.agrees(["it's a test"])
    assert confirmed(wrong, ["it's a test"], "the first documents", said.append).name == "tokenizers"
    assert said == ["encoding with tokenizers: tiktoken gave other ids on the first documents"]
    assert fastest(made, said.append).name == "tokenizers"
