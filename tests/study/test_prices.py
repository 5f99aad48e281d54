"""Seconds of a plan: sums by hand, what is left out, elapsed time, and many GPUs."""

import json
import re
from dataclasses import asdict, replace

import pytest

from biphase import (
    CATALOG,
    CLM,
    LLAMA3,
    MLM,
    SIZES,
    WSD,
    Chunks,
    Corpus,
    Finetune,
    Hub,
    Pretrain,
    Rows,
    Size,
    Stage,
    Study,
)
from biphase.fast.trunk import refusal
from biphase.keys import Identities
from biphase.models.backbone import from_scratch
from biphase.protocol import GIB
from biphase.store import Store, publish, with_checksum
from biphase.study.costs import shape_of, shape_of_size
from biphase.study.describe import plan_json, summary
from biphase.study.devices import Measurement, PricedDevice, device_named, fit
from biphase.study.ledger import count, finetunings
from biphase.study.many_gpus import (
    ROOM,
    Load,
    ShardingOption,
    collectives,
    has_own_kernels,
    memory,
)
from biphase.study.plan import make_plan
from biphase.study.prices import (
    FIRST_TUNING_SECONDS,
    JOB_SECONDS,
    SAVED_BYTES,
    START_SECONDS,
    TRIAL_SECONDS,
    bill,
    elapsed,
    left_of,
    price,
)
from biphase.text import duration

OUTSIDE = Identities(data=lambda corpus: "data", hub=lambda hub: hub.source, task=lambda task: task.name)
CORPUS = Corpus("mine", "./texts", LLAMA3)
OF = {"size": "210m", "vocab": 128_256, "precision": "bf16"}
STEP = {"kind": "pretrain", "objective": "mlm", "ratio": 0.4, "packing": "chunks", "length": 2048, "rows": 12}
CASES = [
    OF | STEP | {"seconds": 0.067},
    OF | STEP | {"seconds": 0.2, "size": "610m"},
    OF | {"kind": "finetune", "batch": 32, "tokens": 32 * 13, "seconds": 0.004},
    OF | {"kind": "finetune", "batch": 32, "tokens": 32 * 180, "seconds": 0.014},
    OF | {"kind": "score", "tokens_per_second": 1.5e6},
]
SPEEDS = fit(CASES)


MEASURED = Measurement("NVIDIA Fast", "2026-11-15", "2.11.0", False, tuple(CASES), SPEEDS)
FAST = PricedDevice("fast", {"bf16": MEASURED})


def run(name, *stages, start=SIZES["210m"], **fields):
    said = {"corpus": CORPUS, "batch_tokens": 49_152, "schedule": WSD(warmup=0, decay=0)}
    return Pretrain(name, start, stages=tuple(Stage(*stage) for stage in stages), **(said | fields))


ONE = run("a", (CLM(), 10))


def plan_of(*runs, finetune=None):
    return make_plan(Study("s", runs, finetune), OUTSIDE)


def store_with(folder):
    place = folder / "devices" / "fast"
    place.mkdir(parents=True)
    told = {"device": MEASURED.title, "date": MEASURED.date, "versions": {"torch": MEASURED.torch}}
    facts = told | {"cases": CASES, "speeds": asdict(SPEEDS)}
    (place / "bf16.json").write_text(json.dumps(with_checksum(facts)))
    return Store(folder)


def saving(run):
    each, a_second = SAVED_BYTES
    return JOB_SECONDS + each * shape_of(run).parameters / a_second


def test_a_training_job_takes_its_steps_its_heldout_losses_and_its_checkpoint():
    one = run("a", (CLM(), 2_500), heldout_every=1_000, heldout_tokens=10_000)
    (took,) = price(plan_of(one), FAST).jobs.values()
    share = CLM().labelled_share(Chunks(), 0, 1)
    steps = 2_500 * SPEEDS.step(shape_of(one), Chunks(), 49_152, causal=True, labelled=share)
    heldout = sum(
        SPEEDS.forward(shape_of(one), Chunks(), 8_192, causal=causal, labelled=labelled)
        for causal, labelled in ((True, share), (False, 0.4))
    )
    assert took == pytest.approx(steps + 3 * heldout + saving(one))  # after 1,000, 2,000 and at the end
    forty, twenty = (run(f"m{r}", (MLM(r / 100), 10), heldout_tokens=10**8) for r in (40, 20))
    usual, longer = (seconds - saving(forty) for seconds in price(plan_of(forty, twenty), FAST).jobs.values())
    assert longer > 1.2 * usual, "an objective of its own is evaluated too"


