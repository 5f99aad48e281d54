"""biphase from Python: the notebook of the docs, cell by cell, and what a `Workbench` does when something is wrong."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from biphase import CLM, SIZES, WSD, Chunks, Pretrain, Stage, Study, Workbench
from biphase.errors import BiphaseError, SpecError

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("BIPHASE_STORE", raising=False)
    return tmp_path


def training(steps):
    schedule = WSD(1e-3, warmup=2, decay=2)
    small = {"packing": Chunks(64), "batch_tokens": 256, "heldout_tokens": 512}
    return Study("one", Pretrain("run", SIZES["1m"], "builtin", Stage(CLM(), steps), schedule, **small))


def test_the_notebook_runs_and_its_tables_have_numbers(place, capsys):
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    known: dict[str, object] = {}
    for cell in cells:
        exec(compile("".join(cell["source"]), str(NOTEBOOK), "exec"), known)
    assert "training jobs" in capsys.readouterr().err, "progress is shown in the cell"
    bench, study = known["bench"], known["study"]
    results = bench.results(study).to_pylist()
    assert [(row["model"], row["done"]) for row in results] == [("clm", 4), ("clm-mlm", 4)]
    assert all(isinstance(row["mean"], float) for row in results)
    trials = bench.trials(study).to_pylist()
    chosen = [row["test"] for row in trials if row["model"] == "clm" and row["chosen"] == "yes"]
    assert results[0]["mean"] == pytest.approx(sum(chosen) / len(chosen), abs=1e-3)
    held_out = [row["loss"] for row in bench.losses(study).to_pylist() if row["text"] == "held out"]
    assert len(held_out) == 2 * 2 * 4, "two runs, two objectives, every ten of 40 steps"
    bench.run(study)
    assert "all 5 training jobs and 8 fine-tunings are done" in capsys.readouterr().err, (
        "nothing is left to compute"
    )


def test_a_refusal_is_raised_with_the_line_of_the_command(place):
    bench = Workbench("store")
    with pytest.raises(SpecError, match="no result of one matches --only 'two'; known: run"):
        bench.run(training(4), only="two")
    with pytest.raises(SpecError, match="No such option: --colour"):
        bench.plan(training(4), colour="red")
    (place / "study.py").write_text("from biphase import Study\nstudy = Study('none', runs=())\n")
    with pytest.raises(BiphaseError, match="has no runs"):
        bench.results("study.py")


@pytest.fixture
def interruptible():
    """A process of pytest-xdist ignores interrupts."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


def test_an_interrupted_run_saves_and_the_next_call_goes_on(place, interruptible):
    bench, study = Workbench("store"), training(20_000)

    def interrupt():
        while not list(place.glob("store/studies/one/live/*.jsonl")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    assert "stopped. 0 of 2 training jobs done, nothing lost" in bench.run(study)
    steps = max(bench.losses(study)["step"].to_pylist())
    bench.run(study, for_time="3s")
    assert 0 < steps < max(bench.losses(study)["step"].to_pylist()) < 20_000
