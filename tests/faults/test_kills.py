"""A study that tokenizes, trains, branches, goes on, fine-tunes and reports, killed at random moments, loses nothing.

BIPHASE_KILLS=120 pytest -s -m campaign tests/faults/test_kills.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faults.tiny import documents, ended, report_bytes, set_times_alike, write_study

DRIVER = Path(__file__).with_name("kill_driver.py")
KILLS = int(os.environ.get("BIPHASE_KILLS", "10"))


@pytest.mark.campaign
def test_no_kill_loses_a_job_or_changes_a_bit(verb, tmp_path, capsys):
    study = write_study(tmp_path / "input", documents(1_500), steps=40, tuned=10)
    words = [sys.executable, DRIVER, study, tmp_path / "killed", str(KILLS), "1"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60 + 30 * KILLS)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    with capsys.disabled():
        print(f"\n{told['kills']} kills in {len(told['stores']) - 1} studies: {told['fell']}")
    assert told["kills"] >= KILLS
    assert set(told["codes"]) == {"0"}, "whatever was not killed ended well"
    if KILLS >= 100:
        assert {"tokenize", "trunk", "branch", "go on", "fine-tune", "report"} <= set(told["fell"])

    def reported(store: Path) -> dict[str, str]:
        set_times_alike(store)
        assert verb("report", study, "--store", store, "--out", store.with_suffix(".report"))[0] == 0
        return report_bytes(store.with_suffix(".report"))

    calm, *killed = map(Path, told["stores"])
    end, page = ended(calm), reported(calm)
    for store in killed:
        assert ended(store) == end
        assert reported(store) == page
