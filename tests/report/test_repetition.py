"""How often a corpus was read, from what states tell; and training losses beside the held-out losses of their steps."""

import json
import shutil

import pytest

from biphase import CLM, MLM, WSD, Corpus, Linear, Pretrained, Rows, Stage, Study
from biphase.report.evidence import gather
from biphase.report.pretraining import LATELY, Epochs, LossGap, about_state, gaps
from biphase.report.provenance import runs

ROWS = 16  # of the corpus; a step reads two


@pytest.fixture
def clm(run):
    return run("clm", Stage(CLM(), 20), keep=(4, 10))


def test_epochs_are_those_that_every_state_tells_of_itself(run, clm, invent, tmp_path):
    more = run("more", Stage(MLM(0.4), 10), start=clm)
    plan, store = invent(Study("s", (clm, more)), tmp_path / "store", rows=ROWS)
    epochs = Epochs(plan, store)
    assert {name: epochs.at(name) for name in plan.results} == {
        "clm-4": 0.5, "clm-10": 1.25, "clm": 2.5, "more": 3.75,
    }  # fmt: skip
    assert all(about_state(plan, store, name)["epochs"] == epochs.at(name) for name in plan.results)
    assert [epochs.at("more", step) for step in (2, 8, 20, 26, 30)] == [0.25, 1.0, 2.5, 3.25, 3.75]
    assert epochs.tokens("more") == ROWS * 64


def test_the_table_of_runs_has_the_epochs_of_kept_steps(clm, invent, tmp_path):
    plan, store = invent(Study("s", (clm,)), tmp_path / "store", rows=ROWS)
    found = {one.name: one.epochs for one in runs(gather(plan, store))}
    assert found == {"clm-4": 0.5, "clm-10": 1.25, "clm": 2.5}


def test_data_that_begins_anew_was_read_before(run, clm, invent, tmp_path):
    again = run("again", Stage(MLM(0.4), 10), start=clm, data="restart")
    plan, store = invent(Study("s", (clm, again)), tmp_path / "store", rows=ROWS)
    epochs = Epochs(plan, store)
    assert about_state(plan, store, "again")["epochs"] == 1.25  # of its own
    assert (epochs.at("again"), epochs.at("again", 20), epochs.at("again", 24)) == (3.75, 2.5, 3.0)


def test_of_two_corpora_the_one_being_read_counts(run, invent, tmp_path):
    first, second = (Corpus(name, f"./{name}", Pretrained("./tokenizer")) for name in ("first", "second"))
    clm = run("clm", Stage(CLM(), 20), corpus=first)
    other = run("other", Stage(MLM(0.4), 10), start=clm, corpus=second, data="restart")
    plan, store = invent(Study("s", (clm, other)), tmp_path / "store", rows=ROWS)
    epochs = Epochs(plan, store)
    assert (epochs.at("other", 20), epochs.at("other", 24), epochs.at("other")) == (2.5, 0.5, 1.25)


def test_steps_of_several_sizes_are_counted_by_their_rows(run, clm, invent, tmp_path):
    wide = run("wide", Stage(CLM(), 10), start=clm, batch_tokens=256)
    plan, store = invent(Study("s", (clm, wide)), tmp_path / "store", rows=ROWS)
    assert Epochs(plan, store).at("wide") == 2.5 + 10 * 4 / ROWS


def test_rows_of_another_length_are_other_rows(run, clm, invent, tmp_path, rewrite):
    longer = run("longer", Stage(CLM(), 10), start=clm, packing=Rows(128), data="restart")
    plan, store = invent(Study("s", (clm, longer)), tmp_path / "store", rows=ROWS)
    for job in plan.path(plan.results["longer"]):
        if job.run.packing.length == 128:  # half as many as of 64 tokens
            rewrite(
                store.checkpoints / job.key,
                "checkpoint.json",
                lambda about: about.update(epochs=2 * about["epochs"]),
            )
    assert Epochs(plan, store).at("longer") == 2.5 + 10 / (ROWS / 2)


def test_what_no_state_tells_is_not_known(clm, invent, planned, tmp_path):
    from biphase.store import Store

    plan, store = invent(Study("s", (clm,)), tmp_path / "store")  # nobody knows the rows
    assert Epochs(plan, store).at("clm") is None
    assert Epochs(plan, store).tokens("clm") is None
    assert Epochs(planned(clm), Store(tmp_path / "nothing")).at("clm") is None


