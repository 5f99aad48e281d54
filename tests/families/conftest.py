"""One corpus for all families, read by a tokenizer without a mask token and by one that has it."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from common import store_with

from biphase import Corpus, Pretrained
from biphase.store import Store


@dataclass(frozen=True)
class TokenizedCorpus:
    """What the models of some families read."""

    tokenizer: Path
    corpus: Corpus
    shards: Path

    def store(self, folder: Path) -> Store:
        """An empty store that already has the corpus."""
        return store_with(self.shards, folder)


@pytest.fixture(scope="session")
def corpora(
    corpus: Corpus, shards: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[bool, TokenizedCorpus]:
    """By whether the tokenizer has a mask token of its own."""
    from biphase.data.tokenize import tokenize

    corpora_by_mask = {}
    for masked in (False, True):
        folder = tmp_path_factory.mktemp("tokenizer")
        content = (shards / "tokenizer" / "tokenizer.json").read_text("utf-8")
        names = {"eos_token": "<|end_of_text|>", "pad_token": "<|pad|>"}
        if masked:
            names["mask_token"] = "<|mask|>"
        else:
            content = content.replace("<|mask|>", "<|spare|>")
        (folder / "tokenizer.json").write_text(content, "utf-8")
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
        read = replace(corpus, tokenizer=Pretrained(str(folder)))
        store = Store(tmp_path_factory.mktemp("store"))
        corpora_by_mask[masked] = TokenizedCorpus(
            folder, read, tokenize(read, store, processes=1, report=lambda text: None)
        )
    return corpora_by_mask
