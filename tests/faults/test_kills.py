"""A study killed at random moments ends in the same bits as one that was left alone.

BIPHASE_KILLS=120 pytest -s -m campaign tests/faults/test_kills.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from common import sentences
from faults.tiny import ended, report_bytes, set_times_alike, write_study

from biphase import CLM, MLM, WSD, Stage, Study
from biphase.leases import Leases

DRIVER = Path(__file__).with_name("kill_driver.py")
KILLS = int(os.environ.get("BIPHASE_KILLS", "10"))


def drive(study: Path, folder: Path, kills: int, seed: int) -> dict[str, Any]:
    """Kill the study, and compare every store with the one that was left alone."""
    command = [sys.executable, DRIVER, study, folder, str(kills), str(seed)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * kills, check=False)
    assert finished.returncode == 0, finished.stderr[-3000:]
    report = json.loads(finished.stdout.splitlines()[-1])
    assert report["kills"] >= kills
    assert report["codes"] == [0], "attempts that were not killed succeeded"
    calm, *killed = map(Path, report["stores"])
    for store in killed:
        assert ended(store) == ended(calm)
        holders = Leases(store / "leases").holders().values()
        assert not [holder for holder in holders if holder.alive is not False], (
            "a finished study holds no job"
        )
    return report


@pytest.mark.parametrize(
    ("kills", "steps", "seed"),
    [(4, 40, 0), *(pytest.param(25, 400, seed, marks=pytest.mark.campaign) for seed in (1, 2))],
)
def test_kills_during_pretraining_change_no_bit(tiny_run, study_file, tmp_path, kills, steps, seed):
    half, schedule = steps // 2, WSD(peak=3e-3, warmup=5, decay=10)
    clm = tiny_run("clm", Stage(CLM(), steps), schedule=schedule)
    runs = (
        clm,
        tiny_run("two", Stage(CLM(), half), Stage(MLM(0.4), half), schedule=schedule),
        tiny_run("mlm", Stage(MLM(0.4, replace=(0.8, 0.1, 0.1)), steps), schedule=schedule),
        tiny_run("on", Stage(MLM(0.4), half), start=clm),
    )
    drive(study_file(Study("killed", runs)), tmp_path / "stores", kills, seed)


@pytest.mark.campaign
def test_kills_of_a_whole_study_and_its_reports_change_nothing(verb, tmp_path, capsys):
    study = write_study(tmp_path / "input", sentences(1_500), steps=40, tuned=10)
    report = drive(study, tmp_path / "stores", KILLS, 1)
    with capsys.disabled():
        print(f"\n{report['kills']} kills in {len(report['stores']) - 1} studies")

    def reported(store: Path) -> dict[str, str]:
        set_times_alike(store)
        assert verb("report", study, "--store", store, "--out", store.with_suffix(".report"))[0] == 0
        return report_bytes(store.with_suffix(".report"))

    calm, *killed = map(Path, report["stores"])
    page = reported(calm)
    for store in killed:
        assert reported(store) == page
