"""Time limits, stop signals, and how processes that train together report to their parent."""

import os
import signal
import sys
import time

import pytest

from biphase.cluster import launch
from biphase.errors import SpecError


@pytest.mark.parametrize(
    ("text", "value"), [("90s", 90), ("9m", 540), ("2h", 7200), ("1.5d", 129_600), (" 3s ", 3)]
)
def test_times_have_units(text, value):
    assert launch.seconds(text) == value


@pytest.mark.parametrize("text", ["", "9", "m", "9 minutes", "-3s", "1e3s"])
def test_a_time_without_a_unit_is_refused(text):
    with pytest.raises(SpecError, match="9m"):
        launch.seconds(text)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_stops_and_a_second_interrupt_raises(handlers):
    printed = []
    stop = launch.Stop(None, printed.append)
    assert not stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert (stop(), stop.warned) == (True, False)
    assert "after this step" in printed[0]
    signal.raise_signal(signal.SIGUSR1)
    assert stop.warned
    assert len(printed) == 1, "it is printed once"
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_stop_request_is_printed_once(handlers):
    printed, requests = [], iter([False, True])
    stop = launch.Stop(None, printed.append, lambda: next(requests))
    assert [stop(), stop(), stop()] == [False, True, True]
    assert len(printed) == 1
    assert "biphase stop" in printed[0]


def test_the_time_limit_stops(handlers):
    stop = launch.Stop(0.02, lambda text: None)
    assert not stop()
    time.sleep(0.03)
    assert stop()


@pytest.fixture
def launcher(handlers, tmp_path, monkeypatch):
    """A shell script in place of the Python that starts the processes."""

    def write(*lines):
        path = tmp_path / "launcher"
        path.write_text("\n".join(["#!/bin/sh", *lines]))
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))

    return write


@pytest.mark.parametrize(("ends", "code"), [(143, 0), (130, 0), (0, 0), (1, 1), (2, 2), (137, 137)])
def test_a_requested_stop_is_clean_unless_a_process_failed(launcher, ends, code):
    # It signals its parent, and exits when the parent signals it.
    launcher(f"trap 'exit {ends}' TERM", "kill -TERM $PPID", "while :; do sleep 0.05; done")
    assert launch.in_processes(2, ["run"], {}) == (code, False)


def test_a_killed_launcher_is_named_and_the_exit_code_is_1(launcher, capsys):
    launcher("kill -KILL $$")
    assert launch.in_processes(2, ["run"], {}) == (1, False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "SIGKILL" in line
    assert "same command" in line


# ---------------------------------------------------------------- reports of the processes
