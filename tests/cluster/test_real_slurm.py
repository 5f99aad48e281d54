"""Workers as jobs of a real Slurm: submitted, warned, requeued, stopped, submitted again; the results are the same."""

import json
import re
import signal
import time
from pathlib import Path

import pytest
from common import store_with
from small_study import (
    JOBS,
    MACHINES_STUDY,
    SHORT,
    TRAININGS,
    apart,
    biphase,
    contents,
    done,
    last,
    published_twice,
    tensors,
    typed,
    wait_until,
    write_study,
)

from biphase.leases import Leases

PROFILE = """
jobs = {jobs}
warning = "{warning}"
[sbatch]
partition = "short"
gres = "gpu:1"
cpus-per-task = 1
time = "{time}"
"""


@pytest.fixture
def place(slurm, corpus, shards, tmp_path) -> Path:
    """A folder with the study, a profile, and a store that has the corpus."""
    write_study(tmp_path, corpus.source, **SHORT)
    (tmp_path / "slurm.toml").write_text(PROFILE.format(jobs=3, time="10:00", warning="10s"))
    store_with(shards, tmp_path / "store")
    return tmp_path


def verb(place: Path, name: str, *words: object, code: int = 0) -> str:
    return biphase(name, place / "fleet.py", "--store", place / "store", *words, code=code)


def submit(place: Path) -> str:
    return verb(place, "run", "--checkpoint", "100", "--slurm", place / "slurm.toml")


def logs(place: Path) -> list[str]:
    return [path.read_text() for path in sorted((place / "store/studies/fleet/slurm").glob("*.log"))]


def checkpoints(place: Path) -> int:
    return len(list((place / "store" / "checkpoints").glob("*/manifest.json")))


def is_whole(place: Path, calm: dict[str, object], seeds: int = 1) -> None:
    """All results exist once and equal those of a local run, and no lease is held."""
    store = place / "store"
    assert done(store) == (JOBS, seeds * TRAININGS)
    assert contents(store) == calm
    assert not published_twice(logs(place))
    for folder in (store / "leases", store / "studies" / "fleet" / "workers"):
        assert not [holder for holder in Leases(folder).holders().values() if holder.alive is not False]


def test_warned_requeued_stopped_and_resubmitted_jobs_give_the_same_results(slurm, place, calm):
    printed = submit(place)
    assert "3 workers" in printed
    assert "biphase stop" in printed
    store = place / "store"
    plan = json.loads((store / "studies" / "fleet" / "plan.json").read_text())
    held = Leases(store / "leases").take(
        plan["jobs"][-1]["key"]
    )  # so the study cannot end before it is stopped
    assert held
    wait_until(lambda: checkpoints(place), 120, "a first checkpoint")
    first, *_ = slurm.jobs("RUNNING")
    typed("scancel", "--batch", "--signal=USR1", first)  # as Slurm does when the time is nearly up
    assert "3 of 3 jobs" in submit(place)

    def requeued() -> list[str]:
        jobs = json.loads(verb(place, "status", "--json"))["slurm"]["jobs"]
        return [job["id"] for job in jobs if job["restarts"]]

    assert wait_until(requeued, 30, "the warned job went back into the queue") == [first]
    assert "running" in verb(place, "status")
    assert "checkpoints are kept" in verb(place, "stop")  # those that run and the one that waits
    assert slurm.jobs("PENDING,RUNNING") == []
    assert "no worker of fleet runs" in verb(place, "stop")
    assert sum("is left: requeued" in log for log in logs(place)) == 1
    assert done(store) != (JOBS, TRAININGS)
    held.release()
    submit(place)  # no old request stops these
    wait_until(lambda: not slurm.jobs(), 120, "all jobs have ended")
    is_whole(place, calm)
    assert "nothing to submit" in submit(place)


