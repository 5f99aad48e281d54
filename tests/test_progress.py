"""Progress: one line on a terminal, a line a minute in a log, nothing where nobody asked."""

import io
import sys
import time

import pytest

from biphase import progress
from biphase.progress import Live, seconds_between


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "MINUTE", 0.05)


def test_on_a_terminal_one_line_is_written_over(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    live = Live(enabled=True)
    live("step 3 \x1b[2J")
    live("")
    assert sys.stderr.getvalue() == "\r\x1b[K  step 3 \\x1b[2J\r\x1b[K"
    assert seconds_between(2.0) == 2.0


def test_in_a_log_what_is_being_done_is_told_every_minute_until_it_ends(monkeypatch, quick):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    live = Live(enabled=True)
    for _ in range(30):  # jobs of a few milliseconds, for several minutes
        live("a short job")
        live("")
        time.sleep(0.005)
    assert log.getvalue() == "", "short work says nothing"
    live("step 3")
    live("step 4")
    deadline = time.monotonic() + 10
    while log.getvalue().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(log.getvalue().splitlines()) == {"  step 4"}
    live("")
    time.sleep(0.1)
    told = log.getvalue()
    time.sleep(0.2)
    assert log.getvalue() == told
    assert seconds_between(2.0) == 0.05


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_nothing_is_told_where_nobody_asked(stream, monkeypatch, quick):
    monkeypatch.setattr(sys, "stderr", stream())
    Live(enabled=False)("step 3")
    time.sleep(0.2)
    assert sys.stderr.getvalue() == ""
