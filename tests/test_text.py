"""Text for people: numbers with units, safe output, hints, the code version, and progress lines."""

import io
import sys
import time

import pytest
from common import Terminal

from biphase import errors, progress
from biphase.progress import Live, seconds_between
from biphase.text import apart, fit, middle, printable, short, si
from biphase.version import __version__, _commit, code_version


@pytest.mark.parametrize(
    ("value", "unit", "count"),
    [
        (0, "0 ", "0"), (128, "128 ", "128"), (999.7, "1 k", "1k"), (12_345, "12.3 k", "12.3k"),
        (999_960, "1 M", "1M"), (99_090_432_000, "99.1 G", "99.1B"), (1.15e12, "1.15 T", "1.15T"),
        (float("nan"), "? ", "?"),
    ],
)  # fmt: skip
def test_numbers_have_three_digits_and_a_unit(value, unit, count):
    assert (si(value), short(value)) == (unit, count)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("two\nlines\tand ünïcode 漢字 →", "two\nlines\tand ünïcode 漢字 →"),
        ("\x1b]0;owned\x07\x1b[2J", r"\x1b]0;owned\x07\x1b[2J"),
        ("over\rwritten \x7f \x9b31m", r"over\rwritten \x7f \x9b31m"),
        ("\u202egpj.exe \u2066", r"\u202egpj.exe \u2066"),
        ("half \ud800", r"half \ud800"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
    printable(text).encode()


# ---------------------------------------------------------------- errors


def test_the_nearest_name_or_all_names_are_suggested():
    known = ["builtin", "fineweb-edu"]
    assert errors.nearest("fineweb-edo", known) == "did you mean 'fineweb-edu'?"
    assert errors.nearest("x", known) == "known: builtin, fineweb-edu"


# ---------------------------------------------------------------- version


def test_the_commit_is_read_without_git(tmp_path):
    (tmp_path / "refs/heads").mkdir(parents=True)
    (tmp_path / "HEAD").write_text("ref: refs/heads/main\n")
    assert _commit(tmp_path / "nowhere") == ""
    assert _commit(tmp_path) == "", "a branch without any commit"
    (tmp_path / "packed-refs").write_text(f"# pack-refs\n{'a' * 40} refs/heads/main\n")
    assert _commit(tmp_path) == "a" * 40
    (tmp_path / "refs/heads/main").write_text("b" * 40 + "\n")  # newer than what was packed
    assert _commit(tmp_path) == "b" * 40
    (tmp_path / "HEAD").write_text("c" * 40 + "\n")
    assert _commit(tmp_path) == "c" * 40
    assert code_version().startswith(__version__)


# ---------------------------------------------------------------- progress


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(progress, "MINUTE", 0.05)


def test_on_a_terminal_one_line_is_overwritten(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    live = Live(enabled=True)
    live("step 3 \x1b[2J")
    live("")
    assert sys.stderr.getvalue() == "\r\x1b[K  step 3 \\x1b[2J\r\x1b[K"
    assert seconds_between(2.0) == 2.0


def test_in_a_log_long_activity_is_printed_every_minute_until_it_ends(monkeypatch, quick):
    log = io.StringIO()
    monkeypatch.setattr(sys, "stderr", log)
    live = Live(enabled=True)
    for _ in range(30):  # jobs of a few milliseconds, for several minutes
        live("a short job")
        live("")
        time.sleep(0.005)
    assert log.getvalue() == "", "short jobs print nothing"
    live("step 3")
    live("step 4")
    deadline = time.monotonic() + 10
    while log.getvalue().count("\n") < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert set(log.getvalue().splitlines()) == {"  step 4"}
    live("")
    time.sleep(0.1)
    printed = log.getvalue()
    time.sleep(0.2)
    assert log.getvalue() == printed
    assert seconds_between(2.0) == 0.05


def test_a_line_that_is_too_long_loses_spare_parts_and_then_the_middle_of_its_name():
    parts = ("clm-of-a-very-long-name-seed3 · sst2", "loss 6.1", "lr 0.1", "8 min left")
    assert fit(parts, 0, spare=(2,)) == "  ".join(parts)
    assert fit(parts, 60, spare=(2,)) == "  ".join((parts[0], parts[1], parts[3]))
    line = fit(parts, 50, spare=(2,))
    assert len(line) == 50
    assert line.startswith("clm-of-a-v")
    assert line.endswith("seed3 · sst2  loss 6.1  8 min left")
    assert middle("a-name", 6) == "a-name"
    assert middle("a-long-name", 7) == "a-l…ame"


def test_a_progress_line_never_wraps(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    Live(enabled=True)("a-name-that-is-much-too-long-for-this-terminal   step 3 of 14")
    line = sys.stderr.getvalue().removeprefix("\r\x1b[K")
    assert len(line) < 40
    assert line.endswith("   step 3 of 14")


def test_shortened_names_stay_different():
    names = [f"encoder-that-began-with-{how}-language-modeling-at-1m-seed-0" for how in ("causal", "masked")]
    short = apart(names, 24)
    assert max(map(len, short.values())) <= 24
    assert ["causal" in short[names[0]], "masked" in short[names[1]]] == [True, True]
    assert apart(["a", "b"], 8) == {"a": "a", "b": "b"}
