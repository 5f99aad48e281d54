"""Times, rules and the wish to stop."""

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
    with pytest.raises(SpecError, match="length of time"):
        launch.seconds(text)


def test_checkpoints_come_by_steps_or_by_time():
    assert launch.checkpoint_rule("200") == (200, 0.0)
    assert launch.checkpoint_rule("10m") == (0, 600.0)


@pytest.fixture
def handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_asks_to_stop_and_a_second_interrupt_insists(handlers):
    said = []
    stop = launch.Stop(None, said.append)
    assert not stop()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop()
    assert "stopping after this step" in said[0]
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_a_warning_stops_too_and_is_told_from_other_signals(handlers):
    said = []
    stop = launch.Stop(None, said.append)
    signal.raise_signal(signal.SIGTERM)
    assert (stop(), stop.warned) == (True, False)
    signal.raise_signal(signal.SIGUSR1)
    assert stop.warned
    assert len(said) == 1, "it is said once"


def test_a_request_stops_and_is_said_once(handlers):
    said, requests = [], iter([False, True])
    stop = launch.Stop(None, said.append, lambda: next(requests))
    assert [stop(), stop(), stop()] == [False, True, True]
    assert said == ["stopping after this step, as `biphase stop` asked"]


def test_the_time_runs_out(handlers):
    stop = launch.Stop(0.02, lambda text: None)
    assert not stop()
    time.sleep(0.03)
    assert stop()


@pytest.mark.parametrize(("ends", "code"), [(143, 0), (130, 0), (0, 0), (1, 1), (2, 2), (137, 137)])
def test_a_stop_that_was_asked_for_is_clean_unless_a_process_failed(
    handlers, tmp_path, monkeypatch, ends, code
):
    launcher = tmp_path / "launcher"  # asks its parent to stop, and ends so when it is told to itself
    launcher.write_text(
        f"#!/bin/sh\ntrap 'exit {ends}' TERM\nkill -TERM $PPID\nwhile :; do sleep 0.05; done\n"
    )
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    assert launch.in_processes(2, ["run"], {}) == (code, False)


def test_a_launcher_that_is_killed_is_named_and_the_exit_code_is_1(handlers, tmp_path, monkeypatch, capsys):
    launcher = tmp_path / "launcher"
    launcher.write_text("#!/bin/sh\nkill -KILL $$\n")
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    assert launch.in_processes(2, ["run"], {}) == (1, False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "SIGKILL" in line
    assert "type the same command to go on" in line


@pytest.mark.campaign
def test_a_sigterm_to_the_launcher_stops_all_processes_with_a_checkpoint(corpus, tmp_path, store):
    import json
    import subprocess

    study = tmp_path / "long.py"
    study.write_text(
        "from biphase import *\n"
        f"corpus = Corpus('tiny', {corpus.source!r}, BPE(320), heldout='heldout.jsonl')\n"
        "tiny = Size('tiny', layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision='fp32')\n"
        "study = Study('long', (Pretrain('clm', tiny, corpus, (Stage(CLM(), 1_000_000),), packing=Chunks(32, 4),"
        " batch_tokens=256, schedule=WSD(1e-3, 5, 5)),))\n"
    )
    command = [
        sys.executable,
        "-m",
        "biphase",
        "run",
        study,
        "--store",
        store.root,
        "--processes",
        "2",
        "--checkpoint",
        "20",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not list(store.checkpoints.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    before = {
        json.loads(path.read_text())["progress"]["step"]
        for path in store.checkpoints.glob("*/checkpoint.json")
    }
    time.sleep(0.5)
    child.terminate()
    out, _ = child.communicate(timeout=60)
    after = {
        json.loads(path.read_text())["progress"]["step"]
        for path in store.checkpoints.glob("*/checkpoint.json")
    }
    assert child.returncode == 0
    assert "nothing lost" in out
    assert max(after) > max(before)
    assert not list(store.leases.glob("*.lease"))
