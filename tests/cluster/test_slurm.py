"""Slurm without a cluster: profiles, job scripts, the queue, and `run --slurm`, with stand-ins for its commands."""

import json
import os
import subprocess
import time
from dataclasses import replace

import pytest

from biphase import CLM, Stage, Study
from biphase.cluster import slurm
from biphase.cluster.slurm import Profile, Queue, job_script, read_profile
from biphase.errors import ClusterError, SpecError

WHOLE = """
jobs = 6
warning = "10m"
setup = ["module load cuda", "export HF_HOME='/scratch/a b'"]
command = "apptainer exec --nv image.sif biphase"
[sbatch]
partition = "gpu"
constraint = "a100&nvlink"
time = "8:00:00"
gres = "gpu:a100:4"
cpus-per-task = 32
exclusive = true
contiguous = false
"""


def program(folder, name, text):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def profile(tmp_path):
    def write(text: str) -> Profile:
        path = tmp_path / "slurm.toml"
        path.write_text(text)
        return read_profile(path)

    return write


def script(profile: Profile, **fields: object) -> str:
    known = {"study": "my study", "submission": "s1", "jobs": profile.jobs, "arguments": ["run", "a b.json"]}
    return job_script(profile, **(known | fields))


def test_every_field_of_a_profile_is_in_the_script(profile):
    made = script(profile(WHOLE))
    options = [line.removeprefix("#SBATCH ") for line in made.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        '--partition="gpu"', '--constraint="a100&nvlink"', '--time="8:00:00"', '--gres="gpu:a100:4"',
        '--cpus-per-task="32"', "--exclusive", '--job-name="biphase-my_study-s1"', "--array=0-5",
        "--signal=B:USR1@600", "--requeue", "--open-mode=append", "--nodes=1", "--ntasks=1",
    ]  # fmt: skip
    assert "module load cuda\nexport HF_HOME='/scratch/a b'\n" in made
    assert "apptainer exec --nv image.sif biphase run 'a b.json' --processes 4 &\n" in made
    assert '"${OMP_NUM_THREADS:-8}"' in made
    assert "export BIPHASE_SUBMISSION=s1\n" in made
    made = script(profile(""))
    assert "--array=0-0" in made
    assert "--gres" not in made
    assert "-m biphase run 'a b.json' &" in made


