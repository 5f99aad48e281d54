"""The tokenized corpora a worker needs: found in the store, or made there once, by whoever comes first."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from biphase.data.attempt import TakenOver
from biphase.data.identity import HashMemory
from biphase.data.shards import Shards
from biphase.data.tokenize import tokenize
from biphase.errors import DataError, one_line
from biphase.files import Store
from biphase.keys import Identities
from biphase.leases import Leases
from biphase.presets import corpus_of
from biphase.specs import Pretrain
from biphase.training.devices import Ranks

FAILED = "failed: "  # and what went wrong
POLL_SECONDS = 1.0


class Stopped(Exception):
    """Somebody asked to stop in the middle of something that cannot be kept half done."""


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
        """The shards that a run's keys name, made by this process if they are missing."""
        folder = self.store.shards / self.identities.data(run)
        self._make(run, folder)
        return Shards.open(folder)

    def together(self, run: Pretrain) -> Shards:
        """The same for all processes at once, to train on: every token file is checked first."""
        folder = self.store.shards / self.identities.data(run)
        if self.ranks.world == 1:
            self._make_sound(run, folder)
            return Shards.open(folder)
        # The first process makes them on the side and tells the others how it stands: whoever waits in silence
        # for another process would never learn that it stopped or failed.
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
        """Made, and read before it is trained on: a bit that turned on its way would be learned in silence.

        What was read before and has not changed its size or time since is not read again: a corpus of the paper's size
        would keep every start waiting for minutes.
        """
        self._make(run, folder)
        self.live(f"reading the tokens of {corpus_of(run).name}")
        Shards.open(folder).check_tokens(HashMemory(self.store))

    def _make(self, run: Pretrain, folder: Path) -> None:
        corpus = corpus_of(run)

        def report(text: str) -> None:
            if self.stop():  # what is tokenized so far stays, and the next run goes on from it
                raise Stopped
            if text:
                self.say(f"  {text}")

        while not self.store.has(folder):
            if self.stop():
                raise Stopped
            lease = self.leases.take(f"shards-{folder.name}")
            if lease is None:  # somebody else makes them
                time.sleep(POLL_SECONDS)
                continue
            # A worker that stalled finds another at work: it looks again, like one that came later.
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
