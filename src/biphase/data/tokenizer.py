"""Tokenizers of corpora: loaded (`load`, `load_saved`, `read`) or trained (`train`), with end and mask tokens.

The end token of a document is the one that the tokenizer's configuration names, else a well-known name (`ENDS`).
The mask token is found in this order; `Special.mask_rule` records which rule applied:
    own       the configuration names it, or it has a well-known name
    reserved  a free slot of the vocabulary, e.g. <|reserved_special_token_0|> of Llama 3; no id changes
    added     a new token <|mask|> at the end of the vocabulary
A tokenizer trained here has <|end_of_text|>, <|mask|> and <|pad|> as ids 0, 1 and 2.

The name of a special token in a document is ordinary text: "</s>" is four characters, not the end of the document.
`tokenizers` can be told not to match special tokens in text, but some vocabularies also contain them as ordinary
pieces (Unigram models such as XLM-R's, word-level vocabularies), so their models produce them anyway. `without_special`
copies such a tokenizer and gives these pieces, under the same ids, names that no text contains. The characters are then
encoded with other pieces, or as unknown if there are none.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from biphase.data.corpus import TOKENIZER_FILES, tokenizer_files
from biphase.errors import DataError, one_line
from biphase.specs import BPE, Corpus, Pretrained


def merged_pairs(bpe: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE in tokenizer.json, which are strings or pairs depending on the version."""
    return [tuple(one.split(" ") if isinstance(one, str) else one) for one in bpe["merges"]]


def unknown_id(model: Any) -> int | None:
    """Return the id of the unknown token, if there is one."""
    named = getattr(model.model, "unk_token", None)
    if named:
        return model.token_to_id(named)
    if type(model.model).__name__ == "Unigram":  # it stores an id, which only its JSON shows
        return json.loads(model.to_str())["model"].get("unk_id")
    return None


