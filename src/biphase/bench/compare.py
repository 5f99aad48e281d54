"""Run `biphase bench`: biphase first, then each peer, one after another on an otherwise idle device.

The peers are transformers' Trainer and sentence-transformers. The Trainer runs in bf16 under autocast, with fused AdamW
and sdpa, compiled or not, on the same model shape and the same tokens. Options that its users usually leave at their
defaults stay there. Retrieval compares training and encoding with sentence-transformers on the same folder.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
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

from biphase.bench import measure
from biphase.bench.cases import (
    LIKE,
    OURS,
    PASSAGES,
    QUERIES,
    SENTENCES,
    BenchCase,
    BenchRequest,
    CaseMaker,
    Compared,
    FinetuneCase,
    Lengths,
    PretrainCase,
    Report,
    RetrievalCase,
    ScoreCase,
    Timing,
    save,
    saved_cases,
)
from biphase.bench.measure import CONTEXT, MASK, RATE, TUNING_RATE, Dataset, StepClock
from biphase.data.corpus import resolve, texts_of
from biphase.data.tokenizer import Tokenizer
from biphase.data.tokenizer import train as train_tokenizer
from biphase.errors import TrainingError
from biphase.fast.trunk import fp8_refusal
from biphase.finetune.encoder import EncoderUnderTest, TaskModel, encoder_of_hub, per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import FineTuner
from biphase.models.backbone import config_fields, from_scratch
from biphase.models.encoder import EmbeddingHead, TextHead, TokenHead, initialise
from biphase.models.hub import quietly
from biphase.objectives import IGNORE
from biphase.presets import CORPORA, SIZES
from biphase.protocol import micro_rows
from biphase.specs import AdamW, Finetune, Hub, Retrieve, Splits, Task
from biphase.store import Store
from biphase.study import devices
from biphase.tasks.encode import Tokenization, encode_texts
from biphase.tasks.load import Examples, Library, Pair, Search
from biphase.text import counted
from biphase.training import distributed

# ---------------------------------------------------------------- Trainer


COMPILED = "trainer-compiled"
# Compiled, transformers' encoders build a mask that masks nothing, which disables the fast attention kernels. Whole
# rows need no mask, so the peer gets this variant and is measured at its best.
MASKLESS = "sdpa-without-mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(MASKLESS, lambda *parts, **named: None)


def arguments(
    case: BenchCase,
    device: torch.device,
    *,
    peer: str,
    batch: int,
    rate: float,
    kind: Any = TrainingArguments,
    **more: Any,
) -> Any:
    """The Trainer's arguments: precision, optimizer, one device, and no output."""
    adam = AdamW()
    options = kind(
        output_dir=tempfile.gettempdir(),
        per_device_train_batch_size=batch,
        max_steps=case.warm + case.steps,
        use_cpu=device.type == "cpu",
        bf16=case.precision != "fp32",
        torch_compile=peer == COMPILED,
        optim="adamw_torch_fused",
        learning_rate=rate,
        lr_scheduler_type="constant",
        adam_beta1=adam.betas[0],
        adam_beta2=adam.betas[1],
        adam_epsilon=adam.eps,
        weight_decay=adam.weight_decay,
        max_grad_norm=adam.clip,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        **more,
    )
    if options.device.type == "cuda":
        options._n_gpu = 1  # else the Trainer uses DataParallel if there are several GPUs
    return options


class MarkSteps(TrainerCallback):
    """Marks a clock at the end of each step."""

    def __init__(self, clock: StepClock) -> None:
        self.clock = clock

    def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
        self.clock.mark()


def time_trainer(trainer: Trainer, device: torch.device, warm: int, *, tokens: float, path: str) -> Timing:
    """Run a trainer and time its steps."""
    clock = StepClock(device)
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(MarkSteps(clock))
    trainer.train()
    return clock.measured(warm, tokens=tokens, path=path)


Rows = list[dict[str, Tensor]]  # ids and labels of each row or text


def labelled(ids: Any, labels: Tensor) -> Rows:
    return [{"input_ids": text, "labels": label} for text, label in zip(ids, labels, strict=True)]


