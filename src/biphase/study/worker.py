"""A worker: runs the jobs of a plan until none is left that it can run.

`run_plan` is what the verbs `run`, `adapt` and `evaluate` call: it checks the tasks, registers the worker, starts
several processes if asked for, and lets a `Worker` work. `submit_workers` starts the same command as Slurm jobs.

`Worker` fine-tunes finished models before it continues pretraining. Otherwise it takes the first training job,
depth first, whose parent is done and whose lease it gets, trains, publishes the checkpoint and repeats. Any number
of workers on any machines may share a store: leases keep them apart, and the jobs of a dead worker are taken over.
With several processes (torchrun), rank 0 chooses and the others follow: all train a training job together, while
each takes fine-tunings by itself until none is left. `ShardMaker` makes tokenized corpora, `PlanTuner` runs fine-tunings.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from biphase.cluster import launch, slurm
from biphase.cluster.launch import WORKER
from biphase.cluster.machines import ALONE, Machines
from biphase.cluster.workers import WorkerHeartbeat, control
from biphase.data.corpus import HashMemory
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.errors import ClusterError, DataError, ModelError, SpecError, StoreError, one_line
from biphase.finetune.encoder import EncoderUnderTest, encoder_of
from biphase.finetune.families import Lexical, PartScores
from biphase.finetune.trial import Checkpoints
from biphase.finetune.tune import Stopped, TunedModel, Tuner, publish_trial
from biphase.keys import Identities
from biphase.leases import Lease, Leases, end_with_parent
from biphase.presets import sources_of
from biphase.progress import Live, columns
from biphase.records import content_key
from biphase.specs import Contrastive, Corpus, Pretrain, Task
from biphase.store import Store, look_again, publish, read_checked, verify, with_checksum, write_json
from biphase.study import ledger
from biphase.study.costs import flops_of
from biphase.study.datasets import Description, describe, keep
from biphase.study.describe import opening, work_left
from biphase.study.ledger import (
    FineTuning,
    TuningGrid,
    finished,
    screened_in,
    tuning_grid,
    tuning_grids,
    unfinished,
)
from biphase.study.plan import PLAN, Plan, TrainingJob, needed_jobs, save_plan
from biphase.study.time_left import TimeLeft
from biphase.study.tracked import finish_job, job_run, track_tuned
from biphase.tasks.baselines import METHOD
from biphase.tasks.files import on_hub, refuse_changed
from biphase.text import counted, duration, fit, si
from biphase.tracking import FINISH_SECONDS, Tracking
from biphase.training import checkpoint, distributed
from biphase.training.contrastive import read_pairs
from biphase.training.distributed import Ranks, poor_precision
from biphase.training.merge import publish_merge
from biphase.training.options import RuntimeOptions, Sharding
from biphase.training.pretrain import LiveModel, Pretraining, refuse_unfit

POLL_SECONDS = 1.0
WIDE = 110  # columns of a terminal from which nothing is abbreviated
MOST_IDLE = 10  # polls that a worker without a job skips at most, after it has waited long
KEPT_BYTES = 2**31  # largest pretrained model that stays in memory while others are fine-tuned


@dataclass
class Outcome:
    """What a worker did, and how it ended."""

    computed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    unsaved: float = 0.0  # seconds of fine-tuning, summed over processes, that a stop lost
    tracked: bool = True  # whether the trackers have taken everything


class Worker:
    """Runs the training jobs `wanted` of a plan, and the fine-tunings of the models `evaluated` (keys; None: all)."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        identities: Identities,
        ranks: Ranks,
        options: RuntimeOptions,
        *,
        wanted: set[str],
        evaluated: set[str] | None = None,
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.plan, self.store, self.identities = plan, store, identities
        self.ranks, self.options = ranks, options
        self.wanted = wanted
        self.time_left = TimeLeft(plan, store, wanted, evaluated)
        self.say = say if ranks.first else lambda text: None
        self.leases = Leases(store.leases)
        self.live = Live(enabled=ranks.first and not options.quiet)
        self.shards = ShardMaker(store, identities, self.leases, ranks, options.stop, self.say, self.live)
        self.tracking = Tracking(
            options.track, plan.study.name, store.studies / plan.study.name / "tensorboard"
        )
        self.outcome = Outcome()
        self.warned: set[str] = set()
        self.closed: set[str] = set()  # fine-tunings known to be done
        self.grids: dict[tuple[str, str], TuningGrid] = {}  # by model and task
        self.grid = "", ""  # of the last fine-tuning: its model and task
        self._open_finetunings(tuning_grids(plan, screened_in(store), evaluated))
        self.unloadable: set[str] = set()  # models that cannot be loaded here
        self.tuner: PlanTuner | None = None
        self.live_model: LiveModel | None = None  # of the last training job

    def work(self) -> Outcome:
        """Run jobs until none is left for this worker, or a stop is requested."""
        if self.ranks.first:
            self._discard_checkpoints()
        wait = FINISH_SECONDS
        try:
            return self._work()
        except KeyboardInterrupt:  # a second ^C
            wait = 1.0
            raise
        finally:
            self.live("")
            self.outcome.tracked = self.tracking.close(wait)

    def _work(self) -> Outcome:
        idle = 0
        while True:
            stopping = self.ranks.sum(self.options.stop())[0] > 0  # a stop of any rank applies to all
            lease, order = self._choose(stopping) if self.ranks.first else (None, None)
            order = self.ranks.share(order)
            if order["do"] == "end":
                return self.outcome
            if order["do"] == "wait":
                self.live("waiting for what other workers compute")
                idle = min(idle + 1, MOST_IDLE)  # a look reads the lease of every open job
                for _ in range(idle):
                    if not self.options.stop():
                        time.sleep(POLL_SECONDS)
                continue
            idle = 0
            self.live("")
            try:
                if order["do"] == "tune":
                    self._tune(lease)
                else:
                    self._train(self.plan.jobs[order["key"]], lease)
            finally:
                if lease:
                    lease.release()

    def _discard_checkpoints(self) -> None:
        """Remove checkpoints of finished fine-tunings that a killed worker, or one on another machine, left behind."""
        self.store.sweep_discarded()
        for key in unfinished(self.store):
            if key in self.open and finished(self.open[key], self.store):
                Checkpoints(self.store, key).discard()

    def _choose(self, stopping: bool) -> tuple[Lease | None, dict[str, Any]]:
        """Return the lease and the description of the next job."""
        if stopping:
            self.outcome.stopped = True
            return None, {"do": "end"}
        done = ledger.keys_with_weights(self.plan, self.store)
        if lease := self._take_finetuning(done):
            return lease, {"do": "tune"}
        left = self._left(done)
        pending = [key for key in left if key in self.wanted and not self._blocked(key)]
        for key in pending:
            if not done.issuperset(self.plan.jobs[key].needs):
                continue
            lease = self.leases.take(key)
            if lease is None:
                continue
            # Its last holder may have published it just now.
            if not self.store.has_now(self.store.checkpoints / key):
                return lease, {"do": "train", "key": key}
            lease.release()
        others = any(
            training.key not in self.outcome.failed and self._ready(training, done)
            for training in self.open.values()
        )
        return None, {"do": "wait" if pending or others else "end"}

    def _left(self, done: set[str]) -> list[str]:
        """Return the training jobs left, including those whose weights are on another machine and needed here."""
        metadata_only = ledger.done_keys(self.plan, self.store) - done
        unscored: set[str] = set()
        for training in list(self.open.values()) if metadata_only else ():
            if training.model in metadata_only - unscored and not self._close(training):
                unscored.add(training.model)
        return self.plan.left(done, metadata_only=metadata_only, unscored=unscored)

    def _take_finetuning(self, done: set[str]) -> Lease | None:
        for training in self._least_crowded_first(done):
            if training.key in self.outcome.failed or self._close(training):
                continue
            lease = self.leases.take(training.key)
            if lease is None:
                continue
            look_again(self.store.trials)  # its last holder may have published it just now
            if not self._close(training):
                self.grid = training.model, training.task.name
                return lease
            lease.release()
        return None

    def _least_crowded_first(self, done: set[str]) -> Iterator[FineTuning]:
        """Yield open fine-tunings whose model is here: those of this process's grid, then of the least crowded ones.

        A process reads a model and a dataset once for a grid that it stays with. If all began with the first grid, each
        of them would read every model and every dataset.
        """
        if self.grid in self.grids and self._ready(self.grids[self.grid], done):
            yield from self._open_in(self.grid)
        holders = (self.open.get(key) for key in self.leases.holders())
        crowd = Counter((each.model, each.task.name) for each in holders if each)
        ready = [place for place, grid in self.grids.items() if self._ready(grid, done)]
        for place in sorted(ready, key=lambda place: (crowd[place], place[0] != self.grid[0])):
            if place != self.grid:
                yield from self._open_in(place)

    def _open_in(self, place: tuple[str, str]) -> Iterator[FineTuning]:
        grid = None
        while grid is not self.grids.get(place):  # replaced when its screening ends
            grid = self.grids[place]
            yield from (each for each in grid.tunings if each.key in self.open)

    def _close(self, training: FineTuning) -> bool:
        """Whether a fine-tuning is finished, here or elsewhere; then it is no longer open."""
        done = finished(training, self.store)
        if done:
            self._forget(training)
        return done

    def _forget(self, training: FineTuning) -> None:
        """Remove a finished fine-tuning from the open ones; if it ended the screening of a grid, open what follows."""
        self.closed.add(training.key)
        self.open.pop(training.key, None)
        grid = self.grids[training.model, training.task.name]
        if training.share < 1 and not any(each.share < 1 and each.key in self.open for each in grid.tunings):
            self._open_finetunings(
                [tuning_grid(self.plan, grid.model, grid.task, grid.scored, screened_in(self.store))]
            )

    def _open_finetunings(self, grids: Iterable[TuningGrid]) -> None:
        """Collect the fine-tunings not known to be done, in the order of grids, so that a model is not loaded twice.

        `grids`: those that are new or that the end of a screening has changed.
        """
        self.grids |= {(grid.model, grid.task.name): grid for grid in grids}
        every = {each.key: each for grid in self.grids.values() for each in grid.tunings}
        self.open = {key: each for key, each in every.items() if key not in self.closed}
        self.planned, self.pending = len(every), sum(grid.pending for grid in self.grids.values())

    def _ready(self, training: FineTuning | TuningGrid, done: set[str]) -> bool:
        """Whether its model is here and can be loaded."""
        return training.model not in self.unloadable and (
            training.model in self.plan.roots or training.model in done
        )

    def _blocked(self, key: str) -> bool:
        """Whether this job, or one that it depends on, failed in this worker."""
        return not self.plan.needed_for((key,)).isdisjoint(self.outcome.failed)

    def _tune(self, lease: Lease | None) -> None:
        """Run fine-tunings, this process by itself, until none is left that it can take; `lease`: of the first."""
        while lease := lease or self._take_finetuning(ledger.keys_with_weights(self.plan, self.store)):
            with lease:
                self._run_finetuning(self.open[lease.key], lease)
            lease = None
            if self.options.stop():
                break
        self.outcome.unsaved += self.ranks.sum_float(self.tuner.unsaved if self.tuner else 0.0)
        if self.tuner:
            self.tuner.unsaved = 0.0
        for failed in self.ranks.gather(
            self.outcome.failed
        ):  # rank 0 must know, or it would choose the same again
            self.outcome.failed |= failed

    def _run_finetuning(self, training: FineTuning, lease: Lease) -> None:
        if self.live_model:
            self.live_model.graphs = None  # they hold the memory of a whole step
            if self.live_model.bytes > KEPT_BYTES:
                self.live_model = None
        if self.tuner is None:
            self.tuner = PlanTuner(
                self.plan,
                self.store,
                self.ranks,
                self.options,
                shards=self.shards.alone,
                tracking=self.tracking,
                live=self.live,
                say=self.say,
            )
            self._say_once(poor_precision(self.ranks.device, self.tuner.spec.precision, "Finetune(…)"))
        title, began = training.title(self.plan), time.monotonic()
        try:
            scored = self.tuner.compute(training, lambda: lease.lost)
        except Stopped:
            return
        except (DataError, SpecError):
            self.tuner.live("")
            raise  # the study's input is wrong, and its author must correct it
        except Exception as error:
            self.tuner.live("")
            if lease.lost:  # the worker that took it over may have removed files that were being written
                return
            if self.tuner.loaded is None:  # the model cannot be loaded, so none of its fine-tunings can run
                only_model = len(set(self.plan.results.values())) == 1 and self.ranks.world == 1
                if only_model and isinstance(error, ModelError):
                    raise
                self.unloadable.add(training.model)
            ledger.note_failure(self.plan, self.store, training.key, error)
            unloadable = training.model in self.unloadable
            self._failed(
                training.key, title, error, "; its other fine-tunings are left out" if unloadable else ""
            )
            return
        self.tuner.live("")
        self._forget(training)
        self.outcome.computed += 1
        ledger.forget_failure(self.plan, self.store, training.key)
        left = self.time_left()
        parts = (
            self._progress(),
            title,
            f" {_validation(scored)}",
            f" {time.monotonic() - began:.1f} s",
            f" study {left} left" if left else "",
        )
        self.say(f"  {fit(parts, columns(sys.stderr) - 2, spare=(3,), name=1)}")

    def _progress(self) -> str:
        """Format how many of the planned fine-tunings are known to be done."""
        of = self.planned + self.pending
        narrow = 0 < columns(sys.stderr) < WIDE
        return f"{self.planned - len(self.open):>{len(str(of))}}/{of}{'' if narrow else ' fine-tunings'}"

    def _train(self, job: TrainingJob, lease: Lease | None) -> None:
        number = len(ledger.done_keys(self.plan, self.store) - {job.key}) + 1
        decays = " ↘" if job.decaying else ""
        title = (
            f"{number}/{self.plan.job_count}  {job.objective.label}{decays} {job.span[0]:,} → {job.span[1]:,}"
        )
        tracked = job_run(job, self.tracking) if self.ranks.first and not job.merge else None
        options = replace(
            self.options,
            lost=lambda: lease is not None and lease.lost,
            tracked=tracked,
            live=ledger.live_file(self.plan, self.store, job.key),
            study_left=self.time_left,
        )
        self._say_once(poor_precision(self.ranks.device, job.run.precision, f"Pretrain({job.run.name!r}, …)"))
        self._say_once(self.options.slower_path if self.ranks.device.type == "cuda" else "")
        began = time.monotonic()
        live, self.live_model = self.live_model, None
        try:
            if not all(map(self.store.has, self.shards.folders(job.run).values())):
                refuse_unfit(job.run)  # fail before hours of tokenizing
            sources = self.shards.together(job.run)
            shards = next(iter(sources.values()))
            self.live(f"{title}   reading the model")
            if job.merge:
                del live  # the mean needs its memory
                self._merge(job, sources, title)
                return
            pretraining = Pretraining(
                job.run,
                job.step,
                store=self.store,
                shards=shards,
                sources=sources,
                identities=self.identities,
                ranks=self.ranks,
                needed=lambda: self._needed(job.run),
                flops_per_token=None if (flops := flops_of(job)) is None else flops / job.tokens,
                options=options,
                title=title,
                live=live,
            )
            del live  # so that a model that does not fit is freed before the next one is built
            pretraining.load()
            trained = pretraining.progress.seconds
            self.live("")  # the pretraining shows its own progress
            finished = pretraining.train()
            if tracked and finished:
                finish_job(tracked, job, pretraining.progress)
        except Stopped:
            return
        except (DataError, SpecError):
            raise  # the study's input is wrong, and its author must correct it
        except Exception as error:
            # The worker that took it over may have removed files that were being written.
            lost = options.lost()
            if lost and self.ranks.world == 1:
                return
            # The loss of another process is not a failure of this job.
            if not lost and not launch.has_lost(error):
                ledger.note_failure(self.plan, self.store, job.key, error)
            if self.ranks.world > 1:
                raise  # the ranks are no longer at the same point
            only_run = len({other.run.name for other in self.plan.jobs.values()}) == 1
            if only_run and isinstance(error, ModelError):
                raise  # nothing else could be trained, so report it as an error
            self.live("")
            self._failed(job.key, title, error)
            return
        if finished:
            self.live_model = pretraining.live_model()
            self.outcome.computed += 1
            if self.ranks.first:
                ledger.forget_failure(self.plan, self.store, job.key)
                ledger.live_file(self.plan, self.store, job.key).unlink(missing_ok=True)
                seconds = pretraining.progress.seconds - trained, time.monotonic() - began
                self.say(f"  {title}  {job.key[:6]}  {_summary(pretraining, *seconds)}")

    def _merge(self, job: TrainingJob, sources: dict[Corpus, Shards], title: str) -> None:
        if self.ranks.first:
            publish_merge(
                job.run, store=self.store, sources=sources, identities=self.identities, ranks=self.ranks
            )
        self.ranks.wait()
        self.outcome.computed += 1
        if self.ranks.first:
            self.live("")
            ledger.forget_failure(self.plan, self.store, job.key)
            self.say(f"  {title}  {job.key[:6]}")

    def _failed(self, key: str, title: str, error: Exception, more: str = "") -> None:
        self.outcome.failed[key] = one_line(error)
        self.say(f"  {title}  {key[:6]}  failed: {one_line(error)}{more}")

    def _needed(self, run: Pretrain) -> set[str]:
        """Return the checkpoints on a run's path that pruning must keep; all if a plan of the store cannot be read."""
        try:
            planned = needed_jobs(self.store) | {job["key"]: job for job in self.plan.to_json()["jobs"]}
            return set(planned) | checkpoint.resume_points(run, planned.values(), self.store, self.identities)
        except (StoreError, KeyError, TypeError, ValueError) as error:
            self._say_once(f"{one_line(error)}; until then no checkpoint is removed")
            return {folder.name for folder in self.store.checkpoints.iterdir()}

    def _say_once(self, warning: str) -> None:
        if warning and warning not in self.warned:
            self.warned.add(warning)
            self.say(f"  note: {warning}")