def test_a_fine_tuning_takes_its_steps_its_scores_and_a_moment():
    task = replace(CATALOG["ontonotes5"], steps=100)
    made = price(plan_of(ONE, finetune=Finetune(task, lrs=(1e-4, 2e-4), protocol="standard")), FAST)
    ((grid, took),) = made.tunings.items()
    tokens = 91 / 4.5 + 1
    by_hand = 100 * SPEEDS.tuning_step(shape_of(ONE), 32 * tokens, 32)
    for rows, characters in ((8_528, 87), (8_262, 92)):
        length = characters / 4.5 + 1
        by_hand += SPEEDS.scoring(shape_of(ONE), rows * length, length)
    assert took == pytest.approx(by_hand + TRIAL_SECONDS)
    assert made.grids == {grid: 10}
    assert made.finetuning(made.grids) == pytest.approx(10 * took / 3600)


def test_a_fine_tuning_of_a_small_model_is_predicted(tmp_path):
    """One worker on an H200 takes 2.0 s for 1,000 steps on SST-2 and its scores (docs/performance.md)."""
    one = Finetune(replace(CATALOG["sst2"], steps=1_000), lrs=(1e-4,), seeds=(0,), protocol="standard")
    plan = plan_of(run("a", (CLM(), 10), start=SIZES["30m"]), finetune=one)
    (took,) = price(plan, device_named("h200", Store(tmp_path))).tunings.values()
    assert took == pytest.approx(2.0, rel=0.15)


def test_what_cannot_be_priced_is_left_out_and_said():
    theirs = Corpus("theirs", "./texts", replace(LLAMA3, source="org/m"))
    far = run("far", (CLM(), 10), start=Hub("org/m", revision="1"), corpus=theirs)
    small = run("small", (CLM(), 10), start=SIZES["8m"])
    tasks = tuple(CATALOG[name] for name in ("sst2", "record"))
    plan = plan_of(ONE, far, small, finetune=Finetune(tasks))
    made = price(plan, FAST)
    assert len(made.jobs) == 1
    assert made.hours(plan.jobs) is None
    assert {task for _, task, _ in made.tunings} == {"sst2"}
    assert {task for _, task, _ in made.grids} == {"sst2", "record"}
    facts = (("record",), ("org/m",), ("fp32", "fast", "biphase bench scale --save --precision fp32"))
    for note, known in zip((*made.notes, *made.unmeasured), facts, strict=True):
        assert all(fact in note for fact in known)


# ---------------------------------------------------------------- as it is told


def tuned_plan():
    both = tuple(CATALOG[name] for name in ("sst2", "mnli"))
    return plan_of(run("a", (CLM(), 200_000)), finetune=Finetune(both, lrs=(1e-4,), seeds=(0, 1)))


def finish(store, plan, count):
    for training in list(finetunings(plan))[:count]:
        for trial in training.trials:
            with store.attempt("x") as folder:
                publish(folder, store.trials / trial.key)


def test_what_is_left_is_priced_too(tmp_path):
    plan, store = tuned_plan(), store_with(tmp_path)
    finish(store, plan, 3)
    assert left_of(plan, store) == {(plan.results["a"], "mnli", 1.0): 1}
    made = bill(plan, store, "fast", None, tuned=3)
    last = summary(plan, list(plan.jobs), count(plan, store), made, "s.py")[-1]
    assert all(fact in last for fact in ("1 of 1", "3 of 4", "6 s", "biphase run s.py"))
    told = plan_json(plan, done=list(plan.jobs), tuned=count(plan, store), bill=made)
    assert json.loads(json.dumps(told)) == told
    prices = told["prices"]
    assert prices["pretraining_hours_left"] == 0
    each = {task: seconds for (_, task, _), seconds in made.tunings.items()}
    assert prices["finetuning_hours_left"] == pytest.approx(each["mnli"] / 3600)
    assert prices["finetuning_hours"] == pytest.approx(2 * (each["sst2"] + each["mnli"]) / 3600)
    assert told["costs"]["device_hours"] == pytest.approx(prices["pretraining_hours"])
    origin = {"date": "2026-11-15", "torch": "2.11.0", "shipped": False}
    assert prices["measured"] == {"device": "NVIDIA Fast", "precisions": {"bf16": origin}}


