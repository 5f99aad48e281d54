"""What pretraining cost and how its losses fell: sums that agree with the plan, curves that agree with the files."""

import json
import shutil

import pytest
from synthetic_states import put

from biphase import CLM, MLM, Corpus, Hub, Pretrain, Pretrained, Stage, Study
from biphase.report.evidence import gather
from biphase.report.pretraining import POINTS, SAMPLE, Epochs, checkpoint_of, curve, job_costs, switches
from biphase.store import Store
from biphase.study.costs import costs
from biphase.study.ledger import live_file, note_failure, survey_jobs
from biphase.study.plan import save_plan


@pytest.fixture
def tree(run, invent, tmp_path):
    """Two runs that share a trunk, and one that goes on from the first: no fine-tuning."""
    both = run("both", Stage(CLM(), 10), Stage(MLM(0.4), 10))
    clm = run("clm", Stage(CLM(), 20), keep=(5,))
    more = run("more", Stage(MLM(0.4), 10), start=clm)
    return invent(Study("tree", (clm, both, more)), tmp_path / "store")


def lines_of(store, key):
    return [json.loads(line) for line in (store.checkpoints / key / "metrics.jsonl").read_text().splitlines()]


def jsonl(lines):
    return "".join(json.dumps(line) + "\n" for line in lines)


def relog(store, key, lines, **progress):
    """Publish a checkpoint with other lines of metrics, and with changes of its progress."""
    place = store.checkpoints / key
    about = json.loads((place / "checkpoint.json").read_text())
    about["progress"] |= progress
    shutil.rmtree(place)
    put(place, {"checkpoint.json": json.dumps(about).encode(), "metrics.jsonl": jsonl(lines).encode()})


def logged(steps, objective="clm", loss=float, first=1):
    """Lines as a run logs them: one for every step."""
    return [
        {"step": step, "loss": loss(step), "objective": objective, "tokens": 128 * step, "seconds": step / 10}
        for step in range(first, first + steps)
    ]


def steps_of(found):
    return [point.step for point in found.points]


def summaries(plan, store):
    return {run.name: run for run in gather(plan, store).runs}


def by_key(plan, store):
    return {one.key: one for one in job_costs(plan, store)}


# ---------------------------------------------------------------- training jobs and costs


def test_pieces_sum_to_what_the_plan_costs(tree):
    plan, store = tree
    every, whole = job_costs(plan, store), costs(plan)
    assert [one.key for one in every] == list(plan.jobs)
    assert sum(one.tokens for one in every) == whole.tokens
    assert sum(one.flops for one in every) == pytest.approx(whole.flops, rel=1e-12)
    assert [(one.title, plan.jobs[one.key].results, one.decaying) for one in every] == [
        ("clm 0 → 5", ("clm-5",), False),
        ("clm 5 → 10", (), False),
        ("clm 10 → 16", (), False),
        ("clm 16 → 20", ("clm",), True),
        ("mlm 40% 20 → 26", (), False),
        ("mlm 40% 26 → 30", ("more",), True),
        ("mlm 40% 10 → 16", (), False),
        ("mlm 40% 16 → 20", ("both",), True),
    ]
    assert {(one.standing, one.device, one.devices) for one in every} == {("done", "synthetic", 192)}


def test_a_result_costs_its_whole_way_and_shared_ways_count_for_each(tree):
    plan, store = tree
    every, known = by_key(plan, store), summaries(plan, store)
    for result, key in plan.results.items():
        way = [job.key for job in plan.path(key)]
        whole, run = costs(plan, way), known[result]
        assert run.tokens == whole.tokens == sum(every[one].tokens for one in way)
        assert run.flops == pytest.approx(whole.flops, rel=1e-12)
        seconds = checkpoint_of(store, key)["progress"]["seconds"]
        assert run.seconds == seconds == pytest.approx(sum(every[one].seconds for one in way))
        assert run.device == "synthetic"
    assert known["more"].tokens == 30 * 128


