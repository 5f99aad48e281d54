"""A machine that refuses: no room, no memory, no rights. A clear line, and the next start ends the same."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults.tiny import ended

DRIVER = Path(__file__).with_name("fault_driver.py")
FAULTS = int(os.environ.get("BIPHASE_FAULTS", "20"))


@pytest.fixture
def machine(calm):
    """Run the study under each fault, and then again without."""
    folder = calm.study.parents[1] / "driven"

    def refuse(*faults: tuple[str, int]) -> list[dict[str, Any]]:
        words = [sys.executable, DRIVER, calm.study, folder, json.dumps(faults)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60 + 60 * len(faults))
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        for place, (fault, attempt) in enumerate(zip(faults, found, strict=True)):
            assert attempt["code"] in (0, 1, 2), (fault, attempt["output"][-3000:])
            assert "Traceback" not in attempt["output"], (fault, attempt["output"][-3000:])
            assert attempt["after"] == 0, (fault, attempt["log"][-3000:])
            assert ended(folder / f"store-{place}") == calm.ended, fault
        return found

    yield refuse
    shutil.rmtree(folder)


def test_a_machine_that_refuses_is_told_of_and_nothing_is_lost(machine):
    memory, read_only, full = machine(("memory", 5), ("read-only", 0), ("full", 40))
    assert memory["code"] == 1
    assert "failed: MemoryError" in memory["output"]
    assert read_only["code"] == 2
    assert read_only["output"].splitlines()[-1].startswith("error: ")
    assert "store-1" in read_only["output"].splitlines()[-1], "the folder is named"
    assert "permissions" in read_only["output"]
    assert full["code"] != 0
    assert "No space left" in full["output"]


@pytest.mark.campaign
def test_a_disk_full_at_any_contact_loses_nothing(machine, capsys):
    """Moments spread over the whole study, which has about 620 contacts with the disk."""
    chance = random.Random(1)
    found = machine(*[("full", chance.randrange(1, 620)) for _ in range(FAULTS)])
    failed = sum(attempt["code"] != 0 for attempt in found)
    with capsys.disabled():
        print(f"\n{len(found)} times no room, {failed} of them stopped the study, 0 changed a result")
    assert failed > FAULTS / 2
