"""What is said of Slurm where it is absent, silent or strange. The real one is asked in tests/cluster."""

import json
import shutil
from pathlib import Path

import pytest

from biphase.cluster import slurm
from biphase.cluster.slurm import Job, Profile, Queue
from biphase.errors import ClusterError


@pytest.fixture
def submitted(store):
    """A store in which something was submitted once."""
    slurm.folder(store, "study").mkdir(parents=True)
    (slurm.folder(store, "study") / "s1.sh").touch()
    return store


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """A squeue that says what a test wants."""
    folder = tmp_path / "programs"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def says(text: str) -> None:
        (folder / "squeue").write_text(f"#!/bin/sh\n{text}\n")
        (folder / "squeue").chmod(0o755)

    return says


def test_without_submissions_nothing_is_asked(store, squeue):
    squeue("exit 1")
    assert slurm.queue_of(store, "study") == Queue()
    assert slurm.lines(Queue(), store.root) == []


def test_without_slurm_its_absence_is_said(submitted, squeue):
    found = slurm.queue_of(submitted, "study")
    assert "squeue is not on this machine" in found.problem
    (line,) = slurm.lines(found, submitted.root)
    assert line.startswith("  Slurm: squeue is not")
    with pytest.raises(ClusterError, match="login node"):
        slurm.submit(Profile(), submitted, "study", jobs=1, arguments=[])


def test_a_controller_that_does_not_answer_is_one_line(submitted, squeue, monkeypatch):
    squeue("printf 'slurm_load_jobs error:\\n Unable to contact' >&2; exit 1")
    assert "slurm_load_jobs error: Unable to contact" in slurm.queue_of(submitted, "study").problem
    monkeypatch.setattr(slurm, "PATIENCE", 0.2)
    squeue("exec /bin/sleep 5")
    assert "did not answer" in slurm.queue_of(submitted, "study").problem


def test_a_submission_that_may_have_worked_is_kept_and_one_that_was_refused_is_not(
    store, squeue, monkeypatch
):
    squeue("")
    program = shutil.which("squeue")
    assert program
    for text, kept in (("echo 'invalid partition' >&2; exit 1", 0), ("exec /bin/sleep 5", 1)):
        squeue(text)
        Path(program).replace(Path(program).with_name("sbatch"))
        monkeypatch.setattr(slurm, "PATIENCE", 0.5)
        with pytest.raises(ClusterError, match="invalid partition" if not kept else "did not answer"):
            slurm.submit(Profile(), store, "study", jobs=1, arguments=["run"])
        assert len(slurm.submissions(store, "study")) == kept


def test_jobs_are_read_and_told(submitted, squeue):
    squeue(
        "echo '7_0|RUNNING|None|n1|2|1:00|9:00|biphase-study-s1|'\n"
        "echo '7_1|PENDING|BeginTime||1|0:00|10:00|biphase-study-s1|'\n"
        "echo '7_2|COMPLETING|None|n2|0|0:10|9:50|biphase-study-s1|'\n"
        "echo 'something else'"
    )
    found = slurm.queue_of(submitted, "study")
    assert [job.id for job in found.active] == ["7_0", "7_1"]
    told = slurm.lines(found, submitted.root)
    assert told[0].startswith("  Slurm: 1 completing, 1 pending, 1 running")
    assert told[1] == "    job 7_0  running  on n1 for 1:00, 9:00 left  requeued 2 times"
    assert told[2] == "    job 7_1  pending  (BeginTime)  requeued 1 time"
    assert json.loads(json.dumps(slurm.as_json(found)))["jobs"][1]["reason"] == "BeginTime"


def test_only_what_is_named_is_asked_for(submitted, squeue):
    (slurm.folder(submitted, "study") / "s2.sh").touch()
    squeue('for word; do case $word in --name=*) echo "$word" >&2; exit 1;; esac; done')
    assert "--name=biphase-study-s1,biphase-study-s2" in slurm.queue_of(submitted, "study").problem
    assert "--name=biphase-study-s2;" in slurm.queue_of(submitted, "study", {"s2"}).problem
    assert slurm.queue_of(submitted, "study", set()) == Queue()


def test_of_many_jobs_some_are_listed():
    job = Job("1_1", "pending", "Priority", "", 0, "0:00", "1:00")
    told = slurm.lines(Queue((job,) * 40, submitted=True), "logs")
    assert len(told) == 2 + slurm.SHOWN
    assert "28 more jobs" in told[-1]
