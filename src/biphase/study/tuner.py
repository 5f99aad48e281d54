"""Computes fine-tunings for a worker: what is loaded and tokenised once serves the whole grid.

A grid is a model and a task; its learning rates and seeds run one after another in this process. The model's
weights, the tokenised datasets and the measured times are kept from one to the next, so a training costs its steps
and its scores and nothing else.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from biphase.data.shards import Shards
from biphase.errors import ModelError
from biphase.files import Store, publish, write_json
from biphase.finetune.checkpoints import Checkpoints
from biphase.finetune.families import Family, Part, Scored, as_text, family_of
from biphase.finetune.leaf import Bench, Trained, score
from biphase.finetune.model import Setting, Tuned
from biphase.finetune.subject import Subject, subject_of_hub, subject_of_state
from biphase.metadata import LEAF
from biphase.models.attention import varlen_works
from biphase.models.encoder import Encoder
from biphase.records import encode
from biphase.specs import Finetune, Hub, Pretrain, Task
from biphase.study.leaves import PREDICTIONS, VALUES, Leaf, Training
from biphase.study.plan import Plan
from biphase.study.shard_maker import Stopped
from biphase.tasks.load import load
from biphase.tasks.places import refuse_changed
from biphase.training.devices import Ranks, machine

SHOWN_EVERY = 0.5  # seconds between two updates of the live line


class Tuner:
    def __init__(
        self,
        plan: Plan,
        store: Store,
        ranks: Ranks,
        *,
        shards: Callable[[Pretrain], Shards],
        stop: Callable[[], bool],
        live: Callable[[str], None],
        say: Callable[[str], None] = lambda text: None,
        checkpoint_steps: int = 0,
        checkpoint_seconds: float = 600.0,
    ) -> None:
        assert plan.study.finetune is not None
        self.plan, self.store, self.ranks = plan, store, ranks
        self.spec: Finetune = plan.study.finetune
        self.shards, self.stop, self.live = shards, stop, live
        self.checkpoints = partial(
            Checkpoints, store, steps=checkpoint_steps, seconds=checkpoint_seconds, say=say
        )
        self.unsaved = 0.0  # seconds of work that the last stop has cost
        self.lost: Callable[[], bool] = lambda: False  # is the training at hand another's now?
        self.families: dict[tuple[str, str], Family] = {}
        self.at_hand: tuple[str, Bench, Subject] | None = None  # the model, its bench
        self.seconds: dict[str, list[float]] = defaultdict(list)  # measured, by task

    def compute(self, training: Training, lost: Callable[[], bool]) -> Scored | None:
        """Fine-tune, score, publish. Gives the validation scores of the task itself, or None if it was stopped."""
        threads = torch.get_num_threads()
        try:
            return self._compute(training, lost)
        finally:
            torch.set_num_threads(threads)  # a trial that goes on takes as many as it began with

    def _compute(self, training: Training, lost: Callable[[], bool]) -> Scored | None:
        began = time.monotonic()
        self.lost, self.unsaved = lost, 0.0
        title = training.title(self.plan)
        self.live(f"{title}   reading the model and the data")
        bench, subject = self._bench(training.model)
        for leaf in training.leaves:
            self.store.refuse_debris(self.store.leaves / leaf.key)  # now, and not after the work
        family = self._family(training.task, subject)
        shown = 0.0

        def tell(step: int, steps: int) -> None:
            nonlocal shown
            if time.monotonic() - shown > SHOWN_EVERY:
                shown = time.monotonic()
                self.live(f"{title}   step {step:,} of {steps:,}")

        checkpoints = self.checkpoints(training.key)
        model, trained = bench.finetune(
            family,
            self.spec,
            lr=training.lr,
            seed=training.seed,
            stop=self.stop,
            lost=lost,
            loaders=1 if self.ranks.device.type == "cuda" else 0,
            tell=tell,
            checkpoints=checkpoints,
        )
        if not trained.finished:
            self.unsaved = 0.0 if lost() or checkpoints.saved == trained.steps else trained.seconds
            return None
        at = time.monotonic()
        try:
            own = self._score(training, bench, subject, model, trained)
        except Stopped:
            if not lost():
                assert bench.grid is not None
                kept = checkpoints.save(*bench.grid.tensors(), trained.about())
                self.unsaved = time.monotonic() - at + (0.0 if kept else trained.seconds)
            raise
        if own is not None:
            checkpoints.discard()
            self.seconds[training.task.name].append(time.monotonic() - began)
        return own

    def _score(
        self, training: Training, bench: Bench, subject: Subject, model: Tuned, trained: Trained
    ) -> Scored | None:
        """Score and publish what is missing; gives the validation scores of the task itself. None: another's now."""
        title, own = training.title(self.plan), Scored({}, {})
        for leaf in training.leaves:
            if self.store.knows(self.store.leaves / leaf.key):
                continue
            self.live(f"{title}   scoring {leaf.task.name}")
            asked = self._family(leaf.task, subject)
            at = time.monotonic()
            scored = score(model, asked, bench.setting)
            if self.lost():
                return None
            self._publish(leaf, training, trained, asked, scored, time.monotonic() - at)
            if leaf.task is training.task:
                own = scored["validation"]
        return own

    def seconds_left(self, left: list[Training]) -> float | None:
        """At the speed measured here; tasks not measured yet are taken for an average one."""
        every = [seconds for some in self.seconds.values() for seconds in some]
        if not every:
            return None
        usual = sum(every) / len(every)
        means = {name: sum(some) / len(some) for name, some in self.seconds.items()}
        return sum(means.get(training.task.name, usual) for training in left)

    # ------------------------------------------------------------ what is kept

    def _bench(self, model: str) -> tuple[Bench, Subject]:
        if self.at_hand is None or self.at_hand[0] != model:
            self.at_hand = None  # the old one's memory first
            subject = self._subject(model)
            reads = subject.reading.identity
            self.families = {place: kept for place, kept in self.families.items() if place[1] == reads}
            self.at_hand = model, Bench(subject.encoder, self._setting(subject.encoder)), subject
        return self.at_hand[1:]

    def _setting(self, encoder: Encoder) -> Setting:
        precision = "fp32" if self.spec.precision == "fp32" else "bf16"
        device = self.ranks.device
        varlen = varlen_works(device, precision)
        setting = Setting.of(device, self.spec.precision, varlen=varlen, encoder=encoder)
        return replace(setting, causal=self.spec.causal, pause=self._pause)

    def _pause(self) -> None:
        """Asked while a model is scored, which may take long."""
        if self.stop() or self.lost():
            raise Stopped

    def _subject(self, model: str) -> Subject:
        if model in self.plan.states:
            run = self.plan.states[model].run
            return subject_of_state(run, model, self.store, self.shards(run), self.spec)
        run = self.plan.roots[model].run
        if isinstance(run.start, Hub):
            return subject_of_hub(run.start, self.spec)
        return subject_of_state(run, None, self.store, self.shards(run), self.spec)

    def _family(self, task: Task, subject: Subject) -> Family:
        place = self.plan.tasks[task.name], subject.reading.identity
        if place not in self.families:
            self.live(f"reading {task.name}")
            examples = load(task, documents=self.spec.documents)
            refuse_changed(task, place[0], self.store)
            self.families[place] = family_of(task, examples, subject.reading, protocol=self.spec.protocol)
        return self.families[place]

    # ------------------------------------------------------------ what comes out

    def _publish(
        self,
        leaf: Leaf,
        training: Training,
        trained: Trained,
        family: Family,
        scored: dict[Part, Scored],
        seconds: float,
    ) -> None:
        borrowed = leaf.task is not training.task
        about = {
            "key": leaf.key,
            "training": training.key,
            "model": training.model,
            "task": encode(leaf.task),
            "trained_on": encode(training.task) if borrowed else None,
            "finetune": {k: v for k, v in encode(self.spec).items() if k not in ("tasks", "lrs", "seeds")},
            "lr": training.lr,
            "seed": training.seed,
            "metric": family.metric,
            "scores": {part: one.metrics for part, one in scored.items()},
            "baselines": family.baselines,
            "constant": {part: one.constant for part, one in scored.items()},
            "examples": {part: len(next(iter(one.values.values()))) for part, one in scored.items()},
            "steps": trained.steps,
            "trained_examples": trained.examples,
            "losses": [[step, loss] for step, loss in trained.losses.items()],
            "skipped": trained.skipped,
            "seconds": {"train": 0.0 if borrowed else round(trained.seconds, 3), "score": round(seconds, 3)},
            "machine": machine(self.ranks.device),
        }
        with self.store.attempt(f"leaf-{leaf.key}") as folder:
            write_json(folder / LEAF, _finite(about))
            _save(folder / VALUES, {part: one.values for part, one in scored.items()})
            _save(
                folder / PREDICTIONS, {part: _predictions(one, part, family) for part, one in scored.items()}
            )
            publish(folder, self.store.leaves / leaf.key)


def _predictions(scored: Scored, part: Part, family: Family) -> dict[str, np.ndarray]:
    """Of each example its id, and what was predicted."""
    count = len(next(iter(scored.values.values())))
    return {"ids": as_text(list(family.example_ids.get(part, range(count)))), **scored.predictions}


def _save(path: Path, by_part: dict[Part, dict[str, np.ndarray]]) -> None:
    arrays = {
        f"{part}/{name}": np.ascontiguousarray(each)
        for part, some in by_part.items()
        for name, each in some.items()
    }
    save_file(arrays, str(path))


def _finite(about: dict[str, object]) -> dict[str, object]:
    """A loss that was not finite is written as null; a score always is finite, or something is wrong."""
    losses = about["losses"]
    assert isinstance(losses, list)
    about["losses"] = [[step, loss if np.isfinite(loss) else None] for step, loss in losses]
    scores = about["scores"]
    assert isinstance(scores, dict)
    for part, metrics in scores.items():
        for name, value in metrics.items():
            if not np.isfinite(value):
                raise ModelError(f"{name} on the {part} part is {value}; the model gives no finite numbers")
    return about
