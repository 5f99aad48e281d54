"""Losses: from checkpoints on disk, whether or not anything was fine-tuned."""

import json

import pytest

from biphase import CLM, MLM, Stage, Study
from biphase.report.estimates import estimate
from biphase.report.evidence import gather
from biphase.report.figures import scores, training
from biphase.store import Store, publish, write_json


def compute(plan, store, *, only=None):
    """Leave the states of a plan as a worker would: loss = 10 − step / 10, held out every 5 steps."""
    for job in plan.jobs.values():
        if only is not None and job.key not in only:
            continue
        lines = []
        for cost in plan.path(job.key):
            for step in range(cost.span[0] + 1, cost.span[1] + 1):
                lines.append(
                    {
                        "step": step,
                        "loss": 10 - step / 10,
                        "objective": cost.objective.label,
                        "tokens": step * 128,
                    }
                )
                if step % 5 == 0:
                    lines.append({"step": step, "heldout": {"clm": 5 - step / 100, "mlm40": 6 - step / 100}})  # fmt: skip
        with store.attempt("state") as folder:
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            progress = {"step": job.step, "next_sample": 0, "seconds": 10.0 * job.span[1], "world": 1, "machine": {"device": "x86_64"}}  # fmt: skip
            about = {"run": {"kind": "Pretrain"}, "origin_step": 0, "epochs": 0.0, "progress": progress}
            write_json(folder / "checkpoint.json", {"key": job.key, **about})
            publish(folder, store.checkpoints / job.key)


@pytest.fixture
def three(run, planned, tmp_path):
    runs = [
        run("clm", Stage(CLM(), 20), keep=(10,)),
        run("both", Stage(CLM(), 10), Stage(MLM(0.4), 10)),
        run("mlm", Stage(MLM(0.4), 20)),
    ]
    plan, store = planned(*runs), Store(tmp_path)
    compute(plan, store)
    return gather(plan, store)


# ---------------------------------------------------------------- losses


def test_training_losses_are_drawn_once_and_never_joined_across_objectives(three):
    panel = training.losses_figure(three).panels[0]
    lines = {(one.name, one.x[0], one.x[-1]) for one in panel.series}
    # What `both` shares with `clm` is drawn with `clm`; its own part begins with MLM.
    assert lines == {("CLM", 1, 20), ("CLM → MLM 40%", 11, 20), ("MLM 40%", 1, 20)}
    clm = next(one for one in panel.series if one.name == "CLM")
    assert list(clm.y) == pytest.approx([10 - step / 10 for step in range(1, 21)])


def test_heldout_losses_begin_where_their_run_leaves_another(three):
    figure = training.losses_figure(three)
    assert [panel.title for panel in figure.panels] == ["Training", "Held out, CLM", "Held out, MLM 40%"]
    causal = {one.name: one for one in figure.panels[1].series}
    assert causal["CLM"].x == (5, 10, 15, 20)
    both = causal["CLM → MLM 40%"]
    assert both.x == (10, 15, 20)  # from the last point both have
    assert list(both.y) == pytest.approx([4.9, 4.85, 4.8])
    assert both.hover[1].startswith("both\nstep 15")
    assert [one.name for one in figure.entries] == ["CLM", "CLM → MLM 40%", "MLM 40%"]


def test_a_run_on_its_way_is_drawn_as_far_as_it_came_and_named(run, planned, tmp_path):
    store = Store(tmp_path)
    runs = [run("clm", Stage(CLM(), 20), keep=(10,)), run("mlm", Stage(MLM(0.4), 20))]
    plan = planned(*runs)
    compute(plan, store, only={plan.results["clm-10"]})
    figure = training.losses_figure(gather(plan, store))
    (line,) = figure.panels[0].series
    assert line.x[-1] == 10
    assert "Not complete: clm." in figure.caption
    assert not figure.panels[0].verticals  # the decay lies ahead


# ---------------------------------------------------------------- repetition


ROWS = 200  # of the corpus; a step reads two


@pytest.fixture
def several(run, grid, invent, tmp_path):
    """CLM, MLM, one after the other, and MLM on top of CLM: four epochs, and two more."""
    clm = run("clm", Stage(CLM(), 400), keep=(100, 300), heldout_every=20)
    made = Study(
        "s",
        (
            clm,
            run("mlm", Stage(MLM(0.4), 400), keep=(100, 300), heldout_every=20),
            run("both", Stage(CLM(), 200), Stage(MLM(0.4), 200), heldout_every=20),
            run("more", Stage(MLM(0.4), 200), start=clm, heldout_every=20),
        ),
        grid("sst2"),
    )
    return lambda rows: gather(*invent(made, tmp_path / f"store-{rows}", rows=rows))


def test_one_epoch_is_marked_among_losses_where_every_run_that_repeats_has_it_at_one_step(several):
    def marked(rows):
        return [
            one.x for one in training.losses_figure(several(rows)).panels[0].verticals if "epoch" in one.label
        ]

    assert marked(ROWS) == [100]
    # Not known; 0.92 epochs; 1.05, a few rows twice.
    assert [marked(rows) for rows in (0, 1_300, 1_145)] == [[], [], []]


def test_one_epoch_is_marked_among_checkpoints_over_tokens_alone(several):
    evidence = several(ROWS)
    figure = scores.efficiency_figure(evidence, estimate(evidence))
    assert [(one.x, one.label) for one in figure.panels[0].verticals] == [(ROWS * 64, "one epoch")]
    assert "one epoch" in figure.caption
