"""`run --slurm`, `status` and `stop` as typed: refusals in one line, and nothing that needs a Slurm to say so."""

import pytest

STUDY = """
from biphase import BPE, CLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
corpus = Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl")
study = Study("small", (Pretrain("clm", tiny, corpus, (Stage(CLM(), 8),), packing=Chunks(32, 4), batch_tokens=256,
                                 schedule=WSD(1e-3, 2, 2)),))
"""


@pytest.fixture
def typed(verb, corpus, store, tmp_path, monkeypatch):
    """A verb on a small study, on a machine without Slurm."""
    study = tmp_path / "small.py"
    study.write_text(STUDY.format(source=corpus.source))
    (tmp_path / "slurm.toml").write_text("jobs = 2\n")
    (tmp_path / "nothing").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.chdir(tmp_path)
    return lambda name, *words: verb(name, study, "--store", store.root, *words)


@pytest.mark.parametrize(
    ("profile", "more", "words"),
    [
        ("partitoin = 'gpu'", (), "did you mean 'partition'?"),
        ("processes = 9", (), "processes = 9: run 'clm' has 8 rows a step, one for each at most; type"),
        ("jobs = 2", ("--processes", "2"), "type processes = 2 in slurm.toml"),
        ("jobs = 2", (), "sbatch is not on this machine"),
        (None, (), "no profile slurm.toml"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(typed, tmp_path, store, profile, more, words):
    path = tmp_path / "slurm.toml"
    path.write_text(profile) if profile else path.unlink()
    code, out, told = typed("run", "--slurm", "slurm.toml", *more)
    assert code == 2
    assert words in told
    assert len(told.splitlines()) == 1
    assert out == ""
    assert not list((store.studies / "small").glob("slurm/*.sh"))


def test_a_study_that_is_done_submits_nothing_and_needs_no_slurm(typed):
    assert typed("run", "--quiet")[0] == 0
    code, out, _ = typed("run", "--slurm", "slurm.toml")
    assert code == 0
    assert "nothing to submit" in out


def test_status_and_stop_do_without_slurm(typed, store):
    code, out, _ = typed("status")
    assert code == 0
    assert "Slurm" not in out
    assert typed("stop")[:2] == (0, "no worker of small runs, here or elsewhere\n")
    (store.studies / "small" / "slurm").mkdir(parents=True)  # submitted elsewhere
    (store.studies / "small" / "slurm" / "s1.sh").touch()
    code, out, _ = typed("status")
    assert code == 0
    assert "squeue is not on this machine" in out
    code, _, told = typed("stop", "--wait", "1s")
    assert code == 0
    assert "jobs that run see the request" in told


def program(folder, name, text):
    (folder / name).write_text(f"#!/bin/sh\n{text}\n")
    (folder / name).chmod(0o755)


def test_a_job_on_its_way_back_into_the_queue_counts_as_there(typed, store, tmp_path):
    (store.studies / "small" / "slurm").mkdir(parents=True)
    (store.studies / "small" / "slurm" / "s1.sh").touch()
    program(tmp_path / "nothing", "squeue", "echo '12_0|COMPLETING|None|node1|1|0:10|0:00|'")
    program(tmp_path / "nothing", "sbatch", "echo 13")
    code, out, _ = typed("run", "--slurm", "slurm.toml")
    assert code == 0
    assert "1 of 2 jobs were there already: 12_0 (completing)" in out
    assert "submitted job 13: 1 worker;" in out


def test_with_only_what_matches_and_is_done_nothing_is_submitted(typed, tmp_path):
    study = tmp_path / "small.py"
    study.write_text(
        study.read_text() + "from dataclasses import replace\n"
        "study = replace(study, runs=(*study.runs, replace(study.runs[0], name='other', seed=7)))\n"
    )
    assert typed("run", "--quiet", "--only", "clm")[0] == 0
    code, out, _ = typed("run", "--slurm", "slurm.toml", "--only", "clm")
    assert code == 0
    assert "all of small that matches --only 'clm' is done: nothing to submit" in out
    code, _, told = typed("run", "--slurm", "slurm.toml")
    assert code == 2
    assert "sbatch is not on this machine" in told
