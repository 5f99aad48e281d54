"""Every study in studies/ and of the papers plans, comes back from its plan.json, and prints; the paper's is complete."""

import json
from pathlib import Path

import pytest

from biphase import Hub
from biphase.keys import Identities
from biphase.papers import papers_of
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
OUTSIDE = Identities(data=lambda corpus: corpus.name, hub=lambda hub: f"{hub.source}@{hub.revision}")


def planned(name: str) -> Plan:
    loaded = load(next(path for path in STUDIES if name in (path.stem, str(path))))
    return make_plan(loaded.study, OUTSIDE, loaded.question)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: "-".join(path.parts[-2:]))
def test_every_study_asks_a_question_plans_comes_back_and_is_printed_on_the_page(path, tmp_path):
    loaded = load(path)
    assert loaded.question
    plan = make_plan(loaded.study, OUTSIDE, loaded.question)
    assert plan.results
    save_plan(plan, Store(tmp_path))
    back = load(tmp_path / "studies" / plan.study.name / "plan.json")
    assert back.study == plan.study
    assert make_plan(back.study, OUTSIDE, back.question).to_json() == plan.to_json()
    claims = verdicts.render(verdicts.prospects(plan, None, papers_of(plan.study)))
    text = printed(plan, claims)
    assert "\n".join(claims) in text
    assert max(map(len, text.splitlines())) <= PAGE
    assert all(name in text for name in plan.results)
    json.dumps(plan_json(plan, done=(), tuned=Count(0, 1), bill=Bill("h200", 0.4)), allow_nan=False)


def printed(plan: Plan, claims: list[str]) -> str:
    return render(
        plan, done=(), tuned=Count(0, 1), bill=Bill("h200", 0.4), command_path="s.py", claims=claims
    )


def test_the_paper_has_its_38_models_12_checkpoints_and_the_steps_of_the_document():
    plan = planned("paper")
    runs = {run.name for run in plan.study.runs}
    on_the_way = plan.results.keys() - runs
    assert (len(runs), len(on_the_way), len(set(plan.results.values()))) == (38, 12, 50)
    assert not any(plan.jobs[plan.results[name]].decaying for name in on_the_way)
    assert (plan.steps_to_compute, plan.steps_written) == (812_000, 1_166_000)
    (line,) = (line for line in printed(plan, []).splitlines() if line.startswith("38 runs"))
    assert line in DOCUMENT
    finetune = plan.study.finetune
    assert (finetune.protocol, 50 * finetune.scores, 50 * finetune.finetunings) == ("paper", 18_000, 15_000)


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
