"""Trackers show what the store has; a tracker that fails, hangs or is slow changes nothing else."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from common import python_with

from biphase import CLM, Finetune, Stage, Study
from biphase.store import read_json
from biphase.study import ledger
from biphase.study.plan import identities, make_plan
from biphase.tracking import Tracking

SOURCE = Path(__file__).parents[2] / "src"
VERSIONS = {
    "wandb": ["wandb==0.31.0"],
    "trackio": ["trackio==0.43.0"],
    "mlflow": ["mlflow-skinny==3.17.2", "sqlalchemy==2.1.9", "alembic==1.20.1"],
}


def lines_of(plan, store, key):
    """The metrics of a job in the store, without those of the jobs before it: step → line, held-out losses → line."""
    text = (store.checkpoints / key / "metrics.jsonl").read_text()
    every = [json.loads(line) for line in text.splitlines()]
    own = [line for line in every if line["step"] > plan.jobs[key].span[0]]
    return {line["step"]: line for line in own if "loss" in line}, [line for line in own if "heldout" in line]


def scalars(folder):
    """What TensorBoard shows of a run: name → [(step, value)]."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}


def boards(store, plan):
    return {path.name[-6:]: path for path in (store.studies / plan.study.name / "tensorboard").iterdir()}


def test_tensorboard_has_the_losses_of_jobs_and_the_scores_of_fine_tunings(plan, store, worker):
    assert not worker(plan, store, track=("tensorboard",)).work().failed
    shown = boards(store, plan)
    for key, job in plan.jobs.items():
        steps, heldout = lines_of(plan, store, key)
        board = scalars(shown[key[:6]])
        assert board["loss"] == [(step, pytest.approx(line["loss"])) for step, line in steps.items()]
        assert [step for step, _ in board[f"heldout/{job.objective.column}"]] == [e["step"] for e in heldout]
        assert board["flops"] == [(job.span[1], pytest.approx(job_flops(store, key)))]
    tuned = [scalars(path) for key, path in shown.items() if key not in {job[:6] for job in plan.jobs}]
    scores = sorted(value for board in tuned for _, value in board.get("toys/test/accuracy", []))
    trials = [read_json(path) for path in store.trials.glob("*/trial.json")]
    of_toys = sorted(each["scores"]["test"]["accuracy"] for each in trials if each["task"]["name"] == "toys")
    assert scores == pytest.approx(of_toys)
    assert any("facts-untitled/test/ndcg@10" in board for board in tuned), "tasks that borrow the model"


def job_flops(store, key):
    return read_json(store.checkpoints / key / "checkpoint.json")["progress"]["flops"]


def test_a_resumed_job_goes_on_in_its_run_with_every_step_once(tmp_path):
    for lines, steps in ([], range(11, 18)), (range(8, 15), range(15, 21)):
        tracking = Tracking(("tensorboard",), "study", tmp_path)
        run = tracking.run("5eed", "job, 5eed", "pretraining", {}, first=10)
        run.lines = [{"step": step, "loss": float(step)} for step in lines]
        for step in steps:
            run.log({"step": step, "loss": float(step)})
        assert tracking.close()
    assert scalars(tmp_path / "job, 5eed")["loss"] == [(step, step) for step in range(11, 21)]


