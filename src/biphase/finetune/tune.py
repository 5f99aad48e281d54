"""A fine-tuning from a model's weights to its scores: `Tuner.tune`, which the worker and the export call.

A `Tuner` keeps the model and the tokenized datasets between calls, so that of a grid of learning rates and seeds each
fine-tuning costs only its training steps and its scoring. `publish_trial` writes the scores on one dataset to the
store:

    store/trials/<key>/
      trial.json                what was trained, its scores, baselines, losses, seconds, machine
      values.safetensors        the values of every example that a score is made of, by split
      predictions.safetensors   the id and the prediction of every example, by split
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from biphase.attention import varlen_works
from biphase.finetune.encoder import EncoderUnderTest, TaskModel, TuningOptions
from biphase.finetune.families import PARTS, FamilyTrainer, Lexical, Part, PartScores, as_text, family_of
from biphase.finetune.trial import Checkpoints, FineTuner, TrainingSummary, score
from biphase.metadata import PREDICTIONS, TRIAL, VALUES
from biphase.records import encode
from biphase.specs import Finetune, Task
from biphase.store import Store, publish, write_json
from biphase.tasks.collection import temporary
from biphase.tasks.load import load
from biphase.training.distributed import machine

GRID = ("tasks", "lrs", "seeds", "discard")  # fields of `Finetune` that no single trial depends on
SHOWN_EVERY = 0.5  # seconds between two updates of the live line


class Stopped(Exception):
    """A stop was requested, or another worker took the work over."""


@dataclass(frozen=True)
class ScoredTask:
    """The scores of a fine-tuned model on one task."""

    family: FamilyTrainer
    parts: dict[Part, PartScores]
    seconds: float


@dataclass(frozen=True)
class TunedModel:
    """A fine-tuned model and how it was made; `scores` by the name of the task."""

    model_key: str
    task: Task
    lr: float
    seed: int
    model: TaskModel
    summary: TrainingSummary
    share: float  # of the task's steps; below 1: to screen learning rates
    scores: dict[str, ScoredTask] = field(default_factory=dict)


class Tuner:
    """Fine-tunes models as `spec` says.

    `load_encoder` loads a model by its key; `check` is called after a task's files were read, `recall` for its lexical
    baseline, `keep` for its documents if they are many. `live` shows progress.
    """

    def __init__(
        self,
        spec: Finetune,
        device: torch.device,
        load_encoder: Callable[[str], EncoderUnderTest],
        *,
        check: Callable[[Task], None] = lambda task: None,
        recall: Callable[[Task, Callable[[], Lexical]], Lexical] = lambda task, compute: compute(),
        keep: Callable[[Task, str, Callable[[Path], None]], Path] = lambda task, what, build: temporary(
            what, build
        ),
        stop: Callable[[], bool] = lambda: False,
        live: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.spec, self.device, self.load_encoder, self.keep = spec, device, load_encoder, keep
        self.check, self.recall, self.stop, self.live = check, recall, stop, live
        self.lost: Callable[[], bool] = lambda: False  # whether another worker took the fine-tuning over
        self.unsaved = 0.0  # seconds of work that the last stop lost
        self.shown = 0.0  # when progress was last shown
        self.loaded: tuple[str, FineTuner, EncoderUnderTest] | None = None  # the key of the model, and it
        self.families: dict[tuple[Task, str], FamilyTrainer] = {}  # by task and tokenization

    def tune(
        self,
        model_key: str,
        task: Task,
        *,
        lr: float,
        seed: int,
        share: float = 1.0,
        scored_on: Sequence[Task],
        scored: Callable[[TunedModel, Task], None] = lambda tuned, task: None,
        checkpoints: Checkpoints | None = None,
        lost: Callable[[], bool] = lambda: False,
        title: str = "",
    ) -> TunedModel:
        """Fine-tune a model on a task and score it; call `scored` after each dataset.

        With a `share` below 1 of the task's steps, which screens a learning rate, only validation is scored. On a stop
        or if `lost`, raise `Stopped`; what is trained so far is in `checkpoints`, and the next call with them resumes
        from there.
        """
        self.lost, self.unsaved = lost, 0.0
        threads = torch.get_num_threads()
        try:
            tuner, _ = self.load(model_key)
            model, summary = tuner.finetune(
                self.family(task),
                self.spec,
                lr=lr,
                seed=seed,
                share=share,
                stop=self.stop,
                lost=lost,
                loaders=1 if self.device.type == "cuda" else 0,
                tell=lambda step, steps: self._tell(f"{title}   step {step:,} of {steps:,}"),
                checkpoints=checkpoints,
            )
            if not summary.finished:
                saved = checkpoints is not None and checkpoints.saved == summary.steps
                self.unsaved = 0.0 if lost() or saved else summary.seconds
                raise Stopped
            tuned = TunedModel(model_key, task, lr, seed, model, summary, share)
            self._score(tuned, tuner, scored_on, scored, checkpoints, title)
        finally:
            torch.set_num_threads(threads)  # a resumed fine-tuning sets the number that it began with
        if checkpoints:
            checkpoints.discard()
        return tuned

    def _tell(self, text: str) -> None:
        if time.monotonic() - self.shown > SHOWN_EVERY:
            self.shown = time.monotonic()
            self.live(text)

    def _score(
        self,
        tuned: TunedModel,
        tuner: FineTuner,
        tasks: Sequence[Task],
        scored: Callable[[TunedModel, Task], None],
        checkpoints: Checkpoints | None,
        title: str,
    ) -> None:
        began = time.monotonic()
        try:
            for task in tasks:
                self.live(f"{title}   scoring {task.name}")
                family, at = self.family(task), time.monotonic()
                scored_parts = PARTS if tuned.share == 1 else PARTS[:1]
                sampled = self.spec.sampled(tuned.share)
                parts = score(tuned.model, family, tuner.options, scored_parts, sampled=sampled)
                if self.lost():
                    raise Stopped
                tuned.scores[task.name] = ScoredTask(family, parts, time.monotonic() - at)
                scored(tuned, task)
        except Stopped:
            if not self.lost():  # keep the model, which is trained and not yet scored
                self.unsaved = time.monotonic() - began
                saved = not tuned.summary.steps  # zero-shot: nothing was trained
                if checkpoints and tuner.grid and not saved:
                    saved = checkpoints.save(*tuner.grid.tensors(), tuned.summary.about())
                self.unsaved += 0.0 if saved else tuned.summary.seconds
            raise

    def load(self, model_key: str) -> tuple[FineTuner, EncoderUnderTest]:
        """Load a model onto the device, if it is not the one that is there."""
        if self.loaded is None or self.loaded[0] != model_key:
            self.loaded = None  # free the old model's memory first
            encoder = self.load_encoder(model_key)
            identity = encoder.tokenization.identity
            self.families = {key: family for key, family in self.families.items() if key[1] == identity}
            self.loaded = model_key, FineTuner(encoder.encoder, self._options(encoder)), encoder
        return self.loaded[1:]

    def _options(self, encoder: EncoderUnderTest) -> TuningOptions:
        varlen = varlen_works(self.device, "fp32" if self.spec.precision == "fp32" else "bf16")
        options = TuningOptions.of(self.device, self.spec.precision, varlen=varlen, encoder=encoder.encoder)
        return replace(options, causal=self.spec.causal, pause=self._pause)

    def _pause(self) -> None:
        """Raise `Stopped` if a stop was requested; called during scoring, which may take long."""
        if self.stop() or self.lost():
            raise Stopped

    def family(self, task: Task) -> FamilyTrainer:
        """Return a task's dataset in the tokens of the loaded model."""
        assert self.loaded is not None
        tokenization = self.loaded[2].tokenization
        key = task, tokenization.identity
        if key not in self.families:
            self.live(f"reading {task.name}")
            keep = partial(self.keep, task)
            examples = load(task, documents=self.spec.documents, keep=keep)
            self.check(task)
            recall = partial(self.recall, task)
            self.families[key] = family_of(
                task, examples, tokenization, protocol=self.spec.protocol, recall=recall, keep=keep
            )
        return self.families[key]


