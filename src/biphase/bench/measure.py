"""Run `biphase bench`: measure each case with biphase and then with each peer, one after another on an idle device.

`StepClock` times steps on the device; `measure_job` times two training jobs as a worker computes them. `ours` and
`theirs` run one measurement at a time and free everything after it. Data are random tokens, because the cost of a step
does not depend on their content.

The peer is transformers' Trainer, compiled or not. It runs in bf16 under autocast, with fused AdamW and sdpa, on the
same model shape and the same tokens. Options that its users usually leave at their defaults stay there.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
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
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor, nn
from torch.autograd import DeviceType
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

from biphase.attention import pattern_of, varlen_works
from biphase.bench.cases import (
    OURS,
    PASSAGES,
    BenchRequest,
    Case,
    CaseMaker,
    Compared,
    FinetuneCase,
    JobCase,
    Lengths,
    PretrainCase,
    Report,
    ScoreCase,
    Timing,
    defaults_of,
    failure,
    kind_of,
    save,
)
from biphase.data.stream import Stream, load_ahead
from biphase.errors import BiphaseError, TrainingError, one_line
from biphase.finetune.encoder import TaskModel, TuningOptions, per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import FineTuner
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.models.backbone import config_fields, from_scratch
from biphase.models.encoder import EmbeddingHead, Encoder, TextHead, TokenHead, initialise
from biphase.models.hub import quietly
from biphase.objectives import IGNORE, Batch, Vocabulary
from biphase.presets import SIZES, STARTS
from biphase.protocol import micro_rows
from biphase.specs import (
    CLM,
    MLM,
    AdamW,
    Answer,
    Chunks,
    Classify,
    Finetune,
    RowObjective,
    Rows,
    Splits,
    Task,
)
from biphase.specs.tasks import AnswerSpan, LabelledText, Question
from biphase.store import MANIFEST, Store
from biphase.study import devices
from biphase.tasks.collection import Ragged
from biphase.tasks.encode import Tokenization
from biphase.tasks.load import Examples
from biphase.text import counted
from biphase.training import distributed, optimizer
from biphase.training.distributed import Ranks, Replicated
from biphase.training.loop import Graphs, Hooks, PlainStep, train, worth_capturing

READY = 3  # steps after which everything is compiled, captured and cached


class StepClock:
    """Records when each step ends. On a GPU it records CUDA events and synchronizes once, at step `READY`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.marks: list[Any] = []
        self.ready: float | None = None
        self.began = time.perf_counter()

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())
        if len(self.marks) == READY:
            distributed.finish(self.device)
            self.ready = time.perf_counter() - self.began

    def measured(self, warm: int, *, tokens: float, path: str = "") -> Timing:
        """The timing of the steps after the first `warm`."""
        distributed.finish(self.device)
        pairs = zip(self.marks[warm - 1 :], self.marks[warm:], strict=False)
        if self.device.type == "cuda":
            seconds = [before.elapsed_time(after) / 1000 for before, after in pairs]
        else:
            seconds = [after - before for before, after in pairs]
        median, mean = statistics.median(seconds), statistics.fmean(seconds)
        return Timing(median, mean, tokens, peak_bytes(self.device), self.ready, path)


