"""Studies built from options: `biphase evaluate` and `biphase adapt`."""

import csv
import json
import re
from dataclasses import replace

import pytest

from biphase import (
    CLM,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Chunks,
    Contrastive,
    Finetune,
    Hub,
    Linear,
    LoRA,
    Pairs,
    Stage,
    Study,
)
from biphase.catalog import CATALOG, TASKS
from biphase.errors import SpecError
from biphase.metadata import TRIAL, VALUES
from biphase.store import Store, read_json
from biphase.study.build import AdaptOptions, adaptation, evaluation, finetuning
from biphase.study.ledger import finetunings
from biphase.study.plan import identities, make_plan, save_plan

GRID = Finetune(TASKS[0])


def published(store):
    """Every trial: what it says but for times, and the bytes of its values."""
    return {
        place.name: (
            {k: v for k, v in read_json(place / TRIAL).items() if k != "seconds"},
            (place / VALUES).read_bytes(),
        )
        for place in store.trials.iterdir()
    }


# ---------------------------------------------------------------- what is evaluated


def asked(model, store, finetune=GRID):
    return evaluation([str(model)], finetune, store)


def refused(words, call):
    with pytest.raises(SpecError, match=words) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_every_checkpoint_is_evaluated_under_its_own_key(tiny_run, store, grid, worker):
    first = tiny_run("first", Stage(CLM(), 4), Stage(MLM(Linear(0.4, 0.2, 5)), 6), keep=(2, 6))
    runs = (
        first,
        tiny_run("plain", Stage(CLM(), 4), Stage(CLM(), 5), keep=(3,)),
        tiny_run("on", Stage(MLM(0.4), 4), start=first, keep=(1,)),
    )
    plan = make_plan(Study("s", runs, grid), identities(store))
    save_plan(plan, store)
    worker(plan, store, evaluated=set()).work()
    trials = {one.model: [trial.key for trial in one.trials] for one in finetunings(plan)}
    for key, job in plan.jobs.items():
        made = make_plan(asked(key[:8], store, grid), identities(store))
        assert list(made.results.values()) == [key], f"{job.run.name} at {job.step}"
        if job.results:
            own = {one.model: [trial.key for trial in one.trials] for one in finetunings(made)}
            assert own == {key: trials[key]}
    assert plan.job_count == 10
    assert [run.name for run in asked(plan.results["on-1"], store).runs] == ["on-1"]


# ---------------------------------------------------------------- several models


def test_models_are_compared_from_the_command_line(tiny_run, store, worker, verb):
    """Two checkpoints of a store, fine-tuned alike: scores are those of `evaluate`, so nothing is computed twice."""
    runs = tiny_run("first", Stage(CLM(), 6)), tiny_run("second", Stage(MLM(0.4), 6))
    plan = make_plan(Study("s", runs), identities(store))
    save_plan(plan, store)
    worker(plan, store, evaluated=set()).work()
    first, second = plan.results.values()
    grid = ("--tasks", "sources-mini", "--lrs", "1e-3", "--seeds", "0-1", "--steps", 3, "--store", store.root)
    code, said, _ = verb("compare", first[:8], second[:8], *grid)
    assert code == 0, said
    assert re.search(r"A +first\n +B +second\n", said), said
    assert re.search(r"sources-mini( +\S+){3} +\[", said), said
    trials = set(store.trials.iterdir())
    assert len(trials) == 4
    code, said, _ = verb("compare", second[:8], first[:8], "--json", *grid)
    (one,) = json.loads(said)["differences"]
    assert one["other"] == "first"
    assert one["difference"] == pytest.approx(one["scores"][1] - one["scores"][0])
    assert verb("evaluate", first[:8], *grid)[0] == 0
    assert set(store.trials.iterdir()) == trials


