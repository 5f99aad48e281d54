"""The verbs as a user types them: one clear line for a mistake, exit codes, nothing slow on the light ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from biphase import cli

STUDY = '''
"""Do the verbs work?"""
from biphase import BPE, CLM, MLM, WSD, Chunks, Corpus, Pretrain, Size, Stage, Study

tiny = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")


def run(name, *stages):
    return Pretrain(
        name, start=tiny, corpus=Corpus("tiny", {source!r}, BPE(320), heldout="heldout.jsonl"), stages=stages,
        packing=Chunks(32, shortest=4), batch_tokens=256, schedule=WSD(peak=3e-3, warmup=2, decay=3),
        heldout_every=5, heldout_tokens=512,
    )


study = Study("verbs", runs=(run("clm", Stage(CLM(), {steps})), run("two", Stage(CLM(), 6), Stage(MLM(0.4), {rest}))))
'''


@pytest.fixture
def study(corpus, tmp_path):
    path = tmp_path / "verbs.py"
    path.write_text(STUDY.format(source=corpus.source, steps=12, rest=6))
    return path


def biphase(*arguments, code=0):
    """Run a verb inside this process; gives its output."""
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    assert done.exit_code == code, done.output
    return done.stdout


def refused(*arguments):
    """Run a verb as a process and expect a refusal; gives its one line."""
    done = subprocess.run(
        [sys.executable, "-m", "biphase", *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    assert done.stdout == ""
    return lines[0]


def test_plan_run_status_plan(study, store):
    planned = biphase("plan", study, "--store", store.root)
    assert "Do the verbs work?" in planned
    assert "5 pieces" in planned
    assert "nothing computed yet" in planned
    assert not store.states.exists()

    ran = biphase("run", study, "--store", store.root, "--quiet")
    assert "all 5 pieces are done" in ran
    assert "masked 40%" in ran
    assert "knows only how often each token occurs" in ran

    status = biphase("status", study, "--store", store.root)
    assert "5/5 pieces" in status
    read = json.loads(biphase("status", study, "--store", store.root, "--json"))
    assert {state["standing"] for state in read["states"]} == {"done"}
    assert set(read["heldout"]) == {"clm", "two"}
    assert "5" in read["heldout"]["clm"]

    planned = json.loads(biphase("plan", study, "--store", store.root, "--json"))
    assert len(planned["done"]) == 5
    again = biphase("run", store.studies / "verbs" / "plan.json", "--store", store.root, "--quiet")
    assert "all 5 pieces are done" in again


def test_only_takes_names_and_refuses_strangers(study, store):
    biphase("run", study, "--store", store.root, "--quiet", "--only", "two")
    done = json.loads(biphase("plan", study, "--store", store.root, "--json"))["done"]
    assert len(done) == 3
    assert "did you mean 'two'?" in refused("run", study, "--store", store.root, "--only", "twos")


def test_for_stops_cleanly_and_says_how_to_go_on(corpus, tmp_path, store):
    path = tmp_path / "long.py"
    path.write_text(STUDY.format(source=corpus.source, steps=100_000, rest=100_000))
    said = biphase("run", path, "--store", store.root, "--quiet", "--for", "0.3s", "--only", "clm")
    assert "nothing lost. To go on: biphase run" in said
    assert len(list(store.states.iterdir())) in (1, 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_current_step_with_a_checkpoint(corpus, tmp_path, store, number):
    path = tmp_path / "long.py"
    path.write_text(STUDY.format(source=corpus.source, steps=1_000_000, rest=6))
    command = [
        sys.executable,
        "-m",
        "biphase",
        "run",
        path,
        "--store",
        store.root,
        "--only",
        "clm",
        "--checkpoint",
        "5",
    ]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(store.states.glob("*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    child.send_signal(number)
    out, said = child.communicate(timeout=30)
    assert child.returncode == 0, said
    assert "stopping after this step" in said
    assert "nothing lost" in out
    kept = [json.loads(place.read_text())["progress"]["step"] for place in store.states.glob("*/state.json")]
    assert max(kept) >= 5
    assert not list(store.leases.glob("*.lease"))
    assert not list(store.attempts.iterdir())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "no_such_study.py"), "no file no_such_study.py"),
        (("run", "README.md"), "a study is a Python file"),
        (("tokenize", "finweb-edu"), "did you mean 'fineweb-edu'?"),
        (("tokenize", "README.md"), "--tokenizer"),
        (("tokenize", "README.md", "--tokenizer", "bpe:many"), "bpe:32000"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_mistakes_get_one_line(arguments, words, tmp_path):
    assert words in refused(*arguments)


def test_more_mistakes_get_one_line(study, store):
    assert "there is no device 'h20'; did you mean 'h200'?" in refused("plan", study, "--device", "h20")
    assert "90s, 9m or 2h" in refused("run", study, "--store", store.root, "--for", "soon")
    assert "90s, 9m or 2h" in refused("run", study, "--store", store.root, "--checkpoint", "0")


def test_an_unknown_option_is_wrong_use(study):
    done = subprocess.run(
        [sys.executable, "-m", "biphase", "plan", study, "--sore", "x"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "--store" in done.stderr


def test_a_failed_job_gives_exit_code_one(study, store, monkeypatch):
    from biphase.training.pretrain import Pretraining

    def fails(self):
        raise RuntimeError("no luck")

    monkeypatch.setattr(Pretraining, "train", fails)
    said = biphase("run", study, "--store", store.root, "--quiet", code=1)
    assert "failed" in said
    assert "no luck" in biphase("status", study, "--store", store.root)


def test_tokenize_says_what_it_made(corpus, tmp_path):
    made = biphase(
        "tokenize", corpus.source, "--tokenizer", "bpe:300", "--store", tmp_path / "s", "--processes", 1
    )
    assert "training tokens" in made
    assert "mask token" in made
    assert biphase("tokenize", corpus.source, "--tokenizer", "bpe:300", "--store", tmp_path / "s") == made


def test_doctor_examines_this_machine(tmp_path):
    done = CliRunner().invoke(cli.app, ["doctor", "--store", str(tmp_path), "--json"])
    assert done.exit_code in (0, 1)
    assert any("torch" in finding["name"] for finding in json.loads(done.stdout))


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "studies/paper.py", "--store", "no-store"]], ids=" ".join
)
def test_light_verbs_import_nothing_heavy(arguments):
    code = (
        "import sys\nfrom biphase import cli\ntry:\n    cli.app(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'transformers', 'pyarrow', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    root = Path(__file__).parents[1]
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    assert (
        time.monotonic() - began < 5
    )  # 0.2 s and 0.4 s on an idle machine; this bound only catches the absurd


def test_the_store_may_be_named_by_the_environment(study, store):
    done = subprocess.run(
        [sys.executable, "-m", "biphase", "plan", study, "--json"],
        capture_output=True,
        text=True,
        env=os.environ | {"BIPHASE_STORE": str(store.root)},
        check=True,
    )
    assert json.loads(done.stdout)["done"] == []
    assert store.root.joinpath("corpora").exists()


def test_an_unusable_store_gets_one_line(study):
    assert "choose another --store" in refused("run", study, "--store", "/dev/null/x")


def test_more_processes_than_rows_are_refused_before_any_starts(study, store):
    assert "type --processes 8" in refused("run", study, "--store", store.root, "--processes", "9")
