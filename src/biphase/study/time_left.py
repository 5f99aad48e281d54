"""How long a study will still take, at the speed measured so far, on the workers that run now.

What is left is simulated on the live workers as `plan` does (`prices.elapsed`), so a chain of jobs is not divided by
workers that cannot share it. Training jobs are timed by their FLOPs, running ones by the steps they have taken;
fine-tunings by those on the same task. Scoring is timed apart from training, because it does not get shorter where
learning rates are screened with fewer steps. Results that were merged from an archive tell the speed of another
machine, and count only if nothing was computed in this store.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable
from dataclasses import dataclass

from biphase.cluster.workers import WorkerRegistry
from biphase.errors import StoreError
from biphase.store import Store
from biphase.study import ledger
from biphase.study.costs import flops_of, start_of
from biphase.study.ledger import Count, FineTuning, finished, screened_in, tuning_grids
from biphase.study.plan import Plan, TrainingJob
from biphase.study.prices import Grid, elapsed
from biphase.text import duration

# Between two estimates of a running worker, which look at every result that is not known to be done.
PAUSE_SECONDS = 5.0
PAUSE_SHARE = 100  # a pause is also this many times as long as an estimate took: at most 1% of the time


@dataclass(frozen=True)
class Remaining:
    """What a study will still take; `complete`: nothing is left out for want of a measured speed."""

    seconds: float
    tuning: float  # seconds of the fine-tunings alone, shared by all workers
    workers: int
    complete: bool

    def text(self, since: float = 0.0) -> str:
        """Say how much is left `since` seconds after the estimate: "8 min", or "over 8 min" if it is not complete."""
        return f"{'' if self.complete else 'over '}{duration(max(1.0, self.seconds - since))}"


class _Speed:
    """Seconds per unit of work for each kind of work, in this store and on other machines."""

    def __init__(self) -> None:
        self.sums: defaultdict[tuple[Hashable, bool], list[float]] = defaultdict(lambda: [0.0, 0.0])

    def add(self, kind: Hashable, seconds: float, work: float, *, here: bool) -> None:
        for group in (kind, None):  # None: all kinds
            total = self.sums[group, here]
            total[0], total[1] = total[0] + seconds, total[1] + work

    def of(self, kind: Hashable) -> float | None:
        """Return the speed of this kind, or else of all; of this store before that of other machines."""
        for key in ((kind, True), (None, True), (kind, False), (None, False)):
            seconds, work = self.sums.get(key, (0.0, 0.0))
            if work > 0:
                return seconds / work
        return None


class TimeLeft:
    """Estimates the time left for a plan, or for its training jobs `jobs` and the fine-tunings of `models` (keys)."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        jobs: Collection[str] | None = None,
        models: Collection[str] | None = None,
    ) -> None:
        self.plan, self.store, self.jobs, self.models = plan, store, jobs, models
        self.training, self.scoring = _Speed(), _Speed()  # of fine-tunings
        self.known: set[str] = set()  # fine-tunings whose seconds were read
        self.open: set[str] = set()  # those that are not done
        self.remaining: Remaining | None = None
        self.estimated = self.due = 0.0

    def __call__(self) -> str:
        """Return the time left for people, e.g. "8 min"; "" before anything was measured. Cheap to call often."""
        now = time.monotonic()
        if now >= self.due:
            # Informative only, and others write the store meanwhile.
            with contextlib.suppress(OSError, StoreError):
                self.remaining = self.estimate()
            took = time.monotonic() - now
            self.estimated, self.due = now, now + took + max(PAUSE_SECONDS, PAUSE_SHARE * took)
        return self.remaining.text(now - self.estimated) if self.remaining else ""

    def estimate(self) -> Remaining | None:
        """Return what is left, 0 if nothing; None before anything was measured."""
        tunings, counts, done = self._tunings()
        settled = ledger.settled(self.plan, self.store, Count(done, done + sum(counts.values())))
        left = [key for key in self.plan.left(settled) if self.jobs is None or key in self.jobs]
        jobs = self._jobs(left)
        registered = WorkerRegistry(self.store, self.plan.study.name).living()
        running = set(ledger.living_holders(self.store)) & {*left, *self.open}
        workers = max(1, len(registered), len(running))
        complete = len(jobs) == len(left) and tunings.keys() >= counts.keys()
        if not complete and not jobs and not tunings:
            return None
        tuning = sum(seconds * counts[grid] for grid, seconds in tunings.items()) / workers
        took = elapsed(self.plan, jobs, tunings, counts, workers)
        return Remaining(took.seconds, tuning, workers, complete)

    def _jobs(self, left: Collection[str]) -> dict[str, float]:
        """Return the seconds that each training job of `left` will still take, if its speed is known."""
        entries = ledger.survey_jobs(self.plan, self.store)
        speed, shares = _Speed(), dict.fromkeys(entries, 0.0)
        for key, entry in entries.items():
            parent = entries.get(entry.job.parent or "")
            before = parent.progress["seconds"] if parent and parent.progress else 0.0
            if entry.progress:
                seconds, shares[key] = entry.progress["seconds"] - before, 1.0
            elif entry.standing == "running" and (line := ledger.live_line(self.plan, self.store, entry.job)):
                seconds, taken = line["seconds"] - before, line["step"] - entry.job.span[0]
                shares[key] = min(1.0, max(0.0, taken / max(1, entry.job.steps)))
            else:
                continue
            speed.add(
                start_of(entry.job.run), max(0.0, seconds), shares[key] * _work(entry.job), here=entry.weights
            )
        seconds_of = {}
        for key in left:
            job, share = self.plan.jobs[key], shares[key] if entries[key].standing == "running" else 0.0
            rate = 0.0 if job.merge else speed.of(start_of(job.run))
            if rate is not None:
                seconds_of[key] = rate * _work(job) * (1 - share)
        return seconds_of

    def _tunings(self) -> tuple[dict[Grid, float], Counter[Grid], int]:
        """Return the seconds of one fine-tuning of each grid, how many are left of each, and how many are done."""
        counts: Counter[Grid] = Counter()
        self.open, done = set(), 0
        for grid in tuning_grids(self.plan, screened_in(self.store), self.models):
            for tuning in grid.tunings:
                if tuning.key in self.known or (finished(tuning, self.store) and self._read(tuning)):
                    done += 1
                else:
                    counts[tuning.model, tuning.task.name, tuning.share] += 1
                    self.open.add(tuning.key)
            if grid.pending:
                counts[grid.model, grid.task.name, 1.0] += grid.pending
        seconds = {}
        for model, task, share in counts:
            kind = self._size(model), task
            training, scoring = self.training.of(kind), self.scoring.of((*kind, share < 1))
            if training is not None and scoring is not None:
                seconds[model, task, share] = training * share + scoring
        return seconds, counts, done

    def _read(self, tuning: FineTuning) -> bool:
        """Add the seconds of a finished fine-tuning to the speeds; False if they cannot be read."""
        try:
            took = [ledger.read_trial(self.store, trial.key)["seconds"] for trial in tuning.trials]
        except StoreError:
            return False
        kind = self._size(tuning.model), tuning.task.name
        here = all(self.store.has(self.store.trials / trial.key) for trial in tuning.trials)
        train, score = (sum(each.get(part, 0.0) for each in took) for part in ("train", "score"))
        self.training.add(kind, train, tuning.share, here=here)
        self.scoring.add((*kind, tuning.share < 1), score, 1, here=here)
        self.known.add(tuning.key)
        return True

    def _size(self, model: str) -> str:
        return start_of((self.plan.jobs.get(model) or self.plan.roots[model]).run)


def _work(job: TrainingJob) -> float:
    """Return the FLOPs of a training job; if they are not known, its tokens, which compare jobs of one model."""
    return flops_of(job) or float(job.tokens)
