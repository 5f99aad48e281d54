"""Every study in studies/ and of the papers plans, comes back from its plan.json, and prints; the paper's is complete."""

import json
from pathlib import Path

import pytest

from biphase import Hub
from biphase.keys import Identities
from biphase.papers import papers_of
from biphase.presets import corpus_of
from biphase.report import verdicts
from biphase.specs.study import PAPERS
from biphase.store import Store
from biphase.study.describe import PAGE, Bill, plan_json, render
from biphase.study.ledger import Count
from biphase.study.load import load, studies_of
from biphase.study.plan import Plan, make_plan, save_plan

STUDIES = sorted(Path(__file__).parents[2].joinpath("studies").glob("*.py"))
STUDIES += [Path(study) for paper in PAPERS for study in studies_of(paper)]
DOCUMENT = Path(__file__).parents[2].joinpath("docs/paper-steps.md").read_text(encoding="utf-8")
OUTSIDE = Identities(data=lambda run: corpus_of(run).name, hub=lambda hub: f"{hub.source}@{hub.revision}")


def planned(name: str) -> Plan:
    loaded = load(next(path for path in STUDIES if name in (path.stem, str(path))))
    return make_plan(loaded.study, OUTSIDE, loaded.question)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_study_asks_a_question_plans_and_comes_back(path, tmp_path):
    loaded = load(path)
    assert loaded.question
    plan = make_plan(loaded.study, OUTSIDE, loaded.question)
    assert plan.results
    save_plan(plan, Store(tmp_path))
    back = load(tmp_path / "studies" / plan.study.name / "plan.json")
    assert back.study == plan.study
    assert make_plan(back.study, OUTSIDE, back.question).to_json() == plan.to_json()


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_study_is_printed_on_the_page(path):
    plan = planned(str(path))
    claims = verdicts.render(verdicts.prospects(plan, None, papers_of(plan.study)))
    bill = Bill("h200", 0.4)
    text = render(plan, done=(), tuned=Count(0, 1), bill=bill, command_path=str(path), claims=claims)
    assert "\n".join(claims) in text
    assert max(map(len, text.splitlines())) <= PAGE
    assert all(name in text for name in plan.results)
    json.dumps(plan_json(plan, done=(), tuned=Count(0, 1), bill=bill), allow_nan=False)


# ---------------------------------------------------------------- the paper


RATIOS = (20, 30, 40, 50)
BASE = {
    f"{size}-{word}-42k" for size in ("210m", "610m", "1b") for word in ("clm", *(f"mlm{r}" for r in RATIOS))
}
SCRATCH = {
    *(f"610m-{word}-{budget}k" for word in ("clm", "mlm40") for budget in (12, 22)),
    *(f"610m-clm-{first}k-mlm40-12k" for first in (3, 6, 9)),
    *(f"610m-clm-{first}k-mlm40-22k" for first in (5, 11, 17)),
    *(f"610m-clm-{first}k-mlm40-42k" for first in (10, 21, 32)),
    *(f"610m-clm-40k-mlm{r}-42k" for r in RATIOS),
}
CONTINUED = {f"610m-{word}-dec42k-mlm40-{n}k" for word in ("clm", "mlm40") for n in (44, 54, 64)}
ON_THE_WAY = {
    f"610m-{word}-42k-{step}" for word in ("clm", "mlm40") for step in (1000, 2000, 5000, 10000, 20000, 40000)
}


def test_the_paper_has_its_38_models_and_12_checkpoints_under_their_names():
    assert (len(BASE), len(SCRATCH), len(CONTINUED), len(ON_THE_WAY)) == (15, 17, 6, 12)
    plan = planned("paper")
    assert {run.name for run in plan.study.runs} == BASE | SCRATCH | CONTINUED
    assert len(plan.study.runs) == 38
    assert set(plan.results) == BASE | SCRATCH | CONTINUED | ON_THE_WAY
    assert len(set(plan.results.values())) == 50
    assert not any(plan.jobs[plan.results[name]].decaying for name in ON_THE_WAY)
    finetune = plan.study.finetune
    assert (finetune.protocol, 50 * finetune.scores, 50 * finetune.finetunings) == ("paper", 18_000, 15_000)


