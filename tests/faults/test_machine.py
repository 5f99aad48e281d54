"""A machine that refuses: no room, no memory, no rights, no handles. A clear line, and the next start ends the same."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from faults.tiny import ended

DRIVER = Path(__file__).with_name("fault_driver.py")


@pytest.fixture
def machine(calm, tmp_path):
    """Run the study under each fault, and then again without."""
    for place in (tmp_path, *tmp_path.parents, calm.study.parent.parent):
        if place.stat().st_mode & 0o777 == 0o700:  # the user who is not root must come to the store
            place.chmod(0o755)

    def refuse(*faults: tuple[str, int]) -> list[dict[str, Any]]:
        words = [sys.executable, DRIVER, calm.study, tmp_path / "driven", json.dumps(faults)]
        done = subprocess.run(words, capture_output=True, text=True, timeout=60 + 60 * len(faults))
        assert done.returncode == 0, done.stderr[-3000:]
        found = json.loads(done.stdout.splitlines()[-1])
        for place, (fault, one) in enumerate(zip(faults, found, strict=True)):
            assert one["code"] in (0, 1, 2), (fault, one["said"][-3000:])
            assert "Traceback" not in one["said"], (fault, one["said"][-3000:])
            assert one["after"] == 0, (fault, one["told"][-3000:])
            assert ended(tmp_path / "driven" / f"store-{place}") == calm.ended, fault
        return found

    return refuse


def test_memory_rights_and_handles_that_are_missing_are_told_and_nothing_is_lost(machine):
    faults = [("memory", 5), ("gpu memory", 12), ("read-only", 0), ("locked", 0), ("handles", 24)]
    memory, device, read_only, locked, handles = machine(*faults)
    assert (memory["code"], device["code"]) == (1, 1)
    assert "MemoryError" in memory["said"]
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in device["said"]
    assert (read_only["code"], locked["code"]) == (2, 2)
    assert read_only["said"].splitlines()[-1].startswith("error: ")
    assert "store-2" in read_only["said"].splitlines()[-1], "the folder is named"
    assert "see who may read and write there" in read_only["said"]
    said = " ".join(locked["said"].replace("│", " ").split())  # the parser of the command line draws a box
    assert "Invalid value for '--store'" in said
    assert "is not readable" in said
    assert handles["code"] != 0
    assert "Too many open files" in handles["said"]


def test_a_full_disk_is_told_and_nothing_is_lost(machine):
    counted, *full = machine(("none", 0), ("full", 1), ("full", 40), ("file", 20_000))
    assert counted["code"] == 0
    assert counted["contacts"] > 100
    for one in full:
        assert one["code"] != 0, one["said"]
        assert any(words in one["said"] for words in ("No space left", "File too large")), one["said"]


@pytest.mark.campaign
def test_a_disk_full_at_any_contact_loses_nothing(machine, capsys):
    """A hundred moments, spread over the whole study; and sizes at which a write fails in its middle."""
    chance = random.Random(1)
    faults = [("full", chance.randrange(1, 620)) for _ in range(88)]
    faults += [
        ("file", size)
        for size in (1, 100, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 80_000, 120_000, 200_000)
    ]
    found = machine(*faults)
    failed = sum(one["code"] != 0 for one in found)
    with capsys.disabled():
        print(f"\n{len(found)} faults of the disk, {failed} of them stopped the study, 0 changed a result")
    assert failed > 60