STUDY = '''"""What does it cost?"""
from biphase import CATALOG, CLM, SIZES, Finetune, Pretrain, Stage, Study

study = Study(
    "costly",
    runs=(Pretrain("a", SIZES["210m"], "fineweb-edu", Stage(CLM(), 9_000)),),
    finetune=Finetune(CATALOG["sst2"]),
)
'''


def test_elapsed_time_and_the_longest_chain_are_told(tmp_path):
    plan, store = plan_of(run("a", (CLM(), 2_000)), run("b", (MLM(0.4), 1_000))), store_with(tmp_path)
    one, two = (bill(plan, store, "fast", None, tuned=0, workers=n) for n in (1, 2))
    took = {key: one.jobs[plan.results[key]] for key in ("a", "b")}
    told = plan_json(plan, done=(), tuned=count(plan, store), bill=two)["elapsed"]
    assert told.pop("ends_at")
    assert told == {"workers": 2, "seconds": took["a"] + START_SECONDS, "chain": took["a"], "ends": "a"}
    alone = plan_json(plan, done=(), tuned=count(plan, store), bill=one)["elapsed"]["seconds"]
    assert alone == pytest.approx(sum(took.values()) + START_SECONDS)
    assert f"{duration(took['a'] + START_SECONDS)} on 2 fast" in " ".join(
        " ".join(summary(plan, (), count(plan, store), two, "s.py")).split()
    )


def test_the_verb_prices_on_a_measured_device_and_says_how_to_measure_another(verb, tmp_path):
    study, store = tmp_path / "study.py", store_with(tmp_path / "store").root
    study.write_text(STUDY)
    typed = ("plan", study, "--store", store, "--device")
    code, out, err = verb(*typed, "fast")
    assert code == 0, err
    assert all(fact in out for fact in ("2026-11-15", "torch 2.11.0", "fine-tuning"))
    told = json.loads(verb(*typed, "fast", "--json")[1])
    assert told["efficiency"] is None
    assert told["prices"]["finetuning_hours"] > 0
    _, out, _ = verb(*typed, "a100")
    assert all(fact in out for fact in ("a100 at 40%", f"biphase bench scale --store {store} --save"))
    (tmp_path / "store" / "devices" / "fast" / "bf16.json").write_text("{")
    for name, fact in (("fast", f"biphase bench scale --store {store} --save"), ("fst", "'fast'")):
        code, _, err = verb(*typed, name)
        assert code == 2
        assert fact in err


# ---------------------------------------------------------------- elapsed time


@pytest.fixture(scope="module")
def plan():
    """A trunk of 10 steps with two branches of 20 and 30, and a run of 40 steps apart; two fine-tunings each."""
    short = {"start": SIZES["1m"], "corpus": "builtin", "batch_tokens": 128, "packing": Rows(64)}
    runs = (
        run("a", (CLM(), 10), (MLM(0.4), 20), **short),
        run("b", (CLM(), 40), **short),
        run("m", (MLM(0.4), 40), **short),
    )
    return plan_of(
        *runs, finetune=Finetune((CATALOG["sources-mini"],), lrs=(1e-3,), seeds=(0, 1), protocol="standard")
    )


def priced(plan):
    jobs = {key: float(job.steps) for key, job in plan.jobs.items()}
    tunings = {(key, "sources-mini"): 5.0 for key in plan.results.values()}
    return jobs, tunings, dict.fromkeys(tunings, 2)