def peak_bytes(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


# ---------------------------------------------------------------- isolation

_DYNAMO = ("recompile_limit", "fail_on_recompile_limit_hit")  # settings that our models change


def ours(device: torch.device, advice: str, measure: Callable[[], Timing]) -> Timing:
    """Run our side in isolation. Out of memory is a result, whose message ends with the advice."""
    try:
        return _alone(device, measure)
    except torch.OutOfMemoryError:
        pass  # free memory outside this handler, where the traceback no longer holds tensors
    free(device)
    return failure(f"out of memory; {advice}")


def theirs(device: torch.device, measure: Callable[[], Timing]) -> Timing:
    """Run a peer's side in isolation: its output goes to stderr, and its failure is a result."""
    why = ""
    try:
        with contextlib.redirect_stdout(sys.stderr), warnings.catch_warnings(), quietly():
            warnings.simplefilter("ignore")
            return _alone(device, measure)
    except BiphaseError:
        raise
    except torch.OutOfMemoryError:
        why = "out of memory"
    except Exception as wrong:  # peers raise many types
        why = one_line(wrong)
    free(device)
    return failure(why)


def _alone(device: torch.device, measure: Callable[[], Timing]) -> Timing:
    free(device)
    compiles = device.type == "cuda" or "torch._dynamo" in sys.modules
    dynamo: Any = torch._dynamo.config if compiles else None
    kept = {name: getattr(dynamo, name) for name in _DYNAMO} if dynamo else {}
    try:
        return measure()
    finally:
        for name, value in kept.items():
            setattr(dynamo, name, value)
        free(device)


def free(device: torch.device) -> None:
    """Reset compiled code and free memory, so that the next measurement starts from the same state."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


# ---------------------------------------------------------------- profile by kind of kernel


PROFILED = 3  # steps


def breakdown(run: Callable[[], object], device: torch.device, steps: int) -> dict[str, float]:
    """Profile `run`, which executes `steps` steps; return the ms of one step by kind of kernel, the largest first."""
    run()  # warm up
    distributed.finish(device)
    with torch.profiler.profile(acc_events=True) as profiler:  # without it, torch warns
        run()
        distributed.finish(device)
    kinds: dict[str, float] = defaultdict(float)
    events: Any = profiler.key_averages()
    for event in events:
        if event.is_user_annotation:
            continue
        if device.type == "cpu":
            kinds[kind_of(event.key)] += event.self_cpu_time_total
        elif event.device_type == DeviceType.CUDA:
            kinds[kind_of(event.key)] += event.self_device_time_total
    return {kind: time / steps / 1000 for kind, time in sorted(kinds.items(), key=lambda item: -item[1])}


# ---------------------------------------------------------------- random tokens


BEGIN, END, PAD, MASK = range(4)
FIRST_TOKEN = 4
DOCUMENT = 700  # mean tokens of a document
BATCHES = 64  # distinct batches; then they repeat in another order
QUESTION = 12  # tokens of the question before the context


class RandomTokens:
    """Random rows with document ends at random places; has the interface of a corpus's shards."""

    def __init__(self, rows: int, length: int, vocab: int) -> None:
        generator = np.random.default_rng(0)
        self.data = generator.integers(FIRST_TOKEN, vocab, (rows, length), dtype=np.uint32)
        self.data[generator.random((rows, length)) < 1 / DOCUMENT] = END

    def __len__(self) -> int:
        return self.data.size

    def rows(self, indices: np.ndarray, length: int) -> np.ndarray:
        return np.take(self.data, indices, axis=0)


def stream_of(case: PretrainCase, *, whole_rows: bool = False) -> Stream:
    """The training stream over random tokens; `whole_rows`: without the packing's boundaries."""
    packing: Chunks | Rows
    if case.packing == "chunks" and not whole_rows:
        packing = Chunks(case.length)
    else:
        packing = Rows(case.length, document_mask=case.packing == "documents" and not whole_rows)
    tokens: Any = RandomTokens(case.rows * BATCHES, case.length, case.vocab)
    return Stream(tokens, packing, 0, END, Vocabulary.of(case.vocab, MASK, (BEGIN, END, PAD)))


# ---------------------------------------------------------------- texts


def sample_lengths(lengths: Lengths, count: int) -> np.ndarray:
    """Sample text lengths, the same at every call."""
    sample = np.random.default_rng(0).gamma(lengths.shape, lengths.mean / lengths.shape, count)
    sample *= lengths.mean / sample.mean()
    return np.clip(np.round(sample), 3, lengths.most).astype(np.int64)


def sample_ids(lengths: Lengths, count: int, vocab: int) -> list[np.ndarray]:
    """Texts as ids, each with an end token.

    Token frequencies follow Zipf's law (the n-th occurs 1/n as often as the first): fine-tuning updates only the
    vocab rows that occur, and real texts use few of them.
    """
    generator, tokens = np.random.default_rng(1), vocab - FIRST_TOKEN
    return [
        np.append(FIRST_TOKEN - 1 + (tokens ** generator.random(length - 1)).astype(np.int64), END)
        for length in sample_lengths(lengths, count)
    ]


def numbers_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of texts of numbers separated by spaces, in which each number is its own token."""
    numbers = Tokenizer(WordLevel({str(number): number for number in range(vocab)}, unk_token=str(PAD)))
    numbers.pre_tokenizer = WhitespaceSplit()
    return numbers


def tokenization_of(vocab: int, length: int) -> Tokenization:
    return Tokenization(numbers_tokenizer(vocab), (), (END,), length, "numbers")


@dataclass(frozen=True)
class Dataset:
    """The labelled texts of a case: ids for a peer, examples for us. Both have the same tokens."""

    case: FinetuneCase

    @cached_property
    def ids(self) -> list[np.ndarray]:
        return sample_ids(self.case.lengths, self.case.batch * BATCHES, self.case.vocab)

    @cached_property
    def labels(self) -> np.ndarray:
        """(n,) the class of each text; or (n, 2) the first and last token of its answer."""
        generator, labels = np.random.default_rng(2), self.case.lengths.labels
        if labels:
            return generator.integers(0, labels, len(self.ids))
        ends = np.array([len(ids) - 1 for ids in self.ids])  # before the end token
        first = generator.integers(np.minimum(QUESTION, ends - 1), ends)
        return np.stack([first, np.minimum(first + 2, ends - 1)], axis=1)

    @property
    def tokens(self) -> float:
        """Mean tokens of a step."""
        return float(np.mean([len(ids) for ids in self.ids])) * self.case.batch

    def task(self) -> Task:
        labels = tuple(f"label{number}" for number in range(self.case.lengths.labels))
        form = Classify("{text}", labels) if labels else Answer()
        steps = self.case.warm + self.case.steps
        return Task("bench", form, ".", Splits(test="train*"), steps=steps, batch=self.case.batch)

    def examples(self) -> Examples:
        example = self._text if self.case.lengths.labels else self._question
        examples: Any = [example(ids, label) for ids, label in zip(self.ids, self.labels, strict=True)]
        return Examples(examples, examples[:1], examples[:1])

    @staticmethod
    def _text(ids: np.ndarray, label: Any) -> LabelledText:
        return LabelledText(_spelled(ids[:-1]), int(label))

    @staticmethod
    def _question(ids: np.ndarray, bounds: np.ndarray) -> Question:
        first, last = bounds.tolist()
        begins = min(QUESTION, len(ids) - 2)
        before = _spelled(ids[begins:first])
        answer = AnswerSpan(_spelled(ids[first : last + 1]), len(before) + (1 if before else 0))
        return Question("bench", _spelled(ids[:begins]) + " ", _spelled(ids[begins:-1]), (answer,))


def _spelled(ids: np.ndarray) -> str:
    return " ".join(map(str, ids.tolist()))


# ---------------------------------------------------------------- pretraining
# The stream, loop and optimizer of real runs.


RATE = 5e-4


def objective_of(case: PretrainCase) -> RowObjective:
    return MLM(case.ratio) if case.objective == "mlm" else CLM()


class PretrainingSide:
    """A model and its optimizer, ready to train steps of a case."""

    def __init__(self, case: PretrainCase, device: torch.device) -> None:
        self.case, self.device = case, device
        model = from_scratch(STARTS[case.size], vocab=case.vocab, mask_id=MASK, length=case.length, seed=0)
        self.model = model.to(device).train()
        self.path = model.prepare(device, case.precision)
        self.adam = optimizer.build(model, AdamW())
        self.stream, self.objective = stream_of(case), objective_of(case)
        self.varlen = varlen_works(device, case.precision)
        captures = case.packing != "documents" and worth_capturing(model, device, case.rows * case.length)
        self.graphs: Graphs[Batch] | None = Graphs(self.adam, device) if captures else None

    def batches(self, step: int) -> list[Batch]:
        """The one micro-batch of a step."""
        samples = torch.arange(self.case.rows) + step * self.case.rows
        batch = self.stream.batch(
            self.objective, samples, step=step, fixed=self.path == "compiled" or self.graphs is not None
        )
        return [batch.ready_for(self.device)]

    def loss_sum(self, batch: Batch) -> Tensor:
        with distributed.autocast(self.device, self.case.precision):
            return self.model.loss_sum(batch, pattern_of(batch, varlen=self.varlen))

    def train(self, steps: int, after: Callable[[], None]) -> None:
        """Train steps as a run does, with data from the stream."""
        ranks = Ranks(0, 1, self.device)
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        gradients = Replicated(trained, ranks)
        step = PlainStep(self.adam, self.loss_sum, AdamW().clip, gradients, self.model.encoder)
        batches = load_ahead(self.batches, 0, steps, loaders=1)
        hooks = Hooks(after=(lambda done: after(),))
        taken = self.graphs.over(step) if self.graphs else step
        train(taken, batches, first=0, rate=lambda step: RATE, ranks=ranks, hooks=hooks)


Profiled = Callable[[dict[str, float]], None]  # receives the ms of a step by kind of kernel


def measure_pretraining(case: PretrainCase, device: torch.device, profile: Profiled | None = None) -> Timing:
    """Measure our pretraining."""
    side = PretrainingSide(case, device)
    clock = StepClock(device)
    side.train(case.warm + case.steps, clock.mark)
    timing = clock.measured(case.warm, tokens=case.rows * case.length, path=side.path)
    if profile is not None:
        profile(breakdown(lambda: side.train(PROFILED, lambda: None), device, PROFILED))
    return timing


# ---------------------------------------------------------------- fine-tuning


TUNING_RATE, SEED = 5e-5, 0
CONTEXT = 2_048
REPEATS = 3  # passes over all texts; the median counts


def finetuner_of(case: FinetuneCase | ScoreCase, device: torch.device) -> FineTuner:
    """A new random model to fine-tune."""
    model = from_scratch(STARTS[case.size], vocab=case.vocab, mask_id=MASK, length=CONTEXT, seed=0)
    encoder = Encoder(model.model.base_model, context=CONTEXT)
    varlen = varlen_works(device, case.precision)
    return FineTuner(encoder, TuningOptions.of(device, case.precision, varlen=varlen, encoder=encoder))


def measure_finetuning(case: FinetuneCase, device: torch.device, profile: Profiled | None = None) -> Timing:
    """Measure our second fine-tuning: the first pays the one-time costs of a grid."""
    data, tokenization = Dataset(case), tokenization_of(case.vocab, CONTEXT)
    family = family_of(data.task(), data.examples(), tokenization, protocol="standard")
    finetuner = finetuner_of(case, device)

    def once(after: Callable[[], None]) -> TaskModel:
        """One fine-tuning as a study makes it; `after` is called at the end of each step."""
        precision: Any = case.precision  # one of those that fine-tuning has
        spec = Finetune(
            (family.task,), lrs=(TUNING_RATE,), seeds=(SEED,), protocol="standard", precision=precision
        )
        loaders = 1 if device.type == "cuda" else 0
        model, _ = finetuner.finetune(
            family, spec, lr=TUNING_RATE, seed=SEED, loaders=loaders, tell=lambda step, steps: after()
        )
        return model

    first = StepClock(device)
    once(first.mark)
    second = StepClock(device)
    once(second.mark)
    timing = second.measured(case.warm, tokens=data.tokens, path=path_of(finetuner))
    if profile is not None:
        profile(breakdown(lambda: once(lambda: None), device, family.steps))
    return replace(timing, ready_seconds=first.ready)


def path_of(finetuner: FineTuner) -> str:
    return "fused" if finetuner.encoder.graphable else "plain"


# ---------------------------------------------------------------- inference


def measure_encoding(case: ScoreCase, device: torch.device) -> Timing:
    """Encode texts without gradients; seconds are for all texts: the median of `REPEATS` passes after the first."""
    finetuner = finetuner_of(case, device)
    texts = Ragged.from_lists(sample_ids(PASSAGES, case.passages, case.vocab))
    model = TaskModel(finetuner.encoder, EmbeddingHead()).eval()
    clock = StepClock(device)
    for _ in range(1 + REPEATS):
        per_text(model, texts, finetuner.options)
        clock.mark()
    return replace(clock.measured(1, tokens=len(texts.flat), path=path_of(finetuner)), ready_seconds=None)


# ---------------------------------------------------------------- training jobs of a study
# Two jobs of a small study, computed by a `biphase run` in a store of its own, on random text that was tokenized before.
# The first takes half of the steps, its child the other half, in which the learning rate decays. All times come from what
# the store holds afterwards: metrics.jsonl, `times` in checkpoint.json, and when manifest.json was written.


STUDY = """
from biphase import CLM, MLM, WSD, Chunks, Corpus, Pretrain, Pretrained, Rows, Stage, Study
from biphase.presets import STARTS

corpus = Corpus("random", "text.jsonl", Pretrained("./tokenizer"), heldout="heldout.jsonl")
run = Pretrain(
    "job", STARTS[{size!r}], corpus, Stage({objective}, {steps}), WSD(1e-4, warmup=0, decay={decay}),
    batch_tokens={tokens}, packing={packing}, precision={precision!r},
    heldout_every={every}, heldout_tokens={heldout},
)
study = Study("job", run)
"""
# Steps of tokens. They are measured in the middle of a job too, because kernels are loaded when they are first used.
HELDOUT_STEPS = 4


def measure_job(case: JobCase) -> Timing:
    """Compute the two jobs; return the seconds of a step and, in `details`, of what a worker does besides."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _write_study(folder, case)
        _biphase(folder, "tokenize", "text.jsonl", "--tokenizer", "tokenizer", "--heldout", "heldout.jsonl")
        began = time.time()
        _biphase(folder, "run", "study.py", "--micro-batch", case.rows, "--quiet")
        return _job_timing(Store(folder / "store"), case, began)


def _biphase(folder: Path, *words: object) -> None:
    command = [sys.executable, "-m", "biphase", *map(str, words)]
    # site made sys.path absolute; a relative PYTHONPATH would mean nothing in that folder.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TrainingError(
            f"biphase {words[0]} failed in this case: {(done.stderr or '?').splitlines()[-1]}"
        )


