"""A worker: runs the jobs of a plan until none is left that it can run.

`Worker` fine-tunes finished models before it continues pretraining. Otherwise it takes the first training job,
depth first, whose parent is done and whose lease it gets, trains, publishes the checkpoint and repeats. Any number
of workers on any machines may share a store: leases keep them apart, and the jobs of a dead worker are taken over.
With several processes (torchrun), rank 0 chooses and the others follow: all train a training job together, while
each takes fine-tunings by itself until none is left. `ShardMaker` makes tokenized corpora, `PlanTuner` runs fine-tunings.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from biphase.cluster import launch
from biphase.data.corpus import HashMemory
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.errors import DataError, ModelError, SpecError, StoreError, one_line
from biphase.finetune.encoder import EncoderUnderTest, encoder_of
from biphase.finetune.families import Lexical, PartScores
from biphase.finetune.trial import Checkpoints
from biphase.finetune.tune import Stopped, TunedModel, Tuner, publish_trial
from biphase.keys import Identities
from biphase.leases import Lease, Leases
from biphase.presets import sources_of
from biphase.progress import Live, columns
from biphase.records import content_key
from biphase.specs import Corpus, Pretrain, Task
from biphase.store import Store, look_again, publish, read_checked, verify, with_checksum, write_json
from biphase.study import ledger
from biphase.study.costs import flops_of, start_of
from biphase.study.ledger import (
    FineTuning,
    TuningGrid,
    finished,
    screened_in,
    tuning_grid,
    tuning_grids,
    unfinished,
)
from biphase.study.plan import Plan, TrainingJob, needed_jobs
from biphase.study.time_left import TimeLeft
from biphase.tasks.baselines import METHOD
from biphase.tasks.files import refuse_changed
from biphase.text import duration, fit, si
from biphase.tracking import FINISH_SECONDS, TrackedRun, Tracking
from biphase.training import checkpoint
from biphase.training.checkpoint import Progress
from biphase.training.distributed import Ranks, poor_precision
from biphase.training.merge import publish_merge
from biphase.training.options import RuntimeOptions
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
        """Remove checkpoints inside finished work that a killed worker, or one on another machine, left behind."""
        self.store.sweep_discarded()
        for key in unfinished(self.store):
            if key in self.open and finished(self.open[key], self.store):
                Checkpoints(self.store, key).discard()
        planned = self._planned()
        if planned is None or all(folder.name in planned for folder in self.store.checkpoints.glob("*")):
            return
        for run in self.plan.study.runs:
            needed = self._needed(run, planned)
            checkpoint.prune(run, run.steps, self.store, self.identities, needed)

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

    def _needed(self, run: Pretrain, planned: dict[str, dict[str, Any]] | None = None) -> set[str]:
        """Return the checkpoints on a run's path that pruning must keep; all if a plan of the store cannot be read.

        `planned`: the training jobs of all plans, if they were read just now.
        """
        planned = self._planned() if planned is None else planned
        if planned is None:
            return {folder.name for folder in self.store.checkpoints.iterdir()}
        return set(planned) | checkpoint.resume_points(run, planned.values(), self.store, self.identities)

    def _planned(self) -> dict[str, dict[str, Any]] | None:
        """Return the training jobs of all plans of the store by their keys; None if a plan cannot be read."""
        try:
            return needed_jobs(self.store) | {job["key"]: job for job in self.plan.to_json()["jobs"]}
        except (StoreError, KeyError, TypeError, ValueError) as error:
            self._say_once(f"{one_line(error)}; until then no checkpoint is removed")
            return None

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


# ---------------------------------------------------------------- jobs as runs of trackers


def job_run(job: TrainingJob, tracking: Tracking) -> TrackedRun:
    """Return the run of a training job, named after its result or run, objective, steps, and key."""
    run, (first, until) = job.run, job.span
    config = {
        "run": run.name,
        "results": ", ".join(job.results),
        "parent": job.parent or job.root,
        "start": start_of(run),
        "objective": job.objective.label,
        "first_step": first,
        "last_step": until,
        "corpus": getattr(job.corpus, "name", ""),
        "batch_tokens": run.batch_tokens,
        "peak": run.schedule.peak,
        "precision": run.precision,
        "seed": run.seed,
    }
    name = f"{(job.results or (run.name,))[0]}, {job.objective.label} {first}-{until}, {job.key[:6]}"
    return tracking.run(job.key, name, "pretraining", config, first)


def finish_job(tracked: TrackedRun, job: TrainingJob, progress: Progress) -> None:
    """Add what its steps and those before them cost, beside the tokens and seconds of every line; finish its run."""
    tracked.log({"step": job.span[1], "flops": progress.flops, "joules": progress.joules})
    tracked.finish()


def track_tuned(training: FineTuning, tuned: TunedModel, plan: Plan, tracking: Tracking) -> None:
    """Send a fine-tuning that is done: its losses, and at its last step its scores and costs."""
    summary = tuned.summary
    config = {
        "model": training.model,
        "results": ", ".join(name for name, key in plan.results.items() if key == training.model),
        "task": training.task.name,
        "lr": training.lr,
        "seed": training.seed,
        "share": training.share,
        "trials": ", ".join(trial.key for trial in training.trials),
    }
    name = f"{training.title(plan)}, {training.key[:6]}"
    run = tracking.run(training.key, name, "fine-tuning", config)
    for step, loss in summary.losses.items():
        run.log({"step": step, "loss": loss})
    scores = {
        task: {part: scores.metrics for part, scores in scored.parts.items()}
        for task, scored in tuned.scores.items()
    }
    seconds = summary.seconds + sum(scored.seconds for scored in tuned.scores.values())
    run.log({"step": summary.steps, **scores, "examples": summary.examples, "seconds": seconds})
    run.finish()
