"""The peers that biphase is compared with: transformers' Trainer and sentence-transformers.

The Trainer runs in bf16 under autocast, with fused AdamW and sdpa, compiled or not, on the same model shape and the
same tokens. Options that its users usually leave at their defaults stay there. Retrieval compares training and encoding
with sentence-transformers on the same folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    EuroBertConfig,
    EuroBertForMaskedLM,
    EuroBertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from biphase.bench.cases import PASSAGES, QUERIES, FinetuneCase, Lengths, PretrainCase, RetrievalCase
from biphase.bench.measure import (
    BATCHES,
    CONTEXT,
    MASK,
    PAD,
    RATE,
    TUNING_RATE,
    Dataset,
    StepClock,
    Timing,
    bench_on,
    drawn_lengths,
    objective_of,
    path_of,
    read,
    stream_of,
    tuned,
)
from biphase.data import corpus as corpus_module
from biphase.data import documents, tokenizer
from biphase.data.corpus import resolve
from biphase.errors import TrainingError
from biphase.finetune.encoder import EncoderUnderTest, TaskModel, encoder_of_hub, per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import FineTuner
from biphase.models.backbone import from_scratch
from biphase.models.heads import EmbeddingHead, TextHead, TokenHead, initialise
from biphase.models.hub import quietly
from biphase.objectives import IGNORE
from biphase.presets import CORPORA, SIZES
from biphase.specs import CLM, AdamW, Finetune, Hub, Retrieve, Splits, Task
from biphase.tasks.encode import Tokenization, encode_texts
from biphase.tasks.load import Examples, Library, Pair, Search

COMPILED = "trainer-compiled"
# Compiled, transformers' encoders build a mask that masks nothing, which disables the fast attention kernels. Whole
# rows need no mask, so the peer gets this variant and is measured at its best.
MASKLESS = "sdpa-without-mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(MASKLESS, lambda *parts, **named: None)


def refuse_missing(package: str, peer: str) -> None:
    """Refuse if a package that a peer needs is not installed."""
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise TrainingError(f"{peer} needs the package {name}; type pip install {name}, or --against none")


def arguments(case: Any, device: torch.device, *, peer: str, batch: int, rate: float) -> dict[str, Any]:
    """The Trainer's arguments: precision, optimizer, and no output."""
    adam = AdamW()
    return {
        "output_dir": tempfile.gettempdir(),
        "per_device_train_batch_size": batch,
        "max_steps": case.warm + case.steps,
        "use_cpu": device.type == "cpu",
        "bf16": case.precision != "fp32",
        "torch_compile": peer == COMPILED,
        "optim": "adamw_torch_fused",
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": adam.betas[0],
        "adam_beta2": adam.betas[1],
        "adam_epsilon": adam.eps,
        "weight_decay": adam.weight_decay,
        "max_grad_norm": adam.clip,
        "report_to": [],
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
    }


def use_one_gpu(said: TrainingArguments) -> None:
    """Prevent the Trainer from using DataParallel if there are several GPUs."""
    if said.device.type == "cuda":
        said._n_gpu = 1