def masked_rows(case: PretrainCase) -> Rows:
    """Rows masked before the clock starts; for CLM unshifted, since Llama shifts labels itself."""
    stream, objective = measure.stream_of(case, whole_rows=True), measure.objective_of(case)
    batch = stream.batch(objective, torch.arange(stream.rows), step=0)
    if objective.causal:
        return labelled(batch.ids, batch.ids)
    labels = torch.full((batch.ids.numel(),), IGNORE)
    labels[batch.label_at] = batch.labels
    return labelled(batch.ids, labels.view_as(batch.ids))


def peer_config(case: PretrainCase | FinetuneCase, length: int) -> dict[str, Any]:
    fields = config_fields(SIZES[case.size], vocab=case.vocab, length=length)
    return {**fields, "attn_implementation": "sdpa"}


def peer_model(case: PretrainCase) -> nn.Module:
    """The transformers model of a case: EuroBERT for MLM, Llama for CLM."""
    config = peer_config(case, case.length)
    torch.manual_seed(0)
    if case.objective == "mlm":
        config["attn_implementation"] = MASKLESS
        return EuroBertForMaskedLM(EuroBertConfig(**config, mask_token_id=MASK))
    return LlamaForCausalLM(LlamaConfig(**config, use_cache=False))


def pretrain(case: PretrainCase, device: torch.device, *, peer: str, rows: int) -> Timing:
    """Time the Trainer's pretraining, on whole rows whatever our packing: it has no other."""
    case = replace(case, rows=rows)
    options = arguments(
        case, device, peer=peer, batch=rows, rate=RATE, gradient_accumulation_steps=case.micro_batches
    )
    data: Any = masked_rows(case)  # any sequence will do
    trainer = Trainer(peer_model(case), options, train_dataset=data)
    return time_trainer(trainer, device, case.warm, tokens=case.tokens, path=f"{rows} rows")


class PaddedModel(nn.Module):
    """Our heads and losses on padded batches."""

    def __init__(self, case: FinetuneCase) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = peer_config(case, CONTEXT)
        self.trunk = EuroBertModel(EuroBertConfig(**config, mask_token_id=MASK))
        width, labels = config["hidden_size"], case.lengths.labels
        self.head = TextHead(width, labels) if labels else TokenHead(width, 2)
        initialise(self.head, std=config["initializer_range"], seed=0)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        if isinstance(self.head, TextHead):
            real = attention_mask[..., None].to(hidden.dtype)
            pooled = (hidden * real).sum(1) / real.sum(1)
            logits = self.head.out(F.gelu(self.head.dense(pooled)))
            return {"loss": F.cross_entropy(logits.float(), labels), "logits": logits}
        bounds = self.head.out(hidden).float().masked_fill(attention_mask[..., None] == 0, float("-inf"))
        losses = [F.cross_entropy(bounds[..., which], labels[:, which]) for which in (0, 1)]
        return {"loss": sum(losses, torch.zeros_like(losses[0])) / 2, "logits": bounds}


def labelled_texts(data: Dataset) -> Rows:
    return labelled([torch.from_numpy(ids) for ids in data.ids], torch.from_numpy(data.labels))


