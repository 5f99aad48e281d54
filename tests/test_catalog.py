"""The catalog: the paper's twelve tasks are cut, asked and trained as the paper says, and all are named offline."""

import re

import pytest

from biphase.catalog import CATALOG, TASKS
from biphase.specs import Answer, Finetune, Retrieve, Tag
from biphase.store import Store
from biphase.study.plan import identities
from biphase.tasks.files import task_key

# Name, family, epochs (0: 1,000 steps), where validation is from, labels, and the text around the columns.
PAPER = [
    ("sst2", "SC", 0, "5% of train", 2, "{sentence}"),
    ("mnli", "SC", 0, "5% of train", 3, "Premise: {premise}\nHypothesis: {hypothesis}"),
    ("qqp", "SC", 0, "5% of train", 2, "Question 1: {question1}\nQuestion 2: {question2}"),
    ("conll2003", "TC", 1, "its own", 9, ""),
    ("ontonotes5", "TC", 0, "its own", 37, ""),
    ("uner_en", "TC", 1, "its own", 7, ""),
    ("squad", "QA", 0, "5% of train", 0, "Question: {question}\nContext: "),
    ("squad_v2", "QA", 0, "5% of train", 0, "Question: {question}\nContext: "),
    ("record", "QA", 0, "5% of train", 0, "Question: {question}\nContext: "),
    ("msmarco", "IR", 0, "its own", 0, "Query: {text} Document: {text}"),
    ("nq", "IR", 0, "50% of test", 0, "Query: {text} Document: {title}. {text}"),
    ("mldr_en", "IR", 0, "its own", 0, "Query: {text} Document: {text}"),
]


@pytest.mark.parametrize(
    ("name", "family", "epochs", "validation", "labels", "text"), PAPER, ids=[row[0] for row in PAPER]
)
def test_each_task_of_the_paper_is_cut_asked_and_trained_as_the_paper_says(
    name, family, epochs, validation, labels, text
):
    task = CATALOG[name]
    splits = task.splits
    cut = f"{splits.cut:.0%} of {splits.cut_from}"
    assert (task.family, task.batch) == (family, 32)
    assert (task.epochs, task.steps) == (epochs, 1_000)
    assert ("its own" if splits.validation else cut) == validation
    assert splits.seed == 42
    assert splits.rows == (0, 0, 0)
    assert len(getattr(task.form, "labels", ())) == labels
    assert " ".join(task.form.templates.values()).removesuffix("{context}") == text


def test_the_twelve_are_in_the_papers_order_three_of_each_family():
    assert [task.name for task in TASKS] == [row[0] for row in PAPER]
    assert [task.family for task in TASKS] == ["SC"] * 3 + ["TC"] * 3 + ["QA"] * 3 + ["IR"] * 3


def test_the_public_validation_part_is_scored_where_test_has_no_labels():
    for name in ("sst2", "qqp", "squad", "squad_v2", "record"):
        assert CATALOG[name].splits.test == "validation*"
    assert CATALOG["mnli"].splits.test == "validation_matched*"
    for name in ("conll2003", "ontonotes5", "uner_en"):
        assert CATALOG[name].splits.test == "test*"
    assert [task.name for task in TASKS if isinstance(task.form, Answer) and task.form.unanswerable] == [
        "squad_v2"
    ]


def test_retrieval_is_trained_once_on_pairs_and_shared():
    assert {task.name: task.trained_on for task in TASKS if task.trained_on} == {
        "nq": "msmarco",
        "mldr_en": "msmarco",
    }
    lender = CATALOG["msmarco"]
    assert isinstance(lender.form, Retrieve)
    assert lender.form.pairs
    assert not lender.splits.train
    assert lender.form.relevant == 1
    grid = Finetune(TASKS)
    assert (grid.lrs, grid.seeds) == ((1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), (0, 1, 2, 3, 4))
    assert (grid.warmup, grid.length, grid.protocol) == (0.1, 0, "paper")
    assert (grid.optimizer.betas, grid.optimizer.eps, grid.optimizer.weight_decay) == (
        (0.9, 0.95),
        1e-5,
        0.1,
    )


def test_every_task_is_filed_under_its_own_name_and_their_keys_need_no_network(tmp_path):
    assert len(CATALOG) == 22
    assert all(task.name == name for name, task in CATALOG.items())
    store = Store(tmp_path)
    known = identities(store)
    keys = {name: known.task(task) for name, task in CATALOG.items()}
    assert len(set(keys.values())) == 22
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in keys.values())
    assert keys == {name: task_key(task, store) for name, task in CATALOG.items()}


def test_what_is_on_the_hub_is_pinned_by_a_commit_or_known_not_to_be():
    loose = {
        task.name
        for task in CATALOG.values()
        for place in task.places
        if place.startswith("hf://") and not re.search(r"@[0-9a-f]{40}(/|$)", place)
    }
    assert loose == {"uner_en", "record", "wikiann_en"}


@pytest.mark.parametrize(
    "task", [task for task in CATALOG.values() if isinstance(task.form, Tag)], ids=lambda t: t.name
)
def test_every_tag_that_is_inside_something_can_also_begin_it(task):
    labels = set(task.form.labels)
    assert {f"B-{one[2:]}" for one in labels if one.startswith("I-")} <= labels
