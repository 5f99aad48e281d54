"""What a worker prepares and computes: tokenized corpora (`ShardMaker`) and fine-tunings (`Tuner`).

`ShardMaker` opens the shards of a run, or tokenizes its corpus if they are missing; a lease ensures that one worker
does it. `Tuner` fine-tunes, scores and publishes trials. A grid is a model and a task; its learning rates and seeds
run one after another in this process. The model's weights, the tokenized datasets and the measured times are kept
between them, so that a fine-tuning costs only its training steps and scoring.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file

from biphase.attention import varlen_works
from biphase.data.corpus import HashMemory
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.errors import DataError, ModelError, one_line
from biphase.finetune.encoder import (
    EncoderUnderTest,
    TaskModel,
    TuningOptions,
    encoder_of_checkpoint,
    encoder_of_hub,
)
from biphase.finetune.families import Family, Part, PartScores, as_text, family_of
from biphase.finetune.trial import Checkpoints, FineTuner, TrainingSummary, score
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.metadata import TRIAL
from biphase.models.encoder import Encoder
from biphase.presets import corpus_of
from biphase.records import encode
from biphase.specs import Finetune, Hub, Pretrain, Task
from biphase.store import Store, publish, write_json
from biphase.study.ledger import PREDICTIONS, VALUES, FineTuning, Trial
from biphase.study.plan import Plan
from biphase.tasks.files import refuse_changed
from biphase.tasks.load import load
from biphase.training.distributed import Ranks, machine

FAILED = "failed: "  # prefix of a shared status; the error follows
POLL_SECONDS = 1.0


class Stopped(Exception):
    """A stop was requested during work that cannot be saved halfway."""


class ShardMaker:
    def __init__(
        self,
        store: Store,
        identities: Identities,
        leases: Leases,
        ranks: Ranks,
        *,
        stop: Callable[[], bool],
        say: Callable[[str], None],
        live: Callable[[str], None],
    ) -> None:
        self.store, self.identities, self.leases, self.ranks = store, identities, leases, ranks
        self.stop, self.say, self.live = stop, say, live

    def alone(self, run: Pretrain) -> Shards:
        """Return a run's shards, made by this process if missing; fine-tuning processes call it independently."""
        folder = self.store.shards / self.identities.data(run)
        self._make(run, folder)
        return Shards.open(folder)

    def together(self, run: Pretrain) -> Shards:
        """Return a run's shards for training by all ranks together, after checking every token file."""
        folder = self.store.shards / self.identities.data(run)
        if self.ranks.world == 1:
            self._make_sound(run, folder)
            return Shards.open(folder)
        # Rank 0 makes them in a thread while all ranks poll its status; a bare wait would hang if it stopped or failed.
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self._make_sound, run, folder) if self.ranks.first else None
            while (standing := self.ranks.share(_standing(job))) == "working":
                time.sleep(POLL_SECONDS)
        if standing == "stopped":
            raise Stopped
        if job:
            job.result()
        if standing.startswith(FAILED):
            raise DataError(standing.removeprefix(FAILED))
        return Shards.open(folder)

    def _make_sound(self, run: Pretrain, folder: Path) -> None:
        """Make the shards and verify the hashes of their token files, since training would not notice a flipped bit.

        A file whose size and time have not changed since it was last verified is not read again: with a large
        corpus, every start would take minutes.
        """
        self._make(run, folder)
        self.live(f"reading the tokens of {corpus_of(run).name}")
        Shards.open(folder).check_tokens(HashMemory(self.store))

    def _make(self, run: Pretrain, folder: Path) -> None:
        corpus = corpus_of(run)

        def report(text: str) -> None:
            if self.stop():  # what is tokenized so far is kept, and the next run continues from it
                raise Stopped
            if text:
                self.say(f"  {text}")

        while not self.store.has(folder):
            if self.stop():
                raise Stopped
            lease = self.leases.take(f"shards-{folder.name}")
            if lease is None:  # another worker makes them
                time.sleep(POLL_SECONDS)
                continue
            # `TakenOver`: this worker stalled and another one took its lease; look for the shards again.
            with lease, contextlib.suppress(TakenOver):
                if tokenize(corpus, self.store, report=report, lost=lambda held=lease: held.lost) != folder:
                    raise DataError(
                        f"the files of corpus {corpus.name!r} have changed since the study was planned; "
                        "start the run again to plan with what is there now"
                    )


def _standing(job: Future[None] | None) -> str:
    if job is None or not job.done():
        return "working"
    error = job.exception()
    if error is None:
        return "done"
    return "stopped" if isinstance(error, Stopped) else FAILED + one_line(error)


