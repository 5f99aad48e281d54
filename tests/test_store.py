"""A process killed at any moment leaves a complete result or none."""

import contextlib
import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from biphase.errors import StoreError
from biphase.store import (
    ABOUT,
    MANIFEST,
    Store,
    publish,
    read_checked,
    read_json,
    verify,
    with_checksum,
    write_json,
)

# The C functions through which Python touches the disk. The child dies before or after the nth of them.
TOUCHES = {
    "open", "close", "write", "flush", "fsync", "rename", "replace", "mkdir", "unlink", "link", "stat", "read",
}  # fmt: skip


def killed_at(moment: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that is killed at its nth contact with the disk; False if it ended before."""
    return _fork(lambda: _die_at(moment), work) == -signal.SIGKILL


def killed_by_size(limit: int, work: Callable[[], object]) -> bool:
    """Run `work` in a fork that the kernel kills in the middle of a write, when a file exceeds `limit` bytes."""

    def prepare() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    return _fork(prepare, work) == -signal.SIGXFSZ


def _fork(prepare: Callable[[], None], work: Callable[[], object]) -> int:
    child = os.fork()
    if child == 0:
        try:
            prepare()
            work()
            os._exit(0)
        finally:
            os._exit(99)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status != 99, "the work itself failed"
    return status


def _die_at(moment: int) -> None:
    left = [moment]

    def watch(_frame: object, event: str, function: object) -> None:
        if event in ("c_call", "c_return") and getattr(function, "__name__", "") in TOUCHES:
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(watch)


def build(folder: Path, mark: str) -> Path:
    (folder / "inner").mkdir(parents=True)
    (folder / "weights.bin").write_bytes(mark.encode() * 5_000)
    (folder / "inner" / "config.json").write_text(json.dumps({"mark": mark}))
    return folder


def marks(folder: Path) -> set[str]:
    """Which publishers' content stands in a folder."""
    verify(folder)
    return {(folder / "weights.bin").read_text()[0], read_json(folder / "inner" / "config.json")["mark"]}


def test_publish_killed_at_any_disk_access_leaves_a_complete_result_or_none(tmp_path):
    outcomes = []
    for moment in range(10_000):
        store = Store(tmp_path / str(moment))
        folder = store.checkpoints / "key"
        built = build(store.attempts / "one", "a")
        alive = not killed_at(moment, lambda built=built, folder=folder: publish(built, folder))
        outcomes.append(store.has(folder))
        if store.has(folder):
            assert marks(folder) == {"a"}
        else:
            assert not folder.exists()
            # and whoever comes next finds a free folder
            assert publish(build(store.attempts / "two", "b"), folder) is True
            assert marks(folder) == {"b"}
        if alive:
            break
    assert len(outcomes) > 40
    assert True in outcomes[:-1], "some kill must fall after the rename"
    assert outcomes == sorted(outcomes), "once published, a later kill changes nothing"


def test_publish_killed_in_the_middle_of_a_write_leaves_no_result(tmp_path):
    size = len(json.dumps({"mark": "a"})) + 5_000
    deaths = 0
    for limit in (0, 1, 50, 100, 200):  # the manifest has about 300 bytes
        store = Store(tmp_path / str(limit))
        built = build(store.attempts / "one", "a")
        deaths += killed_by_size(
            limit, lambda built=built, store=store: publish(built, store.checkpoints / "key")
        )
        assert not (store.checkpoints / "key").exists()
        assert not (built / MANIFEST).exists()
    assert deaths == 5
    store = Store(tmp_path / "enough")
    built = build(store.attempts / "one", "a")
    assert not killed_by_size(size, lambda: publish(built, store.checkpoints / "key"))
    assert marks(store.checkpoints / "key") == {"a"}


def test_write_json_killed_at_any_moment_leaves_the_old_or_the_new(tmp_path):
    path = tmp_path / "plan.json"
    old, new = {"version": 1, "runs": ["one"] * 5}, {"version": 2, "runs": ["two"] * 9}
    seen = []
    for moment in range(10_000):
        write_json(path, old)
        alive = not killed_at(moment, lambda: write_json(path, new))
        seen.append(read_json(path))
        assert seen[-1] in (old, new)
        if alive:
            break
    assert len(seen) > 20
    assert seen[0] == old
    assert seen[-1] == new
    assert seen == sorted(seen, key=lambda value: value["version"])
    for limit in (0, 1, 30):
        write_json(path, old)
        assert killed_by_size(limit, lambda: write_json(path, new))
        assert read_json(path) == old


def test_write_json_that_fails_leaves_the_old_file_and_no_draft(tmp_path):
    path = tmp_path / "plan.json"
    write_json(path, {"loss": 1.0})
    with pytest.raises(ValueError):
        write_json(path, {"loss": float("nan")})
    assert read_json(path) == {"loss": 1.0}
    assert [one.name for one in tmp_path.iterdir()] == ["plan.json"]


def test_of_many_publishers_exactly_one_succeeds(tmp_path):
    for trial in range(5):
        store = Store(tmp_path / str(trial))
        folder = store.checkpoints / "key"
        attempts = {mark: build(store.attempts / mark, mark) for mark in "abcdef"}
        start, go = os.pipe()
        children = {}
        for mark, built in attempts.items():
            child = os.fork()
            if child == 0:
                os.read(start, 1)
                os._exit(int(publish(built, folder)))
            children[mark] = child
        os.write(go, b"x" * len(children))
        won = {
            mark
            for mark, child in children.items()
            if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
        }
        os.close(start)
        os.close(go)
        assert len(won) == 1
        assert marks(folder) == won


def test_publish_takes_an_empty_folder_and_a_second_publish_changes_nothing(tmp_path):
    folder = tmp_path / "checkpoints" / "key"
    folder.mkdir(parents=True)
    assert publish(build(tmp_path / "one", "a"), folder) is True
    assert publish(build(tmp_path / "two", "b"), folder) is False
    assert marks(folder) == {"a"}


@pytest.mark.parametrize("debris", ["folder", "file"])
def test_publish_onto_other_files_names_what_to_remove(tmp_path, debris):
    folder = tmp_path / "checkpoints" / "key"
    folder.parent.mkdir()
    if debris == "folder":
        folder.mkdir()
        (folder / "weights.bin").write_bytes(b"half a copy")
    else:
        folder.write_bytes(b"?")
    with pytest.raises(StoreError, match=r"rm -r .*checkpoints/key") as refusal:
        publish(build(tmp_path / "one", "a"), folder)
    assert "\n" not in str(refusal.value)
    assert folder.exists()


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


DAMAGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "removed": ("weights.bin", Path.unlink),
    "cut": ("weights.bin", lambda path: os.truncate(path, 4_999)),
    "one bit": ("weights.bin", flip_a_bit),
    "rewritten": (f"inner/{MANIFEST}", lambda path: path.write_text("{ }")),
}


