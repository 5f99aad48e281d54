"""Workers that share only a folder: different clocks, a slow file system, and a worker that is suspended for long."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from small_study import JOBS, SHORT, TRAININGS, biphase, contents, done, published_twice, write_study

DRIVER = Path(__file__).with_name("fleet_driver.py")


def drive(study: Path, store: Path, *, workers: int, stalls: int, seed: int) -> dict:
    ended = subprocess.run(
        [sys.executable, DRIVER, study, store, str(workers), str(stalls), str(seed)],
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
    return json.loads(ended.stdout.splitlines()[-1])


def is_whole(store: Path, calm: dict[str, object], *, seeds: int) -> None:
    assert done(store) == (JOBS, seeds * TRAININGS)
    assert contents(store) == calm, "the same bits, and nothing that was left behind"
    published = Counter((store / "published").read_text().split())
    plan = json.loads((store / "studies" / "fleet" / "plan.json").read_text())
    results = {job["key"] for job in plan["jobs"]} | {path.name for path in (store / "trials").iterdir()}
    assert {key: published[key] for key in results} == dict.fromkeys(results, 1), "each once"
    assert not published_twice([path.read_text() for path in store.glob("*.log")])
    assert not list((store / "leases").glob("*.lease"))


def test_a_suspended_worker_whose_job_was_taken_over_changes_nothing(corpus, tmp_path, calm):
    study, store = write_study(tmp_path, corpus.source, **SHORT), tmp_path / "store"
    report = drive(study, store, workers=3, stalls=1, seed=0)
    assert report == {"codes": [0, 0, 0], "taken": 1}
    is_whole(store, calm, seeds=1)


@pytest.mark.campaign
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_many_suspended_workers_change_nothing(corpus, tmp_path, seed):
    study = write_study(tmp_path, corpus.source, steps=3000, tuning=60, seeds=(0, 1, 2))
    store = tmp_path / "store"
    report = drive(study, store, workers=4, stalls=8, seed=seed)
    assert report["codes"] == [0] * 4
    assert report["taken"] >= 5, report
    biphase("run", study, "--store", tmp_path / "calm", "--quiet")
    is_whole(store, contents(tmp_path / "calm"), seeds=3)
