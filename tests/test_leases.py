"""A lease has one holder at a time, whichever processes are killed, suspended or racing."""

import errno
import fcntl
import json
import os
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
from common import wait_until

from biphase.errors import StoreError
from biphase.leases import (
    TAKEOVERS,
    Holder,
    Leases,
    machine,
    parse,
    process_lives,
    process_start,
)

QUICK = {"beat_seconds": 0.05, "stale_seconds": 0.4}
PATIENT = {"beat_seconds": 0.05, "stale_seconds": 60.0}


def fork(work: Callable[[], int]) -> int:
    child = os.fork()
    if child == 0:
        code = 99
        try:
            code = work()
        finally:
            os._exit(code)
    return child


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def holder_elsewhere(folder: Path, key: str = "job", **timing: float):
    """Another process that holds `key`, and after a byte from the pipe reports whether it was lost (exit code 3)."""
    reader, writer = os.pipe()

    def hold() -> int:
        lease = Leases(folder, **timing).take(key)
        os.read(reader, 1)
        return 3 if lease.lost else 0

    child = fork(hold)
    try:
        wait_until(lambda: key in Leases(folder).holders())
        yield child, writer
    finally:
        os.close(reader)
        os.close(writer)
        try:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        except (ProcessLookupError, ChildProcessError):
            pass


def test_a_lease_has_one_holder_until_it_is_released(tmp_path):
    ours, others = Leases(tmp_path, **PATIENT), Leases(tmp_path, **PATIENT)
    with ours.take("job") as lease:
        assert lease.key == "job"
        assert not lease.lost
        assert others.take("job") is None
        assert ours.take("job") is None
        with others.take("a"):
            (tmp_path / "torn.lease").write_bytes(b"")
            holders = others.holders()
            (tmp_path / "torn.lease").unlink()
        assert list(holders) == ["a", "job"]
        assert (holders["a"].pid, holders["a"].host) == (os.getpid(), socket.gethostname())
        assert holders["a"].alive is True
    with others.take("job") as successor:
        lease.release()  # a second release of the old one does not touch the new one
        assert ours.take("job") is None
        assert not successor.lost
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


def test_a_held_lease_beats_until_it_is_released(tmp_path):
    leases = Leases(tmp_path, **PATIENT)
    with leases.take("job"):
        wait_until(lambda: leases.holders()["job"].beats >= 3)
    wait_until(lambda: leases._heart is None)
    with leases.take("job"):  # and starts again
        wait_until(lambda: leases.holders()["job"].beats >= 1)


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without"])
def test_of_racing_processes_one_holds_the_lease(tmp_path, links, monkeypatch):
    if not links:
        monkeypatch.setattr(os, "link", _no_links)

    def compete() -> int:
        leases, taken, until = Leases(tmp_path / "leases", **PATIENT), 0, time.monotonic() + 0.8
        while time.monotonic() < until or not taken:
            lease = leases.take("job")
            if lease:
                taken += 1
                with lease, alone(tmp_path):
                    time.sleep(0.001)
            time.sleep(0.0005)
        return 0

    children = [fork(compete) for _ in range(6)]
    assert [exit_code(child) for child in children] == [0] * 6
    assert Leases(tmp_path / "leases").takeovers() == []


def _no_links(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, "this file system has no links")


@contextmanager
def alone(folder: Path):
    """Fails if another process is inside too. The kernel ends the claim of a dead one."""
    witness = os.open(folder / "witness", os.O_RDWR | os.O_CREAT)
    fcntl.flock(witness, fcntl.LOCK_EX | fcntl.LOCK_NB)
    yield
    os.close(witness)


def test_a_holder_killed_in_a_race_has_one_successor(tmp_path):
    def compete(seed: int) -> int:
        dice, leases = random.Random(seed), Leases(tmp_path / "leases", **PATIENT)
        for _ in range(400):
            lease = leases.take("job")
            if lease:
                with alone(tmp_path):
                    time.sleep(0.001)
                    if dice.random() < 0.2:
                        os.kill(os.getpid(), signal.SIGKILL)
                lease.release()
            time.sleep(0.001)
        return 0

    children = [fork(lambda seed=seed: compete(seed)) for seed in range(12)]
    codes = [exit_code(child) for child in children]
    assert set(codes) <= {0, -signal.SIGKILL}
    deaths = codes.count(-signal.SIGKILL)
    assert deaths >= 6
    last = Leases(tmp_path / "leases").take("job")
    assert last is not None
    last.release()
    events = Leases(tmp_path / "leases").takeovers()
    assert len(events) == deaths
    assert {event["reason"] for event in events} == {"dead"}
    left = {path.name for path in (tmp_path / "leases").iterdir()}
    assert left == {".lock", TAKEOVERS}


