"""What the studies of papers share: text, tasks, and the scale of the small ones.

Text and tasks are local copies under ./data where they are there, else from the hub.

A machine without network needs the copies: data/pretrain/*.jsonl.zst with a field "text", data/tokenizer (a tokenizer
of 16,384 tokens), and a folder for each task, named as in the catalog, with the files of the hub. Which of the two was
read decides the key, so results from copies and from the hub are never mixed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from biphase.catalog import CATALOG
from biphase.presets import CORPORA, SIZES
from biphase.specs import BPE, Blend, Chunks, Corpus, Finetune, Pretrain, Pretrained, Splits, Study, Task

COPIES = Path("data")
PUBMED = "hf://taln-ls2n/kpbiomed@8813843a9bb5f6c2ccee4d98b8125df6df4214e8/medium/train/*.parquet"
HELDOUT = "validation.jsonl.zst"
BERT = (0.8, 0.1, 0.1)  # how BERT replaces masked tokens: by the mask token, by a random one, not at all


def text(name: str, files: str = "*-*.jsonl.zst", *, hub: Corpus | None = None, tokens: int = 0) -> Corpus:
    """English text: these files of data/pretrain, else `hub`, by default FineWeb-Edu; `tokens` of it, 0: all."""
    local = COPIES / "pretrain"
    if local.is_dir():
        return Corpus(name, f"{local}/{files}", _tokenizer(), heldout=HELDOUT, tokens=tokens)
    return replace(hub or CORPORA["fineweb-edu-10b"], name=name, tokenizer=_tokenizer(), tokens=tokens)


def _tokenizer() -> BPE | Pretrained:
    folder = COPIES / "tokenizer"
    return Pretrained(f"./{folder}", vocab=16_384) if folder.is_dir() else CORPORA["fineweb-edu"].tokenizer


def pubmed(name: str) -> Corpus:
    """Abstracts of PubMed, about 2 million: KPBiomed (arXiv 2211.12124)."""
    return Corpus(name, PUBMED, CORPORA["fineweb-edu"].tokenizer, text="abstract")


# The better text of the full studies' last stages: public, and with the tokenizer of FineWeb-Edu.
SCIENTIFIC = Blend(((CORPORA["fineweb-edu"], 0.75), (pubmed("pubmed"), 0.25)))


def refined(name: str) -> Corpus:
    """Text that is better than the rest, for a last stage: Wikipedia; from the hub abstracts of PubMed."""
    return text(name, "wikipedia-*.jsonl.zst", hub=pubmed(name))


# Where a local copy has other files than the hub: BEIR's own layout.
FILES: dict[str, dict[str, Any]] = {
    "scifact": {
        "form": CATALOG["scifact-mini"].form,
        "splits": Splits(train="qrels/train*", test="qrels/test*", cut=0.1),
    }
}


def task(name: str, **fields: Any) -> Task:
    """A task of the catalog, read from data/NAME if that folder is there; `fields` replace its own."""
    copy = {"source": f"{COPIES}/{name}"} | FILES.get(name, {}) if (COPIES / name).is_dir() else {}
    return replace(CATALOG[name], **copy, **fields)


# On a CPU: 8 rows of 128 tokens a step. On a GPU: 128 rows of 256, about 1.4M tokens/s on an H200.
TINY: dict[str, Any] = {
    "start": SIZES["1m"],
    "packing": Chunks(128),
    "batch_tokens": 8 * 128,
    "heldout_every": 60,
    "heldout_tokens": 4_096,
}
GPU: dict[str, Any] = {
    "start": SIZES["30m"],
    "packing": Chunks(256),
    "batch_tokens": 128 * 256,
    "precision": "bf16",
    "heldout_every": 400,
    "heldout_tokens": 200_000,
}


def small_study(name: str, runs: tuple[Pretrain, ...], papers: tuple[str, ...]) -> Study:
    """A study for a CPU: two tiny tasks of the built-in data, three seeds."""
    tasks = (
        replace(CATALOG["sources-mini"], steps=14, batch=16),
        replace(CATALOG["wikiann-mini"], steps=20),
    )
    # A laptop's CPU computes bf16 slowly.
    finetune = Finetune(tasks, lrs=(4e-3,), seeds=(0, 1, 2), protocol="standard", precision="fp32")
    return Study(name, runs, finetune, papers=papers, effect=2.0)


def gpu_study(
    name: str, runs: tuple[Pretrain, ...], papers: tuple[str, ...], seeds: tuple[int, ...] = (0, 1, 2)
) -> Study:
    """A study for one GPU: a task of each family but answering, about two seconds a fine-tuning.

    SciFact (biomedical), MNLI, CoNLL-2003.
    """
    tasks = task("scifact", steps=300), task("mnli"), task("conll2003")
    finetune = Finetune(tasks, lrs=(5e-4, 1e-3), seeds=seeds, protocol="standard")
    return Study(name, runs, finetune, papers=papers)
