"""Training an encoder to retrieve, and reading passages with it, beside sentence-transformers on the same folder."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from biphase.bench.cases import PASSAGES, QUERIES, Lengths, RetrievalCase
from biphase.bench.clock import Measured
from biphase.bench.finetune import CONTEXT, RATE, bench_on, path_of, read, tuned
from biphase.bench.tokens import BATCHES, drawn_lengths
from biphase.bench.trainer import arguments, timed, use_one_gpu
from biphase.data import documents, sources, tokenizer
from biphase.data.listing import resolve
from biphase.finetune.families import family_of
from biphase.finetune.leaf import Bench
from biphase.finetune.model import Tuned, per_text
from biphase.finetune.subject import Subject, subject_of_hub
from biphase.models.backbone import from_scratch
from biphase.models.heads import EmbeddingHead
from biphase.models.silence import quietly
from biphase.presets import CORPORA, SIZES
from biphase.specs import Finetune, Hub, Retrieve, Splits, Task
from biphase.tasks.encoding import Reading, encode_texts
from biphase.tasks.examples import Examples, Library, Pair, Search

ENCODE_BATCHES = (64, 256)  # of sentence-transformers; the faster counts


@dataclass(frozen=True)
class Texts:
    """Pieces of the built-in corpus, as long as asked in tokens of its own tokenizer."""

    case: RetrievalCase

    @cached_property
    def words(self) -> tokenizer.Tokenizer:
        return tokenizer.train(CORPORA["builtin"], _builtin(), lambda text: None)

    @cached_property
    def ids(self) -> np.ndarray:
        encoded = self.words.model.encode_batch_fast(list(_builtin()), add_special_tokens=False)
        return np.concatenate([np.array(one.ids, np.int64) for one in encoded])

    def pieces(self, lengths: Lengths, count: int) -> list[str]:
        """Cut anywhere: a word that is cut in two may be spelled by other tokens than it was cut from."""
        sizes = drawn_lengths(lengths, count)
        starts = np.random.default_rng(3).integers(0, len(self.ids) - lengths.most, count)
        cut = [self.ids[start : start + size].tolist() for start, size in zip(starts, sizes, strict=True)]
        return self.words.model.decode_batch(cut)

    @cached_property
    def pairs(self) -> list[Pair]:
        count = self.case.batch * BATCHES
        both = zip(self.pieces(QUERIES, count), self.pieces(PASSAGES, count), strict=True)
        return [Pair(query, passage) for query, passage in both]

    @cached_property
    def passages(self) -> list[str]:
        return self.pieces(PASSAGES, self.case.passages)


def _builtin() -> Iterator[str]:
    corpus = CORPORA["builtin"]
    tally = documents.Tally()
    for block in documents.blocks(corpus, sources.local(resolve(corpus).train)):
        yield from (text for text, _ in documents.parse(block, corpus.text, tally))


def write_folder(texts: Texts, folder: Path) -> None:
    """A model with random weights and the tokenizer of the texts, as both sides load them."""
    case, words = texts.case, texts.words
    vocab, size = max(case.vocab, words.vocab), SIZES[case.size]
    model = from_scratch(size, vocab=vocab, mask_id=words.special.mask, length=CONTEXT, seed=0)
    with quietly():
        model.model.base_model.save_pretrained(folder)
    words.save(folder)


# ---------------------------------------------------------------- ours


def task_of(case: RetrievalCase) -> Task:
    form = Retrieve("{text}", "{text}")
    return Task("bench", form, ".", Splits(), steps=case.warm + case.steps, batch=case.batch)


def spec_of(case: RetrievalCase) -> Finetune:
    return Finetune((task_of(case),), protocol="standard", precision=case.precision)  # ty: ignore[invalid-argument-type]


def examples_of(texts: Texts) -> Examples:
    library = Library(("passage",), (texts.pairs[0].document,))
    asked = Search(library, ("query",), (texts.pairs[0].query,), ({0: 1},))
    return Examples(texts.pairs, asked, asked)


def train_ours(texts: Texts, folder: Path, device: torch.device) -> Measured:
    subject, bench = _loaded(texts.case, folder, device)
    task, examples = task_of(texts.case), examples_of(texts)
    family = family_of(task, examples, subject.reading, protocol="standard")
    return tuned(bench, family, texts.case, tokens=tokens_of_pairs(texts, subject.reading))


def read_ours(texts: Texts, folder: Path, device: torch.device) -> Measured:
    """From texts to vectors: making tokens of them is counted, as it is there."""
    subject, bench = _loaded(texts.case, folder, device)
    model = Tuned(bench.encoder, EmbeddingHead()).eval()

    def once() -> torch.Tensor:
        return per_text(model, encode_texts(subject.reading, texts.passages), bench.setting).cpu()

    tokens = float(encode_texts(subject.reading, texts.passages).lengths.sum())
    return read(once, device, tokens=tokens, path=path_of(bench))


def _loaded(case: RetrievalCase, folder: Path, device: torch.device) -> tuple[Subject, Bench]:
    subject = subject_of_hub(Hub(str(folder.resolve())), spec_of(case))
    return subject, bench_on(subject.encoder, case.precision, device)


def tokens_of_pairs(texts: Texts, reading: Reading) -> float:
    """Of a step, on average."""
    sides = ([one.query for one in texts.pairs], [one.document for one in texts.pairs])
    total = sum(int(encode_texts(reading, side).lengths.sum()) for side in sides)
    return total / len(texts.pairs) * texts.case.batch


# ---------------------------------------------------------------- sentence-transformers


def _sentences(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from sentence_transformers import SentenceTransformer

    told = {"attn_implementation": "sdpa", "dtype": dtype}
    model = SentenceTransformer(str(folder), device=device.type, model_kwargs=told)
    model.max_seq_length = CONTEXT
    return model


@contextlib.contextmanager
def _without_bars() -> Generator[None]:
    """None of datasets', which silence about transformers does not reach."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def train_sentences(texts: Texts, folder: Path, device: torch.device, *, tokens: float) -> Measured:
    """Its own trainer and loss: in-batch negatives, cosines at the same temperature."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    case = texts.case
    model = _sentences(folder, device, torch.float32)
    # Examples for a model card: with some at hand it looks for none, which it would do under a bar of its own.
    model.model_card_data.widget = [{"text": texts.pairs[0].query}]
    pairs = Dataset.from_dict(
        {"anchor": [one.query for one in texts.pairs], "positive": [one.document for one in texts.pairs]}
    )
    said = SentenceTransformerTrainingArguments(
        **arguments(case, device, peer="", batch=case.batch, rate=RATE)
    )
    use_one_gpu(said)
    with _without_bars():
        trainer = SentenceTransformerTrainer(
            model, args=said, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
        )
        return timed(trainer, device, case.warm, tokens=tokens, path="padded")


def read_sentences(texts: Texts, folder: Path, device: torch.device, *, tokens: float) -> Measured:
    """`encode` with its weights in 16 bits, at the batch size that suits it best."""
    dtype = torch.float32 if texts.case.precision == "fp32" else torch.bfloat16
    model = _sentences(folder, device, dtype)
    measured = [
        read(
            lambda size=size: model.encode(texts.passages, batch_size=size, show_progress_bar=False),
            device,
            tokens=tokens,
            path=f"batches of {size}",
        )
        for size in sorted({min(size, texts.case.passages) for size in ENCODE_BATCHES})
    ]
    return min(measured, key=lambda one: one.seconds)