def test_the_lease_of_a_killed_process_is_taken_over_at_once(tmp_path):
    with holder_elsewhere(tmp_path, **PATIENT) as (child, _):
        leases = Leases(tmp_path, **PATIENT)
        assert leases.take("job") is None
        os.kill(child, signal.SIGKILL)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a zombie is dead, though its number is in use
        assert leases.holders()["job"].alive is False
        with leases.take("job") as lease:
            assert lease is not None
        assert [event["reason"] for event in leases.takeovers()] == ["dead"]


def test_a_suspended_holder_is_replaced_and_finds_its_lease_lost(tmp_path):
    with holder_elsewhere(tmp_path, **QUICK) as (child, writer):
        leases = Leases(tmp_path, **QUICK)
        until = time.monotonic() + 3 * QUICK["stale_seconds"]
        while time.monotonic() < until:
            assert leases.take("job") is None, "a beating holder is never replaced"
            time.sleep(0.02)
        os.kill(child, signal.SIGSTOP)
        stopped = time.monotonic()
        lease = wait_until(lambda: leases.take("job"))
        assert time.monotonic() - stopped >= QUICK["stale_seconds"] - QUICK["beat_seconds"]
        os.write(writer, b"x")
        os.kill(child, signal.SIGCONT)
        assert exit_code(child) == 3
        time.sleep(3 * QUICK["beat_seconds"])
        assert not lease.lost, "the one that came back must not disturb the new holder"
        assert leases.holders()["job"].owner == lease.owner
        assert [event["reason"] for event in leases.takeovers()] == ["silent"]
        lease.release()


def test_a_reader_never_sees_a_partial_lease(tmp_path):
    def churn() -> int:
        leases, until = Leases(tmp_path, beat_seconds=0.0005, stale_seconds=60.0), time.monotonic() + 1.0
        while time.monotonic() < until:
            lease = leases.take("job")
            if lease:
                time.sleep(0.003)
                lease.release()
        return 0

    children = [fork(churn) for _ in range(2)]
    seen, until = set(), time.monotonic() + 1.0
    while time.monotonic() < until:
        try:
            raw = (tmp_path / "job.lease").read_bytes()
        except FileNotFoundError:
            continue
        assert isinstance(parse(raw), Holder), raw
        seen.add(raw)
    assert [exit_code(child) for child in children] == [0, 0]
    assert len(seen) > 20


def test_a_truncated_or_foreign_lease_is_respected_until_it_is_stale(tmp_path):
    leases = Leases(tmp_path, **QUICK)
    (tmp_path / "torn.lease").write_bytes(b'{"beat": "0000')
    host, boot, namespace = machine()
    away = {"host": host + "-2", "boot": boot, "namespace": namespace, "pid": 2**22 + 1, "started": "1"}
    (tmp_path / "away.lease").write_text(json.dumps({"beat": "7", "owner": "o", "since": "", **away}))
    assert leases.holders()["away"].alive is None
    for key in ("torn", "away"):
        assert leases.take(key) is None
    for key in ("torn", "away"):
        with wait_until(lambda key=key: leases.take(key)) as lease:
            assert lease.key == key
    assert {event["from"] for event in leases.takeovers()} == {"unreadable", f"{host}-2:{2**22 + 1}"}


def test_one_long_gap_between_two_checks_does_not_make_a_lease_stale(tmp_path):
    with holder_elsewhere(tmp_path, **QUICK) as (child, _):
        leases = Leases(tmp_path, **QUICK)
        os.kill(child, signal.SIGSTOP)
        assert leases.take("job") is None
        time.sleep(3 * QUICK["stale_seconds"])  # as if we had been stopped together with the holder
        assert leases.take("job") is None
        os.kill(child, signal.SIGCONT)
        time.sleep(4 * QUICK["beat_seconds"])
        assert leases.take("job") is None


def test_lost_reads_the_file_if_beats_are_overdue(tmp_path):
    leases = Leases(tmp_path, beat_seconds=30.0, stale_seconds=60.0)
    lease = leases.take("job")
    (tmp_path / "job.lease").unlink()
    assert not lease.lost
    lease._confirmed -= 61.0
    assert lease.lost
    lease.beat()
    assert list(tmp_path.glob("*.lease")) == [], "what is lost is never made again"
    lease.release()


