"""Figures of scores: the points are the numbers that were put in, the marks those of the paper, gaps are gaps."""

from dataclasses import replace

import numpy as np
import pytest

from biphase import CATALOG, CLM, MLM, SIZES, WSD, Finetune, Hub, Pretrain, Stage, Study
from biphase.papers.gisserot2025 import PAPER as REFERENCE
from biphase.report.figures.description import PAPER, role_of
from biphase.specs.tasks import FAMILIES
from biphase.store import Store

SCORED = ["objectives", "ratio", "efficiency", "rates", "splits", "robustness", "continued", "crossings"]
PANELS = [FAMILIES[family].name.capitalize() for family in REFERENCE.tasks]
T4 = 2.7764451051977987  # Student's t for five seeds


def points(series):
    return dict(zip(series.x, [round(y, 9) for y in series.y], strict=True))


def test_a_whole_study_has_every_figure_in_the_order_of_the_paper(by_id):
    assert [*by_id] == SCORED
    for figure in (by_id[one] for one in SCORED):
        assert [panel.title for panel in figure.panels] == PANELS
        measured = "MLM − CLM, points" if figure.id == "crossings" else "test score, %"
        assert [panel.y.title for panel in figure.panels] == [measured, "", "", ""]


def of_budget(steps, *causal):
    return [f"610m-mlm40-{steps}k", *(f"610m-clm-{n}k-mlm40-{steps}k" for n in causal), f"610m-clm-{steps}k"]


CURVES = {  # figure, series → models
    **{("objectives", name): [f"{size}-{word}-42k" for size in ("210m", "610m", "1b")]
       for name, word in (("CLM", "clm"), ("MLM 40%", "mlm40"))},
    ("objectives", "CLM → MLM 40%"): ["610m-clm-10k-mlm40-42k"],  # the split nearest to a quarter
    **{("ratio", size): [f"{size}-mlm{ratio}-42k" for ratio in (20, 30, 40, 50)] for size in ("210m", "610m", "1b")},
    **{("splits", f"{steps}k steps"): of_budget(steps, *causal)
       for steps, *causal in ((12, 3, 6, 9), (22, 5, 11, 17), (42, 10, 21, 32, 40))},
    **{("continued", name): [f"610m-{word}-42k", *(f"610m-{word}-dec42k-mlm40-{n}k" for n in (44, 54, 64))]
       for name, word in (("CLM base", "clm"), ("MLM 40% base", "mlm40"))},
    ("efficiency", "CLM"): [f"610m-clm-42k-{step}" for step in (1000, 2000, 5000, 10000, 20000, 40000)],
}  # fmt: skip
PLACES = {  # figure → where a model stands
    "objectives": lambda recipe: recipe.parameters,
    **dict.fromkeys(("ratio", "robustness"), lambda recipe: 100 * recipe.ratio),
    "splits": lambda recipe: 100 * recipe.causal_share,
    "continued": lambda recipe: recipe.continued,
    "efficiency": lambda recipe: recipe.tokens,
}


def named_in(series):
    """The models that the hover texts of a series name."""
    return [text.split("\n")[0] for text in series.hover]


@pytest.mark.parametrize("id", PLACES)
def test_points_are_the_means_of_the_models_they_name_and_marks_the_papers(by_id, mean_of, paper, id):
    models, figure = paper[0].models, by_id[id]
    for (family, tasks), panel in zip(paper[0].families.items(), figure.panels, strict=True):
        ours = [series for series in panel.series if series.name != PAPER]
        for series in ours:
            of = [models[name] for name in named_in(series)]
            assert list(series.x) == pytest.approx([PLACES[id](model.recipe) for model in of])
            assert list(series.y) == pytest.approx([mean_of(model, paper[0].tasks[tasks[0]]) for model in of])
        drawn = {name for series in ours for name in named_in(series)}
        known = {REFERENCE.published.family_mean(models[name].recipe, family) for name in drawn} - {None}
        marks = [series for series in panel.series if series.name == PAPER]
        assert {y for series in marks for y in series.y} == known
        looks = {(one.look.role, one.look.marker, one.look.hollow, one.low) for one in marks}
        assert looks <= {(PAPER, "diamond", True, ())}


@pytest.mark.parametrize(("id", "name"), CURVES)
def test_curves_join_their_models(by_id, drawn, id, name):
    assert named_in(drawn(by_id[id], "Sequence classification", name)) == CURVES[id, name]