def test_what_is_not_computed_has_no_seconds_and_its_children_know_their_own(tree):
    plan, store = tree
    trunk, early = plan.path(plan.results["clm"])[1], plan.results["clm-5"]
    store.discard(store.checkpoints / plan.results["more"])
    store.discard(store.checkpoints / trunk.key)
    note_failure(plan, store, trunk.key, RuntimeError("no luck"))
    every = by_key(plan, store)
    assert (every[trunk.key].standing, every[trunk.key].seconds) == ("failed", None)
    assert every[plan.results["more"]].standing == "ready"
    assert every[plan.results["more"]].flops
    assert every[early].seconds > 0
    children = [one for one in every.values() if plan.jobs[one.key].parent == trunk.key]
    assert len(children) == 2
    assert all(one.standing == "done" and one.seconds >= 0 for one in children)
    known = summaries(plan, store)
    assert known["more"].seconds is None
    assert known["both"].seconds > 0, "a state knows its whole way"


def test_a_parent_that_was_trained_again_elsewhere_is_not_charged_to_its_children(tree):
    """Its own lines say when a training job began; what its parent spent since, nobody can tell from it."""
    plan, store = tree
    way = [job.key for job in plan.path(plan.results["both"])]
    steps = [0, *(plan.jobs[key].span[1] for key in way)]
    clock = dict(zip(steps, (0.0, 10.0, 20.0, 50.0, 54.0), strict=True))
    lines = [line | {"seconds": clock[line["step"]]} for line in logged(20) if line["step"] in clock]

    def spent():
        every = by_key(plan, store)
        return [every[key].seconds for key in way], [every[key].joules for key in way]

    for key, step in zip(way, steps[1:], strict=True):
        relog(store, key, lines, seconds=clock[step], joules=100 * clock[step])
    assert spent() == ([10, 10, 30, 4], [1000, 1000, 3000, 400])
    relog(store, way[1], lines, seconds=12.0, joules=1200.0)  # on a faster machine
    assert spent() == ([10, 2, 30, 4], [1000, 200, None, 400])


def test_a_state_that_cannot_be_trusted_costs_nothing_that_is_told(tree):
    plan, store = tree
    key = plan.results["clm"]
    whole = by_key(plan, store)
    path = store.checkpoints / key / "checkpoint.json"
    path.write_bytes(b"[" * path.stat().st_size)
    assert "has changed" in survey_jobs(plan, store)[key].error
    every = by_key(plan, store)
    assert (every[key].standing, every[key].seconds, every[key].device) == ("failed", None, "")
    child = next(one for one in every.values() if plan.jobs[one.key].parent == key)
    assert (child.seconds, child.joules) == (pytest.approx(whole[child.key].seconds, abs=1e-3), None)
    others = [one for one in every if one not in (key, child.key)]
    assert all(every[one] == whole[one] for one in others)
    run = summaries(plan, store)["clm"]
    assert (run.seconds, run.device, "checkpoint.json" in run.wrong) == (None, "", True)
    assert run.flops == pytest.approx(sum(whole[job.key].flops for job in plan.path(key)))


def test_a_start_costs_nothing_and_flops_of_an_unknown_shape_are_not_known(planned, run, tmp_path):
    plan, store = planned(Pretrain("as-is", Hub("./model"))), Store(tmp_path)
    told, found = summaries(plan, store)["as-is"], curve(plan, store, "as-is")
    assert (told.tokens, told.flops, told.seconds, told.device) == (0, 0, None, "")
    assert (found.points, found.heldout, found.switches, found.complete) == ([], {}, [], False)
    corpus = Corpus("c", "./text", Pretrained("./tokens"))
    start = Hub("someone/model", revision="a" * 40)  # only a download would tell its shape
    plan = planned(run("x", Stage(MLM(0.4), 20), start=start, corpus=corpus))
    told = summaries(plan, store)["x"]
    assert [one.flops for one in told.way] == [None, None]
    assert (told.flops, told.tokens) == (None, 20 * 128)


