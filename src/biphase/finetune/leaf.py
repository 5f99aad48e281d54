"""One fine-tuning: a model, a task, a learning rate, a seed. The loop is the one that pretrains.

The seed fixes the head's weights, the order of the examples and what dropout drops, each by counters: a leaf that is
computed again, in whatever company, sees the same.

A long one saves checkpoints on its way, and goes on from the last (`checkpoints.py`).

What the fine-tunings of a task share (`Grid`) stays in the device's memory from one to the next; each begins by putting
back what it holds. Where the encoder allows it, their steps are CUDA graphs, and of its embedding only the words that
occur are trained.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from biphase.data.stream import load_ahead
from biphase.finetune.buckets import Buckets, buckets_of
from biphase.finetune.checkpoints import Checkpoints
from biphase.finetune.families import Family, Part, Scored
from biphase.finetune.graphs import Graphs
from biphase.finetune.model import Setting, TaskBatch, Tuned
from biphase.finetune.words import Words, words_of
from biphase.models.encoder import Encoder
from biphase.models.heads import initialise
from biphase.randomness import permute, salt
from biphase.specs import AdamW, Finetune
from biphase.training.devices import Ranks, draw_from
from biphase.training.loop import Done, train
from biphase.training.optimizer import by_depth, forget, make_capturable, moments
from biphase.training.schedule import linear_rate

MOST_MICRO = 2**12  # micro-batches of a step
CURVE = 50  # points of the loss curve that are kept
BLOCK = 2**13  # examples whose order is worked out at a time


@dataclass(frozen=True)
class Trained:
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

    def note(self, done: Done) -> None:
        self.step = done.step + 1
        self.skipped.add_(done.unsound)
        if done.step % max(1, self.steps // CURVE) == 0 or self.step == self.steps:
            self.losses[self.step] = done.loss
        self.tell(self.step, self.steps)

    def trained(self) -> Trained:
        curve = {step: float(loss) for step, loss in self.losses.items()}
        return Trained(
            self.step,
            examples_of(self.family, self.step),
            time.monotonic() - self.began,
            curve,
            int(self.skipped.item()),
            finished=self.step == self.steps,
        )


@dataclass(frozen=True)
class Grid:
    """What all fine-tunings of a task share, and where each leaves its results."""

    family: Family
    spec: AdamW
    model: Tuned
    adam: torch.optim.AdamW
    graphs: Graphs | None  # None: every step is taken the plain way
    words: Words | None  # None: the whole embedding is trained

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
        return {**self.model.state_dict(), **trained}, moments(trained, self.adam)

    def training(self) -> AbstractContextManager[None]:
        """Steps are taken inside; behind it the model is whole."""
        return self.words.trained(self.model.encoder) if self.words else nullcontext()


class Bench:
    """A model on which fine-tunings are made one after another: its weights are put back before each."""

    def __init__(self, encoder: Encoder, setting: Setting) -> None:
        self.setting = setting
        self.encoder = encoder.to(setting.device)
        for parameter in encoder.parameters():  # and no buffer: rotations in bf16 would be wrong by radians
            parameter.data = parameter.data.to(setting.dtype)
        self.weights = {name: value.clone() for name, value in encoder.state_dict().items()}
        encoder.prepare(setting.device, setting.precision)
        self.grid: Grid | None = None

    def fresh(self, family: Family, seed: int) -> Tuned:
        """The model as it came, with a new head."""
        self._put_back()
        head = family.head(self.encoder.width)
        initialise(head, std=self.encoder.init_std, seed=salt(seed, "head"))
        return Tuned(self.encoder, head.to(self.setting.device, self.setting.dtype))

    @torch.no_grad()
    def _put_back(self) -> None:
        now = self.encoder.state_dict()
        for name, value in self.weights.items():
            now[name].copy_(value)
        # A fine-tuning that failed on its way may have left gradients.
        self.encoder.zero_grad(set_to_none=True)
        self.encoder.refresh()

    def _grid(self, family: Family, spec: AdamW, seed: int) -> Grid:
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

    def _new_grid(self, family: Family, spec: AdamW) -> Grid:
        setting = self.setting
        head = family.head(self.encoder.width).to(setting.device, setting.dtype)
        model = Tuned(self.encoder, head)
        words = words_of(family, self.encoder) if setting.sparing else None
        adam = build_optimizer(model, spec, words)
        graphs = None
        allowed = setting.graphs and setting.varlen and setting.device.type == "cuda"
        if allowed and self.encoder.graphable:
            make_capturable(adam, setting.device)
            graphs = Graphs(buckets_of(family, setting), setting.device)
        return Grid(family, spec, model, adam, graphs, words)

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
    ) -> tuple[Tuned, Trained]:
        """Train a fresh model on the task, or go on from a checkpoint; what it scores is asked afterwards.

        `lost`: the trial is another worker's now, so nothing more is saved.
        """
        setting, steps = self.setting, family.steps
        if not steps:  # zero-shot
            return self.fresh(family, seed).eval(), Trained(0, 0, 0.0, {}, 0, finished=True)
        grid = self._grid(family, spec.optimizer, seed)
        model, buckets = grid.model.train(), grid.buckets

        def save(done: Done) -> None:
            if checkpoints and not done.lost and (done.save or done.stop) and progress.step < steps:
                checkpoints.save(*grid.tensors(), progress.trained().about())

        def loss_sum(batch: TaskBatch) -> Tensor:
            if not self.encoder.graphable:  # else nothing is dropped, and a graph could not be told
                draw_from(salt(seed, "dropout", batch.draw), setting.device)
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
    family: Family, step: int, seed: int, setting: Setting, buckets: Buckets | None = None
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


def build_optimizer(model: nn.Module, spec: AdamW, words: Words | None = None) -> torch.optim.AdamW:
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


def score(model: Tuned, family: Family, setting: Setting) -> dict[Part, Scored]:
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
