"""What is learnt by heart, over epochs; and where one epoch lies among the checkpoints of a run."""

import pytest

from biphase import CLM, MLM, Stage, Study
from biphase.report.estimates import estimate
from biphase.report.evidence import gather
from biphase.report.figures import scores
from biphase.report.figures import training as losses
from biphase.report.pretraining import gaps

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


def test_each_objective_has_a_panel_and_what_is_shared_is_drawn_once(several):
    figure = losses.repetition_figure(several(ROWS))
    causal, masked = figure.panels
    assert (causal.title, masked.title) == ("CLM", "MLM 40%")
    ends = [[(one.name, one.x[0], one.x[-1]) for one in panel.series] for panel in figure.panels]
    assert ends == [
        [("CLM", 0.2, 4.0)],
        [
            ("MLM 40%", 0.2, 4.0),
            ("CLM → MLM 40%", pytest.approx(2.2), 4.0),
            ("CLM → MLM 40%, continued", pytest.approx(4.2), 6.0),
        ],
    ]
    assert [one.x for panel in figure.panels for one in panel.verticals] == [1, 1]
    assert causal.y.range == masked.y.range  # so that they compare
    assert causal.y.range[0] < 0 < causal.y.range[1]


def test_a_point_is_training_minus_heldout_loss(several):
    evidence = several(ROWS)
    (line,) = losses.repetition_figure(evidence).panels[0].series
    known = gaps(evidence.plan, evidence.store, "clm")
    assert list(line.y) == [one.training - one.heldout for one in known]
    assert line.hover[0].startswith("clm\nepoch 0.20, step 20\ntraining ")
    # The synthetic ledger learns by heart: causal text four times as fast as masked text.
    causal, masked = (panel.series[0].y for panel in losses.repetition_figure(evidence).panels)
    assert causal[-2] < -0.18 < masked[-2] < -0.02


def test_it_is_drawn_only_where_a_corpus_was_read_again(several):
    assert losses.repetition_figure(several(0)) is None  # not known
    assert losses.repetition_figure(several(1_300)) is None  # 0.92 epochs
    assert losses.repetition_figure(several(1_145)) is None  # 1.05: a few rows twice
    assert losses.repetition_figure(several(1_000)) is not None


def test_a_study_that_has_not_come_so_far_is_not_drawn(run, invent, tmp_path):
    import shutil

    one = run("clm", Stage(CLM(), 400), keep=(80,), heldout_every=20)
    plan, store = invent(Study("s", (one,)), tmp_path / "store", rows=ROWS)
    for key in plan.jobs:
        if key != plan.results["clm-80"]:
            shutil.rmtree(store.checkpoints / key)
    assert losses.repetition_figure(gather(plan, store)) is None


def test_one_epoch_is_marked_among_checkpoints_over_tokens_alone(several):
    evidence = several(ROWS)
    figure = scores.efficiency_figure(evidence, estimate(evidence))
    assert [(one.x, one.label) for one in figure.panels[0].verticals] == [(ROWS * 64, "one epoch")]
    assert "read once" in figure.caption


def test_one_epoch_is_not_marked_where_none_is_complete(several):
    evidence = several(1_300)
    figure = scores.efficiency_figure(evidence, estimate(evidence))
    assert figure.panels[0].verticals == ()
    assert "read once" not in figure.caption