# One worker does one job after another. Of two, trunk and m begin at once; a's branch at 10; b's at 30 + 5 · 2 where
# fine-tunings come first, on the first worker. Of 99, the longest chain is what is waited for.
@pytest.mark.parametrize(("workers", "seconds"), [(1, 130), (2, 75), (3, 50), (5, None), (99, 45)])
def test_branches_wait_for_their_trunk_and_fine_tunings_for_their_model(plan, workers, seconds):
    jobs, tunings, counts = priced(plan)
    took = elapsed(plan, jobs, tunings, counts, workers)
    assert (took.chain, took.ends) == (45.0, "b")
    assert seconds is None or took.seconds == pytest.approx(seconds)
    assert took.seconds >= max(took.chain, (sum(jobs.values()) + 6 * 5) / workers) - 1e-9
    prepared = elapsed(plan, jobs, tunings, counts, workers, START_SECONDS, FIRST_TUNING_SECONDS)
    once = START_SECONDS + FIRST_TUNING_SECONDS
    assert workers not in (1, 99) or prepared.seconds == pytest.approx(took.seconds + once)


def test_what_is_done_is_not_waited_for(plan):
    jobs, tunings, counts = priced(plan)
    left = {key: seconds for key, seconds in jobs.items() if plan.jobs[key].parent}
    took = elapsed(plan, left, tunings, counts, 99)
    assert (took.chain, took.seconds) == (35.0, 35.0)
    assert elapsed(plan, {}, tunings, counts, 4).seconds == pytest.approx(10), "models as they are"
    assert elapsed(plan, {}, {}, {}, 4).seconds == 0


# ---------------------------------------------------------------- many GPUs


VOCAB = 128_256
ALONE = ShardingOption("none", 1)


def load(size="210m", rows=24, micro=24, **more):
    return Load(shape_of_size(SIZES[size], VOCAB), "bf16", rows, micro, 2048, 0.4, **more)


@pytest.mark.parametrize(
    ("size", "rows", "measured"),
    [("210m", 12, 11.3), ("210m", 24, 22.7), ("210m", 64, 50.1), ("610m", 24, 60.1), ("1b", 24, 91.9)],
)
def test_memory_is_what_was_measured_on_one_h200(size, rows, measured):
    """docs/performance.md: MLM 40% on rows or chunks of 2,048, bf16, one micro-batch a step."""
    predicted = sum(memory(load(size, rows=rows, micro=rows), ALONE).values()) / GIB
    assert predicted == pytest.approx(measured, rel=0.03)


def test_what_is_cut_is_cut_by_those_who_share_it_and_recomputing_keeps_an_input_a_layer():
    one, eight = memory(load(), ALONE), memory(load(), ShardingOption("full", 8))
    for what in ("weights", "gradients", "optimizer state"):
        assert eight[what] == one[what] / 8
    assert eight["fetched"] > 0
    assert "copies" not in eight
    several = memory(load(rows=24, micro=12), ShardingOption("full", 8))
    assert several["gradients"] == one["gradients"] / 8 + one["gradients"], "whole until the last micro-batch"
    again = memory(load(), ShardingOption("full", 8, recompute=True))
    assert again["activations"] < eight["activations"] / 4


def test_bytes_of_a_plain_sum_and_of_groups():
    numbers = load().shape.parameters
    during, after = collectives(load(), ALONE, 16)
    assert during.sent + after.sent == 2 * 15 / 16 * 4 * numbers
    assert after.sent == 2 * 15 / 16 * 4 * load().shape.embedding, "its gradient is complete at the end"
    weights, gradients, copies = collectives(load(), ShardingOption("hybrid", 8), 16)
    assert gradients.sent == 7 / 8 * 4 * numbers
    assert copies.sent == 2 * 1 / 2 * 4 * numbers / 8
    assert (copies.members, copies.stride) == (2, 8)
    twice = next(collectives(load(rows=48), ShardingOption("hybrid", 8), 16))
    assert twice.sent == 2 * weights.sent, "weights are fetched for every micro-batch"


PAPER = "studies/paper.py"


@pytest.fixture
def planned(verb, tmp_path):
    def typed(*words):
        return verb("plan", PAPER, "--store", tmp_path / "store", *words)

    return typed


