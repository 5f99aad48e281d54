"""Only the words that occur in a task's training texts are trained; what happens to all others is one number.

Of a vocabulary of 128,000 words a task has some thousand. The others never get a gradient: AdamW keeps their moments at
zero and multiplies them by 1 − rate · decay at each step, like everything that decays. So the optimizer is given a small
table of the words that occur, and below them a row of ones that no text asks for: it shrinks as the other words would,
in the same kernel, at the same share of the rate, and stays as it is when a step is skipped.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Mapping
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
from biphase.finetune.families import Family, Part, PartScores
from biphase.finetune.graphs import Buckets, Graphs, buckets_of
from biphase.models.encoder import Encoder
from biphase.models.heads import initialise
from biphase.randomness import permute, salt
from biphase.specs import AdamW, Finetune
from biphase.store import Store, debris, publish, read_verified, verify, write_json
from biphase.tasks.encode import Ragged
from biphase.training.distributed import Ranks, seed_device
from biphase.training.loop import LoopStep, train
from biphase.training.optimizer import by_depth, forget, linear_rate, make_capturable, optimizer_state
from biphase.training.tensors import PendingTensor, Tensors, write

PADDING = 0  # the word that batches are padded with


class TrainedRows:
    """The rows of an embedding that texts ask for, as a parameter of its own."""

    def __init__(self, whole: nn.Parameter, texts: Iterable[Ragged], still: int | None = None) -> None:
        """`still`: a word that gets no gradient, as transformers treats the one it pads with."""
        occurs = np.zeros(len(whole), bool)
        occurs[PADDING] = True
        for some in texts:
            occurs[some.flat] = True
        ids = np.flatnonzero(occurs)
        row_of = np.zeros(len(whole), np.int64)  # of a word that does not occur nobody asks
        row_of[ids] = np.arange(len(ids))
        self.whole = whole
        self.ids, self.row_of = (torch.from_numpy(one).to(whole.device) for one in (ids, row_of))
        self.still = int(row_of[still]) if still is not None and occurs[still] else None
        self.table = nn.Parameter(whole.detach().new_ones(len(ids) + 1, whole.shape[1]))

    def among(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The same parameters in the same order, the table in place of the whole embedding."""
        return [self.table if one is self.whole else one for one in parameters]

    def look_up(self, ids: Tensor) -> Tensor:
        return F.embedding(self.row_of[ids], self.table, self.still)

    @contextmanager
    def trained(self, encoder: Encoder) -> Generator[None]:
        """Meanwhile the encoder reads the table, which begins as the embedding is; then the embedding is whole again."""
        fused = encoder.fused
        assert fused is not None, "only the fused trunk can read another table"
        self._take_out()
        fused.words = self.look_up
        try:
            yield
        finally:
            fused.words = None
        self._put_back()

    @torch.no_grad()
    def _take_out(self) -> None:
        # In the same memory each time: captured graphs read it there.
        self.table[:-1] = self.whole[self.ids]
        self.table[-1] = 1
        self.table.grad = None  # a fine-tuning that failed on its way may have left one

    @torch.no_grad()
    def _put_back(self) -> None:
        self.whole.mul_(self.table[-1])
        self.whole[self.ids] = self.table[:-1]


def trained_rows(family: Family, encoder: Encoder) -> TrainedRows | None:
    """The words to train for a task; None where the whole embedding is trained, or nothing of it.

    In 16 bits most steps of the decay are lost to rounding, word by word: no one number could tell which.
    """
    if encoder.fused is None or not family.inputs:
        return None
    own = encoder.fused.trunk.embed_tokens
    trained = own.weight.requires_grad and own.weight.dtype == torch.float32
    return TrainedRows(own.weight, family.inputs, own.padding_idx) if trained else None


