"""A profile says what a job asks for, or one line says what is wrong with it."""

import os
import subprocess
import time

import pytest

from biphase.cluster.slurm import Profile, job_name, job_script, read_profile
from biphase.errors import SpecError

WHOLE = """
partition = "gpu"
account = "proj"
qos = "long"
constraint = "a100&nvlink"
time = "8h"
warning = "10m"
gpus = 4
gpu_type = "a100"
cpus = 32
memory = "200G"
jobs = 6
sbatch = ["--exclude=node7", "--mail-type=FAIL"]
setup = ["module load cuda", "export HF_HOME='/scratch/a b'"]
command = "apptainer exec --nv image.sif biphase"
"""


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


def test_every_field_arrives_in_the_script(profile):
    made = script(profile(WHOLE))
    options = [line.removeprefix("#SBATCH ") for line in made.splitlines() if line.startswith("#SBATCH")]
    assert options == [
        "--exclude=node7", "--mail-type=FAIL", '--job-name="biphase-my_study-s1"', "--array=0-5", "--signal=B:USR1@600", "--requeue", "--open-mode=append",
        "--nodes=1", "--ntasks=1", '--partition="gpu"', '--account="proj"', '--qos="long"',
        '--constraint="a100&nvlink"', "--time=0-08:00:00", "--gres=gpu:a100:4", "--cpus-per-task=32", "--mem=200G",
    ]  # fmt: skip
    assert "module load cuda\nexport HF_HOME='/scratch/a b'\n" in made
    assert "apptainer exec --nv image.sif biphase run 'a b.json' --processes 4 &\n" in made
    assert '"${OMP_NUM_THREADS:-8}"' in made
    assert "export BIPHASE_SUBMISSION=s1\n" in made


def test_an_empty_profile_is_one_job_of_one_process(profile):
    made = script(profile(""))
    assert "--array=0-0" in made
    assert "--gres" not in made
    assert "--processes" not in made
    assert "-m biphase run 'a b.json' &" in made


@pytest.mark.parametrize("text", ["", WHOLE])
def test_bash_can_read_the_script(profile, text, tmp_path):
    path = tmp_path / "job.sh"
    path.write_text(script(profile(text)))
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "seconds"), [("90m", 5400), ("8h", 28_800), ("1-12:00:00", 129_600), ("00:20:30", 1230)]
)
def test_times_are_ours_or_slurms(profile, text, seconds):
    assert profile(f'time = "{text}"').time_seconds == seconds


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('partitions = "gpu"', "did you mean 'partition'"),
        ("jobs = 0", "at least 1"),
        ("jobs = -2", "whole number"),
        ("jobs = true", "whole number"),
        ('jobs = "4"', "whole number"),
        ("partition = 3", 'type partition = "3"'),
        ('partition = "a\\nb"', "one line"),
        ("partition = 'a\"b'", "quotation marks"),
        ('time = "8"', "length of time"),
        ('time = "8 hours"', "length of time"),
        ('warning = "soon"', "length of time"),
        ('warning = "0s"', "between 1s"),
        ('time = "8m"\nwarning = "5m"', "less than half"),
        ("gpus = 4\nprocesses = 2", "leave processes out"),
        ('gpu_type = "a100"', "type gpus = 1"),
        ('setup = "module load"', "list of texts"),
        ("setup = [1]", "list of texts"),
        ('sbatch = ["exclude=node7"]', "is no option"),
        ('sbatch = ["--array=0-9"]', "use the field 'jobs'"),
        ('sbatch = ["-o out"]', "leave it out"),
        ('sbatch = ["-N2"]', "use the field 'processes'"),
        ('sbatch = ["-t5"]', "use the field 'time'"),
        ('sbatch = ["--arr=0-9"]', "use the field 'jobs'"),
        ('sbatch = ["--exclude=node7 --array=0-9"]', "use the field 'jobs'"),
        ("sbatch = ['--comment=\"a']", "cannot be read"),
        ('sbatch = ["--"]', "is no option"),
        ('sbatch = [""]', "is no option"),
        ('sbatch = ["--exclude=a\\rb"]', "one line"),
        ('memory = "64 G"', 'type memory = "64G"'),
        ('gpus = 1\ngpu_type = "a b"', "one word"),
        ('partition = "a\\u0000b"', "one line"),
        ('sbatch = ["--mem=1\\n#SBATCH --array=0-9"]', "one line"),
        ("jobs = ", "cannot be read"),
        ("[slurm]\njobs = 1", "no field 'slurm'"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_that_names_the_file(profile, text, words):
    with pytest.raises(SpecError, match=r"slurm\.toml") as refusal:
        profile(text)
    assert words in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_profile_that_is_not_there_or_no_text_is_refused(tmp_path):
    with pytest.raises(SpecError, match="write one"):
        read_profile(tmp_path / "none.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    for path in (tmp_path, tmp_path / "bytes.toml"):
        with pytest.raises(SpecError, match="cannot be read"):
            read_profile(path)


def test_job_names_are_plain_words():
    assert job_name("a,b c/é", "s1") == "biphase-a_b_c__-s1"


def test_what_only_looks_like_an_option_of_ours_passes(profile):
    lines = (
        "--time-min=10",
        "--ntasks-per-core=1",
        "-C fast",
        "--comment='take -n care'",
        "--wait-all-nodes=1",
    )
    assert profile(f"sbatch = {list(lines)!r}".replace("\\'", "'")).sbatch == lines


@pytest.mark.parametrize(("number", "requeued"), [("USR1", True), ("TERM", False)])
def test_a_signal_between_the_start_of_the_worker_and_its_name_arrives(
    profile, tmp_path, monkeypatch, number, requeued
):
    for name, text in (("scontrol", "echo $*"), ("worker", "exec sleep 12")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    at_once = f"trap '[ \"$BASH_COMMAND\" != worker=\\$! ] || kill -{number} $$' DEBUG"
    path = tmp_path / "job.sh"
    path.write_text(script(Profile(setup=(at_once,), command="worker")))
    began = time.monotonic()
    done = subprocess.run(
        ["bash", path],
        env=os.environ | {"SLURM_JOB_ID": "12"},
        capture_output=True,
        text=True,
        check=False,
        timeout=20,
    )
    assert time.monotonic() - began < 8
    assert ("requeue 12" in done.stdout) == requeued
    assert done.returncode == (0 if requeued else 143)
