"""How fast a corpus is being read, and how long the rest will take: every two seconds on a terminal, else every minute."""

from __future__ import annotations

import time
from collections.abc import Callable

from biphase.data.documents import Place
from biphase.data.sources import File
from biphase.progress import seconds_between
from biphase.specs import Corpus
from biphase.wording import duration

REPORT_SECONDS = 2.0


class Meter:
    """Says from time to time how fast text is read and how long the rest will take.

    `report` is called every two seconds, with an empty text where no line is due: it may end the work.
    """

    def __init__(
        self,
        corpus: Corpus,
        files: list[File],
        report: Callable[[str], None],
        start: Place,
        text: int,  # bytes and training tokens that are there already
        tokens: int,
    ) -> None:
        self.corpus, self.report = corpus, report
        self.total = sum(file.size for file in files)
        self.skipped = sum(file.size for file in files[: start.file])
        self.text, self.tokens = text, tokens
        self.began = self.shown = self.called = time.monotonic()
        self.every = seconds_between(REPORT_SECONDS)

    def show(self, read: int, text: int, tokens: int, *, last: bool = False) -> None:
        now = time.monotonic()
        if not last and now - self.called < REPORT_SECONDS:
            return
        self.called = now
        if not last and now - self.shown < self.every:
            self.report("")
            return
        self.shown, seconds = now, max(now - self.began, 1e-9)
        rate = (text - self.text) / seconds / 1e6
        done = (read - self.skipped) / max(self.total - self.skipped, 1)
        if self.corpus.tokens:
            done = max(done, (tokens - self.tokens) / max(self.corpus.tokens - self.tokens, 1))
        left = f", {duration(seconds * (1 - done) / done)} left" if 0 < done < 1 and not last else ""
        self.report(
            f"{self.corpus.name}: {text / 1e6:,.1f} MB of text, {tokens:,} tokens, {rate:.1f} MB/s{left}"
        )