# ---------------------------------------------------------------- trials


def publish_trial(store: Store, key: str, training: str, tuned: TunedModel, task: Task, tuner: Tuner) -> None:
    """Publish the scores of a fine-tuned model on a task; `training` is the key of the fine-tuning."""
    result, summary = tuned.scores[task.name], tuned.summary
    borrowed = task is not tuned.task
    about = {
        "key": key,
        "training": training,
        "model": tuned.model_key,
        "task": encode(task),
        "trained_on": encode(tuned.task) if borrowed else None,
        "finetune": {k: v for k, v in encode(tuner.spec).items() if k not in GRID},
        "lr": tuned.lr,
        "seed": tuned.seed,
        **({"share": tuned.share} if tuned.share < 1 else {}),
        **({"documents": pool} if "sampled" in (pool := tuner.spec.pool(task, tuned.share)) else {}),
        "metric": result.family.metric,
        "scores": {part: scores.metrics for part, scores in result.parts.items()},
        "baselines": result.family.baselines,
        "constant": {part: scores.constant for part, scores in result.parts.items()},
        "examples": {part: _examples(scores) for part, scores in result.parts.items()},
        "steps": summary.steps,
        **({"best_step": summary.best[0]} if summary.best else {}),
        "trained_examples": summary.examples,
        "losses": summary.about()["losses"],
        "skipped": summary.skipped,
        "seconds": {
            "train": 0.0 if borrowed else round(summary.seconds, 3),
            "score": round(result.seconds, 3),
        },
        "machine": machine(tuner.device),
    }
    with store.attempt(f"trial-{key}") as folder:
        write_json(folder / TRIAL, about)
        _save(folder / VALUES, {part: scores.values for part, scores in result.parts.items()})
        _save(
            folder / PREDICTIONS,
            {
                part: {
                    "ids": as_text(list(result.family.example_ids.get(part, range(_examples(scores))))),
                    **scores.predictions,
                }
                for part, scores in result.parts.items()
            },
        )
        publish(folder, store.trials / key)


def _examples(scores: PartScores) -> int:
    return len(next(iter(scores.values.values())))


def _save(path: Path, by_part: dict[Part, dict[str, np.ndarray]]) -> None:
    arrays = {
        f"{part}/{name}": np.ascontiguousarray(values)
        for part, named in by_part.items()
        for name, values in named.items()
    }
    save_file(arrays, str(path))
