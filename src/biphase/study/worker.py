"""A worker computes jobs of a plan until none is left that it could do.

It takes the first state, depth first, whose parent is done and whose lease it gets; trains up to it; publishes;
looks again. Any number of workers, on any machines, may share a store: leases keep them apart, and a dead
one's job is taken over. With several processes (torchrun) the first one chooses and the others follow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from biphase.data.shards import Shards
from biphase.data.tokenize import tokenize
from biphase.errors import DataError, SpecError, one_line
from biphase.files import Store
from biphase.keys import Identities, label
from biphase.leases import Lease, Leases
from biphase.presets import corpus_of
from biphase.study import ledger
from biphase.study.costs import piece_flops, shape_of
from biphase.study.plan import Plan, State, needed_keys
from biphase.training.devices import Ranks, poor_precision
from biphase.training.pretrain import Manner, Pretraining
from biphase.wording import duration, si

POLL_SECONDS = 1.0


@dataclass
class Outcome:
    """How a worker ended."""

    computed: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    stopped: bool = False


class Worker:
    def __init__(
        self,
        plan: Plan,
        store: Store,
        identities: Identities,
        ranks: Ranks,
        manner: Manner,
        *,
        wanted: set[str],
        say: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True),
    ) -> None:
        self.plan, self.store, self.identities, self.ranks, self.manner = (
            plan,
            store,
            identities,
            ranks,
            manner,
        )
        self.wanted = wanted
        self.say = say if ranks.first else lambda text: None
        self.leases = Leases(store.leases)
        self.outcome = Outcome()
        self.warned: set[str] = set()

    def work(self) -> Outcome:
        """Compute until nothing is left to do here, or somebody asks to stop."""
        while True:
            stopping = self.ranks.sum(self.manner.stop())[0] > 0  # whoever was told, all must know
            lease, order = self._choose(stopping) if self.ranks.first else (None, None)
            order = self.ranks.share(order)
            if order["do"] == "end":
                return self.outcome
            if order["do"] == "wait":
                time.sleep(POLL_SECONDS)
                continue
            try:
                self._compute(self.plan.states[order["key"]], lease)
            finally:
                if lease:
                    lease.release()

    def _choose(self, stopping: bool) -> tuple[Lease | None, dict[str, Any]]:
        """The next job, with its lease."""
        if stopping:
            self.outcome.stopped = True
            return None, {"do": "end"}
        done = ledger.done_keys(self.plan, self.store)
        pending = [key for key in self.plan.left(done) if key in self.wanted and not self._doomed(key)]
        for key in pending:
            parent = self.plan.states[key].parent
            if parent is not None and parent not in done:
                continue
            lease = self.leases.take(key)
            if lease is None:
                continue
            if not self.store.has(self.store.states / key):  # its last holder may just have published it
                return lease, {"do": "train", "key": key}
            lease.release()
        return None, {"do": "wait" if pending else "end"}

    def _doomed(self, key: str) -> bool:
        """Did this job, or one it needs, fail here?"""
        return any(state.key in self.outcome.failed for state in self.plan.path(key))

    def _compute(self, state: State, lease: Lease | None) -> None:
        number = len(ledger.done_keys(self.plan, self.store)) + 1
        decays = " ↘" if state.decaying else ""
        title = f"{number}/{self.plan.pieces}  {label(state.objective)}{decays} {state.span[0]:,} → {state.span[1]:,}"
        manner = replace(
            self.manner,
            lost=lambda: lease is not None and lease.lost,
            board=self.store.studies / self.plan.study.name / "tensorboard" / state.key
            if self.ranks.first
            else None,
        )
        self._warn(state)
        began = time.monotonic()
        try:
            piece = Pretraining(
                state.run,
                state.step,
                store=self.store,
                shards=self._shards(state),
                identities=self.identities,
                ranks=self.ranks,
                needed=lambda: needed_keys(self.store),
                flops_per_token=_flops_per_token(state),
                manner=manner,
                title=title,
            )
            finished = piece.train()
        except _Stopped:
            return
        except (DataError, SpecError):
            raise  # the study's input is wrong: its author has to act
        except Exception as error:
            if self.ranks.first:
                ledger.note_failure(self.plan, self.store, state.key, error)
            if self.ranks.world > 1:
                raise  # the processes no longer agree on where they are
            self.outcome.failed[state.key] = one_line(error)
            self.say(f"  {title}  {state.key[:6]}  failed: {one_line(error)}")
            return
        if finished:
            self.outcome.computed += 1
            if self.ranks.first:
                ledger.forget_failure(self.plan, self.store, state.key)
                self.say(f"  {title}  {state.key[:6]}  {_summary(piece, time.monotonic() - began)}")

    def _warn(self, state: State) -> None:
        warning = poor_precision(self.ranks.device, state.run.precision)
        if warning and warning not in self.warned:
            self.warned.add(warning)
            self.say(f"  note: {warning} (run {state.run.name!r})")

    def _shards(self, state: State) -> Shards:
        """The tokenized corpus that the state's key names, made if it is missing."""
        folder = self.store.shards / self.identities.data(state.run)
        if self.ranks.world == 1:
            self._make_shards(state, folder)
            return Shards.open(folder)
        # The first process makes them on the side and tells the others how it stands: whoever waits in silence
        # for another process would never learn that it stopped or failed.
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(self._make_shards, state, folder) if self.ranks.first else None
            while (standing := self.ranks.share(_standing(job))) == "working":
                time.sleep(POLL_SECONDS)
        if standing == "stopped":
            raise _Stopped
        if job:
            job.result()
        if standing == "failed":
            raise DataError("the first process could not tokenize the corpus; see its error")
        return Shards.open(folder)

    def _make_shards(self, state: State, folder: Path) -> None:
        corpus = corpus_of(state.run)

        def report(text: str) -> None:
            if self.manner.stop():  # what is tokenized so far stays, and the next run goes on from it
                raise _Stopped
            self.say(f"  {text}")

        while not self.store.has(folder):
            if self.manner.stop():
                raise _Stopped
            lease = self.leases.take(f"shards-{folder.name}")
            if lease is None:  # somebody else makes them
                time.sleep(POLL_SECONDS)
                continue
            with lease:
                if tokenize(corpus, self.store, report=report, lost=lambda held=lease: held.lost) != folder:
                    raise DataError(
                        f"the files of corpus {corpus.name!r} have changed since the study was planned; "
                        "start the run again to plan with what is there now"
                    )


def _standing(job: Future[None] | None) -> str:
    if job is None or not job.done():
        return "working"
    error = job.exception()
    return "done" if error is None else "stopped" if isinstance(error, _Stopped) else "failed"


class _Stopped(Exception):
    """Somebody asked to stop while a corpus was being tokenized."""


def _flops_per_token(state: State) -> float | None:
    shape = shape_of(state.run)
    return piece_flops(state, shape) / state.tokens if shape else None


def _summary(piece: Pretraining, seconds: float) -> str:
    first = piece.meter.origin + piece.meter.first  # the lines go back to the root; these are the piece's own
    losses = [
        line["loss"] for line in piece.meter.lines if line["step"] > first and line.get("loss") is not None
    ]
    way = f"loss {losses[0]:.2f} → {losses[-1]:.2f}" if losses else ""
    tokens = (piece.target - piece.meter.first) * piece.run.batch_tokens
    return f"{way}   {si(tokens / max(seconds, 1e-9))}tok/s   {duration(seconds)}"