def test_only_models_of_one_name_get_a_number(store, tmp_path):
    folders = [tmp_path / name for name in ("m-20", "m", "other/m", "m-2")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    study = evaluation([str(folder) for folder in folders], GRID, store, effect=1.0)
    assert [run.name for run in study.runs] == ["m-20", "m", "m-2", "m-2-2"]


def test_one_model_alone_is_not_compared(store, verb):
    for models, why in ((["a"], "alone"), (["a", "b", "a"], "twice")):
        code, _, told = verb("compare", *models, "--tasks", "sources-mini", "--store", store.root)
        assert code == 2
        assert why in told
        assert "biphase compare MODEL OTHER" in told
        assert told.count("\n") == 1


# ---------------------------------------------------------------- the grid


def said(lrs="1e-5", seeds="0", protocol="standard", precision="fp32", documents="", length=0):
    return finetuning((CATALOG["scifact-mini"],), lrs, seeds, protocol, precision, documents, length)


def test_rates_and_seeds_are_listed_or_counted():
    assert said(lrs="1e-5, 3e-5,1e-4").lrs == (1e-5, 3e-5, 1e-4)
    assert said(seeds="0-4").seeds == (0, 1, 2, 3, 4)
    assert said(seeds="7,3").seeds == (7, 3)
    assert said(seeds="3-3").seeds == (3,)
    made = said(protocol="paper", precision="bf16", documents="all", length=64)
    assert (made.protocol, made.precision, made.documents, made.length) == ("paper", "bf16", "all", 64)
    assert said(documents="").documents == "all"


@pytest.mark.parametrize(
    ("fields", "facts"),
    [
        ({"lrs": "fast"}, "'fast'.*--lrs 1e-5,3e-5"),
        ({"lrs": "3"}, "lrs.*0 and below 1.*3"),
        ({"seeds": "0-x"}, "'x'.*--seeds 0-4 or 0,1,2"),
        ({"seeds": "4-0"}, "seeds.*not empty"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused_in_one_line(fields, facts):
    refused(facts, lambda: said(**fields))


# ---------------------------------------------------------------- the verb


@pytest.fixture
def own_csv(tmp_path):
    """Reviews of one's own: train.csv and test.csv."""
    folder = tmp_path / "reviews"
    folder.mkdir()
    for part, rows in (("train", 48), ("test", 10)):
        with (folder / f"{part}.csv").open("w", newline="") as file:
            table = csv.writer(file)
            table.writerow(["text", "label"])
            table.writerows(
                (f"the {'cat, a' if n % 2 else 'river'} {n}", ("bad", "good")[n % 2]) for n in range(rows)
            )
    return folder


SMALL = ("--lrs", "1e-3,4e-3", "--seeds", "0-1", "--steps", "2", "--quiet")


@pytest.mark.parametrize("name", ["bert", "eurobert"])
def test_a_transformers_folder_on_data_of_ones_own(verb, model_folders, own_csv, tmp_path, name):
    store = Store(tmp_path / "store")
    command = ("evaluate", model_folders[name], "--tasks", own_csv, "--store", store.root, *SMALL)
    code, out, told = verb(*command, "--dry-run")
    assert (code, told, store.root.exists()) == (0, "", False)
    said = dict(line.strip().split(None, 1) for line in out.splitlines() if line.startswith("  "))
    for field, beginning in (
        ("family", "SC"), ("columns", "text, label"), ("text", "{text}"), ("labels", "bad, good"),
        ("train", "45 rows; 2 steps of 32"), ("validation", "3 rows"), ("test", "10 rows"),
    ):  # fmt: skip
        assert said[field].startswith(beginning)
    examples = [line.rsplit("→ ", 1)[1] for line in out.splitlines() if line.startswith("  example")]
    assert sorted(examples) == ["bad", "good"]
    assert json.loads(verb(*command, "--dry-run", "--json")[1])[0]["name"] == "reviews"
    assert "\n4 fine-tunings would be made" in out
    _, out, _ = verb("compare", *model_folders.values(), *command[2:], "--dry-run")
    assert f"\n{4 * len(model_folders)} fine-tunings would be made" in out

    code, out, told = verb(*command)
    assert code == 0
    assert f"in {store.root}" in out
    row = next(line for line in out.splitlines() if "reviews" in line)
    assert row.split()[:3] == [name, "reviews", "accuracy"]
    assert re.search(r"\d (± [\d.]+|\[[\d.]+, [\d.]+\])", row), "an interval"
    assert len(published(store)) == 4
    for about, _ in published(store).values():
        assert about["task"]["form"]["labels"] == ["bad", "good"]
        assert about["examples"] == {"validation": 3, "test": 10}
        assert about["steps"] == 2

    before = {path: path.stat().st_mtime_ns for path in store.trials.rglob("*")}
    code, again, told = verb(*command, "--json")
    assert code == 0
    assert "all 4 fine-tunings" in told
    assert {path: path.stat().st_mtime_ns for path in before} == before, "nothing is computed again"
    (scores,) = json.loads(again)["scores"]
    assert (scores["done"], scores["of"], scores["task"]) == (4, 4, "reviews")
    assert f"{sum(scores['test']) / 2 * 100:.2f}" in row


FACTS = ("--quiet", "--documents", "judged")


def test_retrieval_is_scored_without_training(verb, model_folders, tmp_path):
    store = tmp_path / "s"
    command = ("evaluate", model_folders["bert"], "--tasks", "scifact-mini", "--store", store, *FACTS)
    code, out, told = verb(*command, "--zero-shot", "--json")
    assert code == 0, told
    (row,) = json.loads(out)["scores"]
    assert (row["done"], row["of"]) == (1, 1), "learning rates and seeds change nothing"
    (place,) = store.glob("trials/*/trial.json")
    about = read_json(place)
    assert (about["steps"], about["trained_examples"], about["losses"]) == (0, 0, [])
    assert about["examples"]["test"] == about["examples"]["validation"] == 60
    assert about["scores"]["test"] == about["scores"]["validation"]
    (plan,) = store.glob("studies/*/plan.json")
    for words in (["plan"], ["report", "--no-print"], ["status"]):
        code, out, told = verb(words[0], plan, "--store", store, *words[1:])
        assert code == 0, told
        assert "lr" not in out.split()
    code, out, _ = verb(*command, "--zero-shot", "--dry-run")
    assert code == 0
    assert "1 score" in out
    code, out, told = verb("export", place.parent.name[:8], tmp_path / "exported", "--store", store)
    assert code == 0, told


# ---------------------------------------------------------------- adapt


@pytest.fixture
def folder(shards, tmp_path):
    """A model's configuration and its tokenizer: no weights are needed to say what will be done."""
    place = tmp_path / "decoder"
    place.mkdir()
    (place / "config.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 100}))
    words = (shards / "tokenizer" / "tokenizer.json").read_text()
    (place / "tokenizer.json").write_text(words)
    (place / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    return place


@pytest.fixture
def adapted(folder, corpus, tmp_path):
    """The study of some wishes."""

    def make(**wishes):
        options = AdaptOptions(**({"steps": 100, "corpus": corpus.source} | wishes))
        return adaptation(str(folder), options, Store(tmp_path / "store"))

    return make


def test_what_is_not_said_is_what_works(adapted, folder, corpus):
    (run,) = adapted().runs
    assert run.name == "decoder-mlm"
    assert run.start == Hub(str(folder))
    assert run.stages == (Stage(MLM(0.4), 100),)
    assert run.schedule == WSD(2e-4, warmup=5, decay=20)
    assert run.packing == Chunks(64), "the largest power of two that the model reads"
    assert run.batch_tokens == 32 * 64
    assert (run.adapter, run.freeze, run.optimizer, run.seed) == (None, "nothing", AdamW(), 42)
    assert run.corpus.tokenizer.source == str(folder)
    assert (run.corpus.source, run.corpus.bos) == (corpus.source, False)
    assert run.heldout_every == 20


def test_each_wish_has_its_field(adapted):
    (run,) = adapted(
        objective="mntp", ratio=0.2, lr=1e-3, warmup=0.1, decay=0.5, lora=4, length=32, batch_rows=3, seed=3,
        heldout_tokens=2_000, freeze_embeddings=True, precision="fp32", layer_decay=0.9, rope_base=1e5,
    ).runs  # fmt: skip
    (usual,) = adapted().runs
    assert run == replace(
        usual, name="decoder-mntp", stages=(Stage(MNTP(0.2), 100, rope_base=1e5),), schedule=WSD(1e-3, 10, 50),
        adapter=LoRA(rank=4, alpha=8), packing=Chunks(32), batch_tokens=96, seed=3, heldout_tokens=2_000,
        freeze="embeddings", precision="fp32", optimizer=AdamW(layer_decay=0.9),
    )  # fmt: skip
    assert adapted(lora=4).runs[0].schedule == WSD(1e-3, 5, 20)
    assert adapted(steps=3, heldout_tokens=512).runs[0].heldout_every == 1


def test_a_checkpoint_is_continued_with_new_optimizer_state_from_the_beginning_of_its_text(plan, finished):
    key = plan.results["clm"]

    def on(**wishes):
        return adaptation(key[:8], AdaptOptions(steps=10, **wishes), finished)

    (run,) = on().runs
    assert run.name == "clm-mlm"
    assert run.start == replace(plan.study.runs[0], keep=())
    assert (run.optimizer_state, run.data, run.corpus) == ("reset", "restart", run.start.corpus)
    assert (run.packing, run.batch_tokens) == (run.start.packing, 32 * 32)
    assert on(length=24).runs[0].packing == Chunks(24)
    with pytest.raises(SpecError, match=r"--text, --heldout.*--tokens.*--corpus"):
        on(tokens=5)


def test_pairs_are_a_second_run_or_the_only_one(adapted, tmp_path):
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"query": "who sees the cat?", "positive": "the dog"}\n')
    masked, last = adapted(pairs=str(pairs), pair_steps=50, pair_batch=8, temperature=0.1, lora=4).runs
    (plain,) = adapted(lora=4).runs
    assert masked == plain, "the masked run keeps its key"
    assert (last.name, last.start, last.optimizer_state) == ("decoder-pairs", masked, "reset")
    assert last.stages == (Stage(Contrastive(Pairs(str(pairs)), 0.1, 8, length=64), 50),)
    assert last.schedule == WSD(5e-4, warmup=2, decay=10)
    assert last.adapter == masked.adapter
    (only,) = adapted(pairs="scifact-mini", steps=0, pair_lr=1e-4).runs
    assert (only.start, only.schedule.peak, only.corpus) == (masked.start, 1e-4, masked.corpus)
    assert only.stages[0].objective.pairs[0].name == "scifact-mini"
    refused("--steps 0.*--pairs FILE", lambda: adapted(steps=0))


def test_what_was_understood_is_said_before_training_and_stands_in_the_report(
    verb, model_folders, own_csv, tmp_path, monkeypatch
):
    with (own_csv / "train.csv").open("a") as file:
        file.write('"the \x1b[31mred | <b>one</b>",good\n' * 30)
    monkeypatch.chdir(own_csv.parent)
    store = tmp_path / "s"
    tasks = f"./{own_csv.name}"
    code, _, told = verb("evaluate", model_folders["bert"], "--tasks", tasks, "--store", store, *SMALL)
    assert code == 0
    assert told.index("  labels ") < told.index("0 of 4 fine-tunings") < told.index("on validation")
    assert "\x1b[31m" not in told
    assert "  warning     only 74 rows to train on" in told
    monkeypatch.chdir("/")  # the plan that is left can be read from another folder
    (plan,) = store.glob("studies/*/plan.json")
    code, _, _ = verb("report", plan, "--store", store, "--no-print", "--out", tmp_path / "report")
    assert code == 0
    page, text = ((tmp_path / "report" / name).read_text() for name in ("report.html", "report.md"))
    for fact in ("reviews, as it was read", "only 74 rows to train on", "{text}"):
        assert fact in page
        assert fact in text
    assert "<b>one</b>" not in page