# ---------------------------------------------------------------- fine-tunings


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
        self.unsaved = 0.0  # seconds of work that the last stop lost
        self.lost: Callable[[], bool] = lambda: False  # whether the fine-tuning was taken over
        self.families: dict[tuple[str, str], Family] = {}
        self.at_hand: tuple[str, FineTuner, EncoderUnderTest] | None = None  # model key, fine-tuner, encoder
        self.seconds: dict[str, list[float]] = defaultdict(list)  # measured, by task

    def compute(self, training: FineTuning, lost: Callable[[], bool]) -> PartScores | None:
        """Fine-tune, score and publish; return the task's own validation scores, or None if it was stopped."""
        threads = torch.get_num_threads()
        try:
            return self._compute(training, lost)
        finally:
            torch.set_num_threads(threads)  # a resumed trial sets the number that it began with

    def _compute(self, training: FineTuning, lost: Callable[[], bool]) -> PartScores | None:
        began = time.monotonic()
        self.lost, self.unsaved = lost, 0.0
        title = training.title(self.plan)
        self.live(f"{title}   reading the model and the data")
        bench, subject = self._bench(training.model)
        for trial in training.trials:
            self.store.refuse_debris(self.store.trials / trial.key)  # before the work, not after it
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
        self,
        training: FineTuning,
        bench: FineTuner,
        subject: EncoderUnderTest,
        model: TaskModel,
        trained: TrainingSummary,
    ) -> PartScores | None:
        """Score and publish the missing trials; return the task's own validation scores; None: lease lost."""
        title, own = training.title(self.plan), PartScores({}, {})
        for trial in training.trials:
            if self.store.knows(self.store.trials / trial.key):
                continue
            self.live(f"{title}   scoring {trial.task.name}")
            asked = self._family(trial.task, subject)
            at = time.monotonic()
            scored = score(model, asked, bench.setting)
            if self.lost():
                return None
            self._publish(trial, training, trained, asked, scored, time.monotonic() - at)
            if trial.task is training.task:
                own = scored["validation"]
        return own

    def seconds_left(self, left: list[FineTuning]) -> float | None:
        """Estimate the time left from times measured here; tasks without one count as average."""
        every = [seconds for some in self.seconds.values() for seconds in some]
        if not every:
            return None
        usual = sum(every) / len(every)
        means = {name: sum(some) / len(some) for name, some in self.seconds.items()}
        return sum(means.get(training.task.name, usual) for training in left)

    # ------------------------------------------------------------ cached model and data

    def _bench(self, model: str) -> tuple[FineTuner, EncoderUnderTest]:
        if self.at_hand is None or self.at_hand[0] != model:
            self.at_hand = None  # free the old model's memory first
            subject = self._subject(model)
            reads = subject.reading.identity
            self.families = {place: kept for place, kept in self.families.items() if place[1] == reads}
            self.at_hand = model, FineTuner(subject.encoder, self._setting(subject.encoder)), subject
        return self.at_hand[1:]

    def _setting(self, encoder: Encoder) -> TuningOptions:
        precision = "fp32" if self.spec.precision == "fp32" else "bf16"
        device = self.ranks.device
        varlen = varlen_works(device, precision)
        setting = TuningOptions.of(device, self.spec.precision, varlen=varlen, encoder=encoder)
        return replace(setting, causal=self.spec.causal, pause=self._pause)

    def _pause(self) -> None:
        """Raise `Stopped` if a stop was requested; called during scoring, which may take long."""
        if self.stop() or self.lost():
            raise Stopped

    def _subject(self, model: str) -> EncoderUnderTest:
        if model in self.plan.jobs:
            run = self.plan.jobs[model].run
            return encoder_of_checkpoint(run, model, self.store, self.shards(run), self.spec)
        run = self.plan.roots[model].run
        if isinstance(run.start, Hub):
            return encoder_of_hub(run.start, self.spec)
        return encoder_of_checkpoint(run, None, self.store, self.shards(run), self.spec)

    def _family(self, task: Task, subject: EncoderUnderTest) -> Family:
        place = self.plan.tasks[task.name], subject.reading.identity
        if place not in self.families:
            self.live(f"reading {task.name}")
            examples = load(task, documents=self.spec.documents)
            refuse_changed(task, place[0], self.store)
            self.families[place] = family_of(task, examples, subject.reading, protocol=self.spec.protocol)
        return self.families[place]

    # ------------------------------------------------------------ results

    def _publish(
        self,
        trial: Trial,
        training: FineTuning,
        trained: TrainingSummary,
        family: Family,
        scored: dict[Part, PartScores],
        seconds: float,
    ) -> None:
        borrowed = trial.task is not training.task
        about = {
            "key": trial.key,
            "training": training.key,
            "model": training.model,
            "task": encode(trial.task),
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
        with self.store.attempt(f"trial-{trial.key}") as folder:
            write_json(folder / TRIAL, _finite(about))
            _save(folder / VALUES, {part: one.values for part, one in scored.items()})
            _save(
                folder / PREDICTIONS, {part: _predictions(one, part, family) for part, one in scored.items()}
            )
            publish(folder, self.store.trials / trial.key)


def _predictions(scored: PartScores, part: Part, family: Family) -> dict[str, np.ndarray]:
    """Return the id of each example, and its predictions."""
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
    """Replace nonfinite losses by None for JSON; raise an error if a score is not finite."""
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
