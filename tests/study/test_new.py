"""`biphase new`: every study file that it writes plans, stays within its budget, and runs."""

import re
from pathlib import Path

import pytest
from common import sentences, write_lines, write_task

from biphase.store import Store
from biphase.study.build import QUESTIONS
from biphase.study.load import load
from biphase.study.plan import identities, make_plan
from biphase.study.prices import bill

OLD = "a" * 40


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with text and a task of one's own, in which verbs are typed."""
    write_lines(tmp_path / "text.jsonl", ({"words": text} for text in sentences(400)))
    write_task(tmp_path / "toys")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def hours(file: str, device: str) -> tuple[float, float]:
    """The hours of pretraining and of fine-tuning that `biphase plan` shows."""
    loaded, store = load(file), Store("store")
    priced = bill(make_plan(loaded.study, identities(store)), store, device, None, tuned=0)
    return priced.pretraining(), priced.finetuning(priced.grids)


@pytest.fixture
def typed(model_folders):
    """Options with which a question needs nothing from the hub."""
    models = [f"--model={path}" for path in model_folders.values()]
    continued = [models[0], "--corpus=text.jsonl", "--text=words"]
    scratch = ["--size=8m", "--tokenizer=bpe:16000"]
    chosen = dict(zip(QUESTIONS, (scratch, scratch, continued, models, continued), strict=True))
    return lambda question: [*chosen[question], "--device=h200"]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_file_for_every_question_plans(question, verb, typed):
    code, out, err = verb("new", question, *typed(question), "--tasks", "sst2,./toys")
    assert code == 0, err
    assert f"biphase plan {question}.py --device h200" in out
    loaded = load(f"{question}.py")
    assert loaded.question == QUESTIONS[question]
    assert {task.name for task in loaded.study.finetune.tasks} == {"sst2", "toys"}
    assert verb("plan", f"{question}.py", "--device", "h200")[0] == 0
    assert max(map(len, Path(f"{question}.py").read_text().splitlines())) < 400


@pytest.mark.parametrize("question", [question for question in QUESTIONS if question != "evaluate"])
@pytest.mark.parametrize("budget", [0.3, 20])
def test_planned_hours_are_just_below_the_budget(question, budget, verb, typed):
    assert verb("new", question, *typed(question), "--hours", budget)[0] == 0
    pretraining, finetuning = hours(f"{question}.py", "h200")
    assert 0.9 * budget < pretraining + finetuning <= budget
    assert 0 < finetuning <= 0.3 * budget
    assert len(load(f"{question}.py").study.finetune.seeds) >= 2


def test_a_share_is_left_for_fine_tuning_that_has_no_price(verb):
    assert verb("new", "ratio", "--size", "210m", "--hours", 50, "--device", "a100")[0] == 0
    pretraining, finetuning = hours("ratio.py", "a100")
    assert 0.9 * 35 < pretraining <= 35
    assert not finetuning


def test_a_budget_of_an_evaluation_buys_seeds(verb, typed):
    for name, budget in (("few.py", 0.01), ("many.py", 0.02)):
        assert verb("new", "evaluate", name, *typed("evaluate"), "--hours", budget)[0] == 0
        assert hours(name, "h200")[1] <= budget
    few, many = (len(load(name).study.finetune.seeds) for name in ("few.py", "many.py"))
    assert 2 <= few < many


def test_a_longer_run_has_a_larger_batch_between_those_of_the_recipes(verb):
    batches = []
    for name, budget in (("day.py", 24), ("month.py", 720)):
        assert verb("new", "two-stage", name, "--size=610m", f"--hours={budget}", "--device=h200")[0] == 0
        run = load(name).study.runs[0]
        assert 32_768 < run.batch_tokens <= 2_359_296
        batches.append(run.batch_tokens)
    assert batches[0] < batches[1]


def test_a_tiny_study_runs_to_its_report(verb):
    assert verb("new", "two-stage", "tiny.py", "--hours", 0.02, "--device", "cpu")[0] == 0
    text = Path("tiny.py").read_text()
    # The built-in corpus takes half a minute to tokenize; this one takes a second.
    text = re.sub(r'CORPORA\["builtin"\]', 'Corpus("own", "text.jsonl", BPE(320), text="words")', text)
    text = re.sub("import CATALOG", "import BPE, CATALOG, Corpus", text)
    text = text.replace("steps=20,", "steps=2, splits=replace(CATALOG[name].splits, rows=(16, 8, 8)),")
    text = text.replace("lrs=(0.002, 0.004)", "lrs=(0.002,)")
    Path("tiny.py").write_text(re.sub(r"STEPS = .*", "STEPS = 4", text))
    code, out, err = verb("run", "tiny.py", "--quiet")
    assert code == 0, err
    assert "clm-mlm40" in out
    code, out, err = verb("report", "tiny.py", "--no-print")
    assert code == 0, err
    assert "CLM before MLM" in out


@pytest.mark.parametrize(
    ("words", "facts"),
    [
        (["adapts"], ["adapts", "did you mean 'adapt'"]),
        (["adapt"], ["--model"]),
        (["ratio", "--model", "./m"], ["--size"]),
        (["evaluate", "--model", f"a/b@{OLD}", "--corpus", "builtin"], ["--corpus builtin"]),
        (["evaluate", "--model", f"a/b@{OLD}", "--hours", "1", "--device", "h200"], ["a/b", "--hours 1"]),
        (["ratio", "--hours", "0.001", "--device", "h200"], ["--hours 0.001", "--tasks"]),
        (["ratio", "--hours", "0.001", "--device", "cpu"], ["--hours 0.001", "--size"]),
        (["ratio", "taken.py"], ["taken.py", "there already"]),
        (["ratio", "study.txt"], ["study.txt"]),
        (["ratio", "nowhere/study.py"], ["nowhere/study.py", "folder"]),
        (["ratio", "--hours", "inf"], ["--hours"]),
        (["ratio", "--size", "31mm"], ["31mm", "1m"]),
        (["ratio", "--corpus", "nowhere"], ["nowhere"]),
    ],
)  # fmt: skip
def test_what_it_refuses_is_one_line_and_writes_nothing(words, facts, verb):
    Path("taken.py").write_text("mine")
    before = sorted(Path().iterdir())
    code, out, err = verb("new", *words)
    assert (code, out, err.count("\n")) == (2, "", 1), err
    assert all(fact in err for fact in facts), err
    assert sorted(Path().iterdir()) == before
    assert Path("taken.py").read_text() == "mine"
