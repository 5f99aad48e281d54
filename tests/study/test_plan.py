"""The plan is a tree that shares every equal beginning, and no key depends on who else is in it."""

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from biphase.errors import SpecError, StoreError
from biphase.keys import Identities, checkpoint_key
from biphase.presets import SIZES
from biphase.records import decode
from biphase.specs import BPE, CLM, MLM, WSD, Chunks, Corpus, Hub, Linear, Pretrain, Rows, Stage, Study
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import make_plan, needed_jobs, save_plan

OUTSIDE = Identities(data=lambda corpus: f"data of {corpus.name}", hub=lambda hub: f"hub {hub.source}")
OBJECTIVES = (CLM(), MLM(0.4), MLM(0.2), MLM(Linear(0.4, 0.2, 3)))


def run(name, *stages, start=SIZES["1m"], decay=2, **fields):
    """A short run: `stages` are pairs of objective and steps."""
    said = {
        # A hub model has a tokenizer of its own, and what goes on from another run reads the same corpus.
        "corpus": start.corpus
        if isinstance(start, Pretrain)
        else "builtin"
        if start == SIZES["1m"]
        else "fineweb-edu",
        "batch_tokens": 128,
        "packing": Rows(64),
        "schedule": WSD(warmup=0, decay=decay),
    }
    return Pretrain(name, start, **({"stages": tuple(Stage(*stage) for stage in stages)} | said | fields))


SIZED = replace(OUTSIDE, tokens=lambda corpus: {"builtin": 640}.get(corpus.name, 0))


def test_stages_in_epochs_share_the_keys_of_the_same_stages_in_steps():
    steps = run("steps", (CLM(), 10), (MLM(0.4), 5), schedule=WSD(warmup=0, decay=0.2))
    stages = (Stage(CLM(), epochs=2), Stage(MLM(0.4), epochs=1))
    epochs = replace(steps, name="epochs", stages=stages)
    plan = make_plan(Study("both", (steps, epochs)), SIZED)
    assert plan.results["steps"] == plan.results["epochs"]
    assert plan.study.runs[1].stages == steps.stages
    after = Pretrain("after", epochs, stages=Stage(CLM(), epochs=1), schedule=WSD(warmup=0, decay=0))
    assert make_plan(Study("after", (after,)), SIZED).steps_written == 20


def test_epochs_of_a_corpus_that_is_not_tokenized_are_refused():
    epochs = run("epochs", schedule=WSD(warmup=0, decay=0.2), stages=Stage(CLM(), epochs=2))
    with pytest.raises(SpecError, match=r"'epochs'.*'builtin'.*biphase tokenize"):
        make_plan(Study("one", (epochs,)), OUTSIDE)


@st.composite
def studies(draw):
    """Runs over few values, so that many of them begin alike, and some go on from others."""
    made = []
    for number in range(draw(st.integers(1, 7))):
        stages = draw(
            st.lists(st.tuples(st.sampled_from(OBJECTIVES), st.integers(1, 6)), min_size=1, max_size=3)
        )
        steps = sum(count for _, count in stages)
        start = draw(st.sampled_from([SIZES["1m"], SIZES["1m"], Hub("./model"), *made]))
        fields = {"precision": "fp32"}
        if not isinstance(start, Pretrain):
            fields["packing"] = draw(st.sampled_from([Rows(64), Rows(64), Chunks(64)]))
        else:
            fields["packing"] = start.packing
            fields["optimizer_state"] = draw(st.sampled_from(["keep", "reset"]))
        if steps > 1:
            fields["keep"] = draw(st.sets(st.integers(1, steps - 1), max_size=2).map(sorted))
        decay = draw(st.integers(0, min(steps, 4)))
        made.append(run(f"run{number}", *stages, start=start, decay=decay, **fields))
    listed = draw(st.lists(st.sampled_from(made), min_size=1, unique=True))
    return Study("random", tuple(listed))


def children(plan, key):
    """The training jobs that begin at this checkpoint or root."""
    return [job for job in plan.jobs.values() if (job.parent or job.root) == key]


def lineage(one):
    return [*(lineage(one.start) if isinstance(one.start, Pretrain) else []), one]


def every_run(study):
    return {id(member): member for one in study.runs for member in lineage(one)}.values()


@given(studies(), st.randoms())
def test_dropping_adding_or_reordering_runs_changes_no_other_key(study, chance):
    whole = make_plan(study, OUTSIDE)
    some = chance.sample(study.runs, chance.randint(1, len(study.runs)))
    part = make_plan(replace(study, runs=tuple(some)), OUTSIDE)
    assert part.results == {name: whole.results[name] for name in part.results}
    assert set(part.jobs) <= set(whole.jobs)
    assert set(part.roots) <= set(whole.roots)
    assert {key: job.root for key, job in part.jobs.items()}.items() <= {
        key: job.root for key, job in whole.jobs.items()
    }.items()


@given(studies())
def test_a_shared_step_is_computed_once_and_no_other_is_left_out(study):
    plan = make_plan(study, OUTSIDE)
    distinct = {
        checkpoint_key(one, step, OUTSIDE) for one in every_run(study) for step in range(1, one.steps + 1)
    }
    assert plan.steps_to_compute == len(distinct)
    assert plan.steps_written >= plan.steps_to_compute