def test_a_job_of_several_machines_starts_a_launcher_on_each(profile):
    made = script(profile('nodes = 4\ncommand = "biphase"\n[sbatch]\ngres = "gpu:8"'))
    options = {line.removeprefix("#SBATCH ") for line in made.splitlines() if line.startswith("#SBATCH")}
    assert {"--nodes=4", "--ntasks-per-node=1", '--gres="gpu:8"'} <= options
    assert "--ntasks=1" not in options
    assert "srun --nodes=4 --ntasks=4" in made
    assert '--processes 8 --nodes 4 --node "$SLURM_NODEID" --head "$BIPHASE_HEAD"\' &\n' in made
    assert 'kill -"$1"' not in made, "srun would end at once"


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("job = 1", "'jobs'"), ("jobs = 0", "jobs = 1"), ('jobs = "4"', "jobs"), ("nodes = -2", "nodes = 1"),
        ('warning = "soon"', "9m"), ('warning = "0s"', "warning"), ("setup = [1]", "setup"), ("jobs = ", "slurm.toml"),
        ("[slurm]\njobs = 1", "'slurm'"), ('[sbatch]\narray = "0-9"', "'jobs'"), ("[sbatch]\nnodes = 2", "'nodes'"),
        ("[sbatch]\nwait = true", "wait"), ('[sbatch]\n"--qos" = "long"', "--qos"), ('[sbatch]\nN = 2', "long name"),
        ('[sbatch]\nqos = "a\\nb"', "qos"), ("[sbatch]\nqos = 'a\"b'", "qos"), ("[sbatch]\nmem = [1]", "sbatch"),
        ('partition = "gpu"\ngpus = 4', "partition, gpus: "), ('sbatch = ["--exclude=node7"]', "[sbatch]"),
    ],
)  # fmt: skip
def test_a_wrong_profile_is_refused_in_one_line(profile, text, fact):
    with pytest.raises(SpecError, match=r"slurm\.toml") as refusal:
        profile(text)
    assert fact in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_missing_or_undecodable_profile_is_refused(tmp_path):
    with pytest.raises(SpecError, match="write one"):
        read_profile(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes.toml"):
        with pytest.raises(SpecError, match=str(path)):
            read_profile(path)


@pytest.mark.parametrize(("number", "requeued"), [("USR1", True), ("TERM", False)])
def test_a_signal_right_after_the_worker_started_reaches_it(profile, tmp_path, monkeypatch, number, requeued):
    program(tmp_path, "scontrol", "echo $*")
    program(tmp_path, "worker", "exec sleep 12")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    at_once = f"trap '[ \"$BASH_COMMAND\" != worker=\\$! ] || kill -{number} $$' DEBUG"
    path = tmp_path / "job.sh"
    path.write_text(script(Profile(setup=(at_once,), command="worker")))
    began = time.monotonic()
    environment = os.environ | {"SLURM_JOB_ID": "12"}
    ended = subprocess.run(
        ["bash", path], env=environment, capture_output=True, text=True, check=False, timeout=20
    )
    assert time.monotonic() - began < 8
    assert ("requeue 12" in ended.stdout) == requeued
    assert ended.returncode == (0 if requeued else 143)


# ---------------------------------------------------------------- queue


@pytest.fixture
def submitted(store):
    """A store with one submission."""
    slurm.folder(store, "study").mkdir(parents=True)
    (slurm.folder(store, "study") / "s1.sh").touch()
    return store


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Writes a stand-in for one of Slurm's commands; the others are missing."""
    monkeypatch.setenv("PATH", str(tmp_path / "programs"))
    return lambda name, text: program(tmp_path / "programs", name, text)


def test_missing_commands_are_named(submitted, command):
    queue = slurm.queue_of(submitted, "study")
    assert "squeue" in queue.problem
    (line,) = slurm.lines(queue, submitted.root)
    assert line.startswith("  Slurm: squeue")
    with pytest.raises(ClusterError, match=r"sbatch .*login node"):
        slurm.submit(Profile(), submitted, "study", jobs=1, arguments=[])


def test_an_error_and_a_timeout_of_slurm_are_one_line(submitted, command, monkeypatch):
    command("squeue", "printf 'slurm_load_jobs error:\\n Unable to contact' >&2; exit 1")
    assert "slurm_load_jobs error: Unable to contact" in slurm.queue_of(submitted, "study").problem
    monkeypatch.setattr(slurm, "TIMEOUT", 0.2)
    command("squeue", "exec /bin/sleep 5")
    assert "did not answer" in slurm.queue_of(submitted, "study").problem


@pytest.mark.parametrize(
    ("text", "message", "kept"),
    [("echo 'invalid partition' >&2; exit 1", "invalid partition", 0), ("exec /bin/sleep 5", "did not", 1)],
    ids=["refused", "timeout"],
)
def test_a_submission_is_kept_only_if_it_may_have_worked(store, command, monkeypatch, text, message, kept):
    command("sbatch", text)
    monkeypatch.setattr(slurm, "TIMEOUT", 0.5)
    with pytest.raises(ClusterError, match=message):
        slurm.submit(Profile(), store, "study", jobs=1, arguments=["run"])
    assert len(slurm.submissions(store, "study")) == kept


def test_jobs_are_counted(submitted, command):
    command(
        "squeue",
        "echo '7_0|RUNNING|None|2|'\necho '7_1|PENDING|BeginTime|1|'\necho '7_2|COMPLETING|None|0|'\necho 'something else'",
    )
    queue = slurm.queue_of(submitted, "study")
    (line,) = slurm.lines(queue, submitted.root)
    assert line.startswith("  Slurm: 1 completing, 1 pending (BeginTime), 1 running; ")
    assert json.loads(json.dumps(slurm.as_json(queue)))["jobs"][0]["restarts"] == 2


def test_only_named_submissions_are_queried(submitted, command):
    (slurm.folder(submitted, "study") / "s2.sh").touch()
    command("squeue", 'for word; do case $word in --name=*) echo "$word" >&2; exit 1;; esac; done')
    assert "--name=biphase-study-s1,biphase-study-s2" in slurm.queue_of(submitted, "study").problem
    assert "--name=biphase-study-s2;" in slurm.queue_of(submitted, "study", {"s2"}).problem
    assert slurm.queue_of(submitted, "study", set()) == Queue(), "nothing to ask for"


# ---------------------------------------------------------------- run --slurm


@pytest.fixture
def small(tiny_run):
    return Study("small", (tiny_run("clm", Stage(CLM(), 8)),))


@pytest.fixture
def typed(verb, small, study_file, store, tmp_path, monkeypatch):
    """A verb on a small study, on a machine without Slurm."""
    study = study_file(small)
    (tmp_path / "slurm.toml").write_text("jobs = 2\n")
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    return lambda name, *words: verb(name, study, "--store", store.root, *words)


@pytest.mark.parametrize(
    ("profile", "more", "fact"),
    [
        ("proceses = 2", (), "'processes'"),
        ("processes = 9", (), "processes = 8"),
        ("jobs = 2", ("--processes", "2"), "processes = 2 in slurm.toml"),
        ("jobs = 2", ("--nodes", "3", "--head", "n1:29400"), "nodes = 3 in slurm.toml"),
        ("nodes = 3\nprocesses = 3", (), "processes = 2"),
        ("jobs = 2", (), "sbatch"),
        (None, (), "slurm.toml"),
    ],
)
def test_a_submission_that_cannot_work_is_refused_in_one_line(typed, tmp_path, store, profile, more, fact):
    path = tmp_path / "slurm.toml"
    path.write_text(profile) if profile else path.unlink()
    code, out, err = typed("run", "--slurm", "slurm.toml", *more)
    assert (code, out) == (2, "")
    assert fact in err
    assert len(err.splitlines()) == 1
    assert not list((store.studies / "small").glob("slurm/*.sh"))


def test_a_finished_study_submits_nothing(typed):
    assert typed("run", "--quiet")[0] == 0
    code, out, _ = typed("run", "--slurm", "slurm.toml")
    assert code == 0
    assert "nothing to submit" in out


def test_status_and_stop_work_without_slurm(typed, store):
    code, out, _ = typed("status")
    assert code == 0
    assert "Slurm" not in out
    assert typed("stop")[:2] == (0, "no worker of small runs\n")
    (store.studies / "small" / "slurm").mkdir(parents=True)  # submitted elsewhere
    (store.studies / "small" / "slurm" / "s1.sh").touch()
    code, out, _ = typed("status")
    assert code == 0
    assert "Slurm: squeue" in out
    code, _, err = typed("stop", "--wait", "1s")
    assert code == 0
    assert "Slurm: squeue" in err


def test_a_completing_job_counts_as_present(typed, store, tmp_path):
    (store.studies / "small" / "slurm").mkdir(parents=True)
    (store.studies / "small" / "slurm" / "s1.sh").touch()
    program(tmp_path / "nothing", "squeue", "echo '12_0|COMPLETING|None|1|'")
    program(tmp_path / "nothing", "sbatch", "echo 13")
    code, out, _ = typed("run", "--slurm", "slurm.toml")
    assert code == 0
    assert "1 of 2 jobs" in out
    assert "job 13: 1 worker;" in out


def test_finished_results_that_match_only_submit_nothing(typed, small, study_file):
    study_file(replace(small, runs=(*small.runs, replace(small.runs[0], name="other", seed=8))))
    assert typed("run", "--quiet", "--only", "clm")[0] == 0
    code, out, _ = typed("run", "--slurm", "slurm.toml", "--only", "clm")
    assert code == 0
    assert "--only 'clm'" in out
    assert "nothing to submit" in out
    code, _, err = typed("run", "--slurm", "slurm.toml")
    assert code == 2
    assert "sbatch" in err