def padded(examples: Rows) -> dict[str, Any]:
    """A batch padded to its longest text."""
    texts = [example["input_ids"] for example in examples]
    return {
        "input_ids": pad_sequence(texts, batch_first=True, padding_value=measure.PAD),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def finetune(case: FinetuneCase, device: torch.device, *, peer: str) -> Timing:
    """Time the Trainer's fine-tuning, on padded batches."""
    data = Dataset(case)
    options = arguments(case, device, peer=peer, batch=case.batch, rate=TUNING_RATE)
    texts: Any = labelled_texts(data)
    trainer = Trainer(PaddedModel(case), options, train_dataset=texts, data_collator=padded)
    return time_trainer(trainer, device, case.warm, tokens=data.tokens, path="padded")


# ---------------------------------------------------------------- retrieval


ENCODE_BATCHES = (64, 256)  # of sentence-transformers; the faster counts


@dataclass(frozen=True)
class RetrievalTexts:
    """Excerpts of the built-in corpus, with given lengths in tokens of its own tokenizer."""

    case: RetrievalCase

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return train_tokenizer(CORPORA["builtin"], _builtin(), lambda text: None)

    @cached_property
    def ids(self) -> np.ndarray:
        encoded = self.tokenizer.model.encode_batch_fast(list(_builtin()), add_special_tokens=False)
        return np.concatenate([np.array(document.ids, np.int64) for document in encoded])

    def texts(self, lengths: Lengths, count: int) -> list[str]:
        """Excerpts cut at any token, so a word cut in two may be encoded by other tokens than before."""
        sizes = measure.sample_lengths(lengths, count)
        starts = np.random.default_rng(3).integers(0, len(self.ids) - lengths.most, count)
        excerpts = [
            self.ids[start : start + size].tolist() for start, size in zip(starts, sizes, strict=True)
        ]
        return self.tokenizer.model.decode_batch(excerpts)

    @cached_property
    def pairs(self) -> list[Pair]:
        count = self.case.batch * measure.BATCHES
        both = zip(self.texts(QUERIES, count), self.texts(PASSAGES, count), strict=True)
        return [Pair(query, passage) for query, passage in both]

    @cached_property
    def passages(self) -> list[str]:
        return self.texts(PASSAGES, self.case.passages)

    def write_model(self, folder: Path) -> None:
        """Write a randomly initialized model and the tokenizer of the texts, for both sides to load."""
        vocab, mask = max(self.case.vocab, self.tokenizer.vocab), self.tokenizer.special.mask
        model = from_scratch(SIZES[self.case.size], vocab=vocab, mask_id=mask, length=CONTEXT, seed=0)
        with quietly():
            model.model.base_model.save_pretrained(folder)
        self.tokenizer.save(folder)

    def task(self) -> Task:
        steps = self.case.warm + self.case.steps
        form = Retrieve("{text}", "{text}")
        return Task("bench", form, ".", Splits(), steps=steps, batch=self.case.batch)

    def examples(self) -> Examples:
        library = Library(("passage",), (self.pairs[0].document,))
        search = Search(library, ("query",), (self.pairs[0].query,), ({0: 1},))
        return Examples(self.pairs, search, search)

    def tokens(self, tokenization: Tokenization) -> float:
        """Mean tokens of a step."""
        sides = ([pair.query for pair in self.pairs], [pair.document for pair in self.pairs])
        total = sum(int(encode_texts(tokenization, side).lengths.sum()) for side in sides)
        return total / len(self.pairs) * self.case.batch

    def load_ours(self, folder: Path, device: torch.device) -> tuple[EncoderUnderTest, FineTuner]:
        precision = self.case.precision
        spec = Finetune((self.task(),), protocol="standard", precision=precision)  # ty: ignore[invalid-argument-type]
        encoder = encoder_of_hub(Hub(str(folder.resolve())), spec)
        return encoder, measure.finetuner_on(encoder.encoder, precision, device)


def _builtin() -> Iterator[str]:
    corpus = CORPORA["builtin"]
    return texts_of(corpus, resolve(corpus).train)


def train_ours(texts: RetrievalTexts, folder: Path, device: torch.device) -> Timing:
    """Time our training for retrieval."""
    encoder, finetuner = texts.load_ours(folder, device)
    family = family_of(texts.task(), texts.examples(), encoder.tokenization, protocol="standard")
    return measure.time_finetuning(finetuner, family, texts.case, tokens=texts.tokens(encoder.tokenization))


def encode_ours(texts: RetrievalTexts, folder: Path, device: torch.device) -> Timing:
    """Time encoding from texts to vectors; tokenization is included, as for the peer."""
    encoder, finetuner = texts.load_ours(folder, device)
    model = TaskModel(finetuner.encoder, EmbeddingHead()).eval()

    def once() -> Tensor:
        return per_text(model, encode_texts(encoder.tokenization, texts.passages), finetuner.options).cpu()

    tokens = float(encode_texts(encoder.tokenization, texts.passages).lengths.sum())
    return measure.time_calls(once, device, tokens=tokens, path=measure.path_of(finetuner))


def _sentence_transformer(folder: Path, device: torch.device, dtype: torch.dtype) -> Any:
    from sentence_transformers import SentenceTransformer

    options = {"attn_implementation": "sdpa", "dtype": dtype}
    model = SentenceTransformer(str(folder), device=device.type, model_kwargs=options)
    model.max_seq_length = CONTEXT
    return model


def train_sentences(texts: RetrievalTexts, folder: Path, device: torch.device, *, tokens: float) -> Timing:
    """Time its own trainer and loss: in-batch negatives, cosine similarity at the same temperature."""
    from datasets import Dataset, disable_progress_bars
    from sentence_transformers import SentenceTransformerTrainer, SentenceTransformerTrainingArguments
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    case = texts.case
    model = _sentence_transformer(folder, device, torch.float32)
    # Widget examples for the model card; without them the trainer searches for some, with a progress bar.
    model.model_card_data.widget = [{"text": texts.pairs[0].query}]
    columns = {
        "anchor": [pair.query for pair in texts.pairs],
        "positive": [pair.document for pair in texts.pairs],
    }
    kind = SentenceTransformerTrainingArguments
    options = arguments(case, device, peer="", batch=case.batch, rate=TUNING_RATE, kind=kind)
    disable_progress_bars()  # transformers' verbosity does not control these
    loss = MultipleNegativesRankingLoss(model)
    trainer = SentenceTransformerTrainer(
        model, args=options, train_dataset=Dataset.from_dict(columns), loss=loss
    )
    return time_trainer(trainer, device, case.warm, tokens=tokens, path="padded")


def encode_sentences(texts: RetrievalTexts, folder: Path, device: torch.device, *, tokens: float) -> Timing:
    """Time `encode` with bf16 weights (fp32 if the case is), at the faster of the batch sizes."""
    dtype = torch.float32 if texts.case.precision == "fp32" else torch.bfloat16
    model = _sentence_transformer(folder, device, dtype)
    timings = [
        measure.time_calls(
            lambda size=size: model.encode(texts.passages, batch_size=size, show_progress_bar=False),
            device,
            tokens=tokens,
            path=f"batches of {size}",
        )
        for size in sorted({min(size, texts.case.passages) for size in ENCODE_BATCHES})
    ]
    return min(timings, key=lambda timing: timing.seconds)


# ---------------------------------------------------------------- run


VERSIONED = ("triton", "accelerate", "sentence-transformers")  # other packages that affect the results
WHOLE_ROWS = "the Trainer's attention spans whole rows, which is more work; --packing rows makes it equal"
FEWER_ROWS, SMALLER = "type fewer --rows, or a smaller --size", "type a smaller --size"
LEFT_OUT = "this case is left out"
MANY_ROWS = 1_152  # rows of 2,048 in a step of the 210m preset, from which the micro-batch is derived


def report_of(device: torch.device, command: str) -> Report:
    """An empty report with the device, date and versions."""
    versions = distributed.machine(device)
    title = versions.pop("device")
    name = devices.short_name(title)  # to type after --device: "h200" for "NVIDIA H200"
    if device.type == "cpu":
        title, name = f"{title}, {counted(torch.get_num_threads(), 'thread')}", "cpu"
    for package in VERSIONED:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return Report(title, name, datetime.now().astimezone().date().isoformat(), versions, command)


def refuse_missing(package: str, peer: str) -> None:
    """Refuse if a package that a peer needs is not installed."""
    if find_spec(package) is None:
        name = package.replace("_", "-")
        raise TrainingError(f"{peer} needs the package {name}; type pip install {name}, or --against none")


class Measuring:
    """One command: the device, the request, and the growing report."""

    def __init__(
        self, request: BenchRequest, device: torch.device, command: str, tell: Callable[[str], None]
    ) -> None:
        self.request, self.device, self.tell = request, device, tell
        length = CaseMaker(request, device.type, 1).length
        rows = micro_rows(distributed.memory_of(device), MANY_ROWS, length)
        self.cases = CaseMaker(request, device.type, rows)
        self.peers = request.peers(self.cases.defaults)
        self.report = report_of(device, command)

    def run(self) -> Report:
        self._refuse_missing()
        if poor := distributed.poor_precision(self.device, self.cases.precision, "--precision"):
            self.tell(f"note: {poor}")
        for workload in self.request.workloads():
            getattr(self, workload)()
        return self.report

    def _refuse_missing(self) -> None:
        """Refuse before the first measurement if a package or precision is not available."""
        if self.cases.precision == "fp8" and (why := fp8_refusal(self.device)):
            raise TrainingError(f"--precision fp8 cannot be had ({why}); type --precision bf16")
        workloads = self.request.workloads()
        if self.peers and workloads != ("scale",):
            refuse_missing("accelerate", "transformers' Trainer")
        if self.peers and "retrieval" in workloads:
            for package in ("sentence_transformers", "datasets"):
                refuse_missing(package, SENTENCES)

    # ------------------------------------------------------------ workloads

    def pretrain(self) -> None:
        case, rows = self.cases.pretrain(), self.cases.peer_rows()
        facts = {
            "micro_batches": case.micro_batches,
            "deterministic": case.deterministic,
            "peer_rows": rows,
        }
        note = WHOLE_ROWS if self.peers and case.packing != "rows" else ""
        theirs = partial(pretrain, case, self.device, rows=rows)
        self._beside_the_trainer(case, FEWER_ROWS, theirs, facts, note)

    def finetune(self) -> None:
        for lengths in LIKE:
            case = self.cases.finetune(lengths)
            theirs = partial(finetune, case, self.device)
            self._beside_the_trainer(case, SMALLER, theirs, {"tokens": Dataset(case).tokens})

    def _beside_the_trainer(
        self,
        case: PretrainCase | FinetuneCase,
        advice: str,
        theirs: Callable[..., Timing],
        facts: dict[str, Any],
        note: str = "",
    ) -> None:
        sides = {OURS: self._ours(case, advice)}
        for peer in self.peers:
            sides[peer] = self._theirs(peer, case.title, partial(theirs, peer=peer))
        self.report.compared.append(Compared(case.title, case.unit, case.facts() | facts, sides, note=note))

    def retrieval(self) -> None:
        case, device = self.cases.retrieval(), self.device
        texts = RetrievalTexts(case)
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            texts.write_model(folder)
            for what, title, unit, mine, other in (
                ("training", f"{case.title}, training", "ms/step", train_ours, train_sentences),
                ("reading", f"{case.size} reading passages", "passages/s", encode_ours, encode_sentences),
            ):
                timing = self._alone(title, SMALLER, partial(mine, texts, folder, device))
                sides = {OURS: timing}
                if self.peers:
                    theirs = partial(other, texts, folder, device, tokens=timing.tokens)
                    sides[SENTENCES] = self._theirs(SENTENCES, title, theirs)
                facts = case.facts() | {"what": what}
                self.report.compared.append(Compared(title, unit, facts, sides, passages=case.passages))

    def scale(self) -> None:
        """Measure our side only. A case that does not fit in memory is left out of the device's cases."""
        for case in self.cases.scale():
            timing = self._ours(case, LEFT_OUT, idle=False)
            self.report.compared.append(Compared(case.title, case.unit, case.facts(), {OURS: timing}))

    # ------------------------------------------------------------ sides

    def _ours(
        self, case: PretrainCase | FinetuneCase | ScoreCase, advice: str, *, idle: bool = True
    ) -> Timing:
        """Measure a case on our side, with a profile if requested."""

        def keep(milliseconds: dict[str, float]) -> None:
            self.report.profiles[case.title] = milliseconds

        profile = keep if self.request.profile else None
        timed: Callable[[], Timing]
        match case:
            case PretrainCase():
                timed = partial(measure.measure_pretraining, case, self.device, idle=idle, profile=profile)
            case FinetuneCase():
                timed = partial(measure.measure_finetuning, case, self.device, profile=profile)
            case ScoreCase():
                timed = partial(measure.measure_encoding, case, self.device)
        return self._alone(case.title, advice, timed)

    def _alone(self, title: str, advice: str, timed: Callable[[], Timing]) -> Timing:
        self.tell(f"{title}: biphase …")
        return measure.ours(self.device, LEFT_OUT if self.request.save else advice, timed)

    def _theirs(self, peer: str, title: str, timed: Callable[[], Timing]) -> Timing:
        self.tell(f"{title}: {peer} …")
        return measure.theirs(self.device, timed)


def run(
    request: BenchRequest, store: Store, *, device: torch.device, command: str, tell: Callable[[str], None]
) -> Report:
    """Measure everything requested; save it if requested and if any case succeeded."""
    report = Measuring(request, device, command, tell).run()
    if request.save and saved_cases(report.compared):
        report.saved = str(save(report, store))
    elif request.save:
        tell("nothing was saved: no case fits into the memory of this device")
    return report