def own_steps(plan: Plan, names: set[str], beyond: set[str]) -> int:
    """Return the distinct steps of the training jobs of `names` that are not jobs of `beyond`."""

    def jobs(results: set[str]) -> set[str]:
        return {job.key for name in results for job in plan.path(plan.results[name])}

    return sum(plan.jobs[key].steps for key in jobs(names) - jobs(beyond))


def ending(names: set[str], *ends: str) -> set[str]:
    return {name for name in names if name.endswith(ends)}


AFTER_40K = {name for name in SCRATCH if "-40k-" in name}
ONE_OBJECTIVE = {f"610m-{word}-{budget}k" for word in ("clm", "mlm40") for budget in (12, 22)}
# Group, models, steps as written, steps beyond the base models': the table of docs/paper-steps.md.
GROUPS = [
    ("from scratch, budget 12k", ending(SCRATCH, "-12k"), 60_000, 22_000),
    ("from scratch, budget 22k", ending(SCRATCH, "-22k"), 110_000, 37_000),
    ("from scratch, budget 42k", ending(SCRATCH, "-42k") - AFTER_40K, 126_000, 63_000),
    ("ratio after 40k of clm", AFTER_40K, 168_000, 8_000),
    ("*from scratch, together*", SCRATCH, 464_000, 130_000),
    ("continued from the decayed clm", {name for name in CONTINUED if "610m-clm" in name}, 36_000, 26_000),
    ("continued from the decayed mlm 40", {name for name in CONTINUED if "610m-mlm" in name}, 36_000, 26_000),
    ("*continued, together*", CONTINUED, 72_000, 52_000),
]


@pytest.mark.parametrize(("group", "names", "written", "own"), GROUPS, ids=[group[0] for group in GROUPS])
def test_the_steps_of_each_group_of_the_paper_are_those_of_the_document(group, names, written, own):
    plan = planned("paper")
    assert sum(run.steps for run in plan.study.runs if run.name in names) == written
    assert own_steps(plan, names, BASE) == own
    row = next(line for line in DOCUMENT.splitlines() if line.startswith(f"| {group}"))
    cells = [cell.strip(" *") for cell in row.split("|")]
    assert cells[2:5] == [str(len(names)), f"{written:,}", f"{own:,}"]


def test_the_steps_of_the_whole_paper_are_those_of_the_document():
    plan = planned("paper")
    assert own_steps(plan, BASE, set()) == 15 * 42_000 == 630_000
    assert (
        own_steps(plan, SCRATCH - AFTER_40K, BASE)
        == own_steps(plan, SCRATCH - ONE_OBJECTIVE, BASE)
        == 122_000
    )
    assert own_steps(plan, ON_THE_WAY, BASE) == 0
    text = render(
        plan, done=(), tuned=Count(0, 1), bill=Bill("h200", 0.4), command_path="studies/paper.py", claims=[]
    )
    assert next(line for line in text.splitlines() if line.startswith("38 runs")) in DOCUMENT


def test_the_sample_of_two_stages_shares_73_000_steps():
    plan = planned("two_stage")
    assert (plan.job_count, plan.steps_written, plan.steps_to_compute) == (24, 372_000, 299_000)


def test_the_published_models_are_those_of_the_paper_and_nothing_is_trained():
    published, paper = planned("published"), planned("paper")
    assert set(published.results) == set(paper.results)
    assert len(set(published.results.values())) == 50
    assert not published.jobs
    assert published.study.finetune == paper.study.finetune
    assert all(run.start == Hub(f"MLMvsCLM/{run.name}") for run in published.study.runs)
