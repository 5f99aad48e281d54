"""A corpus as the command line says it, and how much text a plan reads of each."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from biphase.data.identity import shards_key
from biphase.errors import BiphaseError, SpecError, nearest
from biphase.files import Store
from biphase.metadata import read_card
from biphase.presets import CORPORA, LLAMA3, TOKENS, corpus_of
from biphase.specs import BPE, Corpus, Pretrained
from biphase.study.plan import Plan
from biphase.wording import counted, short

REPEATED = 1.05  # epochs; more is repetition: a few rows that come twice change little
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


# ---------------------------------------------------------------- how much text


@dataclass(frozen=True)
class Text:
    """The tokens of a corpus of a plan."""

    corpus: Corpus
    tokens: int | None  # to train on; None: not known before it is tokenized
    exact: bool  # counted in this store
    read: dict[str, int]  # run → tokens that it and the runs before it read

    @property
    def bytes(self) -> int | None:
        """Of its shards: two for a token of a small vocabulary, else four."""
        vocab = self.corpus.tokenizer.vocab
        return None if self.tokens is None else self.tokens * (2 if 0 < vocab <= 2**16 else 4)

    def repeats(self) -> str:
        """Which runs read it more than once; empty where none does, or where its tokens are not known."""
        if not self.tokens:
            return ""
        again = {run: tokens for run, tokens in self.read.items() if tokens > REPEATED * self.tokens}
        if not again:
            return ""
        most = max(again, key=lambda run: again[run])
        others = f", and {counted(len(again) - 1, 'other run')} more than once" if len(again) > 1 else ""
        return (
            f"text repeats: {most} reads {short(again[most])} tokens of {self.corpus.name}, which has "
            f"{'' if self.exact else 'about '}{short(self.tokens)} ({again[most] / self.tokens:.1f} epochs){others}"
        )


def texts_of(plan: Plan, store: Store) -> list[Text]:
    """What a plan reads of each corpus."""
    read: dict[Corpus, dict[str, int]] = {}
    for run in plan.study.runs:
        for state in plan.path(plan.results[run.name]):
            tokens = read.setdefault(corpus_of(state.run), {})
            tokens[run.name] = tokens.get(run.name, 0) + state.tokens
    found = []
    for corpus, tokens in read.items():
        counted = card_of(corpus, store)[1].get("train_tokens")
        about = TOKENS.get(corpus.name) if CORPORA.get(corpus.name) == corpus else None
        found.append(Text(corpus, counted or corpus.tokens or about, bool(counted), tokens))
    return found


def card_of(corpus: Corpus, store: Store) -> tuple[str, dict[str, Any]]:
    """The key of a corpus' shards and their card, as far as this machine knows them."""
    try:
        at = shards_key(corpus, store)
        place = store.told(store.shards / at)
        return at, read_card(place) if store.has(place) else {}
    except BiphaseError:
        return "", {}
