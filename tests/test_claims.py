"""Claims in study files: what they may say, and that a study without them is what it was."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Claim, Finetune, Pretrain, Stage, Study
from biphase.errors import SpecError
from biphase.keys import Identities
from biphase.papers import load, papers_of
from biphase.records import decode, encode
from biphase.specs.tasks import FAMILIES
from biphase.study.plan import make_plan

ROOT = Path(__file__).parents[1]
FIELDS = {"start": SIZES["610m"], "corpus": "fineweb-edu"}
RUNS = (
    Pretrain("clm", stages=Stage(CLM(), 12_000), keep=(5_000,), **FIELDS),
    Pretrain("mlm", stages=Stage(MLM(0.4), 12_000), **FIELDS),
)
TASKS = tuple(CATALOG[one] for one in ("sst2", "conll2003", "squad"))


def claim(name="ner", says="causal first helps to tag", more="clm", less="mlm", **fields):
    return Claim(name, says, more, less, **fields)


TUNED = Finetune(TASKS)


def study(*claims, finetune: Finetune | None = TUNED):
    return Study("s", RUNS, finetune, claims)


@pytest.mark.parametrize(
    "fields",
    [
        {"on": ("TC", "squad"), "says": "causal first\n helps"},
        {"on": "TC", "margin": -0.5},
        {"more": "clm-5000", "on": "QA", "metric": "exact_match"},
        {"name": "C1x", "on": ("conll2003",), "metric": "entity_f1"},
    ],
)
def test_a_claim_names_results_families_tasks_and_metrics(fields):
    made = Study("s", RUNS, TUNED, claim(**fields))
    assert decode(encode(made)) == made
    assert "\n" not in made.claims[0].says


REFUSED = {
    "name of a paper's claim": (lambda: claim("C13"), "Claim 'C13'"),
    "a name with a slash": (lambda: claim("a/b"), "without slashes"),
    "no words": (lambda: claim(says=" "), "says nothing"),
    "itself": (lambda: claim(less="clm"), "'clm' with itself"),
    "twice on one thing": (lambda: claim(on=("TC", "TC")), r"on=\('TC', 'TC'\)"),
    "a share as a margin": (lambda: claim(margin=100), "not 100"),
    "an unknown metric": (lambda: claim(metric="entity-f1"), "did you mean 'entity_f1'?"),
    "an unknown field": (lambda: Claim("x", "y", "clm", "mlm", tasks=()), "'tasks'; known: name, says, more"),
    "an unknown result": (lambda: study(claim(more="clm-500")), "'clm-500'; did you mean 'clm-5000'?"),
    "an unknown task": (lambda: study(claim(on=("conll",))), "'conll'; did you mean 'conll2003'?"),
    "a metric of another family": (lambda: study(claim(on=("TC",), metric="f1")), "entity_f1, sentence_f1"),
    "a metric of some families": (lambda: study(claim(metric="f1")), "SC is not .* accuracy"),
    "two of one name": (lambda: study(claim(), claim(more="clm-5000")), "called 'ner'"),
    "nothing to score": (lambda: study(claim(), finetune=None), "nothing is fine-tuned"),
    "an unknown paper": (lambda: Study("s", RUNS, papers="gisserot"), "'gisserot'.*gisserot2025"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    make, facts = REFUSED[case]
    with pytest.raises(SpecError, match=facts) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_papers_are_named_and_stand_in_no_key():
    one = Study("s", RUNS, papers="gisserot2025")
    assert one.papers == ("gisserot2025",)
    assert decode(encode(one)) == one
    assert "papers" not in encode(study()), "a study without papers is written as before there were any"
    written = encode(study())
    assert written.pop("claims") == []
    assert decode(written) == study(), "written before there were claims"
    assert [paper.claims for paper in papers_of(one)] == ["C1 to C21"]
    with pytest.raises(SpecError, match=r"known: .*gisserot2025"):
        load("no-such-paper-at-all")
    with pytest.raises(SpecError, match="called 'C1'"):
        papers_of(replace(one, papers=("gisserot2025", "gisserot2025")))


def test_claims_and_papers_are_in_no_key():
    ids = Identities(data=str, hub=lambda hub: hub.source)
    plain = make_plan(study(), ids)
    for other in (study(claim()), replace(study(), papers="gisserot2025")):
        plan = make_plan(other, ids)
        assert (plan.results, list(plan.jobs), plan.tasks) == (plain.results, list(plain.jobs), plain.tasks)


def test_the_metrics_that_may_be_named_are_those_of_trials():
    """Held against the guide's table of all metrics, and against the code that names them."""
    table = (
        (ROOT / "docs" / "evaluation.md").read_text().split("## What the metrics are")[1].split("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    known = [metric for family in FAMILIES.values() for metric in family.metrics]
    assert set(known) == set(named)
