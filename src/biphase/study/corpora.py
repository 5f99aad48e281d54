"""A corpus as the command line says it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from biphase.errors import SpecError, nearest
from biphase.presets import CORPORA, LLAMA3
from biphase.specs import BPE, Corpus, Pretrained

MASK_RULES = {"own": "its own", "reserved": "a reserved slot", "added": "added"}


def corpus_named(
    name: str, *, tokenizer: str | BPE | Pretrained = "", text: str = "", heldout: str = ""
) -> Corpus:
    """A known corpus by name, or the one at a path; with another tokenizer or text field if said."""
    if name in CORPORA:
        base = CORPORA[name]
        words = tokenizer_named(tokenizer) if tokenizer else base.tokenizer
        return Corpus(
            base.name,
            base.source,
            words,
            text=text or base.text,
            heldout=heldout or base.heldout,
            bos=base.bos,
            tokens=base.tokens,
        )
    pattern = any(sign in name for sign in "*?[")
    if not name.startswith("hf://") and not pattern and not Path(name).expanduser().exists():
        raise SpecError(f"there is no corpus and no file {name!r}; {nearest(name, CORPORA)}")
    if not tokenizer:
        raise SpecError(
            f"say which tokenizer reads {name}: --tokenizer bpe:32000, or one of yours: --tokenizer FOLDER"
        )
    short = re.sub(r"[^\w.-]+", "-", Path(name.split("@")[0]).name) or "corpus"
    return Corpus(short, name, tokenizer_named(tokenizer), text=text or "text", heldout=heldout)


def tokenizer_named(name: str | BPE | Pretrained) -> BPE | Pretrained:
    """bpe:32000, llama3, a folder or tokenizer.json, or owner/name@revision."""
    if not isinstance(name, str):
        return name
    if name.startswith("bpe:"):
        if not name[4:].isdigit():
            raise SpecError(f"--tokenizer {name}: type bpe: and a vocabulary size, e.g. bpe:32000")
        return BPE(int(name[4:]))
    if name == "llama3":
        return LLAMA3
    if Path(name).expanduser().exists():
        return Pretrained(name if name.startswith((".", "/", "~")) else f"./{name}")
    source, _, revision = name.partition("@")
    return Pretrained(source, revision=revision)


def shards_text(shards: Any, folder: Path) -> str:
    """What `biphase tokenize` says at the end."""
    card = shards.card
    lines = [
        f"{folder}",
        f"  {len(shards.train):,} training tokens from {card['train_documents']:,} documents, "
        f"{len(shards.heldout):,} held out from {card['heldout_documents']:,}",
        f"  vocabulary {shards.vocab:,}; mask token {card['mask_token']} = {shards.mask_id} ({MASK_RULES[card['mask_rule']]})",
    ]
    if card["left_out_documents"]:
        lines.append(f"  left out, beyond the held-out million: {card['left_out_documents']:,} documents")
    for reason, count in card["skipped"].items():
        lines.append(f"  skipped {count:,} records, {reason}; the first: {card['first_skipped'][reason]}")
    return "\n".join(lines)
