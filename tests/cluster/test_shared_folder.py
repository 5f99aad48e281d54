"""Workers that share only a folder: different clocks, a slow file system, and a worker that is suspended for long."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from pathlib import Path

import pytest
from common import store_with
from conftest import leave_out
from network import View, ends, start
from small_study import (
    JOBS,
    SHORT,
    TRAININGS,
    apart,
    biphase,
    contents,
    done,
    last,
    published_twice,
    wait_until,
    write_study,
)

from biphase.leases import Leases

DRIVER, CLIENT = (Path(__file__).with_name(name) for name in ("fleet_driver.py", "remote_folder.py"))


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


# ---------------------------------------------------------------- a folder that each machine sees as an NFS client does

REMEMBERED = 5  # seconds


@pytest.fixture
def views(network, tmp_path) -> Generator[list[View]]:
    """One folder, and the mount in its place that each machine of the network sees."""
    if not Path("/dev/fuse").exists() or not Path("/usr/lib/python3/dist-packages/fusepy.py").exists():
        leave_out("no /dev/fuse or no python3-fusepy: run tests/system-packages as root")
    folder, mounts = tmp_path / "shared", [tmp_path / host for host in network.hosts]
    servers = []
    try:
        for place in (folder, *mounts):
            place.mkdir()
        for mount in mounts:
            command = ["/usr/bin/python3", CLIENT, folder, mount, str(REMEMBERED)]
            servers.append(subprocess.Popen(command))
            wait_until(mount.is_mount, 20, "mounted")
        yield [(mount, folder) for mount in mounts]
    finally:
        for mount in mounts:
            subprocess.run(["umount", "--lazy", mount], check=False)
        for server in servers:
            server.wait(20)


@pytest.mark.campaign
def test_workers_that_see_each_others_files_late_share_a_study(network, views, corpus, tmp_path, calm):
    store = views[0][1] / "store"
    words = ("run", write_study(tmp_path, corpus.source, **SHORT), "--store", store, "--checkpoint", "100")
    workers = [network.run(number, *words, "--loaders", "0", view=view) for number, view in enumerate(views)]
    ended = [(*worker.communicate(timeout=400), worker.returncode) for worker in workers]
    assert [code for *_, code in ended] == [0, 0, 0], [err for _, err, _ in ended]
    assert contents(store) == calm, "the same bits"
    log = "".join(err for _, err, _ in ended)
    trained = re.findall(r"^  \d/7  .+  ([0-9a-f]{6})  loss", log, re.MULTILINE)
    assert len(trained) == len(set(trained)) == JOBS, "each job was computed once"
    assert log.count("training a BPE") == 1
    assert not published_twice([log])
    assert not Leases(store / "leases").takeovers()
    assert not list((store / "leases").glob("*.lease"))


@pytest.mark.campaign
def test_machines_that_see_each_others_files_late_train_together(network, views, study, shards, tmp_path):
    stores = tmp_path / "plain", views[0][1] / "store"
    for store, seen in zip(stores, ((), views), strict=True):
        store_with(shards, store)
        ended = ends(start(network, study, store, 3, "--checkpoint", "10", views=seen))
        assert [code for _, code in ended] == [0, 0, 0], ended
    one, two = map(last, stores)
    assert one[1] == two[1]
    assert apart(one[0], two[0]) == 0, "the same bits"
