"""One fine-tuning: a model, a task, a learning rate and a seed, trained by the same loop as pretraining.

`FineTuner` keeps one encoder on the device and runs its fine-tunings one after another; the weights are restored
before each. What all fine-tunings of a task share (`TaskGrid`: model, optimizer, CUDA graphs) stays in device
memory between them. `score` evaluates the result, `Checkpoints` lets a long fine-tuning resume.

The seed determines the head's weights, the order of examples and dropout, each by counters. So a repeated trial
gets the same, whatever else ran in the process.

`TrainedRows`: only the vocab rows that occur in a task's training texts are trained. Of a vocabulary of 128,000
tokens a task has some thousands. The others never get a gradient: AdamW keeps their moments at zero and multiplies
the rows by 1 − lr · weight decay at each step. So the optimizer gets a small table of the rows that occur, plus one
row of ones that no text uses. That row shrinks as the other rows would, in the same kernel and at the same
layer-wise learning rate, and is unchanged when a step is skipped.

    store/unfinished/<key of the fine-tuning>-<step>/       a checkpoint
      model.safetensors       all weights; if only some vocab rows are trained, their table instead of the embedding;
                              with `Finetune.best_epoch` those of the best epoch too
      optimizer.safetensors   AdamW's moments and step counts
      progress.json           step, losses so far, skipped steps, seconds

Dropout and the order of examples are functions of the step, so nothing else has to be saved; on a CPU a resumed
fine-tuning is bit-identical. A checkpoint is published atomically like any result, replaces the one before it, and
is removed when the scores are published. Weights and optimizer state are restored in place, since captured CUDA
graphs read them there.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn

from biphase.data.stream import load_ahead
from biphase.errors import StoreError, one_line
from biphase.finetune.encoder import TaskBatch, TaskModel, TuningOptions
from biphase.finetune.families import PARTS, FamilyTrainer, Part, PartScores, Retrieval
from biphase.models.encoder import Encoder, initialise
from biphase.objectives import IGNORE
from biphase.randomness import permute, salt
from biphase.specs import AdamW, Finetune
from biphase.store import Store, debris, publish, read_verified, verify, write_json
from biphase.tasks.collection import Ragged
from biphase.training.distributed import Ranks, Replicated, seed_device
from biphase.training.loop import Graphs, Hooks, LoopStep, PlainStep, train
from biphase.training.optimizer import by_depth, forget, linear_rate, optimizer_state
from biphase.training.tensors import Tensors, write

PADDING = 0  # the id that batches are padded with


class TrainedRows:
    """The rows of an embedding that a task's texts use, as a separate parameter."""

    def __init__(self, whole: nn.Parameter, texts: Iterable[Ragged], still: int | None = None) -> None:
        """`still`: an id that gets no gradient, as transformers treats `padding_idx`."""
        occurs = np.zeros(len(whole), bool)
        occurs[PADDING] = True
        for ragged in texts:
            occurs[ragged.flat] = True
        ids = np.flatnonzero(occurs)
        row_of = np.zeros(len(whole), np.int64)  # ids that do not occur are never looked up
        row_of[ids] = np.arange(len(ids))
        self.whole = whole
        self.ids, self.row_of = (torch.from_numpy(array).to(whole.device) for array in (ids, row_of))
        self.still = int(row_of[still]) if still is not None and occurs[still] else None
        self.table = nn.Parameter(whole.detach().new_ones(len(ids) + 1, whole.shape[1]))

    def among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Return the same parameters in the same order, with the table in place of the whole embedding."""
        return [self.table if parameter is self.whole else parameter for parameter in parameters]

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(self.row_of[ids], self.table, self.still)

    @contextmanager
    def trained(self, encoder: Encoder) -> Generator[None]:
        """Let the encoder read the table, initialized from the embedding; on exit, write it back."""
        fused = encoder.fused
        assert fused is not None, "only the fused trunk can read another table"
        with torch.no_grad():  # in the same memory each time, where captured graphs read it
            self.table[:-1] = self.whole[self.ids]
            self.table[-1] = 1
        self.table.grad = None  # a failed fine-tuning may have left one
        fused.embed = self.look_up
        try:
            yield
        finally:
            fused.embed = None
        with torch.no_grad():
            self.whole.mul_(self.table[-1])
            self.whole[self.ids] = self.table[:-1]


def trained_rows(family: FamilyTrainer, encoder: Encoder) -> TrainedRows | None:
    """Return the vocab rows to train for a task; None if the whole embedding is trained, or none of it.

    In 16 bits most weight-decay updates are lost to rounding, differently for each row, so one shared factor would
    be wrong.
    """
    if encoder.fused is None or not family.inputs:
        return None
    own = encoder.fused.trunk.embed_tokens
    trained = own.weight.requires_grad and own.weight.dtype == torch.float32
    return TrainedRows(own.weight, family.inputs, own.padding_idx) if trained else None


# ---------------------------------------------------------------- checkpoints


TRIAL = "progress.json"
# Seconds of work; a shorter fine-tuning is repeated faster than a checkpoint is written and read.
WORTH_KEEPING = 10.0


class Checkpoints:
    """The checkpoints of one fine-tuning, for the worker that holds its lease."""

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        steps: int = 0,  # save every so many steps, even of a short fine-tuning; 0: by time
        seconds: float = 600.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.key, self.say = store, key, say
        self.every_steps, self.every_seconds = steps, seconds
        self.saved = 0  # the step of the last checkpoint written or read
        self.saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after the next step, when `step` steps are done."""
        if self.every_steps:
            return (step + 1) % self.every_steps == 0
        return time.monotonic() - self.saved_at > self.every_seconds

    def save(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor], about: dict[str, Any]
    ) -> bool:
        """Publish a checkpoint, unless there is too little work to keep; return whether this step is in the store."""
        step = about["step"]
        if self.saved == step:
            return True
        if not self.every_steps and about["seconds"] < WORTH_KEEPING:
            return False
        name = f"trial-{self.key}"
        for left in self.store.attempts.glob(f"{name}-*"):  # left by a worker that was killed or is suspended
            self.store.discard(left)
        with self.store.attempt(name) as folder:
            checksums = {
                f"{kind}.safetensors": write(folder / f"{kind}.safetensors", tensors)
                for kind, tensors in (("model", weights), ("optimizer", optimizer_tensors))
            }
            write_json(folder / TRIAL, {"key": self.key, "threads": torch.get_num_threads(), **about})
            publish(folder, self.store.unfinished / f"{self.key}-{step}", checksums)
        self.saved, self.saved_at = step, time.monotonic()
        for folder in self._folders():
            if folder.name != f"{self.key}-{step}":
                self.store.discard(folder)
        return True

    def load(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor]
    ) -> dict[str, Any] | None:
        """Restore the last valid checkpoint into these tensors; return its metadata, or None to start anew.

        On a CPU the number of threads is restored too: sums in another order would give other bits.
        """
        both = {"model": weights, "optimizer": optimizer_tensors}
        for folder in self._folders():
            try:
                about = self._checked(folder, both)
            except (StoreError, SafetensorError, OSError, KeyError, TypeError, ValueError) as wrong:
                self.say(f"  note: {folder} cannot be resumed ({one_line(wrong)}); it is removed")
                self.store.discard(folder)
                continue
            for kind, tensors in both.items():
                with Tensors(folder, kind) as saved, torch.no_grad():
                    for name, tensor in tensors.items():
                        tensor.copy_(saved.whole(name))
            self.saved, self.saved_at = about["step"], time.monotonic()
            on_cpu = all(tensor.device.type == "cpu" for tensor in weights.values())
            if on_cpu and 0 < about["threads"] <= (os.cpu_count() or 1):
                torch.set_num_threads(about["threads"])
            return about
        return None

    def discard(self) -> None:
        """Remove all checkpoints, since the fine-tuning is done."""
        for folder in self._folders():
            self.store.discard(folder)

    def _folders(self) -> list[Path]:
        """Return the checkpoints of this fine-tuning, latest first; they are validated when they are read."""
        steps = {
            int(step): folder
            for folder in self.store.unfinished.glob(f"{self.key}-*")
            if (step := folder.name.rpartition("-")[2]).isdecimal()
        }
        return [steps[step] for step in sorted(steps, reverse=True)]

    def _checked(self, folder: Path, both: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """Return a checkpoint's metadata, after verifying its files and comparing its tensors with the targets."""
        if not self.store.has(folder):
            raise StoreError(debris(folder))
        verify(folder)
        about = json.loads(read_verified(folder, TRIAL))
        if f"{about['key']}-{about['step']}" != folder.name:
            raise StoreError(f"it is the checkpoint {about['key']}-{about['step']}")
        for kind, tensors in both.items():
            with Tensors(folder, kind) as saved:
                expected = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
                if {name: (saved.shapes[name], saved.dtypes[name]) for name in saved.shapes} != expected:
                    raise StoreError("its tensors are those of another kind of device or another model")
        return about


# ---------------------------------------------------------------- widths of batches
# `Buckets` pads batches to a few widths, so that `Graphs` captures an optimizer step once per width and replays it for
# every learning rate and seed. The widths depend on the lengths of a task's texts, each about 10% above the one
# before, so that padding adds about 7% on average. They do not depend on seed or learning rate, so a fine-tuning's
# result does not depend on what else ran in the process.


RATIO = 1.1  # of one width to the next smaller
ROUND = 16  # widths are multiples of it, for the tensor cores
SAMPLED = 4_096  # random batches by which the token counts of a step are estimated
RARE = 0.001, 0.02  # shares of batches above the largest width, and below what the smallest is made for


@dataclass(frozen=True)
class Buckets:
    """The widths in tokens to which batches of `texts` texts, none longer than `longest`, are padded."""

    widths: tuple[int, ...]  # ascending
    texts: int
    longest: int

    def spare(self, width: int) -> int:
        """Return how many dummy texts the padding of a width is divided into: enough if all of it were padding."""
        return -(-width // self.longest)

    def width_for(self, tokens: int) -> int:
        """Return the smallest width for so many tokens plus one for each dummy text, or 0 if none is large enough."""
        return next((width for width in self.widths if tokens + self.spare(width) <= width), 0)

    def pad(self, batch: TaskBatch) -> TaskBatch:
        """Pad a batch to one of the widths, or return it unchanged if none applies.

        Padding does not affect the result: attention and pooling stay within texts, and padding tokens have no labels.
        """
        packed = batch.inputs[0]
        if len(batch.inputs) > 1 or len(packed) != self.texts or packed.longest > self.longest:
            return batch
        tokens = packed.ids.numel()
        width = self.width_for(tokens)
        if not width:
            return batch
        targets = (
            F.pad(batch.targets, (0, width - tokens), value=IGNORE) if batch.of_tokens else batch.targets
        )
        wide = packed.padded(width, spare=self.spare(width), longest=self.longest)
        return replace(batch, inputs=(wide,), targets=targets, width=width)


def buckets_of(family: FamilyTrainer, options: TuningOptions) -> Buckets:
    """Choose the widths for the training steps of a task."""
    lengths = np.sum([side.lengths for side in family.inputs], axis=0)
    rows = min(family.task.batch, family.size)
    sample = np.random.default_rng(0).integers(0, family.size, (SAMPLED, rows))
    above, below = RARE
    least, most = np.quantile(lengths[sample].sum(1), (below, 1 - above)).tolist()
    longest = max(ROUND, *(int(side.lengths.max()) for side in family.inputs))
    return Buckets(
        _widths(int(least), min(int(most), options.train_tokens), longest),
        rows * len(family.inputs),
        longest,
    )


def _widths(least: int, most: int, longest: int) -> tuple[int, ...]:
    """Return widths from the first that fits `most` tokens down to the last that fits `least`, ascending."""

    def room(width: int) -> int:
        return width - -(-width // longest)

    width = -(-most // ROUND) * ROUND
    while room(width) < most:
        width += ROUND
    widths = [width]
    while (width := int(width / RATIO) // ROUND * ROUND) and room(width) >= least:
        widths.append(width)
    return tuple(reversed(widths))


# ---------------------------------------------------------------- fine-tuning


MOST_MICRO = 2**12  # most micro-batches per step
CURVE = 50  # points of the loss curve that are saved
BLOCK = 2**13  # examples whose order is computed at a time


@dataclass(frozen=True)
class TrainingSummary:
    """The record of a fine-tuning, apart from the model."""

    steps: int
    examples: int
    seconds: float
    losses: dict[int, float]  # mean loss of some evenly spaced steps
    skipped: int  # steps skipped because of nonfinite numbers
    finished: bool
    best: tuple[int, float] | None = (
        None  # with `Finetune.best_epoch`: the step that is kept, its validation score
    )

    def about(self) -> dict[str, Any]:
        """Return the metadata of a checkpoint."""
        losses = [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses.items()]
        best = {"best": list(self.best)} if self.best else {}
        return {
            "step": self.steps,
            "losses": losses,
            "skipped": self.skipped,
            "seconds": self.seconds,
            **best,
        }


class TrialProgress:
    """The progress of a fine-tuning, from its beginning or a checkpoint; counting never waits for the device."""

    def __init__(
        self,
        family: FamilyTrainer,
        steps: int,
        device: torch.device,
        tell: Callable[[int, int], None],
        saved: dict[str, Any] | None,
    ) -> None:
        self.family, self.tell, self.steps = family, tell, steps
        about = saved or {"step": 0, "losses": [], "skipped": 0, "seconds": 0.0}
        self.step: int = about["step"]
        self.losses: dict[int, Tensor | float] = {
            step: math.nan if loss is None else loss for step, loss in about["losses"]
        }
        self.skipped = torch.tensor(float(about["skipped"]), device=device)
        self.best: tuple[int, float] | None = tuple(about["best"]) if "best" in about else None
        self.began = time.monotonic() - about["seconds"]

    def note(self, done: LoopStep) -> None:
        self.step = done.step + 1
        self.skipped.add_(done.nonfinite)
        if done.step % max(1, self.steps // CURVE) == 0 or self.step == self.steps:
            self.losses[self.step] = done.loss
        self.tell(self.step, self.steps)

    def trained(self) -> TrainingSummary:
        curve = {step: float(loss) for step, loss in self.losses.items()}
        return TrainingSummary(
            self.step,
            examples_of(self.family, self.step),
            time.monotonic() - self.began,
            curve,
            int(self.skipped.item()),
            finished=self.step == self.steps,
            best=self.best,
        )


@dataclass(frozen=True)
class TaskGrid:
    """What all fine-tunings of a task share; each restores it to its beginning."""

    family: FamilyTrainer
    spec: AdamW
    model: TaskModel
    adam: torch.optim.AdamW
    graphs: Graphs[TaskBatch] | None  # None: every step is a plain one
    buckets: Buckets | None  # with graphs only
    rows: TrainedRows | None  # None: the whole embedding is trained
    kept: dict[str, Tensor] | None  # with `Finetune.best_epoch`: the weights of the best epoch

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that are trained."""
        every = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        return self.rows.among(every) if self.rows else every

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return all tensors that training changes, by name and in place: weights, and optimizer state."""
        names = [name for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        trained = dict(zip(names, self.parameters, strict=True))
        kept = {f"best.{name}": tensor for name, tensor in (self.kept or {}).items()}
        return {**self.model.state_dict(), **trained, **kept}, optimizer_state(trained, self.adam)

    def training(self) -> AbstractContextManager[None]:
        """Return a context to take steps in; at its end the trained rows are written back to the embedding."""
        return self.rows.trained(self.model.encoder) if self.rows else nullcontext()


class FineTuner:
    """An encoder on which fine-tunings run one after another; its weights are restored before each."""

    def __init__(self, encoder: Encoder, options: TuningOptions) -> None:
        self.options = options
        self.encoder = encoder.to(options.device)
        # Not buffers: rotary frequencies in bf16 would be wrong by radians.
        for parameter in encoder.parameters():
            parameter.data = parameter.data.to(options.dtype)
        self.weights = {name: value.clone() for name, value in encoder.state_dict().items()}
        encoder.prepare(options.device, options.precision)
        self.grid: TaskGrid | None = None

    def fresh(self, family: FamilyTrainer, seed: int) -> TaskModel:
        """Return the restored encoder with a new head."""
        self._put_back()
        head = family.head(self.encoder.width)
        initialise(head, std=self.encoder.init_std, seed=salt(seed, "head"))
        return TaskModel(self.encoder, head.to(self.options.device, self.options.dtype))

    @torch.no_grad()
    def _put_back(self) -> None:
        now = self.encoder.state_dict()
        for name, value in self.weights.items():
            now[name].copy_(value)
        # A failed fine-tuning may have left gradients.
        self.encoder.zero_grad(set_to_none=True)
        self.encoder.refresh()

    def _grid(self, family: FamilyTrainer, spec: Finetune, seed: int) -> TaskGrid:
        """Return the grid of a task, reset for a new fine-tuning; its memory is reused while the task is the same."""
        wanted = family, spec.optimizer, spec.best_epoch
        if self.grid is None or (self.grid.family, self.grid.spec, self.grid.kept is not None) != wanted:
            self.grid = None  # free the old one's memory first
            self.grid = self._new_grid(family, spec.optimizer, best_epoch=spec.best_epoch)
        grid = self.grid
        self._put_back()
        grid.model.zero_grad(set_to_none=True)
        initialise(grid.model.head, std=self.encoder.init_std, seed=salt(seed, "head"))
        forget(grid.adam)
        return grid

    def _new_grid(self, family: FamilyTrainer, spec: AdamW, *, best_epoch: bool) -> TaskGrid:
        options = self.options
        head = family.head(self.encoder.width).to(options.device, options.dtype)
        model = TaskModel(self.encoder, head)
        # Validation texts that are scored on the way have words that the training texts lack.
        rows = trained_rows(family, self.encoder) if options.sparse_rows and not best_epoch else None
        adam = build_optimizer(model, spec, rows)
        graphs = buckets = None
        allowed = options.graphs and options.varlen and options.device.type == "cuda"
        if allowed and self.encoder.graphable:
            graphs, buckets = Graphs(adam, options.device), buckets_of(family, options)
        kept = {name: value.clone() for name, value in model.state_dict().items()} if best_epoch else None
        return TaskGrid(family, spec, model, adam, graphs, buckets, rows, kept)

    def _keep_best(self, progress: TrialProgress, grid: TaskGrid) -> None:
        """At the end of an epoch, or of all steps, keep the weights if they are the best so far on validation."""
        if grid.kept is None or (progress.step % grid.family.epoch and progress.step != progress.steps):
            return
        model = grid.model.eval()
        # A stop waits for this scoring: it comes before the checkpoint of its step.
        options = replace(self.options, pause=lambda: None)
        reached = score(model, grid.family, options, PARTS[:1])["validation"].metrics[grid.family.metric]
        model.train()
        if progress.best is None or reached > progress.best[1]:
            progress.best = progress.step, reached
            _copy(model.state_dict(), grid.kept)

    def finetune(
        self,
        family: FamilyTrainer,
        spec: Finetune,
        *,
        lr: float,
        seed: int,
        share: float = 1.0,
        stop: Callable[[], bool] = lambda: False,
        lost: Callable[[], bool] = lambda: False,
        loaders: int = 0,
        tell: Callable[[int, int], None] = lambda step, steps: None,
        checkpoints: Checkpoints | None = None,
    ) -> tuple[TaskModel, TrainingSummary]:
        """Train a fresh model on the task, or resume from a checkpoint; call `score` afterwards.

        `share`: of the task's steps, with a schedule of that length. `lost`: whether another worker has taken over the
        trial, so that nothing more is saved.
        """
        options, steps = self.options, math.ceil(share * family.steps)
        if not steps:  # zero-shot
            return self.fresh(family, seed).eval(), TrainingSummary(0, 0, 0.0, {}, 0, finished=True)
        grid = self._grid(family, spec, seed)
        model, buckets = grid.model.train(), grid.buckets

        def save(done: LoopStep) -> None:
            if checkpoints and not done.lost and (done.save or done.stop) and progress.step < steps:
                checkpoints.save(*grid.tensors(), progress.trained().about())

        def loss_sum(batch: TaskBatch) -> Tensor:
            # A graphable encoder has no dropout, and a graph could not be reseeded.
            if not self.encoder.graphable:
                seed_device(salt(seed, "dropout", batch.index), options.device)
            with options.autocast():
                return family.loss_sum(model, batch)

        with grid.training():
            saved = checkpoints.load(*grid.tensors()) if checkpoints else None
            progress = TrialProgress(family, steps, options.device, tell, saved)
            if saved:
                self.encoder.refresh()  # its 16-bit copies are still those of the original weights
            ranks = Ranks(0, 1, options.device)
            plain = PlainStep(
                grid.adam,
                loss_sum,
                spec.optimizer.clip,
                Replicated(grid.parameters, ranks),
                self.encoder,
            )
            train(
                grid.graphs.over(plain) if grid.graphs else plain,
                load_ahead(
                    lambda step: batches_of(family, step, seed, options, buckets),
                    progress.step,
                    steps,
                    loaders=loaders,
                ),
                first=progress.step,
                rate=lambda step: linear_rate(step, steps, peak=lr, warmup=spec.warmup),
                ranks=ranks,
                hooks=Hooks(
                    after=(progress.note, lambda done: self._keep_best(progress, grid), save),
                    stop=stop,
                    lost=lost,
                    save=lambda: checkpoints is not None and checkpoints.due(progress.step),
                ),
            )
        if grid.kept is not None and progress.step == steps:
            _copy(grid.kept, model.state_dict())
            self.encoder.refresh()
        return model.eval(), progress.trained()


@torch.no_grad()
def _copy(source: Mapping[str, Tensor], target: Mapping[str, Tensor]) -> None:
    """Copy tensors by name, in place: captured graphs read the weights where they are."""
    for name, tensor in target.items():
        tensor.copy_(source[name])


def rows_of(family: FamilyTrainer, step: int, seed: int) -> np.ndarray:
    """Return the training examples of a step: a new order in each epoch, and no batch across two epochs."""
    batch, size = family.task.batch, family.size
    per_epoch = -(-size // batch)
    epoch, position = divmod(step, per_epoch)
    first, until = position * batch, min((position + 1) * batch, size)
    blocks = [_order(size, seed, epoch, block) for block in range(first // BLOCK, (until - 1) // BLOCK + 1)]
    whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return whole[first % BLOCK : first % BLOCK + until - first]


@lru_cache(maxsize=8)
def _order(size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Return the examples at the positions of one block of an epoch; computed and cached for many steps at once."""
    numbers = torch.arange(block * BLOCK, min((block + 1) * BLOCK, size))
    order = permute(numbers, size, salt(seed, "order", epoch)).numpy()
    order.flags.writeable = False
    return order


def examples_of(family: FamilyTrainer, steps: int) -> int:
    """Return how many examples `rows_of` gives in so many steps."""
    epochs, more = divmod(steps, -(-family.size // family.task.batch))
    return epochs * family.size + min(more * family.task.batch, family.size)


def batches_of(
    family: FamilyTrainer, step: int, seed: int, options: TuningOptions, buckets: Buckets | None = None
) -> list[TaskBatch]:
    """Return the micro-batches of a step, each with its own index, so that dropout differs between them.

    A step of one micro-batch is padded to one of `buckets`, if given. For a GPU the batches are in pinned memory.
    """
    batches = family.batch(rows_of(family, step, seed), options)
    if buckets is not None and len(batches) == 1:
        batches = [buckets.pad(batches[0])]
    if options.device.type == "cuda":
        batches = [batch.gathered(pinned=True) for batch in batches]
    return [replace(batch, index=step * MOST_MICRO + number) for number, batch in enumerate(batches)]


def build_optimizer(model: nn.Module, spec: AdamW, rows: TrainedRows | None = None) -> torch.optim.AdamW:
    """Make an AdamW without weight decay on biases and LayerNorms, as transformers' Trainer does.

    RMSNorms do decay, as in the published results, because the Trainer did not recognize its norm class. If `rows` is given,
    its table takes the place of the embedding in its group.
    """
    norms = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, nn.LayerNorm)
        for parameter in module.parameters(recurse=False)
    }
    decayed: dict[str, nn.Parameter] = {}
    spared: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_spared = name.endswith("bias") or id(parameter) in norms
            (spared if is_spared else decayed)[name] = parameter
    groups: list[dict[str, Any]] = [
        group | {"weight_decay": decay}
        for parameters, decay in ((decayed, spec.weight_decay), (spared, 0.0))
        if parameters
        for group in by_depth(model, parameters, spec.layer_decay)
    ]
    if rows is not None:
        groups = [group | {"params": rows.among(group["params"])} for group in groups]
    return torch.optim.AdamW(groups, lr=0.0, betas=spec.betas, eps=spec.eps, fused=True)


def score(
    model: TaskModel,
    family: FamilyTrainer,
    options: TuningOptions,
    parts: Sequence[Part] = PARTS,
    *,
    sampled: int = 0,
) -> dict[Part, PartScores]:
    """Score a fine-tuned model on a task, which may differ from the one it was trained on.

    `sampled`: of the documents that validation does not judge, retrieval searches so many; 0: all.
    """
    own_head = model.head
    if not list(own_head.parameters()):  # retrieval: the head has no weights, so any task can be scored
        model.head = family.head(model.encoder.width)
    try:
        if sampled and isinstance(family, Retrieval):
            return family.score(model, options, parts, among=family.sample(sampled))
        return family.score(model, options, parts)
    finally:
        model.head = own_head