def test_a_state_that_was_changed_is_not_believed_and_another_is(clm, invent, tmp_path):
    plan, store = invent(Study("s", (clm,)), tmp_path / "store", rows=ROWS)
    first = store.checkpoints / plan.results["clm-4"] / "checkpoint.json"
    first.write_text(first.read_text().replace('"epochs": 0.5', '"epochs": 0.1'))
    assert Epochs(plan, store).at("clm") == 2.5
    for job in plan.jobs.values():
        place = store.checkpoints / job.key / "checkpoint.json"
        place.write_text(place.read_text() + " ")
    assert Epochs(plan, store).at("clm") is None


# ---------------------------------------------------------------- gaps


def relog(plan, store, result, lines):
    from synthetic_states import put

    place = store.checkpoints / plan.results[result]
    about = (place / "checkpoint.json").read_bytes()
    shutil.rmtree(place)
    put(
        place,
        {
            "checkpoint.json": about,
            "metrics.jsonl": "".join(json.dumps(one) + "\n" for one in lines).encode(),
        },
    )


def logged(steps, at, objective="clm", **heldout):
    """A loss that is its step, at every step; held-out losses after those of `at`."""
    lines = []
    for step in steps:
        lines.append({"step": step, "loss": float(step), "objective": objective})
        lines += [{"step": step, "heldout": heldout}] if step in at else []
    return lines


def test_the_training_loss_is_the_mean_of_the_last_steps(run, invent, tmp_path):
    one = run("clm", Stage(CLM(), 2_000), schedule=WSD(1e-3, warmup=2, decay=100))
    plan, store = invent(Study("s", (one,)), tmp_path / "store", lines=10)
    measured = (5, 100, 1_000, 1_900, 2_000)
    begin = [{"step": 0, "heldout": {"clm": 9.0}}]  # before any step there is nothing to compare
    relog(plan, store, "clm", [*begin, *logged(range(1, 2_001), measured, clm=3.0, mlm40=4.0)])
    found = gaps(plan, store, "clm")
    assert [one.step for one in found] == list(measured)
    # The last step; a tenth of 100 steps; 50 at most; and of the decay a tenth again.
    means = [5.0, 95.5, 1_000 - (LATELY - 1) / 2, 1_900 - (LATELY - 1) / 2, 1_995.5]
    assert [one.training for one in found] == means
    assert found[0] == LossGap(5, "clm", 0, 5.0, 3.0)
    assert found[0].nats == 2.0


def test_each_stage_is_held_against_its_own_objective(run, invent, tmp_path):
    one = run("both", Stage(CLM(), 20), Stage(MLM(0.3), 20))
    plan, store = invent(Study("s", (one,)), tmp_path / "store")
    first = logged(range(1, 21), (20,), clm=1.0, mlm40=2.0)
    second = logged(range(21, 41), (21, 40), objective="mlm 30%", clm=1.0, mlm40=2.0, mlm30=3.0)
    relog(plan, store, "both", first + second)
    found = gaps(plan, store, "both")
    assert [(one.step, one.objective, one.begins, one.heldout) for one in found] == [
        (20, "clm", 0, 1.0), (21, "mlm 30%", 20, 3.0), (40, "mlm 30%", 20, 3.0),
    ]  # fmt: skip
    assert found[1].training == 21.0  # none of the other stage


def test_another_rule_of_masking_is_found_by_its_label_and_a_moving_ratio_is_not(run, invent, tmp_path):
    rule = run("rule", Stage(MLM(0.4, (0.8, 0.1, 0.1)), 20))
    moves = run("moves", Stage(MLM(Linear(0.4, 0.2, steps=20)), 20))
    plan, store = invent(Study("s", (rule, moves)), tmp_path / "store")
    relog(plan, store, "rule", logged(range(1, 21), (20,), **{"mlm40": 1.0, "mlm 40% 80/10/10": 2.0}))
    relog(plan, store, "moves", logged(range(1, 21), (20,), mlm40=1.0, mlm20=2.0))
    assert [one.heldout for one in gaps(plan, store, "rule")] == [2.0]
    assert gaps(plan, store, "moves") == []


def test_losses_that_were_not_finite_or_not_logged_are_passed_over(run, invent, tmp_path):
    plan, store = invent(Study("s", (run("clm", Stage(CLM(), 20)),)), tmp_path / "store")
    late = [{"step": 10, "loss": None, "objective": "clm"}, {"step": 10, "heldout": {"clm": 1.0}}]
    relog(plan, store, "clm", [*logged([4], (), clm=1.0), *late])
    assert [one.training for one in gaps(plan, store, "clm")] == [4.0]  # the nearest that is known