def test_efficiency_over_tokens_flops_and_nothing_that_is_not_known(by_id, drawn, paper):
    evidence = paper[0]
    figure = by_id["efficiency"]
    assert [view.name for view in figure.views] == ["tokens", "FLOPs"]  # nothing was computed, so no seconds
    names = [f"610m-clm-42k-{step}" for step in (1000, 2000, 5000, 10000, 20000, 40000)]
    costs = [run for run in evidence.runs if run.name in names]
    series = drawn(figure, "Retrieval", "CLM")
    assert series.views == (tuple(float(one.tokens) for one in costs), tuple(one.flops for one in costs))
    hollow = [one for one in figure.panels[0].series if one.look.hollow and one.name != PAPER]
    ends = [one for one in hollow if one.draws == "points"]
    assert [one.x for one in ends] == [(42_000 * 2_359_296.0,)] * 2


def test_rates_show_every_rate_of_the_middle_size(by_id, drawn, paper):
    figure = by_id["rates"]
    assert "610m" in figure.caption
    series = drawn(figure, "Sequence classification", "MLM 40%")
    assert series.x == (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
    assert list(series.y) == pytest.approx([85.0, 88.0, 85.0, 82.0, 79.0, 76.0])  # three less for each place
    assert series.band
    assert series.low[1] == pytest.approx(88 - 0.9816, abs=1e-3)
    assert [one.name for one in figure.entries] == ["CLM", "MLM 40%", "CLM → MLM 40%"]


# ---------------------------------------------------------------- studies of other shapes


GRID = Finetune((CATALOG["sst2"],), lrs=(1e-5, 5e-5), seeds=(0, 1, 2))


@pytest.fixture
def figures_of(evidence_of, planned, figures_by_id, tmp_path):
    def of(runs, mean=lambda *_: 60.0, grid=GRID):
        return figures_by_id(evidence_of(planned(Study("s", tuple(runs), grid)), Store(tmp_path), mean))

    return of


def test_one_size_is_shown_side_by_side_with_its_seeds(run, figures_of):
    runs = [run("a", Stage(CLM(), 20)), run("b", Stage(MLM(0.3), 20)), run("c", Stage(CLM(), 8), Stage(MLM(0.3), 12))]  # fmt: skip
    means = {"a": 70.0, "b": 71.0, "c": 72.0}
    found = figures_of(runs, lambda model, task: means[model.name])
    (panel,) = found["objectives"].panels
    assert panel.x.labels == ("CLM", "MLM\n30%", "CLM →\nMLM 30%")
    shown = [one for one in panel.series if one.low]
    assert [(one.x, round(one.y[0], 9)) for one in shown] == [((0.0,), 70.0), ((1.0,), 71.0), ((2.0,), 72.0)]
    seeds = [one for one in panel.series if not one.low]
    assert [[round(y, 9) for y in one.y] for one in seeds] == [[m - 0.5, m, m + 0.5] for m in means.values()]
    assert not any(one.name == PAPER for one in panel.series)  # the paper has no such size
    assert not found["objectives"].entries
    assert [*found] == ["objectives", "rates", "splits"]


def test_no_score_decides_which_model_is_shown(run, figures_of):
    runs = [run("clm", Stage(CLM(), 20)), *(run(f"m{r}", Stage(MLM(r / 100), 20)) for r in (20, 50, 60))]
    found = figures_of(runs, lambda model, task: 90.0 if model.name == "m20" else 50.0)
    assert found["objectives"].panels[0].x.labels == ("CLM", "MLM\n50%")  # nearest to 40%, not best


def test_missing_points_are_counted_and_not_drawn(run, figures_of):
    runs = [run(f"m{r}", Stage(MLM(r / 100), 20)) for r in (20, 40, 60)]
    found = figures_of(runs, lambda model, task: None if model.name == "m40" else 60.0)
    figure = found["ratio"]
    assert figure.panels[0].series[0].x == (20.0, 60.0)
    assert "1 of 3 points is missing" in figure.caption
    assert "missing" not in figures_of(runs)["ratio"].caption


def test_a_seed_with_a_hole_is_left_out_and_its_point_says_so(
    run, planned, evidence_of, figures_by_id, tmp_path
):
    runs = [run("m20", Stage(MLM(0.2), 20)), run("m40", Stage(MLM(0.4), 20))]
    evidence = evidence_of(planned(Study("s", tuple(runs), GRID)), Store(tmp_path), lambda *_: 60.0)
    grid = evidence.grids["m20", "sst2"]
    for part in (grid.validation["accuracy"], grid.test["accuracy"], grid.seconds):
        part[0, 2] = np.nan  # one rate of the third seed
    found = figures_by_id(evidence)
    series = found["ratio"].panels[0].series[0]
    assert series.y == pytest.approx((59.75, 60.0))  # the two seeds that are whole
    assert "2 seeds" in series.hover[0]
    assert "1 of 6 fine-tunings missing" in series.hover[0]
    assert "missing" not in series.hover[1]


def test_settings_are_never_joined(run, figures_of):
    runs = [
        *(run(f"m{r}", Stage(MLM(r / 100), 20)) for r in (20, 40)),
        *(run(f"n{r}", Stage(MLM(r / 100), 20), schedule=WSD(2e-3, 2, 4)) for r in (20, 40)),
    ]
    found = figures_of(runs)
    assert [one.name for one in found["ratio"].entries] == ["1m (as m20)", "1m (as n20)"]
    assert [len(one.x) for one in found["ratio"].panels[0].series] == [2, 2]


def test_an_interval_ends_where_scores_do(run, figures_of):
    runs = [run("m20", Stage(MLM(0.2), 20)), run("m40", Stage(MLM(0.4), 20))]
    grid = replace(GRID, seeds=(0, 1))  # two seeds half a point apart: ± 3.18
    found = figures_of(runs, lambda *_: 99.0, grid)
    panel = found["ratio"].panels[0]
    assert panel.series[0].high == (100, 100)
    assert panel.series[0].low[0] == pytest.approx(99 - 3.1765, abs=1e-3)
    assert "99.00 [95.82, 100.00]%" in panel.series[0].hover[0]
    assert all(max(one.high) <= 100 for one in found["rates"].panels[0].series if one.high)


def test_models_as_they_are_have_their_rates(figures_of):
    runs = [Pretrain(name, start=Hub(f"owner/{name}", revision="a" * 40)) for name in ("one", "two")]
    found = figures_of(runs)
    assert [*found] == ["objectives", "rates"]
    assert found["objectives"].title == "Models side by side"
    assert found["objectives"].panels[0].x.labels == ("one", "two")
    assert [one.name for one in found["rates"].entries] == ["one", "two"]
    alone = figures_of(runs[:1])
    assert [*alone] == ["rates"]


def test_the_papers_single_runs_stand_beside_sst2_alone(figures_of):
    runs = [Pretrain("big", start=SIZES["610m"], corpus="fineweb-edu", stages=(Stage(MLM(0.4), 42_000),))]
    found = figures_of(runs)
    marks = next(one for one in found["rates"].panels[0].series if one.name == PAPER)
    assert points(marks) == {1e-5: 76.15, 5e-5: 90.25, 2e-4: 82.34, 5e-4: 81.77}
    assert "single runs" in found["rates"].caption
    two = replace(GRID, tasks=(CATALOG["sst2"], CATALOG["mnli"]))
    assert not figures_of(runs, grid=two)["rates"].entries


def test_nothing_computed_is_no_crash(run, figures_of):
    runs = [run("clm", Stage(CLM(), 20), keep=(10,)), run("mlm", Stage(MLM(0.4), 20))]
    assert not figures_of(runs, lambda *_: None)


def test_one_name_has_one_colour_and_one_hue_one_order_of_objectives(by_id, paper):
    """In every figure: a legend shows what its curves look like."""
    evidence = paper[0]
    roles = {name: role_of(one.recipe) for name, one in evidence.models.items()}
    for figure in by_id.values():
        legend = {one.name: one.look for one in figure.entries}
        for panel in figure.panels:
            for one in panel.series:
                if one.name in legend:
                    assert one.look.colour == legend[one.name].colour, (figure.id, one.name)
                models = {text.split("\n")[0].split(",")[0] for text in one.hover} & roles.keys()
                if one.draws == "points" and models and not one.look.hollow:
                    assert {roles[name] for name in models} == {one.look.role}, (figure.id, one.name)


def test_a_family_without_two_points_to_join_has_no_panel_and_is_named(
    evidence_of, plan_of, figures_by_id, tmp_path
):
    plan = plan_of("paper")

    def mean(model, task):
        return 60.0 if task.family == "SC" or model.recipe.final else None

    evidence = evidence_of(plan, Store(tmp_path), mean)
    made = figures_by_id(evidence)["efficiency"]
    assert [panel.title for panel in made.panels] == ["Sequence classification"]
    assert "retrieval" in made.caption