@pytest.mark.parametrize("number", [8, 192])
def test_the_papers_models_on_many_gpus(planned, number):
    code, out, _ = planned("--gpus", number, "--device", "h100", "--json")
    models = json.loads(out)["gpus"]["models"]
    assert code == 0
    assert [(one["title"].split(",")[0], one["load"]["own"]) for one in models] == [
        ("210m", True),
        ("610m", True),
        ("1b", True),
    ]
    assert (models[1]["title"], models[1]["load"]["labelled"]) == ("610m, mlm 20%", 0.2)
    for one in models:
        ways = {way["way"]: way for way in one["outlooks"]}
        assert set(ways) >= {"none", "full"}
        assert all(way["fits"] for way in ways.values())
        assert ways["full"]["memory"]["optimizer state"] == ways["none"]["memory"]["optimizer state"] / number
        assert 0.4 < ways["full"]["efficiency"] <= 1
        whole = ways["none"]  # what it sends hides behind the backward pass, but for the embedding's part
        exposed = (1 - whole["efficiency"]) * whole["seconds"]
        assert 0 < exposed < 0.5 * whole["sent"] / (300e9 if number > 8 else 337.5e9)
    plain, *_, least = (sum(way["memory"].values()) for way in models[-1]["outlooks"])
    assert least < plain / 2, "sharded, and layers computed again"


@pytest.mark.parametrize("width", [8, 16, 48, 64, 128, 144])
def test_a_plan_knows_which_heads_our_kernels_take(width):
    size = Size("s", layers=1, hidden=2 * width, heads=2, kv_heads=1, ffn=32)
    trunk = from_scratch(size, vocab=40, mask_id=3, length=16, seed=0).model.base_model
    assert has_own_kernels(size) == (refusal(trunk) == "")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--gpus", 2000, "--device", "h100"), "type --gpus 1152"),
        (("--gpus", 8, "--device", "rtx4090"), "is not known"),
        (("--gpus", 8, "--device", "h1000"), "there is no device"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(planned, words, said):
    code, out, err = planned(*words)
    assert (code, out) == (2, "")
    assert said in err
    assert len(err.splitlines()) == 1


def test_what_does_not_fit_is_marked(planned):
    _, out, _ = planned("--gpus", 8, "--device", "l40s")
    assert 0 < out.count("does not fit") < 9


def test_a_plan_says_what_fits_one_gpu_what_it_costs_and_when_it_ends(planned):
    """The advice of a job that does not fit is checked by the same memory model, with fewer rows at a time."""
    _, out, _ = planned("--device", "h200", "--gpus", 8, "--price", 2.5, "--json")
    facts = json.loads(out)
    memory, cost, prices = facts["memory"], facts["cost"], facts["prices"]
    assert {need["work"] for need in memory["jobs"]} >= {"clm", "mlm 40%", "fine-tuning"}
    assert all(need["fits"] and not need["advice"] for need in memory["jobs"])
    hours = prices["pretraining_hours"] + prices["finetuning_hours"]
    assert cost["pretraining"] + cost["finetuning"] == pytest.approx(2.5 * hours)
    assert sum(cost["runs"].values()) == pytest.approx(2.5 * hours)
    _, out, _ = planned("--device", "rtx4090", "--json")
    advice = {(need["model"], need["work"]): need["advice"] for need in json.loads(out)["memory"]["jobs"]}
    assert (advice["210m", "clm"], advice["610m", "clm"]) == ("", "type --micro-batch 4")
    assert "--shard full" in advice["1b", "clm"]
    fits = memory_of_rows(4), memory_of_rows(8)
    assert fits[0] < 24e9 * ROOM < fits[1]
    _, out, _ = planned("--device", "h100", "--gpus", 1, "--price", 2.5)
    assert re.search(r"it\s+ends on \w{3} \d\d \w{3} 20\d\d at \d\d:\d\d", out)
    assert "cost at 2.5 an hour:" in out


def memory_of_rows(micro):
    work = Load(shape_of_size(SIZES["610m"], VOCAB), "bf16", 1152, micro, 2048, 1.0)
    return sum(memory(work, ALONE).values())