def test_switches_are_told_where_they_are(planned, run):
    clm = run("clm", Stage(CLM(), 20))
    both = run("both", Stage(CLM(), 10), Stage(MLM(0.4), 10), keep=(5, 18))
    more = run("more", Stage(MLM(0.4), 10), start=clm)
    late = run("late", Stage(CLM(), 18), Stage(MLM(0.4), 2))
    plan = planned(clm, both, more, late)
    assert {name: switches(plan, name) for name in plan.results} == {
        "clm": [(16, "decay")],
        "both": [(10, "mlm 40%"), (16, "decay")],
        "both-5": [],
        "both-18": [(10, "mlm 40%"), (16, "decay")],
        "more": [(16, "decay"), (20, "mlm 40%"), (26, "decay")],
        "late": [(16, "decay"), (18, "mlm 40%")],
    }


# ---------------------------------------------------------------- curves


def test_a_short_curve_is_every_line_of_the_way(tree):
    plan, store = tree
    lines = lines_of(store, plan.results["more"])
    found = curve(plan, store, "more")
    trained = [(line["step"], line["loss"], line["objective"]) for line in lines if "loss" in line]
    assert found.points == trained
    assert [objective for *_, objective in trained] == ["clm"] * 20 + ["mlm 40%"] * 10
    measured = [line for line in lines if "heldout" in line]
    assert len(measured) > 4
    assert found.heldout == {
        name: [(line["step"], line["heldout"][name]) for line in measured] for name in ("clm", "mlm40")
    }
    assert found.complete
    assert found.switches == switches(plan, "more")