@given(studies())
def test_every_way_to_a_result_is_whole_and_each_job_has_one_objective(study):
    plan = make_plan(study, OUTSIDE)
    for one in study.runs:
        path = plan.path(plan.results[one.name])
        assert [job.span[0] for job in path] == [0, *(job.span[1] for job in path[:-1])]
        assert path[-1].span[1] == sum(member.steps for member in lineage(one))
    for job in plan.jobs.values():
        assert job.steps > 0
        begin = checkpoint_key(job.run, job.first, OUTSIDE)
        assert begin == (job.root if job.parent is None else job.parent)
        assert checkpoint_key(job.run, job.step, OUTSIDE) == job.key
        assert not any(job.first < phase.until < job.step for phase in job.run.phases)
        assert not job.first < job.run.decay_start < job.step
        assert job.decaying == (job.step > job.run.decay_start)


@given(studies())
def test_parents_come_first_and_a_branch_is_finished_before_the_next(study):
    plan = make_plan(study, OUTSIDE)
    seen = []
    for job in plan.jobs.values():
        assert job.parent is None or job.parent in seen
        if seen and seen[-1] != job.parent:  # a new branch begins: nothing hangs below the last checkpoint
            assert not children(plan, seen[-1])
        seen.append(job.key)
    assert sum(len(children(plan, key)) for key in (*plan.roots, *plan.jobs)) == len(plan.jobs)


@given(studies())
def test_a_plan_comes_back_from_json_with_an_equal_study_and_equal_keys(study):
    plan = make_plan(study, OUTSIDE, "why?")
    back = decode(json.loads(json.dumps(plan.to_json()))["study"])
    assert back == plan.study
    again = make_plan(back, OUTSIDE, "why?")
    assert again.to_json() == plan.to_json()
    assert list(again.jobs) == list(plan.jobs)


def test_a_trunk_is_cut_where_another_run_leaves_it():
    plan = make_plan(
        Study("s", (run("a", (CLM(), 10)), run("b", (CLM(), 4), (MLM(0.4), 6)), run("c", (CLM(), 6)))),
        OUTSIDE,
    )
    spans = [(job.span, job.decaying, job.results) for job in plan.jobs.values()]
    assert spans == [
        ((0, 4), False, ()),
        ((4, 8), False, ()),
        ((8, 10), True, ("a",)),
        ((4, 8), False, ()),
        ((8, 10), True, ("b",)),
        ((4, 6), True, ("c",)),
    ]
    assert (plan.job_count, plan.steps_written, plan.steps_to_compute) == (6, 26, 18)
    assert len(plan.roots) == 1
    assert [job.tokens for job in plan.jobs.values()][:2] == [4 * 128, 4 * 128]


def test_a_saved_plan_is_read_back_without_the_study_file(tmp_path):
    mine = Corpus("mine", "./texts", BPE(1_000))
    plan = make_plan(Study("s", (run("a", (CLM(), 5), corpus=mine, keep=(2,)),)), OUTSIDE, "why?")
    store = Store(tmp_path)
    save_plan(plan, store)
    save_plan(plan, store)
    path = store.studies / "s" / "plan.json"
    assert {file.name for file in path.parent.iterdir()} == {"plan.json", "plans"}
    assert len(list((path.parent / "plans").iterdir())) == 1, "the same plan is one version"
    back = load(path)
    assert (back.study, back.question) == (plan.study, "why?")
    assert make_plan(back.study, OUTSIDE, back.question).jobs.keys() == plan.jobs.keys()
    counts = json.loads(path.read_text())["counts"]
    assert counts == {"runs": 1, "jobs": 3, "steps_written": 5, "steps_to_compute": 5}


def test_what_any_saved_plan_needs_is_needed(tmp_path):
    store = Store(tmp_path)
    assert needed_jobs(store) == {}
    plans = [
        make_plan(Study(name, (run("a", (CLM(), 5), seed=seed),)), OUTSIDE) for seed, name in enumerate("pq")
    ]
    for plan in plans:
        save_plan(plan, store)
    assert set(needed_jobs(store)) == set(plans[0].jobs) | set(plans[1].jobs)


@pytest.mark.parametrize("damage", ["{", "[]", '{"question": ""}'])
def test_a_damaged_plan_stops_pruning(tmp_path, damage):
    store = Store(tmp_path)
    (store.studies / "s").mkdir(parents=True)
    (store.studies / "s" / "plan.json").write_text(damage)
    with pytest.raises(StoreError, match=r"plan\.json"):
        needed_jobs(store)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"start": Hub("./model"), "corpus": Corpus("c", "./text", BPE(500))}, "a vocabulary of its own"),
        (
            {"start": "base", "corpus": Corpus("c", "./text", BPE(600)), "data": "restart"},
            "another tokenizer",
        ),
        (
            {"start": "base", "corpus": Corpus("c", "./other", BPE(500)), "data": "restart"},
            "another tokenizer",
        ),
    ],
)
def test_a_model_is_never_trained_on_ids_it_does_not_know(fields, words):
    base = Pretrain("base", SIZES["1m"], Corpus("c", "./text", BPE(500)), (Stage(CLM(), 5_000),))
    fields = fields | {"start": base} if fields["start"] == "base" else fields
    going_on = Pretrain("on", stages=(Stage(CLM(), 5_000),), schedule=WSD(warmup=10), **fields)
    with pytest.raises(SpecError, match=words):
        make_plan(Study("s", (going_on,)), OUTSIDE)
