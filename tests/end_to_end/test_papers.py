"""The small studies of papers, computed as anyone computes them: whole, within minutes, with a verdict on every claim."""

import csv
import subprocess
import sys
import time

import pytest

from biphase.papers import load
from biphase.specs.study import PAPERS
from biphase.study.load import studies_of


@pytest.mark.campaign
@pytest.mark.parametrize("name", [name for name in PAPERS if studies_of(name)])
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
    assert "not tested" not in verdicts.values()