# ---------------------------------------------------------------- checkpoints
# Checkpoints of a trial: a fine-tuning that is stopped goes on from the last one, to the same bits on a CPU.
#
#     store/unfinished/<key of the training>-<step>/
#       model.safetensors       all weights; of an embedding of which only the words that occur are trained, that table
#       optimizer.safetensors   AdamW's moments and step counts
#       progress.json              the step, the losses so far, skipped steps, seconds
#
# Dropout and the order of examples are functions of the step, so nothing else has to be kept. A checkpoint is published
# like any result, whole or not at all, and replaces the one before it; it is removed when the scores are published.
# Weights and moments are restored in place, since captured CUDA graphs read them there.


TRIAL = "progress.json"
WORTH_KEEPING = 10.0  # seconds of work; a shorter trial starts again sooner than it is written and read


class Checkpoints:
    """Those of one trial, for whoever holds its lease."""

    def __init__(
        self,
        store: Store,
        key: str,
        *,
        steps: int = 0,  # save every so many steps, also of a short trial; 0: by time
        seconds: float = 600.0,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.store, self.key, self.say = store, key, say
        self.every_steps, self.every_seconds = steps, seconds
        self.saved = 0  # the step of the last one that was written or read
        self.saved_at = time.monotonic()

    def due(self, step: int) -> bool:
        """Is a checkpoint to be saved after the step that follows `step` steps?"""
        if self.every_steps:
            return (step + 1) % self.every_steps == 0
        return time.monotonic() - self.saved_at > self.every_seconds

    def save(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor], about: dict[str, Any]
    ) -> bool:
        """Publish a checkpoint, unless there is too little to keep. True if this step is in the store."""
        step = about["step"]
        if self.saved == step:
            return True
        if not self.every_steps and about["seconds"] < WORTH_KEEPING:
            return False
        name = f"trial-{self.key}"
        for left in self.store.attempts.glob(f"{name}-*"):  # by a worker that was killed
            shutil.rmtree(left, ignore_errors=True)
        with self.store.attempt(name) as folder:
            known = {
                f"{kind}.safetensors": write(folder / f"{kind}.safetensors", _coming(tensors))
                for kind, tensors in (("model", weights), ("optimizer", optimizer_tensors))
            }
            write_json(folder / TRIAL, {"key": self.key, "threads": torch.get_num_threads(), **about})
            publish(folder, self.store.unfinished / f"{self.key}-{step}", known)
        self.saved, self.saved_at = step, time.monotonic()
        for place in self._places():
            if place.name != f"{self.key}-{step}":
                self.store.discard(place)
        return True

    def load(
        self, weights: Mapping[str, Tensor], optimizer_tensors: Mapping[str, Tensor]
    ) -> dict[str, Any] | None:
        """Put the last checkpoint into these tensors; gives what `save` was told beside them. None: start anew.

        On a CPU the rest is computed with as many threads as before: sums in another order would be other bits.
        """
        both = {"model": weights, "optimizer": optimizer_tensors}
        for place in self._places():
            try:
                about = self._checked(place, both)
            except (StoreError, SafetensorError, OSError, KeyError, TypeError, ValueError) as wrong:
                self.say(f"  note: {place} cannot be gone on from ({one_line(wrong)}); it is removed")
                self.store.discard(place)
                continue
            for kind, tensors in both.items():
                with Tensors(place, kind) as saved, torch.no_grad():
                    for name, one in tensors.items():
                        one.copy_(saved.whole(name))
            self.saved, self.saved_at = about["step"], time.monotonic()
            on_cpu = all(one.device.type == "cpu" for one in weights.values())
            if on_cpu and 0 < about["threads"] <= (os.cpu_count() or 1):
                torch.set_num_threads(about["threads"])
            return about
        return None

    def discard(self) -> None:
        """The trial is done: its checkpoints go."""
        for place in self._places():
            self.store.discard(place)

    def _places(self) -> list[Path]:
        """Checkpoints of this trial, the latest first; whether they are whole is seen when they are read."""
        steps = {
            int(step): place
            for place in self.store.unfinished.glob(f"{self.key}-*")
            if (step := place.name.rpartition("-")[2]).isdecimal()
        }
        return [steps[step] for step in sorted(steps, reverse=True)]

    def _checked(self, place: Path, both: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Any]:
        """What a checkpoint says, after comparing all of it with the tensors it would be put into."""
        if not self.store.has(place):
            raise StoreError(debris(place))
        verify(place)
        about = json.loads(read_verified(place, TRIAL))
        if f"{about['key']}-{about['step']}" != place.name:
            raise StoreError(f"it is the checkpoint {about['key']}-{about['step']}")
        for kind, tensors in both.items():
            with Tensors(place, kind) as saved:
                wanted = {name: (tuple(one.shape), one.dtype) for name, one in tensors.items()}
                if {name: (saved.shapes[name], saved.dtypes[name]) for name in saved.shapes} != wanted:
                    raise StoreError("its tensors are those of another kind of device or another model")
        return about