class Ticks(TrainerCallback):
    """Marks a clock at the end of each step."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.clock.mark()


def timed(trainer: Trainer, device: torch.device, warm: int, *, tokens: float, path: str) -> Timing:
    """Run a trainer and time its steps."""
    clock = StepClock(device)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(Ticks(clock))
    trainer.train()
    return clock.measured(warm, tokens=tokens, path=path)


# ---------------------------------------------------------------- pretraining


class RowDataset(torch.utils.data.Dataset):
    """Rows masked before the clock starts; for CLM unshifted, since Llama shifts labels itself."""

    def __init__(self, case: PretrainCase) -> None:
        stream, objective = stream_of(case, whole_rows=True), objective_of(case)
        batch = stream.batch(objective, torch.arange(stream.rows), step=0)
        self.ids = batch.ids
        if isinstance(objective, CLM):
            self.labels = batch.ids
            return
        labels = torch.full((batch.ids.numel(),), IGNORE)
        labels[batch.label_at] = batch.labels
        self.labels = labels.view_as(batch.ids)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def shape(size_name: str, vocab: int, length: int) -> dict[str, Any]:
    """The configuration fields of a size, as transformers names them."""
    size = SIZES[size_name]
    return {
        "vocab_size": vocab,
        "hidden_size": size.hidden,
        "intermediate_size": size.ffn,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "max_position_embeddings": length,
        "initializer_range": size.init_std,
        "rms_norm_eps": size.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": size.rope_base},
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "sdpa",
    }


def peer_model(case: PretrainCase) -> nn.Module:
    """The transformers model of a case: EuroBERT for MLM, Llama for CLM."""
    like = shape(case.size, case.vocab, case.length)
    torch.manual_seed(0)
    if case.objective == "mlm":
        like["attn_implementation"] = MASKLESS
        return EuroBertForMaskedLM(EuroBertConfig(**like, mask_token_id=MASK))
    return LlamaForCausalLM(LlamaConfig(**like, use_cache=False))


def pretrain(case: PretrainCase, device: torch.device, *, peer: str, rows: int) -> Timing:
    """Time the Trainer's pretraining, on whole rows whatever our packing: it has no other."""
    case = replace(case, rows=rows)
    said = TrainingArguments(
        **arguments(case, device, peer=peer, batch=rows, rate=RATE),
        gradient_accumulation_steps=case.micro_batches,
    )
    use_one_gpu(said)
    trainer = Trainer(peer_model(case), said, train_dataset=RowDataset(case))
    return timed(trainer, device, case.warm, tokens=case.tokens, path=f"{rows} rows")


# ---------------------------------------------------------------- fine-tuning


