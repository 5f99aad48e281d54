"""The catalog: the paper's twelve tasks are cut, asked and trained as the paper says, and all are named offline."""

import re

from biphase.catalog import CATALOG, PRESETS, TASKS
from biphase.specs import Finetune, Retrieve, Tag
from biphase.store import Store
from biphase.study.plan import identities
from biphase.tasks.files import task_key

# Name, family, epochs (0: 1,000 steps), where validation is from, test files, labels, and the text around the columns.
GLUE, QA = "5% of train", "Question: {question}\nContext: "
PAPER = [
    ("sst2", "SC", 0, GLUE, "validation*", 2, "{sentence}"),
    ("mnli", "SC", 0, GLUE, "validation_matched*", 3, "Premise: {premise}\nHypothesis: {hypothesis}"),
    ("qqp", "SC", 0, GLUE, "validation*", 2, "Question 1: {question1}\nQuestion 2: {question2}"),
    ("conll2003", "TC", 1, "its own", "test*", 9, ""),
    ("ontonotes5", "TC", 0, "its own", "test*", 37, ""),
    ("uner_en", "TC", 1, "its own", "test*", 7, ""),
    ("squad", "QA", 0, GLUE, "validation*", 0, QA),
    ("squad_v2", "QA", 0, GLUE, "validation*", 0, QA),
    ("record", "QA", 0, GLUE, "validation*", 0, QA),
    ("msmarco", "IR", 0, "its own", "test*", 0, "Query: {text} Document: {text}"),
    ("nq", "IR", 0, "50% of test", "test*", 0, "Query: {text} Document: {title}. {text}"),
    ("mldr_en", "IR", 0, "its own", "test*", 0, "Query: {text} Document: {text}"),
]


def test_the_twelve_tasks_are_cut_asked_and_trained_as_the_paper_says():
    assert [task.name for task in TASKS] == [row[0] for row in PAPER]
    for task, (_, family, epochs, validation, test, labels, text) in zip(TASKS, PAPER, strict=True):
        splits = task.splits
        cut = f"{splits.cut:.0%} of {splits.cut_from}"
        assert (task.family, task.batch, task.epochs, task.steps) == (family, 32, epochs, 1_000)
        assert ("its own" if splits.validation else cut) == validation, task.name
        assert splits.test.split("/")[-1] == test, task.name
        assert (splits.seed, splits.rows) == (42, (0, 0, 0))
        assert len(getattr(task.form, "labels", ())) == labels
        assert " ".join(task.form.templates.values()).removesuffix("{context}") == text
        assert getattr(task.form, "unanswerable", False) == (task.name == "squad_v2")


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
    adam = grid.optimizer
    assert (adam.betas, adam.eps, adam.weight_decay) == ((0.9, 0.95), 1e-5, 0.1)


def test_every_task_is_filed_under_its_own_name_and_their_keys_need_no_network(tmp_path):
    assert len(CATALOG) == 28
    assert all(task.name == name for name, task in CATALOG.items())
    store = Store(tmp_path)
    known = identities(store)
    keys = {name: known.task(task) for name, task in CATALOG.items()}
    assert len(set(keys.values())) == 28
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in keys.values())
    assert keys == {name: task_key(task, store) for name, task in CATALOG.items()}


def test_presets_have_the_values_that_the_papers_print():
    epochs = {name: {task.name: task.epochs for task in preset.tasks} for name, preset in PRESETS.items()}
    eight = ["cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte"]
    assert epochs["bert-glue"] == dict.fromkeys(eight, 3)
    assert epochs["roberta-glue"] == dict.fromkeys(eight, 10)
    assert epochs["modernbert-glue"] == dict(zip(eight, (5, 2, 10, 10, 10, 1, 2, 3), strict=True))
    values = {
        name: (
            preset.lrs,
            preset.warmup,
            preset.optimizer.weight_decay,
            preset.optimizer.betas[1],
            preset.best_epoch,
            preset.optimizer.clip,
        )
        for name, preset in PRESETS.items()
    }
    assert values == {
        "bert-glue": ((2e-5, 3e-5, 4e-5, 5e-5), 0.1, 0.01, 0.999, False, 1.0),
        "roberta-glue": ((1e-5, 2e-5, 3e-5), 0.06, 0.1, 0.98, True, 1e6),
        "modernbert-glue": ((1e-5, 3e-5, 5e-5, 8e-5), 0.06, 0.1, 0.98, True, 1e6),
    }
    batches = {name: [task.batch for task in preset.tasks] for name, preset in PRESETS.items()}
    assert batches == {
        "bert-glue": [32] * 8,
        "roberta-glue": [32] * 8,
        "modernbert-glue": [32, 16, 32, 32, 16, 64, 16, 16],
    }
    assert all(CATALOG[task.name].form == task.form for preset in PRESETS.values() for task in preset.tasks)


def test_what_is_on_the_hub_is_pinned_by_a_commit_or_known_not_to_be():
    loose = {
        task.name
        for task in CATALOG.values()
        for place in task.places
        if place.startswith("hf://") and not re.search(r"@[0-9a-f]{40}(/|$)", place)
    }
    assert loose == {"uner_en", "record", "wikiann_en"}


def test_every_tag_that_is_inside_something_can_also_begin_it():
    for task in CATALOG.values():
        if isinstance(task.form, Tag):
            labels = set(task.form.labels)
            assert {f"B-{one[2:]}" for one in labels if one.startswith("I-")} <= labels
