"""Claims in study files: what they may say, and that a study without them is what it was."""

import re
from pathlib import Path

import pytest

from biphase import CATALOG, CLM, MLM, SIZES, Claim, Finetune, Pretrain, Stage, Study
from biphase.errors import SpecError
from biphase.records import decode, encode
from biphase.specs.claims import METRICS

ROOT = Path(__file__).parents[3]
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


ALLOWED = {
    "a family": {"on": ("TC",)},
    "a task": {"on": ("squad",)},
    "both": {"on": ("TC", "squad")},
    "one word": {"on": "TC"},
    "everything": {},
    "a checkpoint": {"more": "clm-5000"},
    "no worse": {"margin": -0.5},
    "a metric": {"on": "QA", "metric": "exact_match"},
    "a metric of one task": {"on": ("conll2003",), "metric": "entity_f1"},
    "a name that only looks like ours": {"name": "C1x"},
}


@pytest.mark.parametrize("case", ALLOWED)
def test_allowed(case):
    made = study(claim(**ALLOWED[case]))
    assert decode(encode(made)) == made


REFUSED = {
    "our names": (lambda: claim("C13"), "Claim 'C13': C and B with a number are the names of the claims"),
    "our other names": (lambda: claim("B1"), "take a word"),
    "a name with a slash": (lambda: claim("a/b"), "a name is one word without slashes"),
    "no words": (lambda: claim(says=" "), "Claim 'ner' says nothing; put it in words"),
    "itself": (lambda: claim(less="clm"), "Claim 'ner' compares 'clm' with itself; name two results"),
    "twice on one thing": (lambda: claim(on=("TC", "TC")), r"on=\('TC', 'TC'\) names one thing twice"),
    "a share as a margin": (lambda: claim(margin=100), "in percent points of a score, not 100"),
    "an unknown metric": (
        lambda: claim(metric="entity-f1"),
        "there is no metric 'entity-f1'; did you mean 'entity_f1'?",
    ),
    "a field that is not there": (
        lambda: Claim("x", "y", "clm", "mlm", tasks=()),
        "Claim has no field 'tasks'; known: name, says, more",
    ),
    "an unknown result": (
        lambda: study(claim(more="clm-500")),
        "Claim 'ner': the study has no result 'clm-500'; did you mean 'clm-5000'?",
    ),
    "an unknown other result": (lambda: study(claim(less="nothing-like-it")), "known: clm-5000, clm, mlm"),
    "an unknown task": (
        lambda: study(claim(on=("conll",))),
        "Claim 'ner': the study has no task or family 'conll'; did you mean 'conll2003'?",
    ),
    "a family that is not there": (lambda: study(claim(on="IR")), "no task or family 'IR'"),
    "a metric of another family": (
        lambda: study(claim(on=("TC",), metric="f1")),
        "TC is not scored with 'f1' but with entity_f1, sentence_f1; make one claim for each metric",
    ),
    "a metric of some families": (
        lambda: study(claim(metric="f1")),
        "SC is not scored with 'f1' but with accuracy",
    ),
    "two of one name": (
        lambda: study(claim(), claim(more="clm-5000")),
        "has two claims called 'ner'; rename one",
    ),
    "nothing to score": (
        lambda: study(claim(), finetune=None),
        "nothing is fine-tuned, so nothing is scored",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_line(case):
    make, words = REFUSED[case]
    with pytest.raises(SpecError, match=words) as refusal:
        make()
    assert "\n" not in str(refusal.value)


def test_one_claim_need_not_be_a_tuple():
    assert Study("s", RUNS, Finetune(TASKS), claim()).claims == (claim(),)


def test_a_study_written_before_there_were_claims_is_read_as_one_without():
    written = encode(study())
    assert written.pop("claims") == []
    assert decode(written) == study()


def test_claims_are_in_no_key(plan_of):
    plain, with_claims = plan_of(study()), plan_of(study(claim()))
    assert with_claims.results == plain.results
    assert list(with_claims.jobs) == list(plain.jobs)
    assert with_claims.tasks == plain.tasks


def test_the_metrics_that_may_be_named_are_those_that_leaves_are_scored_with():
    """Held against the guide's table of all metrics, and against the code that names them."""
    table = (
        (ROOT / "docs" / "evaluation.md").read_text().split("## What the metrics are")[1].split("\n## ")[0]
    )
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in rows for name in re.findall(r"`([^`]+)`", cell)}
    known = [metric for metrics in METRICS.values() for metric in metrics]
    assert sorted(known) == sorted(named)
    scoring = ("finetune/families.py", "tasks/metrics.py")
    source = "".join((ROOT / "src" / "biphase" / name).read_text() for name in scoring)
    assert all(f'"{metric}"' in source for metric in known)


def test_what_is_said_stands_in_one_line():
    assert claim(says="causal first\n  helps to tag ").says == "causal first helps to tag"
