"""The tokenizer and the sentence-transformers files of an exported folder.

`write_sentences` writes the files that make a folder a sentence-transformers model (mean pooling, normalization,
prompts), with the names that every version of sentence-transformers reads.

`write_tokenizer` writes the tokenizer with the special tokens that biphase puts around a text (a begin token if the
corpus had one, the end token) as its template, so `tokenizer(text)` gives the ids that the model was trained with.
`check_tokenizer` verifies this. The one difference: in transformers a text may spell a special token, such as
"<|mask|>" for fill-mask.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.data.corpus import TOKENIZER_FILES
from biphase.data.tokenizer import Tokenizer, unknown_id
from biphase.errors import ModelError, one_line
from biphase.models.hub import load_tokenizer, quietly
from biphase.specs import Hub, Retrieve
from biphase.store import write_json

_PLACE = "sentence_transformers.models"


@dataclass(frozen=True)
class Prompts:
    """The prefixes of queries and documents."""

    query: str
    document: str


def prompts_of(form: Retrieve) -> Prompts:
    """The text before the first column in a retrieval task's templates."""
    return Prompts(*(one.split("{", 1)[0] for one in (form.query, form.document)))


def write_sentences(folder: Path, *, width: int, context: int, prompts: Prompts) -> None:
    """Write the sentence-transformers files beside the model's."""
    modules = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    write_json(
        folder / "modules.json",
        [
            {"idx": number, "name": str(number), "path": path, "type": f"{_PLACE}.{kind}"}
            for number, (path, kind) in enumerate(modules)
        ],
    )
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": context, "do_lower_case": False})
    write_json(
        folder / "config_sentence_transformers.json",
        {
            "prompts": {"query": prompts.query, "document": prompts.document},
            "default_prompt_name": None,
            "similarity_fn_name": "cosine",
        },
    )
    pooling = folder / "1_Pooling"
    pooling.mkdir()
    others = ("cls_token", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")
    write_json(
        pooling / "config.json",
        {
            "word_embedding_dimension": width,
            "pooling_mode_mean_tokens": True,
            **{f"pooling_mode_{name}": False for name in others},
            "include_prompt": True,
        },
    )
    # Normalize has no configuration, so it has no folder: the hub would not keep an empty one.


# ---------------------------------------------------------------- tokenizer


NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
TEXTS = (
    "the cat sat on the mat",
    "Café déjà vu: 3,141.59 € (about 10%)!",
    "two  spaces,\ttabs\nand lines",
    "日本語 and עברית and 🙂",
    "a",
)
BEFORE_MASK = "the cat"


@dataclass(frozen=True)
class ExportedTokenizer:
    """A tokenizer, the ids around every text, and the maximum length."""

    model: Any  # of the `tokenizers` library
    named: dict[str, int]  # special tokens by transformers' names; always has a pad token
    special: frozenset[int]
    vocab: int  # largest id + 1
    before: tuple[int, ...]
    after: tuple[int, ...]
    context: int
    mask_is_ours: bool = False  # the mask token was added by biphase, so no training text contains it

    @property
    def pad(self) -> int:
        return self.named["pad_token"]

    @property
    def token_ids(self) -> dict[str, int | None]:
        """The special token ids as a model's configuration names them."""
        return {
            f"{name}_id": self.named.get(name)
            for name in ("pad_token", "bos_token", "eos_token", "mask_token")
        }

    @property
    def native_ids(self) -> dict[str, int | None]:
        """As `token_ids`, for EuroBERT, whose configuration requires a mask token."""
        return self.token_ids | {"mask_token_id": self.named.get("mask_token", self.pad)}

    def ids(self, text: str) -> list[int]:
        """The ids of a text as biphase encodes it."""
        return [*self.before, *self.model.encode(text, add_special_tokens=False).ids, *self.after]


def tokenizer_of(
    tokenizer: Tokenizer, *, bos: bool, context: int, trained_here: bool = False
) -> ExportedTokenizer:
    """The tokenizer of a model trained here.

    `bos`: documents of its corpus begin with a begin token. `trained_here`: the tokenizer was also trained by biphase.
    """
    special = tokenizer.special
    every = {
        "bos_token": special.bos,
        "eos_token": special.eos,
        "unk_token": unknown_id(tokenizer.model),
        "pad_token": special.pad,
        "mask_token": special.mask,
    }
    return ExportedTokenizer(
        tokenizer.model,
        {name: number for name, number in every.items() if number is not None},
        frozenset(special.ids),
        tokenizer.vocab,
        (special.bos,) if bos and special.bos is not None else (),
        (special.eos,),
        context,
        mask_is_ours=trained_here or special.mask_rule != "own",
    )


def tokenizer_of_hub(
    hub: Hub, before: tuple[int, ...], after: tuple[int, ...], context: int
) -> ExportedTokenizer:
    """The tokenizer of a hub model that was fine-tuned directly; `before` and `after` are the ids around its texts."""
    loaded = load_tokenizer(hub)
    model = loaded.backend_tokenizer
    model.no_truncation()
    model.no_padding()
    named = {name: int(number) for name in NAMES if (number := getattr(loaded, f"{name}_id")) is not None}
    named.setdefault("pad_token", next(iter([*after, *before, *named.values(), 0])))
    added = {number for number, token in model.get_added_tokens_decoder().items() if token.special}
    vocab = max(model.get_vocab(with_added_tokens=True).values()) + 1
    return ExportedTokenizer(
        model, named, frozenset({*added, *named.values()}), vocab, before, after, context
    )


def write_tokenizer(words: ExportedTokenizer, folder: Path) -> None:
    """Write the tokenizer's files into a folder."""
    from tokenizers import Tokenizer as Model

    said = json.loads(words.model.to_str())
    for token in said["added_tokens"]:
        if words.mask_is_ours and token["id"] == words.named["mask_token"]:
            # In "the cat <mask> on" the space belongs to the masked word, as in training, where the mask replaced it.
            token["lstrip"] = True
    model = Model.from_str(json.dumps(said))
    model.post_processor = _template(words)
    model.save(str(folder / TOKENIZER_FILES[0]))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{name: model.id_to_token(number) for name, number in words.named.items()},
        "model_max_length": words.context,
        "padding_side": "right",
        "truncation_side": "right",
        "model_input_names": ["input_ids", "attention_mask"],
    }
    write_json(folder / TOKENIZER_FILES[1], config)


