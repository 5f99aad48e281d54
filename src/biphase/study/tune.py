"""What a worker prepares and computes: tokenized corpora (`ShardMaker`) and a plan's fine-tunings (`PlanTuner`).

`ShardMaker` opens the shards of a run, or tokenizes its corpus if they are missing; a lease ensures that one worker
does it. `PlanTuner` is a `Tuner` for the fine-tunings of a plan: it finds their models, resumes from checkpoints and
publishes trials.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path

from biphase.data.corpus import HashMemory
from biphase.data.shards import Shards
from biphase.data.tokenize import TakenOver, tokenize
from biphase.errors import DataError, one_line
from biphase.finetune.encoder import EncoderUnderTest, encoder_of
from biphase.finetune.families import PartScores
from biphase.finetune.trial import Checkpoints
from biphase.finetune.tune import Stopped, Tuner, publish_trial
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.presets import corpus_of
from biphase.specs import Pretrain, Task
from biphase.store import Store
from biphase.study.ledger import FineTuning
from biphase.study.plan import Plan
from biphase.tasks.files import refuse_changed
from biphase.training.distributed import Ranks

FAILED = "failed: "  # prefix of a shared status; the error follows
POLL_SECONDS = 1.0


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
            self._make_verified(run, folder)
            return Shards.open(folder)
        # Rank 0 makes them in a thread while all ranks poll its status; a bare wait would hang if it stopped or failed.
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self._make_verified, run, folder) if self.ranks.first else None
            while (status := self.ranks.share(_status(job))) == "working":
                time.sleep(POLL_SECONDS)
        if status == "stopped":
            raise Stopped
        if job:
            job.result()
        if status.startswith(FAILED):
            raise DataError(status.removeprefix(FAILED))
        return Shards.open(folder)

    def _make_verified(self, run: Pretrain, folder: Path) -> None:
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


def _status(job: Future[None] | None) -> str:
    if job is None or not job.done():
        return "working"
    error = job.exception()
    if error is None:
        return "done"
    return "stopped" if isinstance(error, Stopped) else FAILED + one_line(error)


# ---------------------------------------------------------------- fine-tunings


class PlanTuner(Tuner):
    """Runs the fine-tunings of a plan."""

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
        super().__init__(
            plan.study.finetune, ranks.device, self._encoder, check=self._check, stop=stop, live=live
        )
        self.plan, self.store, self.shards = plan, store, shards
        self.checkpoints = partial(
            Checkpoints, store, steps=checkpoint_steps, seconds=checkpoint_seconds, say=say
        )
        self.seconds: dict[str, list[float]] = defaultdict(list)  # measured, by task

    def compute(self, training: FineTuning, lost: Callable[[], bool]) -> PartScores:
        """Fine-tune, score and publish; return the task's own validation scores, if they were missing."""
        began, title = time.monotonic(), training.title(self.plan)
        self.live(f"{title}   reading the model and the data")
        self.load(training.model)
        missing: dict[Task, str] = {}
        for trial in training.trials:
            folder = self.store.trials / trial.key
            self.store.refuse_debris(folder)  # before the work, not after it
            if not self.store.knows(folder):
                missing[trial.task] = trial.key
        tuned = self.tune(
            training.model,
            training.task,
            lr=training.lr,
            seed=training.seed,
            scored_on=list(missing),
            scored=lambda tuned, task: publish_trial(
                self.store, missing[task], training.key, tuned, task, self
            ),
            checkpoints=self.checkpoints(training.key),
            lost=lost,
            title=title,
        )
        self.seconds[training.task.name].append(time.monotonic() - began)
        own = tuned.scores.get(training.task.name)
        return own.parts["validation"] if own else PartScores({}, {})

    def _encoder(self, model: str) -> EncoderUnderTest:
        job = self.plan.jobs.get(model)
        run = job.run if job else self.plan.roots[model].run
        return encoder_of(run, model if job else None, self.store, self.shards, self.spec)

    def _check(self, task: Task) -> None:
        refuse_changed(task, self.plan.tasks[task.name], self.store)

    def seconds_left(self, left: list[FineTuning]) -> float | None:
        """Estimate the time left from times measured here; tasks without one count as average."""
        every = [seconds for measured in self.seconds.values() for seconds in measured]
        if not every:
            return None
        usual = sum(every) / len(every)
        means = {name: sum(measured) / len(measured) for name, measured in self.seconds.items()}
        return sum(means.get(training.task.name, usual) for training in left)