def _validation(scored: PartScores) -> str:
    """Format the first validation metric in percent, and note if all predictions are the same."""
    metrics = list(scored.metrics.items())
    same = f" (constant: {scored.constant})" if scored.constant else ""
    if not metrics:
        return ""
    name, score = metrics[0]
    if 0 < columns(sys.stderr) < WIDE:
        return f"{score * 100:.1f}%{' !' if same else ''}"
    return f"{name} {score * 100:.1f}% on validation{same}"


def _summary(pretraining: Pretraining, training: float, seconds: float) -> str:
    # The lines begin at the root; use only this job's own.
    first = pretraining.meter.origin + pretraining.meter.first
    own = [line for line in pretraining.meter.lines if line["step"] > first]
    losses = [line["loss"] for line in own if line.get("loss") is not None]
    change = f"loss {losses[0]:.2f} → {losses[-1]:.2f}" if losses else ""
    tokens = (pretraining.target - pretraining.meter.first) * pretraining.meter.tokens_per_step
    aside = f" ({duration(training)} of training)" if training < 0.9 * seconds else ""
    return f"{change}   {si(tokens / max(training, 1e-9))}tok/s   {duration(seconds)}{aside}"


# ---------------------------------------------------------------- what a worker prepares and computes


@dataclass(frozen=True)
class ShardMaker:
    """Opens the shards of a run, or tokenizes its corpora if they are missing; leases ensure that one worker does each."""

    store: Store
    identities: Identities
    leases: Leases
    ranks: Ranks
    stop: Callable[[], bool]
    say: Callable[[str], None]
    live: Callable[[str], None]
    opened: dict[Path, Shards] = field(default_factory=dict)  # verified by `together` in this process

    def folders(self, run: Pretrain) -> dict[Corpus, Path]:
        """Return where the shards of each corpus that a run reads are, or will be."""
        return {corpus: self.store.shards / self.identities.data(corpus) for corpus in sources_of(run)}

    def alone(self, run: Pretrain) -> Shards:
        """Return the shards of a run's first corpus, for its tokenizer; fine-tuning processes call it independently."""
        corpus, folder = next(iter(self.folders(run).items()))
        self._make(corpus, folder)
        return Shards.open(folder)

    def together(self, run: Pretrain) -> dict[Corpus, Shards]:
        """Return the shards of a run's corpora for training by all ranks, after checking every token file, once.

        Training would not notice a flipped bit. A file whose size and time have not changed since it was last verified
        is not read again: with a large corpus, every start would take minutes.
        """
        return {corpus: self._together(corpus, folder) for corpus, folder in self.folders(run).items()}

    def _together(self, corpus: Corpus, folder: Path) -> Shards:
        if folder in self.opened:
            return self.opened[folder]
        stopped = False
        try:
            if self.ranks.first:  # the others wait for it, and it tells how far it is
                self._make(corpus, folder)
            while not self.store.has(folder):
                if self.stop():
                    raise Stopped
                time.sleep(POLL_SECONDS)
        except Stopped:
            stopped = True
        # Ranks notice a stop at different times, and none may wait for the others in the training.
        if self.ranks.sum(stopped)[0]:
            raise Stopped
        self.live(f"reading the tokens of {corpus.name}")
        shards = Shards.open(folder)
        if self.ranks.first:
            shards.check_tokens(HashMemory(self.store))
        self.ranks.wait()
        self.opened[folder] = shards
        return shards

    def _make(self, corpus: Corpus, folder: Path) -> None:
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


