"""The verbs as a user types them: results, one line for a mistake, exit codes, and no heavy imports for light verbs."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from common import toys, write_lines
from typer.testing import CliRunner

from biphase import CATALOG, CLM, MLM, WSD, Classify, Finetune, Retrieve, Stage, Study, Task, cli
from biphase.specs.study import PAPERS
from biphase.store import read_json

ROOT = Path(__file__).parents[2]


@pytest.fixture
def study(tiny_run, study_file):
    two = tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    return study_file(Study("verbs", (tiny_run("clm"), two)), "Do the verbs work?")


def biphase(*arguments, code=0):
    """Run a verb inside this process; gives its output."""
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def test_control_characters_of_a_study_or_a_path_are_escaped(tiny_run, study_file, verb, tmp_path):
    study = study_file(Study("verbs", (tiny_run(),)), "\x1b]0;owned\x07 Do they?")
    (tmp_path / "store").mkdir()
    for name in ("plan", "report"):
        printed = biphase(name, study, "--store", tmp_path / "store")
        assert r"\x1b]0;owned\x07 Do they?" in printed
        assert "\x1b" not in printed
    assert r"\x1b[2J.py" in verb("plan", tmp_path / "\x1b[2J.py")[2]


def test_papers_lists_what_their_studies_cost(tmp_path, monkeypatch, verb):
    monkeypatch.chdir(tmp_path)
    lines = biphase("papers", "--device", "h200").splitlines()
    titles = [line for line in lines if line.endswith(" claims")]
    assert [line.split(":")[0] for line in titles] == list(PAPERS)
    (cost,) = [line for line in lines if "papers/dual_objective/gpu:" in line]
    for part in ("10 runs", "min on h200", "GB of disk"):
        assert part in cost
    code, out, err = verb("papers", "--device", "nope")
    assert (code, out, err.count("\n"), "'nope'" in err) == (2, "", 1, True)
    assert not list(tmp_path.iterdir())


def test_run_shows_losses_and_writes_them_for_tensorboard(study, store):
    ran = biphase("run", study, "--store", store.root, "--quiet")
    assert "all 5 training jobs are done" in ran
    assert "masked 40%" in ran
    assert "knows only how often each token occurs" in ran
    status = json.loads(biphase("status", study, "--store", store.root, "--json"))
    assert {job["standing"] for job in status["jobs"]} == {"done"}
    assert set(status["heldout"]) == {"clm", "two"}
    assert "5" in status["heldout"]["clm"]
    boards = sorted(path.name for path in (store.studies / "verbs" / "tensorboard").iterdir())
    keys = [
        job["key"][:6] for job in json.loads(biphase("plan", study, "--store", store.root, "--json"))["jobs"]
    ]
    assert sorted(name.split(", ")[-1] for name in boards) == sorted(keys)
    assert any(name.startswith("two, mlm 40% ") for name in boards), boards


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_current_step_with_a_checkpoint(tiny_run, study_file, store, number):
    path = study_file(Study("long", (tiny_run("clm", Stage(CLM(), 1_000_000)),)))
    words = ["run", path, "--store", store.root, "--checkpoint", "5"]
    command = [sys.executable, "-m", "biphase", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(store.checkpoints.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(number)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 0, err
    assert "after this step" in err
    assert "nothing lost" in out
    checkpoints = map(read_json, store.checkpoints.glob("*/checkpoint.json"))
    assert max(checkpoint["progress"]["step"] for checkpoint in checkpoints) >= 5
    assert not list(store.leases.glob("*.lease"))
    assert not list(store.attempts.iterdir())


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["run", "README.md"], "README.md"),
        (["tokenize", "finweb-edu"], "'fineweb-edu'"),
        (["tokenize", "README.md"], "--tokenizer"),
        (["plan", "STUDY", "--device", "h20"], "'h200'"),
        (["run", "STUDY", "--for", "soon"], "9m"),
        (["run", "STUDY", "--checkpoint", "0"], "9m"),
        (["run", "STUDY", "--only", "twos"], "'two'"),
        (["run", "STUDY", "--processes", "9"], "--processes 8"),
        (["run", "STUDY", "--store", "/dev/null/x"], "--store"),
        (["plan", "x.py", "--sore", "x"], "--store"),
        (["evaluate", "m", "--tasks", "sst2", "--steps", "many"], "--steps"),
        (["evaluate", "m"], "--tasks"),
        (["evaluate", "m", "n", "--tasks", "sst2"], "biphase compare m n"),
        (["raport", "x.py"], "report"),
        (["bench", "pretran"], "'pretrain'"),
        (["bench", "--ratio", "40"], "0.99"),
        (["bench", "--size", "9m"], "known: 1m, 2m, 8m"),
        (["bench", "finetune", "--ratio", "0.3"], "type bench pretrain --ratio 0.3"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_refused_in_one_line(verb, study, store, monkeypatch, words, fact):
    monkeypatch.setenv("BIPHASE_STORE", str(store.root))
    monkeypatch.chdir(ROOT)
    code, out, err = verb(*(str(study) if word == "STUDY" else word for word in words))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert err.startswith("error: ")
    assert fact in err


EPOCHS = """
from biphase import BPE, CLM, MNTP, WSD, Chunks, Corpus, Mix, Pretrain, Size, Stage, Study, Uniform

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
drawn = MNTP(Uniform(0.1, 1), weight="1/ratio")
study = Study("epochs", runs=(Pretrain(
    "mixed", start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"),
    stages=(Stage(Mix({{CLM(): 3, drawn: 1}}), epochs=0.02), Stage(MNTP(0.3, unit="word"), 4)),
    packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(peak=3e-3, warmup=0.1, decay=0.2),
    heldout_every=5, heldout_tokens=512,
),))
"""


def test_a_study_in_epochs_is_tokenized_planned_run_and_reported(corpus, verb, tmp_path):
    study, store = tmp_path / "epochs.py", ("--store", tmp_path / "s")
    study.write_text(EPOCHS.format(source=corpus.source))
    code, _, said = verb("plan", study, *store)
    assert code == 2
    assert all(fact in said for fact in ("'mixed'", "'tiny'", "biphase tokenize"))
    assert verb("tokenize", study, "--tokenizer", "bpe:320", *store)[0] == 2
    assert "training tokens" in biphase("tokenize", study, *store)
    (shards,) = (tmp_path / "s" / "shards").iterdir()
    steps = round(0.02 * (json.loads((shards / "card.json").read_text())["train_tokens"] // 32) / 8)
    plan = json.loads(biphase("plan", study, *store, "--json"))
    assert plan["jobs"][0]["steps"] == [0, steps]
    assert plan["jobs"][0]["objective"] == "mix 75% clm + 25% mntp 10–100% weighted 1/ratio"
    assert "jobs are done" in biphase("run", study, *store, "--quiet")
    biphase("report", study, *store)
    assert (tmp_path / "s" / "studies" / "epochs" / "report" / "report.md").exists()


LIGHT = [  # what a verb is typed with, and what it may import of numbers
    (["--help"], set()),
    (["plan", "studies/paper.py", "--store", "OUT"], {"numpy", "scipy"}),
    (["split", "studies/paper.py", "--store", "OUT"], {"numpy", "scipy"}),
    (  # the page's script comes from vl_convert
        ["report", "studies/quickstart.py", "--store", "OUT", "--no-print"],
        {"numpy", "scipy", "vl_convert"},
    ),
]


@pytest.mark.parametrize(("arguments", "allowed"), LIGHT, ids=[arguments[0] for arguments, _ in LIGHT])
def test_light_verbs_import_nothing_heavy(arguments, allowed, tmp_path):
    arguments = [str(tmp_path) if one == "OUT" else one for one in arguments]
    heavy = {"torch", "numpy", "scipy", "transformers", "pyarrow", "tokenizers", "vl_convert"} - allowed
    code = (
        "import sys\nfrom biphase import cli\ntry:\n    cli.app(sys.argv[1:])\nexcept SystemExit as end: assert not end.code, end.code\n"
        f"heavy = {sorted(heavy)} \n"
        "assert not set(heavy) & set(sys.modules), set(heavy) & set(sys.modules)"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < 10  # 0.2 to 2 s on an idle machine


@pytest.mark.parametrize(
    "words",
    [["status", "STUDY", "--json"], ["ledger", "pack", "STUDY", "OUT"], ["export", "0" * 8, "OUT"]],
    ids=lambda words: words[0],
)
def test_a_missing_store_is_refused_and_not_created(words, verb, study, store, tmp_path):
    store.studies.mkdir()
    mistyped = store.root.with_name("stroe")
    out = tmp_path / "out"
    typed = [{"STUDY": study, "OUT": out}.get(word, word) for word in words]
    code, printed, err = verb(*typed, "--store", mistyped)
    assert (code, printed) == (2, "")
    assert err.count("\n") == 1
    assert str(mistyped) in err
    assert f"--store {store.root}" in err, "a store of a similar name is suggested"
    assert not mistyped.exists()
    assert not out.exists()
    other = store.root.with_name("of-another-kind")
    code, _, err = verb(*typed, "--store", other)
    assert code == 2
    assert str(store.root) not in err.replace(str(other), ""), "one of another name is not"


# ---------------------------------------------------------------- a study that is fine-tuned


@pytest.fixture
def tuned(tiny_run, study_file, tmp_path):
    """Writes the study file: 2 results × 2 trained tasks × 2 rates × seeds, and a task that borrows."""
    folder = tmp_path / "own"
    for part, first in (("train", 0), ("test", 40)):
        write_lines(folder / f"{part}.jsonl", toys(40, first))
    facts = replace(CATALOG["scifact-mini"], steps=2, batch=4)
    facts = replace(facts, splits=replace(facts.splits, rows=(16, 6, 8)))
    untrained = replace(facts.splits, train="")
    lent = replace(facts, name="lent", form=Retrieve(), splits=untrained, trained_on="scifact-mini")

    def write(*, steps=2, seeds=2):
        own = Task("own", Classify("{text}", ("even", "odd")), str(folder), steps=steps, batch=8)
        grid = Finetune(
            (own, facts, lent), lrs=(1e-3, 4e-3), seeds=range(seeds), protocol="standard", precision="fp32",
            documents="judged",
        )  # fmt: skip
        run = tiny_run("clm", Stage(CLM(), 6), keep=(3,), schedule=WSD(peak=3e-3, warmup=1, decay=2))
        return study_file(Study("tuned", (run,), grid))

    return write


def trial_stamps(store):
    return {path: path.stat().st_mtime_ns for path in store.trials.glob("*/*")}


def test_a_study_is_fine_tuned_once(tuned, store):
    study = tuned()
    planned = biphase("plan", study, "--store", store.root)
    assert "16 fine-tunings · 24 scores" in planned
    assert "nothing computed yet" in planned
    assert not store.checkpoints.exists()
    assert "0/16 fine-tunings" in biphase("status", study, "--store", store.root)

    ran = biphase("run", study, "--store", store.root, "--quiet")
    assert "all 3 training jobs and 16 fine-tunings are done" in ran
    assert "intervals are over 2 fine-tuning seeds" in ran
    for task in ("own", "scifact-mini", "lent"):
        assert sum(line.split()[1:2] == [task] for line in ran.splitlines()) == 2
    before = trial_stamps(store)
    assert len({path.parent for path in before}) == 24
    assert not list(store.attempts.iterdir())

    status = biphase("status", study, "--store", store.root)
    assert "16/16 fine-tunings" in status
    assert "next: biphase run" not in status
    read = json.loads(biphase("status", study, "--store", store.root, "--json"))
    tuned_ones = {
        "done": 16,
        "of": 16,
        "seconds_left": 0.0,
        "grids": [],
        "running": [],
        "failed": {},
        "kept": {},
    }
    assert read["finetunings"] == tuned_ones
    assert read["takeovers"] == 0
    assert {(one["result"], one["task"], one["done"], one["of"]) for one in read["scores"]} == {
        (result, task, 4, 4) for result in ("clm-3", "clm") for task in ("own", "scifact-mini", "lent")
    }
    facts = json.loads(biphase("plan", study, "--store", store.root, "--json"))
    assert (facts["finetunings"], facts["finetunings_done"], facts["scores"]) == (16, 16, 24)
    assert "all 3 training jobs and 16 fine-tunings are done" in biphase("plan", study, "--store", store.root)

    again = biphase("run", store.studies / "tuned" / "plan.json", "--store", store.root, "--quiet")
    assert "all 3 training jobs and 16 fine-tunings are done" in again
    assert trial_stamps(store) == before, "nothing is computed a second time"
    assert f"What they show: biphase report {store.studies / 'tuned' / 'plan.json'}" in again

    said = biphase("report", study, "--store", store.root, "--no-print")
    page = store.studies / "tuned" / "report" / "report.html"
    assert f"the page: {page}" in said
    facts = json.loads(biphase("report", study, "--store", store.root, "--out", store.root / "r", "--json"))
    assert facts["scores"] == {"done": 24, "of": 24}
    assert (store.root / "r" / "report.html").read_bytes() == page.read_bytes()
    assert list((store.root / "r" / "figures").glob("*.pdf"))


def test_only_restricts_fine_tuning_too(tuned, store):
    study = tuned()
    said = biphase("run", study, "--store", store.root, "--quiet", "--only", "clm-*")
    assert "1 of 3 training jobs and 8 of 16 fine-tunings done. To go on: biphase run" in said
    read = json.loads(biphase("status", study, "--store", store.root, "--json"))
    assert {one["result"]: one["done"] for one in read["scores"]} == {"clm-3": 4, "clm": 0}
    assert read["finetunings"]["done"] == 8
    planned = biphase("plan", study, "--store", store.root)
    assert "1 of 3 training jobs and 8 of 16 fine-tunings done, 3 steps left" in planned


def test_time_limits_stop_fine_tunings_and_lose_none(tuned, store):
    study = tuned(steps=8, seeds=4)
    limit, rounds, done = 0.3, 0, 0
    said = "stopped."
    while "stopped." in said:
        said = biphase("run", study, "--store", store.root, "--quiet", "--for", f"{limit}s")
        rounds, limit = rounds + 1, limit * 2  # on a slow machine, too, it comes to an end
        read = json.loads(biphase("status", study, "--store", store.root, "--json"))
        assert read["finetunings"]["done"] >= done, "nothing is lost"
        done = read["finetunings"]["done"]
        assert not list(store.leases.glob("*.lease"))
        assert not list(store.attempts.iterdir())
    assert rounds > 1
    assert "all 3 training jobs and 32 fine-tunings are done" in said
    assert len(list(store.trials.iterdir())) == 48


def test_a_failed_fine_tuning_has_exit_code_1_and_is_retried(tuned, store):
    study = tuned(seeds=1)
    biphase("run", study, "--store", store.root, "--quiet")
    results = json.loads(biphase("plan", study, "--store", store.root, "--json"))["results"]
    for place in store.trials.iterdir():
        store.discard(place)
    weights = store.checkpoints / results["clm-3"] / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    said = biphase("run", study, "--store", store.root, "--quiet", code=1)
    assert "4 of 8 fine-tunings done, 1 failed. To go on" in said
    status = biphase("status", study, "--store", store.root)
    assert "4/8 fine-tunings" in status
    assert status.count("is missing or cut short") == 1
    assert "next: biphase run" in status
    failed = json.loads(biphase("status", study, "--store", store.root, "--json"))["finetunings"]["failed"]
    assert "clm-3 · own · lr 0.001 · seed 0" in failed
    weights.write_bytes(whole)
    assert "all 3 training jobs and 8 fine-tunings are done" in biphase(
        "run", study, "--store", store.root, "--quiet"
    )
    assert "failed" not in biphase("status", study, "--store", store.root)