@pytest.mark.parametrize("steps", [1, POINTS, POINTS + 1, 42_000])
def test_a_long_curve_is_thinned_to_means(tree, steps):
    plan, store = tree
    relog(store, plan.results["clm"], logged(steps))
    found = curve(plan, store, "clm")
    width = -(-steps // POINTS)
    assert len(found.points) == -(-steps // width) <= POINTS
    ends = steps_of(found)
    assert ends[-1] == steps
    middles = [(first + 1 + last) / 2 for first, last in zip([0, *ends[:-1]], ends, strict=True)]
    near = 0 if width <= SAMPLE else 0.5  # of a wide group some lines are taken, and steps are whole
    assert [point.loss for point in found.points] == pytest.approx(middles, abs=near + 1e-9)


@pytest.mark.parametrize("length", [3, 700])
def test_no_point_mixes_two_objectives(tree, length):
    plan, store = tree
    losses = {"clm": 1.0, "mlm 40%": 2.0}
    lines = []
    for first in range(1, 3_000, length):
        word = [*losses][first // length % 2]
        lines += logged(length, word, lambda step, word=word: losses[word], first)
    relog(store, plan.results["both"], lines)
    found = curve(plan, store, "both")
    assert {(point.objective, point.loss) for point in found.points} == {*losses.items()}
    assert steps_of(found) == sorted({*steps_of(found)})
    assert steps_of(found)[-1] == lines[-1]["step"]


def test_skipped_steps_have_no_loss_and_the_curve_is_complete_without_them(tree):
    plan, store = tree
    lines = logged(20)
    lines[4]["loss"] = lines[19]["loss"] = None
    relog(store, plan.results["clm"], lines)
    found = curve(plan, store, "clm")
    assert steps_of(found) == [step for step in range(1, 20) if step != 5]
    assert found.complete
    relog(store, plan.results["clm"], [line | {"loss": None} for line in logged(20)])
    assert curve(plan, store, "clm").points == []


def test_half_a_way_and_a_damaged_one_are_told_up_to_the_last_whole_state(tree):
    plan, store = tree
    path = store.checkpoints / plan.results["both"] / "metrics.jsonl"
    for damage in (path.read_bytes().replace(b"2", b"3"), b"", b'{"step": 1'):
        path.write_bytes(damage)
        found = curve(plan, store, "both")
        assert (steps_of(found), found.complete) == (list(range(1, 17)), False)
    store.discard(store.checkpoints / plan.results["both"])
    assert curve(plan, store, "both") == found
    for job in plan.path(plan.results["both"]):
        store.discard(store.checkpoints / job.key)
    assert curve(plan, store, "both").points == []


def test_whoever_watches_sees_the_lines_of_now_unless_more_was_published_since(tree):
    """The last training job of `both` is being computed: its worker has told of two steps and a part of a third."""
    plan, store = tree
    save_plan(plan, store)
    store.discard(store.checkpoints / plan.results["both"])
    before = lines_of(store, plan.path(plan.results["both"])[-2].key)
    path = live_file(plan, store, plan.results["both"])
    path.parent.mkdir(parents=True)
    path.write_text(jsonl([*before, *logged(2, "mlm 40%", lambda step: 0.5, 17)]) + '{"step": 19, "lo')
    published = curve(plan, store, "both")
    assert steps_of(published) == list(range(1, 17))
    found = curve(plan, store, "both", live=True)
    assert found.points == [*published.points, (17, 0.5, "mlm 40%"), (18, 0.5, "mlm 40%")]
    assert not found.complete
    assert found.heldout == published.heldout
    path.write_text(jsonl(logged(1)))
    assert curve(plan, store, "both", live=True) == published
    path.unlink()
    assert curve(plan, store, "both", live=True) == published
    path.mkdir()
    assert curve(plan, store, "both", live=True) == published


# ---------------------------------------------------------------- epochs


ROWS = 16  # of the corpus; a step reads two


@pytest.fixture
def clm(run):
    return run("clm", Stage(CLM(), 20), keep=(4, 10))


def test_epochs_are_those_that_every_state_tells_of_itself(run, clm, invent, tmp_path):
    more = run("more", Stage(MLM(0.4), 10), start=clm)
    plan, store = invent(Study("s", (clm, more)), tmp_path / "store", rows=ROWS)
    epochs = Epochs(plan, store)
    told = {name: checkpoint_of(store, key)["epochs"] for name, key in plan.results.items()}
    assert told == {name: epochs.at(name) for name in plan.results}
    assert told == {"clm-4": 0.5, "clm-10": 1.25, "clm": 2.5, "more": 3.75}
    assert [epochs.at("more", step) for step in (2, 8, 20, 26, 30)] == [0.25, 1.0, 2.5, 3.25, 3.75]
    assert epochs.tokens("more") == ROWS * 64


def corpus(name):
    return Corpus(name, f"./{name}", Pretrained("./tokenizer"))


@pytest.mark.parametrize(
    ("first", "second", "expected"),  # fields of the runs; epochs of the second at steps 20, 24 and 30
    [
        ({}, {"data": "restart"}, (2.5, 3.0, 3.75)),  # data that begins anew was read before
        (
            {"corpus": corpus("first")},
            {"corpus": corpus("second"), "data": "restart"},
            (2.5, 0.5, 1.25),  # of the one being read
        ),
        ({}, {"batch_tokens": 256}, (2.5, 3.5, 5.0)),  # steps of several sizes are counted by their rows
    ],
)
def test_epochs_after_a_change_of_data(run, invent, tmp_path, first, second, expected):
    clm = run("clm", Stage(CLM(), 20), keep=(4, 10), **first)
    more = run("more", Stage(MLM(0.4), 10), start=clm, **second)
    plan, store = invent(Study("s", (clm, more)), tmp_path / "store", rows=ROWS)
    assert tuple(Epochs(plan, store).at("more", step) for step in (20, 24, 30)) == expected


def test_epochs_come_from_states_that_are_whole_and_are_else_not_known(clm, invent, planned, tmp_path):
    assert Epochs(planned(clm), Store(tmp_path / "nothing")).at("clm") is None
    plan, store = invent(Study("s", (clm,)), tmp_path / "unknown")  # nobody knows the rows
    assert (Epochs(plan, store).at("clm"), Epochs(plan, store).tokens("clm")) == (None, None)
    plan, store = invent(Study("s", (clm,)), tmp_path / "store", rows=ROWS)
    first = store.checkpoints / plan.results["clm-4"] / "checkpoint.json"
    first.write_text(first.read_text().replace('"epochs": 0.5', '"epochs": 0.1'))
    assert Epochs(plan, store).at("clm") == 2.5
    for job in plan.jobs.values():
        place = store.checkpoints / job.key / "checkpoint.json"
        place.write_text(place.read_text() + " ")
    assert Epochs(plan, store).at("clm") is None