class PlanTuner(Tuner):
    """Runs the fine-tunings of a plan: finds their models, resumes from checkpoints and publishes trials."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        ranks: Ranks,
        options: RuntimeOptions,
        *,
        shards: Callable[[Pretrain], Shards],
        tracking: Tracking,
        live: Callable[[str], None],
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        assert plan.study.finetune is not None
        super().__init__(
            plan.study.finetune, ranks.device, self._encoder, check=self._check, recall=self._recall, keep=self._keep,
            stop=options.stop, live=live,
        )  # fmt: skip
        self.plan, self.store, self.options, self.shards, self.say = plan, store, options, shards, say
        self.leases = Leases(store.leases)
        self.verified: set[Path] = set()  # folders of documents
        self.tracking = tracking

    def compute(self, training: FineTuning, lost: Callable[[], bool]) -> PartScores:
        """Fine-tune, score and publish; return the task's own validation scores, if they were missing."""
        title = training.title(self.plan)
        self.live(f"{title}   reading the model and the data")
        self.load(training.model)
        missing: dict[Task, str] = {}
        for trial in training.trials:
            folder = self.store.trials / trial.key
            self.store.refuse_debris(folder)  # before the work, not after it
            if not self.store.knows(folder):
                missing[trial.task] = trial.key

        def publish(tuned: TunedModel, task: Task) -> None:
            publish_trial(self.store, missing[task], training.key, tuned, task, self)

        steps, seconds = self.options.checkpoint_steps, self.options.checkpoint_seconds
        tuned = self.tune(
            training.model,
            training.task,
            lr=training.lr,
            seed=training.seed,
            share=training.share,
            scored_on=list(missing),
            scored=publish,
            checkpoints=Checkpoints(self.store, training.key, steps=steps, seconds=seconds, say=self.say),
            lost=lost,
            title=title,
        )
        if self.tracking.finetunings:
            track_tuned(training, tuned, self.plan, self.tracking)
        own = tuned.scores.get(training.task.name)
        return own.parts["validation"] if own else PartScores({}, {})

    def _encoder(self, model: str) -> EncoderUnderTest:
        job = self.plan.jobs.get(model)
        run = job.run if job else self.plan.roots[model].run
        return encoder_of(run, model if job else None, self.store, self.shards, self.spec)

    def _check(self, task: Task) -> None:
        refuse_changed(task, self.plan.tasks[task.name], self.store)

    def _recall(self, task: Task, compute: Callable[[], Lexical]) -> Lexical:
        """Return a dataset's lexical baseline, which takes seconds to minutes: one worker computes it for the store."""
        asked = {"task": self.plan.tasks[task.name], "documents": self.spec.documents, "method": METHOD}
        path = self.store.root / "baselines" / f"{content_key(asked | {'protocol': self.spec.protocol})}.json"
        while (known := _kept_baseline(path)) is None:
            lease = self.leases.take(f"baseline-{path.stem}")
            if lease is None:  # another worker computes it
                self._pause()
                time.sleep(POLL_SECONDS)
                continue
            with lease:
                look_again(path.parent)  # its last holder may have written it just now
                if _kept_baseline(path) is None:
                    path.parent.mkdir(exist_ok=True)
                    write_json(path, with_checksum({"lexical": compute()}))
        return known[0]

    def _keep(self, task: Task, what: str, build: Callable[[Path], None]) -> Path:
        """Return the folder of a large collection's files in the store; one worker writes them."""
        folder = self.store.documents / content_key({"task": self.plan.tasks[task.name], "what": what})
        while not self.store.has_now(folder):
            lease = self.leases.take(f"documents-{folder.name}")
            if lease is None:  # another worker writes them
                self._pause()
                time.sleep(POLL_SECONDS)
                continue
            with lease, self.store.attempt(f"documents-{folder.name}") as attempt:
                if not self.store.has_now(folder):  # its last holder may have published it just now
                    build(attempt)
                    self.check(task)  # before it passes for the documents of the plan's dataset
                    publish(attempt, folder)
        if folder not in self.verified:
            memory = HashMemory(self.store)
            memory.hashes(sorted(folder.glob("*.bin")))
            verify(folder, hashed=memory.sha256)
            self.verified.add(folder)
        return folder


