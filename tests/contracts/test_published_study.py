"""studies/published.py evaluates what studies/paper.py computes: the same 50 names, the same fine-tuning."""

from pathlib import Path

from biphase import Hub
from biphase.keys import Identities
from biphase.presets import corpus_of
from biphase.study.load import load
from biphase.study.plan import Plan, make_plan

STUDIES = Path(__file__).parents[2] / "studies"
OUTSIDE = Identities(data=lambda run: corpus_of(run).name, hub=lambda hub: f"{hub.source}@{hub.revision}")


def planned(name: str) -> Plan:
    loaded = load(STUDIES / f"{name}.py")
    return make_plan(loaded.study, OUTSIDE, loaded.question)


def test_the_published_models_are_those_of_the_paper_and_nothing_is_trained():
    published, paper = planned("published"), planned("paper")
    assert set(published.results) == set(paper.results)
    assert len(set(published.results.values())) == 50
    assert not published.jobs
    assert published.study.finetune == paper.study.finetune
    assert all(run.start == Hub(f"MLMvsCLM/{run.name}") for run in published.study.runs)