def _coming(tensors: Mapping[str, Tensor]) -> dict[str, PendingTensor]:
    return {
        name: PendingTensor(tuple(one.shape), one.dtype, lambda one=one: one.detach().cpu())
        for name, one in tensors.items()
    }


# ---------------------------------------------------------------- trial
# One fine-tuning: a model, a task, a learning rate, a seed. The loop is the one that pretrains.
#
# The seed fixes the head's weights, the order of the examples and what dropout drops, each by counters: a trial that is
# computed again, in whatever company, sees the same.
#
# A long one saves checkpoints on its way, and goes on from the last (`checkpoints.py`).
#
# What the fine-tunings of a task share (`Grid`) stays in the device's memory from one to the next; each begins by putting
# back what it holds. Where the encoder allows it, their steps are CUDA graphs, and of its embedding only the words that
# occur are trained.


MOST_MICRO = 2**12  # micro-batches of a step
CURVE = 50  # points of the loss curve that are kept
BLOCK = 2**13  # examples whose order is worked out at a time


@dataclass(frozen=True)
class TrainingSummary:
    """What a fine-tuning leaves behind, apart from the model."""

    steps: int
    examples: int
    seconds: float
    losses: dict[int, float]  # some steps, evenly spread, and the mean loss of each
    skipped: int  # steps without finite numbers
    finished: bool

    def about(self) -> dict[str, Any]:
        """What a checkpoint says beside its tensors."""
        losses = [[step, loss if math.isfinite(loss) else None] for step, loss in self.losses.items()]
        return {"step": self.steps, "losses": losses, "skipped": self.skipped, "seconds": self.seconds}


class TrialProgress:
    """How far a fine-tuning is, from its beginning or from a checkpoint. Counting never waits for the device."""

    def __init__(
        self,
        family: Family,
        device: torch.device,
        tell: Callable[[int, int], None],
        saved: dict[str, Any] | None,
    ) -> None:
        self.family, self.tell, self.steps = family, tell, family.steps
        about = saved or {"step": 0, "losses": [], "skipped": 0, "seconds": 0.0}
        self.step: int = about["step"]
        self.losses: dict[int, Tensor | float] = {
            step: math.nan if loss is None else loss for step, loss in about["losses"]
        }
        self.skipped = torch.tensor(float(about["skipped"]), device=device)
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
        )