def without_special(model: Any, special: frozenset[int]) -> Any:
    """Return a copy of a tokenizer that gives the same ids, but never produces those in `special` from text."""
    from tokenizers import Tokenizer as Model

    spec = json.loads(model.to_str())
    mark = uuid.uuid4().hex
    names = {model.id_to_token(number): f"\ufdd0{mark}{number}\ufdd0" for number in special}
    for token in spec["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    inner = spec["model"]
    if isinstance(inner["vocab"], dict):
        inner["vocab"] = {names.get(job, job): number for job, number in inner["vocab"].items()}
    else:
        inner["vocab"] = [[names.get(job, job), score] for job, score in inner["vocab"]]
    if inner.get("merges"):
        inner["merges"] = [pair for pair in merged_pairs(inner) if not names.keys() & {*pair, "".join(pair)}]
    if inner.get("unk_token"):
        inner["unk_token"] = names.get(inner["unk_token"], inner["unk_token"])
    spec["post_processor"] = None  # it refers to special tokens by name, and we add none
    made = Model.from_str(json.dumps(spec))
    made.encode_special_tokens = True
    return made


def literal(model: Any, special: frozenset[int], source: str) -> Any:
    """Return the tokenizer, or its `without_special` copy if text can produce one of `special`.

    Raises DataError if a special token is the only encoding of some text.
    """
    spelled = _spelled(model, special)
    copy = without_special(model, special) if spelled else model
    for token, text in spelled.items():
        ids = _ids(copy, text)
        if not ids or special & ids:
            raise DataError(
                f"tokenizer {source!r}: its special token {token!r} is also the only way to write that text; name "
                "another in its tokenizer_config.json, or use another tokenizer"
            )
    return copy


def refuse_special_in_text(model: Any, special: frozenset[int], source: str) -> None:
    """Raise DataError if one of a tokenizer's special tokens is the only encoding of some text."""
    literal(model, special, source)


def _spelled(model: Any, special: frozenset[int]) -> dict[str, str]:
    """Return those of `special` that encoding text can produce, each with that text."""
    added = {one.content for one in model.get_added_tokens_decoder().values()}
    spelled = {}
    for number in sorted(special):
        token = model.id_to_token(number)
        plain = token in added or model.decoder is None
        text = (
            token if plain else model.decoder.decode([token])
        )  # the characters of a piece may stand for bytes
        if special & _ids(model, text):
            spelled[token] = text
    return spelled


def _ids(model: Any, text: str) -> set[int]:
    try:
        return set(model.encode(text, add_special_tokens=False).ids)
    except Exception:  # a word-level vocabulary without an unknown token raises a plain Exception
        return set()


# ---------------------------------------------------------------- tokenizer


END, MASK, PAD = "<|end_of_text|>", "<|mask|>", "<|pad|>"
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
BEGINNINGS = ("<|begin_of_text|>", "<s>", "<bos>", "<|bos|>", "[BOS]", "[CLS]")
MASKS = ("<|mask|>", "<mask>", "[MASK]")
_RESERVED = re.compile(r"reserved|unused", re.IGNORECASE)

# Llama 3's pre-tokenization: contractions, letters, up to three digits, punctuation, white space.
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_LONG_RUN = re.compile(r"(?<!\S)(\S{1000})\S+|(?<!\s)(\s{1000})\s+")


@dataclass(frozen=True)
class Special:
    """The ids of the special tokens."""

    eos: int
    mask: int
    pad: int
    bos: int | None
    ids: tuple[int, ...]  # all special ids: never masked, never used as a random replacement
    mask_rule: str  # "own", "reserved" or "added"


@dataclass(frozen=True)
class Tokenizer:
    """A tokenizer of the `tokenizers` library with its special tokens."""

    model: Any
    special: Special
    vocab: int  # the largest id + 1

    @cached_property
    def unspoken(self) -> frozenset[int]:
        """The special ids that no text may produce: all but the unknown token, unless that has another role too."""
        meant = {self.special.eos, self.special.mask, self.special.bos}
        return frozenset(self.special.ids) - ({unknown_id(self.model)} - meant)

    def save(self, folder: Path) -> None:
        """Write the tokenizer so that transformers' AutoTokenizer loads it with its special tokens."""
        folder.mkdir(parents=True, exist_ok=True)
        self.model.save(str(folder / TOKENIZER_FILES[0]))
        named = {
            "eos_token": self.special.eos,
            "mask_token": self.special.mask,
            "pad_token": self.special.pad,
        }
        if self.special.bos is not None:
            named["bos_token"] = self.special.bos
        unknown = unknown_id(self.model)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: self.model.id_to_token(number) for name, number in named.items()},
            **({} if unknown is None else {"unk_token": self.model.id_to_token(unknown)}),
            "biphase": {"mask_rule": self.special.mask_rule},
        }
        (folder / TOKENIZER_FILES[1]).write_text(
            json.dumps(config, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )


# ---------------------------------------------------------------- load


def load(corpus: Corpus) -> Tokenizer:
    """Load the existing tokenizer of a corpus from its folder or the hub."""
    wanted = corpus.tokenizer
    assert isinstance(wanted, Pretrained)
    paths = {file.name: file.path for file in tokenizer_files(wanted)} if wanted.local else _download(wanted)
    made = read(paths, wanted.source)
    if wanted.vocab and wanted.vocab != made.vocab:
        raise DataError(
            f"corpus {corpus.name!r}: Pretrained({wanted.source!r}, vocab={wanted.vocab}) has {made.vocab} tokens, "
            f"mask token ({made.special.mask_rule}) included; type vocab={made.vocab}"
        )
    if corpus.bos and made.special.bos is None:
        raise DataError(
            f"corpus {corpus.name!r}: {wanted.source!r} has no token that begins a document; type bos=False"
        )
    return made


def load_saved(folder: Path) -> Tokenizer:
    """Load a tokenizer that `Tokenizer.save` wrote."""
    rule = (
        json.loads((folder / TOKENIZER_FILES[1]).read_text("utf-8"))
        .get("biphase", {})
        .get("mask_rule", "own")
    )
    made = read({name: folder / name for name in TOKENIZER_FILES if (folder / name).is_file()}, str(folder))
    special = Special(**{**vars(made.special), "mask_rule": rule})
    return Tokenizer(made.model, special, made.vocab)


def read(paths: dict[str, Path], source: str) -> Tokenizer:
    """Load a tokenizer from its files."""
    from tokenizers import Tokenizer as Model

    try:
        model = Model.from_file(str(paths[TOKENIZER_FILES[0]]))
        says: dict[str, Any] = {}
        for name in (TOKENIZER_FILES[2], TOKENIZER_FILES[1]):  # tokenizer_config.json takes precedence
            if name in paths:
                says.update(json.loads(paths[name].read_text("utf-8")))
    except Exception as wrong:  # the Rust library raises plain Exception
        raise DataError(
            f"tokenizer {source!r} cannot be read ({one_line(wrong)}); put a sound tokenizer.json there"
        ) from None
    model.no_truncation()
    model.no_padding()
    # The string "<|endoftext|>" in a document is text, not the end of the document.
    model.encode_special_tokens = True
    made = _with_special(model, says, source)
    refuse_special_in_text(made.model, made.unspoken, source)
    return made


def _download(wanted: Pretrained) -> dict[str, Path]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    paths = {}
    for name in TOKENIZER_FILES:
        try:
            paths[name] = Path(hf_hub_download(wanted.source, name, revision=wanted.revision))
        except Exception as wrong:  # offline, refused, absent: many types
            absent = isinstance(wrong, EntryNotFoundError) and not isinstance(wrong, LocalEntryNotFoundError)
            if absent and name != TOKENIZER_FILES[0]:
                continue
            raise DataError(
                f"tokenizer {wanted.source}@{wanted.revision} cannot be had from the hub ({one_line(wrong)}); put its "
                "tokenizer.json and tokenizer_config.json in a folder and type Pretrained('./folder')"
            ) from wrong
    return paths


def _with_special(model: Any, says: dict[str, Any], source: str) -> Tokenizer:
    from tokenizers import AddedToken

    eos = _named(model, says, source, "eos_token", ENDS)
    if eos is None:
        raise DataError(
            f"tokenizer {source!r} does not say which token ends a text; put "
            '{"eos_token": "…"} in a tokenizer_config.json beside its tokenizer.json'
        )
    mask, rule = _named(model, says, source, "mask_token", MASKS), "own"
    added = model.get_added_tokens_decoder()
    if mask is None:
        free = [
            number
            for number, token in sorted(added.items())
            if token.special and _RESERVED.search(token.content)
        ]
        mask, rule = (free[0], "reserved") if free else (None, "added")
    if mask is None:
        model.add_special_tokens([AddedToken(MASK, normalized=False, special=True)])
        mask = model.token_to_id(MASK)
        added = model.get_added_tokens_decoder()
    bos = _named(model, says, source, "bos_token", BEGINNINGS)
    pad = _named(model, says, source, "pad_token", (PAD, "<pad>", "[PAD]"))
    ids = {number for number, token in added.items() if token.special}
    ids |= {number for number in (eos, mask, bos, pad, unknown_id(model)) if number is not None}
    vocab = max(model.get_vocab(with_added_tokens=True).values()) + 1
    special = Special(eos, mask, eos if pad is None else pad, bos, tuple(sorted(ids)), rule)
    return Tokenizer(model, special, vocab)


def _named(model: Any, says: dict[str, Any], source: str, name: str, usual: tuple[str, ...]) -> int | None:
    """Return the id of the token that the configuration calls `name`, else of an added token with a usual name."""
    said = says.get(name)
    said = said.get("content") if isinstance(said, dict) else said
    if said is not None and not isinstance(said, str):
        raise DataError(
            f"tokenizer {source!r}: {name} in its tokenizer_config.json is {said!r}, not text; correct it"
        )
    number = model.token_to_id(said) if said else None
    if said and number is None and name in ("eos_token", "mask_token"):
        raise DataError(
            f"tokenizer {source!r}: its configuration says {name} is {said!r}, which its tokenizer.json lacks; "
            "correct tokenizer_config.json, or put the tokenizer.json that belongs to it there"
        )
    added = {token.content for token in model.get_added_tokens_decoder().values()}
    known = [model.token_to_id(one) for one in usual if one in added]
    return number if number is not None else next(iter(known), None)


# ---------------------------------------------------------------- train


def _without_long_runs(text: str) -> str:
    """Shorten runs of over 1,000 (non-)space characters: BPE training is quadratic in word length.

    Such runs teach a BPE nothing.
    """
    # A long run covers at least one of these windows entirely; checking them is much cheaper than the regex.
    windows = (text[start : start + 500] for start in range(0, len(text) - 499, 500))
    if any(" " not in window or window.isspace() for window in windows):
        return _LONG_RUN.sub(r"\1\2", text)
    return text


def train(corpus: Corpus, texts: Iterable[str], report: Callable[[str], None]) -> Tokenizer:
    """Train a byte-level BPE on `texts`; the result does not depend on the number of threads."""
    from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
    from tokenizers import Tokenizer as Model

    assert isinstance(corpus.tokenizer, BPE)
    if corpus.bos:
        raise DataError(
            f"corpus {corpus.name!r}: a BPE trained here has no token that begins a document; type bos=False"
        )
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    model.decoder = decoders.ByteLevel()
    model.encode_special_tokens = True
    trainer = trainers.BpeTrainer(
        vocab_size=corpus.tokenizer.vocab,
        special_tokens=[END, MASK, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(map(_without_long_runs, texts), trainer)
    made = _with_special(model, {}, corpus.name)
    if made.vocab != corpus.tokenizer.vocab:
        report(f"{corpus.name}: its text gave only {made.vocab} of {corpus.tokenizer.vocab} tokens")
    return made
