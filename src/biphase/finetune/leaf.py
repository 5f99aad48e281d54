"""One fine-tuning: a model, a task, a learning rate, a seed. The loop is the one that pretrains.

The seed fixes the head's weights, the order of the examples and what dropout drops, each by counters: a leaf that is
computed again, in whatever company, sees the same.

What the fine-tunings of a task share (`Grid`) stays in the device's memory from one to the next; each begins by putting
back what it holds. Where the encoder allows it, their steps are CUDA graphs, and of its embedding only the words that
occur are trained.
"""

from __future__ import annotations

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
from biphase.training.optimizer import by_depth, forget, make_capturable
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
        loaders: int = 0,
        tell: Callable[[int, int], None] = lambda step, steps: None,
    ) -> tuple[Tuned, Trained]:
        """Train a fresh model on the task; what it scores is asked afterwards."""
        setting, steps = self.setting, family.steps
        if not steps:  # zero-shot
            return self.fresh(family, seed).eval(), Trained(0, 0, 0.0, {}, 0, finished=True)
        grid = self._grid(family, spec.optimizer, seed)
        model, buckets = grid.model.train(), grid.buckets
        began, every = time.monotonic(), max(1, steps // CURVE)
        losses: dict[int, Tensor] = {}
        skipped = torch.zeros((), device=setting.device)
        last = 0

        def note(done: Done) -> None:
            nonlocal last
            last = done.step + 1
            skipped.add_(done.unsound)
            if done.step % every == 0 or last == steps:
                losses[last] = done.loss
            tell(last, steps)

        def loss_sum(batch: TaskBatch) -> Tensor:
            if not self.encoder.graphable:  # else nothing is dropped, and a graph could not be told
                draw_from(salt(seed, "dropout", batch.draw), setting.device)
            return family.loss_sum(model, batch)

        with grid.training():
            train(
                grid.parameters,
                grid.adam,
                loss_sum,
                load_ahead(
                    lambda step: batches_of(family, step, seed, setting, buckets), 0, steps, loaders=loaders
                ),
                first=0,
                rate=lambda step: linear_rate(step, steps, peak=lr, warmup=spec.warmup),
                clip=spec.optimizer.clip,
                ranks=Ranks(0, 1, setting.device),
                autocast=setting.autocast,
                after=(note,),
                stop=stop,
                copies=self.encoder.copies,
                refresh=self.encoder.refresh,
                step=grid.graphs.over if grid.graphs else lambda plain: plain,
            )
        curve = {step: float(loss) for step, loss in losses.items()}
        seconds = time.monotonic() - began
        trained = Trained(
            last, examples_of(family, last), seconds, curve, int(skipped.item()), finished=last == steps
        )
        return model.eval(), trained


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