@dataclass(frozen=True)
class TaskGrid:
    """What all fine-tunings of a task share, and where each leaves its results."""

    family: Family
    spec: AdamW
    model: TaskModel
    adam: torch.optim.AdamW
    graphs: Graphs | None  # None: every step is taken the plain way
    words: TrainedRows | None  # None: the whole embedding is trained

    @property
    def buckets(self) -> Buckets | None:
        return self.graphs.buckets if self.graphs else None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """What is trained."""
        every = [one for one in self.model.parameters() if one.requires_grad]
        return self.words.among(every) if self.words else every

    def tensors(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """All that training changes, by name and where it lies: weights, and the optimizer's moments."""
        names = [name for name, one in self.model.named_parameters() if one.requires_grad]
        trained = dict(zip(names, self.parameters, strict=True))
        return {**self.model.state_dict(), **trained}, optimizer_state(trained, self.adam)

    def training(self) -> AbstractContextManager[None]:
        """Steps are taken inside; behind it the model is whole."""
        return self.words.trained(self.model.encoder) if self.words else nullcontext()


class FineTuner:
    """A model on which fine-tunings are made one after another: its weights are put back before each."""

    def __init__(self, encoder: Encoder, setting: TuningOptions) -> None:
        self.setting = setting
        self.encoder = encoder.to(setting.device)
        for parameter in encoder.parameters():  # and no buffer: rotations in bf16 would be wrong by radians
            parameter.data = parameter.data.to(setting.dtype)
        self.weights = {name: value.clone() for name, value in encoder.state_dict().items()}
        encoder.prepare(setting.device, setting.precision)
        self.grid: TaskGrid | None = None

    def fresh(self, family: Family, seed: int) -> TaskModel:
        """The model as it came, with a new head."""
        self._put_back()
        head = family.head(self.encoder.width)
        initialise(head, std=self.encoder.init_std, seed=salt(seed, "head"))
        return TaskModel(self.encoder, head.to(self.setting.device, self.setting.dtype))

    @torch.no_grad()
    def _put_back(self) -> None:
        now = self.encoder.state_dict()
        for name, value in self.weights.items():
            now[name].copy_(value)
        # A fine-tuning that failed on its way may have left gradients.
        self.encoder.zero_grad(set_to_none=True)
        self.encoder.refresh()

    def _grid(self, family: Family, spec: AdamW, seed: int) -> TaskGrid:
        """The grid of a task, at the beginning of a fine-tuning: the same memory while the task is the same."""
        if self.grid is None or self.grid.family is not family or self.grid.spec != spec:
            self.grid = None  # the old one's memory first
            self.grid = self._new_grid(family, spec)
        grid = self.grid
        self._put_back()
        grid.model.zero_grad(set_to_none=True)
        initialise(grid.model.head, std=self.encoder.init_std, seed=salt(seed, "head"))
        forget(grid.adam)
        return grid

    def _new_grid(self, family: Family, spec: AdamW) -> TaskGrid:
        setting = self.setting
        head = family.head(self.encoder.width).to(setting.device, setting.dtype)
        model = TaskModel(self.encoder, head)
        words = trained_rows(family, self.encoder) if setting.sparing else None
        adam = build_optimizer(model, spec, words)
        graphs = None
        allowed = setting.graphs and setting.varlen and setting.device.type == "cuda"
        if allowed and self.encoder.graphable:
            make_capturable(adam, setting.device)
            graphs = Graphs(buckets_of(family, setting), setting.device)
        return TaskGrid(family, spec, model, adam, graphs, words)

    def finetune(
        self,
        family: Family,
        spec: Finetune,
        *,
        lr: float,
        seed: int,
        stop: Callable[[], bool] = lambda: False,
        lost: Callable[[], bool] = lambda: False,
        loaders: int = 0,
        tell: Callable[[int, int], None] = lambda step, steps: None,
        checkpoints: Checkpoints | None = None,
    ) -> tuple[TaskModel, TrainingSummary]:
        """Train a fresh model on the task, or go on from a checkpoint; what it scores is asked afterwards.

        `lost`: the trial is another worker's now, so nothing more is saved.
        """
        setting, steps = self.setting, family.steps
        if not steps:  # zero-shot
            return self.fresh(family, seed).eval(), TrainingSummary(0, 0, 0.0, {}, 0, finished=True)
        grid = self._grid(family, spec.optimizer, seed)
        model, buckets = grid.model.train(), grid.buckets

        def save(done: LoopStep) -> None:
            if checkpoints and not done.lost and (done.save or done.stop) and progress.step < steps:
                checkpoints.save(*grid.tensors(), progress.trained().about())

        def loss_sum(batch: TaskBatch) -> Tensor:
            if not self.encoder.graphable:  # else nothing is dropped, and a graph could not be told
                seed_device(salt(seed, "dropout", batch.draw), setting.device)
            return family.loss_sum(model, batch)

        with grid.training():
            saved = checkpoints.load(*grid.tensors()) if checkpoints else None
            progress = TrialProgress(family, setting.device, tell, saved)
            if saved:
                self.encoder.refresh()  # its 16-bit copies are those of the weights it came with
            train(
                grid.parameters,
                grid.adam,
                loss_sum,
                load_ahead(
                    lambda step: batches_of(family, step, seed, setting, buckets),
                    progress.step,
                    steps,
                    loaders=loaders,
                ),
                first=progress.step,
                rate=lambda step: linear_rate(step, steps, peak=lr, warmup=spec.warmup),
                clip=spec.optimizer.clip,
                ranks=Ranks(0, 1, setting.device),
                autocast=setting.autocast,
                after=(progress.note, save),
                stop=stop,
                lost=lost,
                save=lambda: checkpoints is not None and checkpoints.due(progress.step),
                copies=self.encoder.copies,
                refresh=self.encoder.refresh,
                step=grid.graphs.over if grid.graphs else lambda plain: plain,
            )
        return model.eval(), progress.trained()


def rows_of(family: Family, step: int, seed: int) -> np.ndarray:
    """The training examples of a step: each epoch another order, and no batch across two epochs."""
    batch, size = family.task.batch, family.size
    per_epoch = -(-size // batch)
    epoch, place = divmod(step, per_epoch)
    first, until = place * batch, min((place + 1) * batch, size)
    blocks = [_order(size, seed, epoch, block) for block in range(first // BLOCK, (until - 1) // BLOCK + 1)]
    whole = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
    return whole[first % BLOCK : first % BLOCK + until - first]


@lru_cache(maxsize=8)
def _order(size: int, seed: int, epoch: int, block: int) -> np.ndarray:
    """Which examples of `size` come at the places of a block of an epoch; worked out for many steps at once."""
    numbers = torch.arange(block * BLOCK, min((block + 1) * BLOCK, size))
    order = permute(numbers, size, salt(seed, "order", epoch)).numpy()
    order.flags.writeable = False
    return order


def examples_of(family: Family, steps: int) -> int:
    """How many examples `rows_of` gives in so many steps."""
    epochs, more = divmod(steps, -(-family.size // family.task.batch))
    return epochs * family.size + min(more * family.task.batch, family.size)


def batches_of(
    family: Family, step: int, seed: int, setting: TuningOptions, buckets: Buckets | None = None
) -> list[TaskBatch]:
    """The micro-batches of a step, each with a draw of its own, so that dropout differs between them.

    A step of a single one is padded to one of `buckets`, where there are some. For a GPU they are ready to be copied.
    """
    made = family.batch(rows_of(family, step, seed), setting)
    if buckets is not None and len(made) == 1:
        made = [buckets.pad(made[0])]
    if setting.device.type == "cuda":
        made = [batch.gathered(pinned=True) for batch in made]
    return [replace(batch, draw=step * MOST_MICRO + number) for number, batch in enumerate(made)]


def build_optimizer(model: nn.Module, spec: AdamW, words: TrainedRows | None = None) -> torch.optim.AdamW:
    """AdamW whose weight decay spares biases and LayerNorms, as transformers' Trainer spares them.

    RMSNorms do decay, as they did in the paper, whose norm class the Trainer did not know. `words` take the place of
    the embedding, in its group.
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
        for some, decay in ((decayed, spec.weight_decay), (spared, 0.0))
        if some
        for group in by_depth(model, some, spec.layer_decay)
    ]
    if words is not None:
        groups = [group | {"params": words.among(group["params"])} for group in groups]
    return torch.optim.AdamW(groups, lr=0.0, betas=spec.betas, eps=spec.eps, fused=True)


def score(model: TaskModel, family: Family, setting: TuningOptions) -> dict[Part, PartScores]:
    """The scores of a fine-tuned model on a task, which may be another one than it was trained on."""
    own_head = model.head
    if not list(
        own_head.parameters()
    ):  # retrieval: nothing of the head was learned, so any task can be asked
        model.head = family.head(model.encoder.width)
    try:
        return family.score(model, setting)
    finally:
        model.head = own_head