# ---------------------------------------------------------------- tools that do not work
# Stand-ins for a foreign package. The name of one is that of a real one, since no other can be asked for.


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Writes a module that is imported as mlflow; it hangs where it calls hang() until the test ends."""
    ended = tmp_path / "ended"
    hang = f"import time, pathlib\ndef hang():\n    while not pathlib.Path({str(ended)!r}).exists(): time.sleep(0.01)\n"

    def write(text):
        (tmp_path / "mlflow.py").write_text(hang + text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "mlflow", raising=False)

    yield write
    ended.touch()
    for thread in threading.enumerate():
        if thread.name.startswith("tracker-"):
            thread.join(10)
    sys.modules.pop("mlflow", None)


@pytest.mark.parametrize(
    ("text", "queued", "fact"),
    [
        ("raise OSError('no route to host')", 10_000, "no route to host"),
        ("hang()", 10_000, "in time"),
        ("hang()", 3, "too slow"),
    ],
    ids=["fails", "hangs", "fills its queue"],
)
def test_a_tracker_that_does_not_work_is_one_line_and_no_result_less(
    text, queued, fact, tool, plan, store, worker, monkeypatch, capsys
):
    tool(text)
    monkeypatch.setattr("biphase.tracking.QUEUED", queued)
    monkeypatch.setattr("biphase.study.worker.FINISH_SECONDS", 0.2 if text == "hang()" else 30)
    outcome = worker(plan, store, track=("mlflow",)).work()
    assert not outcome.failed
    assert ledger.done_keys(plan, store) == set(plan.jobs)
    assert outcome.tracked == text.startswith("raise")
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "mlflow" in line]
    assert fact in note


RECORDER = """
from types import SimpleNamespace as Some
sent = []
class entities:
    Param = RunTag = lambda *args: args
    Metric = lambda name, value, time, step: (step, name, value)
class MlflowClient:
    def get_experiment_by_name(self, name): return Some(experiment_id="1")
    def search_runs(self, *args, **options): return []
    def create_run(self, *args, **options): return Some(info=Some(run_id="1"))
    def log_batch(self, id, metrics=(), params=(), tags=()): sent.append(metrics)
    def set_terminated(self, id, state): sent.append(state)
"""


def sent():
    return [batch for batch in getattr(sys.modules.get("mlflow"), "sent", ()) if batch]


def test_a_row_is_sent_when_it_is_complete(tool, tmp_path, monkeypatch):
    """Else a run that is killed while it measures would skip, resumed, what it has not measured."""
    tool(RECORDER)
    monkeypatch.setattr("biphase.tracking.BATCH_SECONDS", 0.01)
    tracking = Tracking(("mlflow",), "study", tmp_path)
    run = tracking.run("5eed", "job", "pretraining", {})
    run.log({"step": 1, "loss": 3.0})
    run.log({"step": 2, "loss": 2.0})
    until = time.monotonic() + 20
    while not sent() and time.monotonic() < until:
        time.sleep(0.01)
    run.log({"step": 2, "heldout": {"clm": 2.5}})
    run.finish()
    assert tracking.close()
    assert sent() == [[(1, "loss", 3.0)], [(2, "loss", 2.0), (2, "heldout/clm", 2.5)], "FINISHED"]


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ("wandbb", ["'wandb'"]),
        ("tensorboard,wandb", ["--track wandb", "pip install 'biphase[wandb]'"]),
        ("mlflow", ["pip install 'biphase[mlflow]'"]),
    ],
)
def test_an_unknown_or_missing_tracker_is_refused_before_any_work(
    names, facts, tiny_run, study_file, store, verb, monkeypatch, tmp_path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wandb").mkdir()  # results of W&B, which are no package
    study = study_file(Study("s", tiny_run()))
    for words in (["--track", names], []):
        monkeypatch.setenv("BIPHASE_TRACK", "" if words else names)
        code, _, told = verb("run", study, "--store", store.root, *words)
        assert code == 2
        assert told.count("\n") == 1
        assert all(fact in told for fact in facts)
    assert not store.checkpoints.exists()


# ---------------------------------------------------------------- the tools themselves


READ = """
import json, os, sys
runs = {}
if sys.argv[1] == "wandb":
    from pathlib import Path
    from biphase.tracking import wandb_records
    for path in sorted(Path("wandb").glob("offline-run-*/run-*.wandb")):
        run = runs.setdefault(path.stem[4:], {"rows": [], "config": {}})
        for record in wandb_records(path):
            run["config"] |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                run["rows"].append([record.history.step.num, items])