class Padded(nn.Module):
    """Our heads and losses on padded batches."""

    def __init__(self, case: FinetuneCase, length: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        like = shape(case.size, case.vocab, length)
        self.trunk = EuroBertModel(EuroBertConfig(**like, mask_token_id=MASK))
        width, labels = like["hidden_size"], case.lengths.labels
        self.head = TextHead(width, labels) if labels else TokenHead(width, 2)
        initialise(self.head, std=like["initializer_range"], seed=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if isinstance(self.head, TextHead):
            real = attention_mask[..., None].to(hidden.dtype)
            pooled = (hidden * real).sum(1) / real.sum(1)
            logits = self.head.out(F.gelu(self.head.dense(pooled)))
            return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
        places = self.head.out(hidden).float().masked_fill(attention_mask[..., None] == 0, float("-inf"))
        losses = [F.cross_entropy(places[..., which], labels[:, which]) for which in (0, 1)]
        return {"loss": sum(losses, torch.zeros_like(losses[0])) / 2, "logits": places}


class TextDataset(torch.utils.data.Dataset):
    def __init__(self, data: Dataset) -> None:
        self.ids = [torch.from_numpy(ids) for ids in data.ids]
        self.labels = torch.from_numpy(data.labels)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


def padded(examples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """A batch padded to its longest text."""
    texts = [one["input_ids"] for one in examples]
    return {
        "input_ids": pad_sequence(texts, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([one["labels"] for one in examples]),
    }


def finetune(case: FinetuneCase, device: torch.device, *, peer: str, rate: float, length: int) -> Timing:
    """Time the Trainer's fine-tuning, on padded batches."""
    data = Dataset(case)
    collate: Callable[[list[Any]], dict[str, Any]] = padded
    said = TrainingArguments(**arguments(case, device, peer=peer, batch=case.batch, rate=rate))
    use_one_gpu(said)
    trainer = Trainer(Padded(case, length), said, train_dataset=TextDataset(data), data_collator=collate)
    return timed(trainer, device, case.warm, tokens=data.tokens, path="padded")


# ---------------------------------------------------------------- retrieval


ENCODE_BATCHES = (64, 256)  # of sentence-transformers; the faster counts


@dataclass(frozen=True)
class RetrievalTexts:
    """Excerpts of the built-in corpus, with given lengths in tokens of its own tokenizer."""

    case: RetrievalCase

    @cached_property
    def words(self) -> tokenizer.Tokenizer:
        return tokenizer.train(CORPORA["builtin"], _builtin(), lambda text: None)

    @cached_property
    def ids(self) -> np.ndarray:
        encoded = self.words.model.encode_batch_fast(list(_builtin()), add_special_tokens=False)
        return np.concatenate([np.array(one.ids, np.int64) for one in encoded])

    def texts(self, lengths: Lengths, count: int) -> list[str]:
        """Excerpts cut at any token, so a word cut in two may be encoded by other tokens than before."""
        sizes = drawn_lengths(lengths, count)
        starts = np.random.default_rng(3).integers(0, len(self.ids) - lengths.most, count)
        cut = [self.ids[start : start + size].tolist() for start, size in zip(starts, sizes, strict=True)]
        return self.words.model.decode_batch(cut)

    @cached_property
    def pairs(self) -> list[Pair]:
        count = self.case.batch * BATCHES
        both = zip(self.texts(QUERIES, count), self.texts(PASSAGES, count), strict=True)
        return [Pair(query, passage) for query, passage in both]

    @cached_property
    def passages(self) -> list[str]:
        return self.texts(PASSAGES, self.case.passages)


def _builtin() -> Iterator[str]:
    corpus = CORPORA["builtin"]
    tally = documents.Tally()
    for block in documents.blocks(corpus, corpus_module.local(resolve(corpus).train)):
        yield from (text for text, _ in documents.parse(block, corpus.text, tally))


def write_folder(texts: RetrievalTexts, folder: Path) -> None:
    """Write a randomly initialized model and the tokenizer of the texts, for both sides to load."""
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


def examples_of(texts: RetrievalTexts) -> Examples:
    library = Library(("passage",), (texts.pairs[0].document,))
    asked = Search(library, ("query",), (texts.pairs[0].query,), ({0: 1},))
    return Examples(texts.pairs, asked, asked)


def train_ours(texts: RetrievalTexts, folder: Path, device: torch.device) -> Timing:
    """Time our training for retrieval."""
    subject, bench = _loaded(texts.case, folder, device)
    task, examples = task_of(texts.case), examples_of(texts)
    family = family_of(task, examples, subject.tokenization, protocol="standard")
    return tuned(bench, family, texts.case, tokens=tokens_of_pairs(texts, subject.tokenization))


def read_ours(texts: RetrievalTexts, folder: Path, device: torch.device) -> Timing:
    """Time encoding from texts to vectors; tokenization is included, as for the peer."""
    subject, bench = _loaded(texts.case, folder, device)
    model = TaskModel(bench.encoder, EmbeddingHead()).eval()

    def once() -> torch.Tensor:
        return per_text(model, encode_texts(subject.tokenization, texts.passages), bench.options).cpu()

    tokens = float(encode_texts(subject.tokenization, texts.passages).lengths.sum())
    return read(once, device, tokens=tokens, path=path_of(bench))


def _loaded(case: RetrievalCase, folder: Path, device: torch.device) -> tuple[EncoderUnderTest, FineTuner]:
    subject = encoder_of_hub(Hub(str(folder.resolve())), spec_of(case))
    return subject, bench_on(subject.encoder, case.precision, device)


def tokens_of_pairs(texts: RetrievalTexts, reading: Tokenization) -> float:
    """Mean tokens of a step."""
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
    """Hide the progress bars of `datasets`, which transformers' verbosity does not control."""
    from datasets.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            enable_progress_bars()


def train_sentences(texts: RetrievalTexts, folder: Path, device: torch.device, *, tokens: float) -> Timing:
    """Time its own trainer and loss: in-batch negatives, cosine similarity at the same temperature."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    case = texts.case
    model = _sentences(folder, device, torch.float32)
    # Widget examples for the model card; without them the trainer searches for some, with a progress bar.
    model.model_card_data.widget = [{"text": texts.pairs[0].query}]
    pairs = Dataset.from_dict(
        {"anchor": [one.query for one in texts.pairs], "positive": [one.document for one in texts.pairs]}
    )
    said = SentenceTransformerTrainingArguments(
        **arguments(case, device, peer="", batch=case.batch, rate=TUNING_RATE)
    )
    use_one_gpu(said)
    with _without_bars():
        trainer = SentenceTransformerTrainer(
            model, args=said, train_dataset=pairs, loss=MultipleNegativesRankingLoss(model)
        )
        return timed(trainer, device, case.warm, tokens=tokens, path="padded")


def read_sentences(texts: RetrievalTexts, folder: Path, device: torch.device, *, tokens: float) -> Timing:
    """Time `encode` with bf16 weights (fp32 if the case is), at the faster of the batch sizes."""
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
