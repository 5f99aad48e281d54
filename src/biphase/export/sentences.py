"""The few files that make a folder a sentence-transformers model: mean pooling, length 1, and our prompts.

Written in the names that every version of sentence-transformers reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from biphase.files import write_json
from biphase.specs import Retrieve

_PLACE = "sentence_transformers.models"


@dataclass(frozen=True)
class Prompts:
    """What stands before a query and before a document."""

    query: str
    document: str


def prompts_of(form: Retrieve) -> Prompts:
    """The words of a retrieval task's templates before their first column."""
    return Prompts(*(one.split("{", 1)[0] for one in (form.query, form.document)))


def write_sentences(folder: Path, *, width: int, context: int, prompts: Prompts) -> None:
    """Leave the files beside the model's."""
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
    # The last module has nothing to remember, so there is no folder of it: the hub would not keep an empty one.
