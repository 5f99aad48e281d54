"""Metrics of a training job: complete lines, no early sync with the device, one progress line."""

import io
import json

import pytest
import torch
from common import Terminal

from biphase.errors import TrainingError
from biphase.training.meter import NONFINITE_LIMIT, Meter
from biphase.training.options import RuntimeOptions


def meter(**fields):
    defaults = {
        "title": "clm", "origin": 100, "first": 0, "until": 6, "tokens_per_step": 10, "out": io.StringIO(),
        "options": RuntimeOptions(),
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


def test_a_skipped_step_says_which_samples_and_breaks_no_json():
    made = meter()
    step(made, 0, loss=float("nan"), bad=1.0)
    step(made, 1)
    assert json.loads(json.dumps(made.lines[0], allow_nan=False))["samples"] == [1, 2]
    assert made.lines[0]["loss"] is None
    assert made.nonfinite_in_a_row == 0
    assert made.skipped == 1
    assert "step 101 skipped" in made.out.getvalue()


def test_the_live_file_has_every_line_at_once_and_those_before_a_resume(tmp_path):
    place = tmp_path / "live" / "key.jsonl"
    made = meter(options=RuntimeOptions(live=place), lines=[{"step": 100, "loss": 2.0}])
    step(made, 0, loss=1.5)
    made.event(1, heldout={"clm": 3.0})
    seen = [json.loads(line) for line in place.read_text().splitlines()]  # before anything is closed
    assert seen == made.lines
    assert [line["step"] for line in seen] == [100, 101, 101]
    made.close()


def test_too_many_skipped_steps_fail_even_if_a_finite_step_has_ended_the_series():
    made = meter(every=30, behind=5, until=40)
    for number in range(34):
        step(made, number, bad=float(1 <= number < 1 + NONFINITE_LIMIT))
    with pytest.raises(TrainingError, match=r"step 121 with samples 1 to 2"):
        step(made, 34)
    made.close()
    assert made.nonfinite_in_a_row == NONFINITE_LIMIT


def test_the_progress_line_shows_the_loss_as_a_curve_and_fits_the_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "70")
    made = meter(
        title="1/7  causal of a very long name 0 → 120",
        out=Terminal(),
        options=RuntimeOptions(study_left=lambda: "8 min"),
    )
    for number in range(6):
        step(made, number, loss=6.0 - number)
    line = made.out.getvalue().split("\r\x1b[K")[-1]
    assert len(line) <= 70
    assert all(fact in line for fact in ("1/7", "…", "step 106/106", "loss 1.000 █▇▅▄▂▁", "study 8 min left"))