def _write_study(folder: Path, case: JobCase) -> None:
    """Write random text in which each number is a token, its tokenizer, and the study."""
    step = case.rows * case.length
    generator = np.random.default_rng(0)
    for name, tokens in (
        ("text.jsonl", min(case.steps, BATCHES) * step),
        ("heldout.jsonl", HELDOUT_STEPS * step),
    ):
        documents = generator.integers(FIRST_TOKEN, case.vocab, (tokens // DOCUMENT + 1, DOCUMENT)).tolist()
        lines = [json.dumps({"text": " ".join(map(str, document))}) for document in documents]
        (folder / name).write_text("\n".join(lines))
    (folder / "tokenizer").mkdir()
    numbers_tokenizer(case.vocab).save(str(folder / "tokenizer" / "tokenizer.json"))
    names = {"eos_token": str(END), "mask_token": str(MASK), "pad_token": str(PAD)}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(names))
    packing = (
        Chunks(case.length)
        if case.packing == "chunks"
        else Rows(case.length, document_mask=case.packing == "documents")
    )
    study = STUDY.format(
        size=case.size, objective=objective_of(case), steps=case.steps, decay=case.steps // 2, tokens=step,
        packing=packing, precision=case.precision, every=max(1, case.steps // 4), heldout=HELDOUT_STEPS * step,
    )  # fmt: skip
    (folder / "study.py").write_text(study)


def _job_timing(store: Store, case: JobCase, began: float) -> Timing:
    folders = [path.parent for path in store.checkpoints.glob(f"*/{MANIFEST}")]
    (first, parent), (last, child) = sorted(
        ((read_checkpoint_file(folder), folder) for folder in folders),
        key=lambda job: job[0]["progress"]["step"],
    )
    published = (child / MANIFEST).stat().st_mtime
    steps = [line for line in read_lines(child) if "loss" in line]
    middle = steps[len(steps) // 3 : 2 * len(steps) // 3 + 1]
    seconds = (middle[-1]["seconds"] - middle[0]["seconds"]) / (len(middle) - 1)
    tokens = case.rows * case.length
    about, after = first["times"], last["times"]
    details = {
        "tokens/s from the first step to the last checkpoint": (
            case.steps * tokens / (published - about["first_step"])
        ),
        "s from the command to the first step": about["first_step"] - began,
        "s from the last step of a job to its child's first": after["first_step"] - about["last_step"],
        "s of that for held-out losses": about["measured"] - about["last_step"],
        "s of that to save, after those": (parent / MANIFEST).stat().st_mtime - about["measured"],
    }
    path = first["progress"]["machine"].get("path", "")
    return Timing(seconds, seconds, tokens, path=path, details=details)


# ---------------------------------------------------------------- Trainer


COMPILED = "trainer-compiled"
# Compiled, transformers' encoders build a mask that masks nothing, which disables the fast attention kernels. Whole
# rows need no mask, so the peer gets this variant and is measured at its best.
MASKLESS = "sdpa-without-mask"
AttentionInterface.register(MASKLESS, sdpa_attention_forward)
AttentionMaskInterface.register(MASKLESS, lambda *parts, **named: None)


def arguments(case: Case, device: torch.device, *, peer: str, batch: int, rate: float) -> TrainingArguments:
    """The Trainer's arguments: precision, optimizer, one device, and no output."""
    adam = AdamW()
    options = TrainingArguments(
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


LabelledRows = list[dict[str, Tensor]]  # ids and labels of each row or text


def labelled(ids: Any, labels: Tensor) -> LabelledRows:
    return [{"input_ids": text, "labels": label} for text, label in zip(ids, labels, strict=True)]


def masked_rows(case: PretrainCase) -> LabelledRows:
    """Rows masked before the clock starts; for CLM unshifted, since Llama shifts labels itself."""
    stream, objective = stream_of(case, whole_rows=True), objective_of(case)
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


def pretrain_with_trainer(case: PretrainCase, device: torch.device, *, peer: str) -> Timing:
    """Time the Trainer's pretraining, on whole rows whatever our packing: it has no other."""
    options = arguments(case, device, peer=peer, batch=case.rows, rate=RATE)
    data: Any = masked_rows(case)  # any sequence will do
    trainer = Trainer(peer_model(case), options, train_dataset=data)
    return time_trainer(trainer, device, case.warm, tokens=case.rows * case.length, path=f"{case.rows} rows")


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


def padded(examples: LabelledRows) -> dict[str, Any]:
    """A batch padded to its longest text."""
    texts = [example["input_ids"] for example in examples]
    return {
        "input_ids": pad_sequence(texts, batch_first=True, padding_value=PAD),
        "attention_mask": pad_sequence([torch.ones_like(text) for text in texts], batch_first=True),
        "labels": torch.stack([example["labels"] for example in examples]),
    }


def finetune_with_trainer(case: FinetuneCase, device: torch.device, *, peer: str) -> Timing:
    """Time the Trainer's fine-tuning, on padded batches."""
    data = Dataset(case)
    options = arguments(case, device, peer=peer, batch=case.batch, rate=TUNING_RATE)
    texts: Any = labelled([torch.from_numpy(ids) for ids in data.ids], torch.from_numpy(data.labels))
    trainer = Trainer(PaddedModel(case), options, train_dataset=texts, data_collator=padded)
    return time_trainer(trainer, device, case.warm, tokens=data.tokens, path="padded")


# ---------------------------------------------------------------- run


VERSIONED = ("triton", "accelerate")  # other packages that affect the results
WHOLE_ROWS = "the Trainer's attention spans whole rows, which is more work; --packing rows makes it equal"
ADVICE = {"pretrain": "type fewer --rows, or a smaller --size", "finetune": "type a smaller --size"}
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


def run(
    request: BenchRequest, store: Store, *, device: torch.device, command: str, tell: Callable[[str], None]
) -> Report:
    """Measure everything requested; save it if requested and if any case succeeded."""
    length = request.length or defaults_of(device.type).length
    maker = CaseMaker(request, device.type, micro_rows(distributed.memory_of(device), MANY_ROWS, length))
    peers, precision = request.peers(maker.defaults), maker.common["precision"]
    if peers and find_spec("accelerate") is None:
        raise TrainingError(
            "transformers' Trainer needs the package accelerate; type pip install accelerate, or --against none"
        )
    if poor := distributed.poor_precision(device, precision, "--precision"):
        tell(f"note: {poor}")
    report = report_of(device, command)
    advice = ADVICE.get(request.workload, "this case is left out")
    for case in maker.cases():
        tell(f"{case.title}: biphase …")
        sides = {OURS: ours(device, advice, partial(_ours, case, device, request, report))}
        for peer in peers:
            tell(f"{case.title}: {peer} …")
            sides[peer] = theirs(device, partial(_theirs, case, device, peer, maker.peer_rows))
        whole = peers and isinstance(case, PretrainCase) and case.packing != "rows"
        report.compared.append(Compared(case, sides, WHOLE_ROWS if whole else ""))
    if request.save and report.measured:
        report.saved = str(save(report, store))
    elif request.save:
        tell("nothing was saved: no case fits into the memory of this device")
    return report


def _ours(case: Case, device: torch.device, request: BenchRequest, report: Report) -> Timing:
    """Measure a case on our side, with a profile if requested."""
    profile = partial(report.profiles.__setitem__, case.title) if request.profile else None
    match case:
        case JobCase():
            return measure_job(case)
        case PretrainCase():
            return measure_pretraining(case, device, profile=profile)
        case FinetuneCase():
            return measure_finetuning(case, device, profile=profile)
        case _:
            return measure_encoding(case, device)


def _theirs(case: Case, device: torch.device, peer: str, rows: int) -> Timing:
    if isinstance(case, PretrainCase):
        return pretrain_with_trainer(replace(case, rows=rows), device, peer=peer)
    assert isinstance(case, FinetuneCase), "no peer measures other cases"
    return finetune_with_trainer(case, device, peer=peer)