def test_a_mistaken_steal_is_undone(tmp_path):
    leases, thief = Leases(tmp_path, **PATIENT), Leases(tmp_path, **PATIENT)
    with leases.take("job") as lease:
        path = tmp_path / "job.lease"
        old = path.read_bytes()
        wait_until(lambda: path.read_bytes() != old)
        assert not thief._steal(path, "job", old, "silent")
        assert not thief._withdraw(path, lambda raw: raw == old)
        assert not thief._withdraw(tmp_path / "none.lease", lambda _: True)
        before = leases.holders()["job"].beats
        wait_until(lambda: leases.holders()["job"].beats > before)
        assert not lease.lost
    assert leases.takeovers() == []


def test_a_forked_child_does_not_release_or_beat_its_parent_s_lease(tmp_path):
    leases = Leases(tmp_path, **PATIENT)
    with leases.take("job") as lease:

        def child() -> int:
            lease.release()
            lease.beat()
            if leases.take("job") is not None:
                return 1
            with leases.take("mine") as mine:
                wait_until(lambda: leases.holders()["mine"].beats >= 1)
                return 0 if not mine.lost and leases.holders()["mine"].pid == os.getpid() else 2

        assert exit_code(fork(child)) == 0
        assert not lease.lost
        assert list(leases.holders()) == ["job"]


def test_a_stuck_or_missing_lock_does_not_block(tmp_path, monkeypatch):
    monkeypatch.setattr("biphase.leases.LOCK_SECONDS", 0.1)
    leases = Leases(tmp_path, **PATIENT)
    with leases.take("job") as lease:
        stuck = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(stuck, fcntl.LOCK_EX)
        lease.release()
        os.close(stuck)
    monkeypatch.setattr(fcntl, "flock", _no_links)
    leases.take("job").release()
    assert leases.holders() == {}


def test_a_failed_take_leaves_no_file(tmp_path, monkeypatch):
    leases = Leases(tmp_path, **PATIENT)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        leases.take("job")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("key", ["", "a/b", "..", ".hidden", "a b", "é"])
def test_a_wrong_key_is_refused(tmp_path, key):
    with pytest.raises(StoreError, match="lease"):
        Leases(tmp_path).take(key)


def test_a_process_is_identified_by_pid_and_start_time():
    started = process_start(os.getpid())
    assert process_lives(os.getpid(), started)
    assert not process_lives(os.getpid(), "1")
    assert not process_lives(2**22 + 1, "1")
    assert process_start(2**22 + 1) is None


def test_a_hidden_process_of_another_user_counts_as_alive(monkeypatch):
    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert process_lives(2**22 + 1, "1")
    assert not process_lives(os.getpid(), "1")


def test_without_proc_only_beats_show_that_a_holder_lives(monkeypatch):
    def missing(*_: object) -> str:
        raise FileNotFoundError

    host, boot, namespace = machine()
    holder = Holder("o", host, boot, namespace, 2**22 + 1, "1", "", 0)
    assert holder.alive is False
    monkeypatch.setattr(os, "readlink", missing)
    assert machine() == (host, boot, "")
    assert holder.alive is None


@pytest.mark.parametrize("what", ["a pipe", "a link", "a folder"])
def test_a_lease_path_that_is_no_regular_file_blocks_until_it_is_stale(tmp_path, what):
    leases = Leases(tmp_path / "leases", **QUICK)
    leases.folder.mkdir()
    for name in ("job.lease", TAKEOVERS, ".lock"):
        path = leases.folder / name
        if what == "a pipe":
            os.mkfifo(path)
        elif what == "a link":
            path.symlink_to(path.parent / "nowhere")
        else:
            path.mkdir()
            (path / "file").touch()

    def work() -> int:
        found = leases.take("job") is None and not leases.holders() and not leases.takeovers()
        lease = wait_until(lambda: leases.take("job"))
        with lease:
            lease.beat()
            return 0 if found and list(leases.holders()) == ["job"] and not lease.lost else 1

    child = fork(work)
    ended = None
    try:
        ended = wait_until(lambda: next((one for one in [os.waitpid(child, os.WNOHANG)] if one[0]), None))
    finally:
        if ended is None:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == (child, 0)
    assert not (leases.folder / "nowhere").exists(), "nothing is written where a link points"
    assert not os.path.lexists(leases.folder / "job.lease")