@pytest.mark.campaign
def test_several_processes_in_one_job_are_requeued_together(slurm, place, corpus):
    (place / "slurm.toml").write_text(
        'processes = 2\nwarning = "20s"\n[sbatch]\npartition = "short"\ntime = "10:00"\n'
    )
    study = place / "fleet.py"
    text = study.read_text().replace("finetune=grid", "").replace("300", "3000").replace("600", "6000")
    study.write_text(text)
    assert "2 processes in each" in submit(place)
    wait_until(lambda: checkpoints(place), 120, "a first checkpoint")
    job, *_ = slurm.jobs("RUNNING")
    typed("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: any("is left: requeued" in log for log in logs(place)), 60, "requeued")
    wait_until(lambda: slurm.jobs("RUNNING"), 60, "started again")
    wait_until(lambda: checkpoints(place) > 1, 200, "it goes on")
    assert "checkpoints are kept" in verb(place, "stop")
    assert slurm.jobs("PENDING,RUNNING") == []


# ---------------------------------------------------------------- one worker on several nodes


@pytest.mark.campaign
def test_a_worker_on_two_nodes_is_warned_stopped_and_loses_a_node_and_ends_in_the_same_bits(
    networked_slurm, corpus, study, fresh, tmp_path
):
    study.write_text(MACHINES_STUDY.format(source=corpus.source, half=150))
    store, calm, profile = fresh("store"), fresh("calm"), tmp_path / "slurm.toml"
    profile.write_text("nodes = 2\n")
    network = networked_slurm.network

    def submitted(where: Path) -> str:
        biphase("run", study, "--store", where, "--checkpoint", "10", "--slurm", profile)
        return networked_slurm.jobs("RUNNING,PENDING")[-1]

    def log() -> str:
        return "".join(path.read_text() for path in store.glob("studies/machines/slurm/*.log"))

    def goes_on(job: str) -> str:
        """Wait until a job runs and has published a checkpoint; return its nodes."""
        wait_until(lambda: job in networked_slurm.jobs("RUNNING"), 120, "it runs")
        before = set(store.glob("checkpoints/*/manifest.json"))
        wait_until(lambda: set(store.glob("checkpoints/*/manifest.json")) - before, 180, "it goes on")
        return typed("squeue", "--noheader", f"--job={job}", "--Format=NodeList").strip()

    job = submitted(store)
    submitted(calm)  # beside it, on the other nodes
    goes_on(job)
    typed("scancel", "--batch", "--signal=USR1", job)
    wait_until(lambda: "is left: requeued" in log(), 120, "requeued")
    assert "error: process" not in log()
    goes_on(job)
    assert "checkpoints are kept" in biphase("stop", study, "--store", store)
    wait_until(lambda: not networked_slurm.jobs(), 240, "the undisturbed job has ended")
    job = submitted(store)
    first, _ = typed("scontrol", "show", "hostnames", goes_on(job)).split()  # it has the job's script
    network.signal(network.names[network.hosts.index(first)], signal.SIGKILL)
    failed = time.monotonic()
    wait_until(lambda: job not in networked_slurm.jobs("RUNNING"), 120, "Slurm knows that the node failed")
    print(f"noticed after {time.monotonic() - failed:.0f} s")
    wait_until(lambda: not networked_slurm.jobs(), 300, "the job has ended")
    one, two = last(store), last(calm)
    assert one[1] == two[1]
    assert apart(one[0], two[0]) == 0, "the same bits"


@pytest.mark.campaign
def test_two_workers_of_two_nodes_each_share_a_study(networked_slurm, corpus, tmp_path):
    study = write_study(tmp_path, corpus.source, steps=60, tuning=10, seeds=(0,))
    study.write_text(study.read_text().replace("finetune=grid", ""))
    store, local, profile = tmp_path / "store", tmp_path / "local", tmp_path / "slurm.toml"
    profile.write_text("nodes = 2\njobs = 2\n")
    biphase("run", study, "--store", local, "--quiet")
    biphase("run", study, "--store", store, "--slurm", profile)
    wait_until(lambda: not networked_slurm.jobs(), 300, "the jobs have ended")
    logs = [path.read_text() for path in store.glob("studies/fleet/slurm/*.log")]
    assert [bool(re.search(r"\d/7  \w", log)) for log in logs] == [True, True], "both worked"
    for place in (local / "checkpoints").iterdir():
        assert apart(tensors(place), tensors(store / "checkpoints" / place.name)) <= 1e-5
