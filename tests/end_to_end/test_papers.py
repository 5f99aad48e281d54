"""The small studies of papers, computed as anyone computes them: whole, within minutes, with a verdict on every claim."""

import csv
import subprocess
import sys
import time

import pytest

from biphase.papers import load
from biphase.specs.study import PAPERS

# Claims that need two sizes, three learning rates, two pretraining seeds, or answering and retrieval, which two tiny
# tasks do not have.
BEYOND = {"gisserot2025": {"C2", "C3", "C5", "C6", "C8", "C12", "C18", "C21", "B3", "B5", "B6"}}


@pytest.mark.campaign
@pytest.mark.parametrize("name", PAPERS)
def test_the_small_study_of_a_paper_is_computed_in_minutes_and_judged(name, tmp_path):
    study = f"papers/{name}/small"
    command = [sys.executable, "-m", "biphase"]
    began = time.monotonic()
    for verb in (["run", study, "--quiet"], ["report", study, "--out", "report"]):
        done = subprocess.run([*command, *verb], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 600, "five minutes alone, twice that beside other tests"
    with (tmp_path / "report" / "claims.csv").open(newline="") as file:
        verdicts = {row["claim"]: row["verdict"] for row in csv.DictReader(file)}
    assert {one.id for one in load(name).statements} <= set(verdicts)
    assert {claim for claim, verdict in verdicts.items() if verdict == "not tested"} == BEYOND.get(
        name, set()
    )