def _kept_baseline(path: Path) -> tuple[Lexical] | None:
    """Return a baseline of the store; None if it is absent or damaged. (A dataset may have none: `(None,)`.)"""
    try:
        kept = read_checked(path)["lexical"]
        return (None if kept is None else (str(kept[0]), dict(kept[1])),)
    except (StoreError, KeyError, TypeError, ValueError):
        return None


# ---------------------------------------------------------------- from a verb to a worker


def run_plan(
    plan: Plan,
    store: Store,
    identities: Identities,
    options: RuntimeOptions,
    *,
    jobs: set[str],
    results: set[str],
    processes: int,
    machines: Machines = ALONE,
    limit: float | None,
    say: Callable[[str], None],
    summarize: Callable[[Outcome], None],
    describe_tasks: bool = False,
) -> NoReturn:
    """Compute the missing training jobs `jobs` and fine-tunings of the models `results`, and exit.

    `processes`: on each of the `machines`. `limit`: seconds after which the worker stops. `summarize` prints the
    outcome. `describe_tasks`: also print what each dataset was read as. With several processes, this one starts those
    of this machine with its own arguments, and waits.
    """
    child = "RANK" in os.environ  # one of several processes, whose parent has done all checks
    if not child:
        for description in check_tasks(plan, store, download=describe_tasks):
            if describe_tasks:
                say("\n".join(description.lines()))
        launch.check_sharding(options.sharding, processes, machines=machines.nodes)
        if processes * machines.nodes > 1:
            gpus = torch.cuda.device_count()
            if gpus and processes > gpus:
                raise SpecError(
                    f"--processes {processes}: this machine has {gpus} GPUs; type --processes {gpus}"
                )
            _check_rows(processes, machines.nodes, [plan.jobs[key].run for key in jobs], "--processes {}")
    heartbeat = WorkerHeartbeat(store, plan.study.name, node=machines.node)
    if processes * machines.nodes > 1 and not child:
        machines = replace(
            machines,
            folder=str(store.studies.resolve() / plan.study.name),
            worker=heartbeat.worker,
            alike=_alike(plan, options, processes, jobs | results),
        )
        try:
            code, warned = launch.in_processes(
                processes, sys.argv[1:], {WORKER: heartbeat.worker} | machines.variables()
            )
        finally:
            heartbeat.leave()
        sys.exit(_exit_code(code, warned, plan, store, heartbeat, results))
    if child:
        end_with_parent()
        launch.note("joining")
    ranks = distributed.join()
    ranks.check()
    say = say if ranks.first else lambda text: None
    if ranks.first:
        save_plan(plan, store)
    ranks.wait()
    stop = launch.Stop(limit, say, heartbeat.asked)
    say(opening(plan, store))
    launch.note("begun")
    options = replace(options, stop=stop)
    worker = Worker(plan, store, identities, ranks, options, wanted=jobs, evaluated=results, say=say)
    try:
        outcome = worker.work()
    finally:
        heartbeat.leave()
    if ranks.first:
        summarize(outcome)  # adds unreadable results to the failed
    ranks.wait()  # torchrun kills the other ranks soon after one has exited with a failure
    code = 1 if outcome.failed else 0
    launch.note("ended", str(code))
    # Of several processes the parent says whether work is left; to torchrun, any code but 0 is a failure.
    if not child:
        code = _exit_code(code, stop.warned, plan, store, heartbeat, results)
    distributed.leave(code, at_once=not outcome.tracked)


