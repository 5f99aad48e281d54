"""A crash leaves no lie: whatever is killed whenever, a result is whole or not there."""

import contextlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from biphase.errors import StoreError
from biphase.store import MANIFEST, Store, publish, read_json, verify, write_json

# The C functions through which Python touches the disk. The child dies before or after the nth of them.
TOUCHES = {
    "open",
    "close",
    "write",
    "flush",
    "fsync",
    "rename",
    "replace",
    "mkdir",
    "unlink",
    "link",
    "stat",
    "read",
}


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


def marks(place: Path) -> set[str]:
    """Which publishers' content stands in a place."""
    verify(place)
    return {(place / "weights.bin").read_text()[0], read_json(place / "inner" / "config.json")["mark"]}


def test_publish_killed_at_any_contact_with_the_disk_leaves_a_whole_result_or_none(tmp_path):
    outcomes = []
    for moment in range(10_000):
        store = Store(tmp_path / str(moment))
        place = store.checkpoints / "key"
        built = build(store.attempts / "one", "a")
        alive = not killed_at(moment, lambda built=built, place=place: publish(built, place))
        outcomes.append(store.has(place))
        if store.has(place):
            assert marks(place) == {"a"}
        else:
            assert not place.exists()
            # and whoever comes next finds a free place
            assert publish(build(store.attempts / "two", "b"), place) is True
            assert marks(place) == {"b"}
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


def test_of_many_publishers_exactly_one_wins_and_its_content_is_whole(tmp_path):
    for trial in range(5):
        store = Store(tmp_path / str(trial))
        place = store.checkpoints / "key"
        folders = {mark: build(store.attempts / mark, mark) for mark in "abcdef"}
        start, go = os.pipe()
        children = {}
        for mark, folder in folders.items():
            child = os.fork()
            if child == 0:
                os.read(start, 1)
                os._exit(int(publish(folder, place)))
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
        assert marks(place) == won


def test_a_second_publish_is_refused_and_changes_nothing(tmp_path):
    place = tmp_path / "checkpoints" / "key"
    assert publish(build(tmp_path / "one", "a"), place) is True
    assert publish(build(tmp_path / "two", "b"), place) is False
    assert marks(place) == {"a"}


def test_publish_takes_an_empty_folder_for_a_free_place(tmp_path):
    place = tmp_path / "checkpoints" / "key"
    place.mkdir(parents=True)
    assert publish(build(tmp_path / "one", "a"), place) is True
    assert marks(place) == {"a"}


@pytest.mark.parametrize("debris", ["folder", "file"])
def test_publish_onto_debris_names_what_to_remove(tmp_path, debris):
    place = tmp_path / "checkpoints" / "key"
    place.parent.mkdir()
    if debris == "folder":
        place.mkdir()
        (place / "weights.bin").write_bytes(b"half a copy")
    else:
        place.write_bytes(b"?")
    with pytest.raises(StoreError, match=r"rm -r .*checkpoints/key\) and run again") as refusal:
        publish(build(tmp_path / "one", "a"), place)
    assert "\n" not in str(refusal.value)
    assert place.exists()


def test_publish_of_a_folder_that_is_gone_says_so(tmp_path):
    with pytest.raises(FileNotFoundError):
        publish(tmp_path / "nothing", tmp_path / "checkpoints" / "key")


def test_publish_that_cannot_rename_for_another_reason_says_which(tmp_path):
    built = build(tmp_path / "one", "a")
    with pytest.raises(OSError, match="Invalid argument"):
        publish(built, built / "inside" / "itself")


def damage_remove(place: Path) -> None:
    (place / "weights.bin").unlink()


def damage_cut(place: Path) -> None:
    os.truncate(place / "weights.bin", 4_999)


def damage_alter(place: Path) -> None:
    content = bytearray((place / "weights.bin").read_bytes())
    content[2_500] ^= 1
    (place / "weights.bin").write_bytes(content)


def damage_inner(place: Path) -> None:
    (place / "inner" / MANIFEST).write_text("{ }")


@pytest.mark.parametrize("damage", [damage_remove, damage_cut, damage_alter, damage_inner])
def test_verify_names_the_damaged_file(tmp_path, damage):
    place = tmp_path / "key"
    built = build(tmp_path / "one", "a")
    (built / "inner" / MANIFEST).write_text("{}")  # a file of the result, though it bears the manifest's name
    publish(built, place)
    assert set(verify(place)) == {"weights.bin", "inner/config.json", f"inner/{MANIFEST}"}
    damage(place)
    with pytest.raises(StoreError, match=r"weights\.bin|inner/manifest"):
        verify(place)


def test_verify_without_contents_sees_sizes_only(tmp_path):
    publish(build(tmp_path / "one", "a"), tmp_path / "key")
    damage_alter(tmp_path / "key")
    assert "weights.bin" in verify(tmp_path / "key", contents=False)
    damage_cut(tmp_path / "key")
    with pytest.raises(StoreError, match="cut short"):
        verify(tmp_path / "key", contents=False)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"files": ["a"]}', '{"files": {"a": 3}}', '"files"'])
def test_verify_refuses_what_is_no_manifest(tmp_path, text):
    (tmp_path / MANIFEST).write_text(text)
    with pytest.raises(StoreError, match="remove"):
        verify(tmp_path)


def test_verify_of_nothing_says_it_is_not_there(tmp_path):
    with pytest.raises(StoreError, match="is not there"):
        verify(tmp_path / "key")


def test_attempt_leaves_nothing_behind(tmp_path):
    store = Store(tmp_path)
    with store.attempt("key") as folder:
        build(folder / "deep", "a")
    assert list(store.attempts.iterdir()) == []
    with contextlib.suppress(RuntimeError), store.attempt("key") as folder:
        build(folder / "deep", "a")
        raise RuntimeError
    assert list(store.attempts.iterdir()) == []


def test_attempt_that_was_published_leaves_the_result(tmp_path):
    store = Store(tmp_path)
    with store.attempt("key") as folder:
        (folder / "a.txt").write_text("a")
        assert publish(folder, store.checkpoints / "key")
    assert store.has(store.checkpoints / "key")
    assert list(store.attempts.iterdir()) == []


def test_attempts_of_one_name_do_not_meet(tmp_path):
    store = Store(tmp_path)
    with store.attempt("key") as one, store.attempt("key") as two:
        assert one != two


def test_discard_killed_at_any_moment_leaves_a_whole_result_or_none(tmp_path):
    seen = []
    for moment in range(10_000):
        store = Store(tmp_path / str(moment))
        place = store.checkpoints / "key"
        publish(build(store.attempts / "one", "a"), place)
        alive = not killed_at(moment, lambda store=store, place=place: store.discard(place))
        seen.append(place.exists())
        if place.exists():
            assert marks(place) == {"a"}
        if alive:
            break
    assert seen[0] is True
    assert seen[-1] is False
    assert list(store.attempts.iterdir()) == []


def test_discard_leaves_nothing(tmp_path):
    store = Store(tmp_path)
    publish(build(store.attempts / "one", "a"), store.checkpoints / "key")
    store.discard(store.checkpoints / "key")
    assert not store.has(store.checkpoints / "key")
    assert list(store.checkpoints.iterdir()) == list(store.attempts.iterdir()) == []


def test_discard_of_nothing_is_no_error(tmp_path):
    Store(tmp_path).discard(tmp_path / "checkpoints" / "key")
