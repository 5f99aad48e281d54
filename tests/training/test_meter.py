"""Metrics of a training job: complete lines, no early sync with the device, one progress line."""

import io
import json
import math
import time

import pytest
import torch

from biphase.text import duration
from biphase.training.meter import Meter


def meter(**fields):
    defaults = {
        "title": "clm", "origin": 100, "first": 0, "until": 6, "tokens_per_step": 10, "flops_per_token": 2.0,
        "out": io.StringIO(),
    }  # fmt: skip
    return Meter(**(defaults | fields))


def step(made, number, loss=1.0, bad=0.0):
    made.step(number, {"rate": 0.1, "samples": (1, 2)}, torch.tensor([loss, 0.5, bad]))


def test_steps_are_counted_from_the_root_and_read_in_groups():
    made = meter(every=3, behind=1)
    for number in range(5):
        step(made, number, loss=float(number))
    assert [line["step"] for line in made.lines] == [101, 102, 103]
    step(made, 5)
    assert len(made.lines) == 6
    assert made.lines[1]["loss"] == 1.0
    assert "samples" not in made.lines[0]


@pytest.mark.parametrize("every", [2, 3, 5])
def test_the_latest_step_is_left_to_the_device_until_the_end(every):
    made = meter(every=every, behind=1, until=20)
    for number in range(19):
        step(made, number, loss=float(number))
        read = len(made.lines)
        assert read % every == 0
        assert 1 <= number + 1 - read <= every, "at least the latest, and no more than a group"
    step(made, 19, loss=19.0)
    assert [(line["step"], line["loss"]) for line in made.lines] == [(101 + n, float(n)) for n in range(20)]
    assert not made.waiting


@pytest.mark.parametrize("ending", ["flush", "close", "event"])
def test_whatever_ends_the_waiting_leaves_no_step_behind(ending):
    made = meter(every=3, until=20)
    for number in range(5):
        step(made, number, bad=float(number == 4), loss=float(number))
    assert len(made.lines) == 3
    assert made.skipped == 0
    made.event(5, heldout=1.0) if ending == "event" else getattr(made, ending)()
    assert [line["step"] for line in made.lines] == [101, 102, 103, 104, 105] + [105] * (ending == "event")
    assert [line["loss"] for line in made.lines[:5]] == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert (made.skipped, made.nonfinite_in_a_row) == (1, 1)
    step(made, 5)
    made.flush()
    assert made.lines[-1]["step"] == 106
    assert made.nonfinite_in_a_row == 0


def test_a_skipped_step_says_which_samples_and_breaks_no_json():
    made = meter()
    step(made, 0, loss=float("nan"), bad=1.0)
    step(made, 1)
    assert json.loads(json.dumps(made.lines[0], allow_nan=False))["samples"] == [1, 2]
    assert made.lines[0]["loss"] is None
    assert made.nonfinite_in_a_row == 0
    assert made.skipped == 1
    assert "step 101 skipped" in made.out.getvalue()


def test_a_log_gets_whole_lines_and_quiet_gets_none():
    made, quiet = meter(), meter(quiet=True)
    for number in range(6):
        step(made, number)
        step(quiet, number)
    lines = made.out.getvalue().splitlines()
    assert lines
    assert "step 106/106" in lines[-1]
    assert all(word in lines[-1] for word in ("loss 1.000", "lr 1.00e-01", "tok/s", "FLOP/s", "left"))
    assert quiet.out.getvalue() == ""


def test_time_in_which_no_step_was_taken_does_not_slow_the_rate():
    slow, made = meter(), meter()
    time.sleep(0.3)
    made.leave_out(0.3)
    step(slow, 0)
    step(made, 0)
    assert slow.rate < 10 / 0.3
    assert made.rate > 2 * slow.rate


def test_a_terminal_gets_one_line_that_is_written_over():
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    made = meter(out=Terminal())
    for number in range(6):
        step(made, number)
    made.close()
    assert "\n" not in made.out.getvalue()
    assert made.out.getvalue().endswith("\r\x1b[K")


def test_tensorboard_gets_what_the_lines_have(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    made = meter(board=tmp_path)
    step(made, 0, loss=2.5)
    made.event(1, heldout={"clm": 3.0})
    made.close()
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert events.Scalars("loss")[0].value == 2.5
    assert events.Scalars("heldout/clm")[0].step == 101


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (600, "10 min"), (7200, "2.0 h"), (86_400 * 3, "3.0 days"), (math.inf, "?")],
)
def test_times_are_said_as_a_person_would(seconds, text):
    assert duration(seconds) == text


def test_the_live_file_has_every_line_at_once_and_those_before_a_resume(tmp_path):
    place = tmp_path / "live" / "key.jsonl"
    made = meter(live=place, lines=[{"step": 100, "loss": 2.0}])
    step(made, 0, loss=1.5)
    made.event(1, heldout={"clm": 3.0})
    seen = [json.loads(line) for line in place.read_text().splitlines()]  # before anything is closed
    assert seen == made.lines
    assert [line["step"] for line in seen] == [100, 101, 101]
    made.close()


def test_a_live_file_that_cannot_be_written_stops_nothing(tmp_path):
    (tmp_path / "live").write_text("not a folder")
    made = meter(live=tmp_path / "live" / "key.jsonl")
    step(made, 0)
    made.close()
    assert len(made.lines) == 1


def test_the_longest_series_of_skipped_steps_is_kept_when_a_finite_step_ends_it():
    made = meter(every=10, until=40)
    for number in range(11):
        step(made, number, bad=float(2 <= number < 8))
    assert made.nonfinite_in_a_row == 0
    assert made.longest_nonfinite == 6
    assert made.last_skipped["step"] == 108
    assert made.last_skipped["samples"] == (1, 2)