def _alike(plan: Plan, options: RuntimeOptions, processes: int, chosen: set[str]) -> dict[str, str]:
    """Return what must be equal on all machines that train together, by the name that a message gives it."""
    parts = ("micro_rows", "checkpoint_steps", "compiled", "deterministic", "sharding", "recompute")
    return {
        **distributed.alike(),
        "the plan": content_key({"plan": plan.to_json()["jobs"], "chosen": sorted(chosen)})[:12],
        "--processes": str(processes),
        "the options of run": ", ".join(f"{name}={getattr(options, name)}" for name in parts),
    }


def _exit_code(
    code: int, warned: bool, plan: Plan, store: Store, heartbeat: WorkerHeartbeat, results: set[str]
) -> int:
    """Return WORK_LEFT, so that it is started again, for a worker that Slurm warned and no user stopped."""
    left = warned and not heartbeat.asked(now=True) and work_left(plan, store, results)
    return launch.WORK_LEFT if left else code


def check_tasks(plan: Plan, store: Store, *, download: bool = False) -> list[Description]:
    """Validate the tasks that are still to be scored and the pairs still to be trained on; describe the tasks.

    A bad row would otherwise be found when its fine-tuning or stage begins, perhaps after days of pretraining. Local
    files are read whole; those on the hub must at least be pinned.
    """
    done = ledger.done_keys(plan, store)
    for objective, job in {job.objective: job for key, job in plan.jobs.items() if key not in done}.items():
        if isinstance(objective, Contrastive) and not any(map(on_hub, objective.pairs)):
            read_pairs(objective, job.run.name)
    tasks: dict[str, Task] = {}
    for grid in tuning_grids(plan, screened_in(store)):
        missing = [
            trial.task
            for training in grid.tunings
            for trial in training.trials
            if not store.knows(store.trials / trial.key)
        ]
        if missing or grid.pending:
            every = (grid.task, *missing, *(grid.scored if grid.pending else ()))
            tasks |= {task.name: task for task in every}
    descriptions = [describe(task, download=download) for task in tasks.values()]
    for task in tasks.values():
        if not on_hub(task):
            refuse_changed(task, plan.tasks[task.name], store)
    if descriptions:
        keep(descriptions, plan.study.name, store)
    return descriptions


