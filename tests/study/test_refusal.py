"""One line for all processes that train together."""

import pytest

from biphase.cluster.launch import (
    ERROR_FILE,
    endings,
    has_lost,
    note_beginning,
    note_ending,
    report_to_parent,
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "refusal"))
    return tmp_path / "refusal"


def test_the_first_line_stays(place):
    assert report_to_parent("too many rows")
    assert report_to_parent("lost the first process")
    assert place.read_text() == "too many rows"


def test_without_a_parent_a_process_speaks_for_itself(monkeypatch):
    monkeypatch.delenv(ERROR_FILE, raising=False)
    assert not report_to_parent("too many rows")
    assert not has_lost(RuntimeError("gloo: Connection closed by peer"))


def test_who_lost_another_process_need_not_say_so(place):
    assert has_lost(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"))
    assert not has_lost(RuntimeError("a matrix is too wide"))
    report_to_parent("too many rows")
    assert has_lost(RuntimeError("whatever follows from it"))


def test_how_each_process_ended_is_known_and_who_died_on_the_way(place, monkeypatch):
    for rank, code in (("0", 0), ("1", 1), ("2", None)):
        monkeypatch.setenv("RANK", rank)
        note_beginning()
        if code is not None:
            note_ending(code)
    assert endings(place) == {0: 0, 1: 1, 2: None}
    assert endings(place.with_name("other")) == {}