def _template(words: ExportedTokenizer) -> Any:
    from tokenizers import processors

    # Aliases, because a token's text may contain characters with a meaning in a template.
    alias = {number: f"t{number}" for number in (*words.before, *words.after)}
    before, after = ([alias[number] for number in some] for some in (words.before, words.after))
    return processors.TemplateProcessing(
        single=[*before, "$A", *after],
        pair=[*before, "$A", *after, "$B", *after],
        special_tokens=[
            {"id": name, "ids": [number], "tokens": [words.model.id_to_token(number)]}
            for number, name in alias.items()
        ],
    )


def check_tokenizer(words: ExportedTokenizer, folder: Path, *, fills: bool = False) -> None:
    """Raise if transformers encodes texts differently; with `fills`, also texts with a mask token."""
    from transformers import AutoTokenizer

    try:
        with quietly():  # transformers warns about a context of a few tokens
            loaded: Any = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
            said = {text: loaded(text)["input_ids"] for text in TEXTS}
            masked = loaded(f"{BEFORE_MASK} {loaded.mask_token} on the mat", add_special_tokens=False)[
                "input_ids"
            ]
        named = {name: getattr(loaded, f"{name}_id") for name in words.named}
    except Exception as wrong:  # tokenizer classes raise many types
        raise ModelError(
            f"transformers cannot load the tokenizer that was written ({one_line(wrong)}); it cannot be exported"
        ) from None
    for text, ids in said.items():
        if ids != words.ids(text):
            raise ModelError(
                f"transformers reads {text!r} as {ids}, and the model was trained with {words.ids(text)}; "
                "its tokenizer cannot be exported"
            )
    before = words.model.encode(BEFORE_MASK, add_special_tokens=False).ids
    if fills and words.mask_is_ours and masked[: len(before) + 1] != [*before, words.named["mask_token"]]:
        raise ModelError(
            "transformers reads a stray token before the mask token, which the model never saw; it cannot be exported"
        )
    if named != words.named:
        raise ModelError(
            f"transformers takes {named} for special tokens, which are {words.named}; its tokenizer cannot be exported"
        )
