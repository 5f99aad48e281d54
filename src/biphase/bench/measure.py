"""Measure biphase's own steps: clock, isolation, profiler, random data, pretraining, fine-tuning, inference.

`StepClock` times steps on the device; `measure_job` times two training jobs as a worker computes them. `ours` and `theirs` run one measurement at a time and free everything after it.
Data are random tokens, because the cost of a step does not depend on their content.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.autograd import DeviceType

from biphase.attention import pattern_of, varlen_works
from biphase.bench.cases import (
    PASSAGES,
    FinetuneCase,
    JobCase,
    Lengths,
    PretrainCase,
    ScoreCase,
    Timing,
    failure,
)
from biphase.data.stream import Stream, load_ahead
from biphase.errors import BiphaseError, TrainingError, one_line
from biphase.finetune.encoder import TaskModel, TuningOptions, per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import FineTuner
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.models.backbone import from_scratch
from biphase.models.encoder import EmbeddingHead, Encoder
from biphase.models.hub import quietly
from biphase.objectives import Batch, Vocabulary
from biphase.presets import STARTS
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
from biphase.tasks.collection import Ragged
from biphase.tasks.encode import Tokenization
from biphase.tasks.load import Examples
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

# The first pattern found in a name decides. Names of fused kernels list the fused operations.
KINDS = {
    "attention": r"flash|fmha|sdpa|attention|attn",
    "optimizer": r"adam|multi_tensor_apply|lpnorm|_foreach",
    "loss": r"cross_entropy|softmax|logsumexp|nll_loss|xent",
    "GEMMs": r"gemm|nvjet|cutlass|xmma|cublas|splitk|matmul|aten::(add|b|bad)?mm\b|scaled_mm|aten::linear",
    "rotary": r"rotary|rotate|rope|_cos_|_sin_|_neg_",
    "swiglu": r"swiglu|silu",
    "norm": r"norm|rsqrt|rms_",
    "copies": r"memcpy|memset|copy|(?<!broad)cast|fill|cat(?!ion)|clone|contiguous",
}
OTHER = "other"


def kind_of(name: str) -> str:
    """The kind of a kernel, or of a CPU operation, by its name."""
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name.lower())), OTHER)


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


def measure_pretraining(
    case: PretrainCase, device: torch.device, *, profile: Profiled | None = None
) -> Timing:
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


def measure_finetuning(
    case: FinetuneCase, device: torch.device, *, profile: Profiled | None = None
) -> Timing:
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
DOCUMENT = 700  # tokens
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