def _check_rows(processes: int, machines: int, runs: list[Pretrain], option: str) -> None:
    """Refuse more processes than a step has rows; `option`: how those of one of the `machines` are typed."""
    on_each = f" on each of {machines} machines" if machines > 1 else ""
    for run in runs:
        if run.rows_per_step < processes * machines:
            most = run.rows_per_step // machines
            raise SpecError(
                f"{option.format(processes)}{on_each}: run {run.name!r} has {run.rows_per_step} rows a step, one for "
                f"each process at most; type {option.format(most) if most else 'fewer machines'}"
            )


def submit_workers(
    plan: Plan,
    store: Store,
    path: Path,
    *,
    jobs: Collection[str],
    results: set[str],
    options: dict[str, Any],
    sharding: Sharding,
) -> list[str]:
    """Submit as many Slurm workers as the profile at `path` asks for and are not yet in the queue.

    `options`: the runtime options of `run` as typed. Returns lines that say what was submitted; none if all is done.
    """
    profile = slurm.read_profile(path)
    _check_rows(
        profile.together,
        profile.nodes,
        [plan.jobs[key].run for key in jobs],
        f"profile {path}, processes = {{}}",
    )
    launch.check_sharding(sharding, profile.together, f"processes = 2 in {path}", machines=profile.nodes)
    check_tasks(plan, store)
    if not work_left(plan, store, results):
        return []
    save_plan(plan, store)
    with control(store, plan.study.name):
        queue = slurm.queue_of(store, plan.study.name)
        if queue.problem:
            raise ClusterError(queue.problem)
        # Completing jobs count too: a warned worker is completing while it is requeued.
        missing = profile.jobs - len(queue.jobs)
        if missing > 0:
            arguments = _job_arguments(plan, store, options)
            id, script = slurm.submit(profile, store, plan.study.name, jobs=missing, arguments=arguments)
    there = f"{len(queue.jobs)} of {profile.jobs} jobs were there already" if queue.jobs else ""
    if missing <= 0:
        return [f"{there}; nothing submitted; for more workers raise jobs in {path}"]
    parts = [f"{profile.nodes} machines"] if profile.nodes > 1 else []
    parts += [f"{profile.together} processes"] if profile.together > 1 else []
    each = f", {' of '.join(parts)} in each" if parts else ""
    submitted = f"submitted job {id}: {counted(missing, 'worker')}{each}; script and logs: {script.parent}"
    return [there, submitted] if there else [submitted]


def _job_arguments(plan: Plan, store: Store, options: dict[str, Any]) -> list[str]:
    """Return the arguments of a Slurm job: the plan in the store, since the study file may move, and the options."""
    root = store.root.resolve()
    arguments = ["run", str(root / "studies" / plan.study.name / PLAN), "--store", str(root)]
    for option, value in options.items():
        if value is True:
            arguments.append(option)
        elif value is False and option == "--compile":
            arguments.append("--no-compile")
        elif value is not None and value is not False and value != "":
            arguments += [option, str(value)]
    return arguments