@pytest.mark.parametrize(("name", "damage"), DAMAGES.values(), ids=DAMAGES)
def test_verify_names_the_damaged_file(tmp_path, name, damage):
    folder = tmp_path / "key"
    built = build(tmp_path / "one", "a")
    (built / "inner" / MANIFEST).write_text("{}")  # a file of the result, though it bears the manifest's name
    publish(built, folder)
    assert set(verify(folder)) == {"weights.bin", "inner/config.json", f"inner/{MANIFEST}"}
    damage(folder / name)
    with pytest.raises(StoreError, match=name):
        verify(folder)
    if damage is flip_a_bit:
        assert name in verify(folder, contents=False), "it compares sizes only"
    else:
        with pytest.raises(StoreError, match=name):
            verify(folder, contents=False)


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", "{}", '{"files": ["a"]}', '{"files": {"a": 3}}', '"files"']
)
def test_verify_refuses_a_missing_or_wrong_manifest(tmp_path, text):
    if text is not None:
        (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(StoreError, match=MANIFEST):
        verify(tmp_path)


@pytest.mark.parametrize(
    "text", ["[]", "{}", '{"a": 1}', '{"a": 1, "sha256": "00"}', '{"a": 1, "sha256": null}']
)
def test_a_file_without_its_checksum_is_refused(tmp_path, text):
    path = tmp_path / "plan.json"
    path.write_text(text)
    with pytest.raises(StoreError, match=r"plan\.json"):
        read_checked(path)
    write_json(path, with_checksum({"a": 1}))
    assert read_checked(path) == {"a": 1}


def test_an_attempt_has_its_own_folder_and_leaves_only_what_was_published(tmp_path):
    store = Store(tmp_path)
    with store.attempt("key") as folder, store.attempt("key") as other:
        assert folder != other
        build(folder / "deep", "a")
    with contextlib.suppress(RuntimeError), store.attempt("key") as folder:
        build(folder / "deep", "a")
        raise RuntimeError
    with store.attempt("key") as folder:
        (folder / "a.txt").write_text("a")
        assert publish(folder, store.checkpoints / "key")
    assert store.has(store.checkpoints / "key")
    assert list(store.attempts.iterdir()) == []


def test_discard_killed_at_any_disk_access_leaves_a_complete_result_or_none(tmp_path):
    seen = []
    for moment in range(10_000):
        store = Store(tmp_path / str(moment))
        folder = store.checkpoints / "key"
        publish(build(store.attempts / "one", "a"), folder)
        alive = not killed_at(moment, lambda store=store, folder=folder: store.discard(folder))
        seen.append(folder.exists())
        if folder.exists():
            assert marks(folder) == {"a"}
        if alive:
            break
    assert seen[0] is True
    assert seen[-1] is False
    store.discard(folder)  # what is not there is no error
    assert list(store.attempts.iterdir()) == []


# ---------------------------------------------------------------- versions of the format


@pytest.fixture
def first_store(tmp_path, monkeypatch) -> Path:
    """A copy of the store that version 0.1.0 wrote, in the folder of its study file."""
    shutil.copytree(Path(__file__).parent / "stores" / "v1", tmp_path / "v1")
    monkeypatch.chdir(tmp_path / "v1")
    return tmp_path / "v1" / "store"


def test_what_the_first_version_wrote_is_read_and_continued(first_store, verb):
    code, out, err = verb("status", "study.py", "--json")
    assert code == 0, err
    facts = json.loads(out)
    assert [job["standing"] for job in facts["jobs"]] == ["done"], "keys are still those of 0.1.0"
    assert (facts["finetunings"]["done"], facts["damaged"]) == (1, {})
    before = {path: path.stat().st_mtime_ns for path in first_store.glob("*/*/manifest.json")}
    more = """
from biphase import MLM, WSD, Pretrain, Stage, Study
from biphase.study.load import load

clm = load("study.py").study.runs[0]
more = Pretrain("more", start=clm, stages=Stage(MLM(0.4), 4), schedule=WSD(peak=3e-3, decay=0))
study = Study("more", (clm, more))
"""
    Path("more.py").write_text(more)
    code, out, err = verb("run", "more.py", "--quiet")
    assert code == 0, err
    after = {path: path.stat().st_mtime_ns for path in first_store.glob("*/*/manifest.json")}
    assert before.items() <= after.items()
    assert len(after) == len(before) + 1, "only the continuation was computed"


@pytest.mark.parametrize("version", [0, 2, "x", None])
def test_a_store_of_another_version_is_refused(version, first_store, verb):
    write_json(first_store / ABOUT, {"version": version})
    for typed in ("plan", "status", "run"):
        code, out, err = verb(typed, "study.py")
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert all(fact in err for fact in (f"version {version},", "version 1;", "--store"))
    (first_store / ABOUT).write_text("{")
    assert "remove" not in verb("status", "study.py")[2], "a damaged file is not worth the store"
    write_json(first_store / ABOUT, {"version": 1})
    assert verb("status", "study.py")[0] == 0
    (first_store / "receipts").mkdir()  # as development versions had; it would pass for an empty store
    code, _, err = verb("status", "study.py")
    assert (code, err.count("\n")) == (2, 1)
    assert "receipts/" in err