elif sys.argv[1] == "trackio":
    import trackio
    from trackio.sqlite_storage import SQLiteStorage
    for run in trackio.Api().runs("tracked") if os.path.exists("tracked.db") else ():
        rows = [[log.pop("step"), log] for log in SQLiteStorage.get_logs("tracked", run.name)]
        runs[run.config["key"]] = {"rows": rows, "config": run.config}
else:
    import mlflow
    client = mlflow.MlflowClient()
    known = client.get_experiment_by_name("tracked")
    for run in client.search_runs([known.experiment_id]) if known else ():
        rows = {}
        for name in run.data.metrics:
            for metric in client.get_metric_history(run.info.run_id, name):
                assert name not in rows.setdefault(metric.step, {}), "sent twice"
                rows[metric.step][name] = metric.value
        runs[run.data.tags["biphase.key"]] = {"rows": sorted(rows.items()), "config": run.data.params}
print(json.dumps(runs))
"""


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A folder to work in, where every tool keeps its files, and nothing is sent to anybody."""
    monkeypatch.chdir(tmp_path)
    offline = {
        "PYTHONPATH": SOURCE, "WANDB_MODE": "offline", "TRACKIO_DIR": tmp_path, "DO_NOT_TRACK": "1",
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db", "WANDB_ERROR_REPORTING": "false",
    }  # fmt: skip
    for name, value in offline.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.campaign
@pytest.mark.parametrize("name", VERSIONS)
def test_a_tool_shows_every_step_of_a_killed_study_once(name, elsewhere, tiny_run, grid, study_file, store):
    python = python_with(*VERSIONS[name])
    run = tiny_run("clm", Stage(CLM(), 400), batch_tokens=64 * 32, heldout_every=20)
    one = Finetune(grid.tasks[:1], lrs=(1e-3,), seeds=(0,), precision="fp32")
    study = Study("tracked", run, one)
    plan = make_plan(study, identities(store))
    command = [python, "-m", "biphase", "run", study_file(study), "--store", store.root]
    command += ["--track", name, "--checkpoint", "100"]

    def read():
        done = subprocess.run([python, "-c", READ, name], capture_output=True, text=True, check=True)
        return json.loads(done.stdout.splitlines()[-1])

    assert read() == {}
    killed = subprocess.Popen(command)
    while max((row[0] for run in read().values() for row in run["rows"]), default=0) < 120:
        assert killed.poll() is None
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"tracker {name}" not in done.stderr
    assert name not in done.stdout
    shown = read()
    for key in plan.jobs:
        steps, heldout = lines_of(plan, store, key)
        trained = [(step, row["loss"]) for step, row in shown[key]["rows"] if "loss" in row]
        assert trained == [(step, pytest.approx(line["loss"])) for step, line in steps.items()]
        measured = [(step, row["heldout/clm"]) for step, row in shown[key]["rows"] if "heldout/clm" in row]
        assert measured == [(line["step"], pytest.approx(line["heldout"]["clm"])) for line in heldout]
        assert shown[key]["rows"][-1][1]["flops"] == pytest.approx(job_flops(store, key))
        assert shown[key]["config"]["objective"] == "clm"
    (trial,) = (read_json(path) for path in store.trials.glob("*/trial.json"))
    tuned = shown[trial["training"]]
    score = trial["scores"]["test"]["accuracy"]
    assert tuned["rows"][-1][1]["toys/test/accuracy"] == pytest.approx(score)
    assert str(tuned["config"]["lr"]) == "0.001"
    assert len(shown) == len(plan.jobs) + 1


@pytest.mark.campaign
def test_of_several_processes_one_tracks_a_job(tiny_run, study_file, store):
    study = study_file(Study("s", tiny_run()))
    command = [sys.executable, "-m", "biphase", "run", study, "--store", store.root, "--processes", "2"]
    done = subprocess.run([*command, "--track", "tensorboard"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for folder in (store.studies / "s" / "tensorboard").iterdir():
        assert len(list(folder.iterdir())) == 1
