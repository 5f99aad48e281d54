"""The catalog: the paper's twelve tasks and the protocols on GLUE are pinned, and all tasks are named offline."""

import re

from biphase.catalog import CATALOG, TASKS
from biphase.papers import PRESETS
from biphase.records import content_key
from biphase.specs import Finetune, Tag
from biphase.store import Store
from biphase.study.plan import identities
from biphase.tasks.files import task_key


def test_the_papers_tasks_and_protocols_never_change():
    """Scores of these names are published: were one of them corrected, it would need another name."""
    assert content_key(TASKS) == "53899e2c37eab717a6df79de0a4fa7e3"
    assert content_key(tuple(PRESETS.values())) == "5043312ce1c7893ac421cc69752dfee7"


def test_the_twelve_tasks_and_the_grid_are_the_papers():
    families = [task.family for task in TASKS]
    assert families == ["SC"] * 3 + ["TC"] * 3 + ["QA"] * 3 + ["IR"] * 3
    assert {task.name for task in TASKS if task.trained_on == "msmarco"} == {"nq", "mldr_en"}
    grid = Finetune(TASKS)
    assert (grid.lrs, grid.seeds) == ((1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), (0, 1, 2, 3, 4))
    assert (grid.warmup, grid.length, grid.protocol) == (0.1, 0, "paper")
    adam = grid.optimizer
    assert (adam.betas, adam.eps, adam.weight_decay) == ((0.9, 0.95), 1e-5, 0.1)


def test_protocols_read_glues_eight_tasks_as_the_catalog_does():
    for preset in PRESETS.values():
        assert [task.name for task in preset.tasks] == [
            "cola",
            "sst2",
            "mrpc",
            "stsb",
            "qqp",
            "mnli",
            "qnli",
            "rte",
        ]
        assert all(CATALOG[task.name].form == task.form for task in preset.tasks)


def test_every_task_is_filed_under_its_own_name_and_their_keys_need_no_network(tmp_path):
    assert len(CATALOG) == 28
    assert all(task.name == name for name, task in CATALOG.items())
    store = Store(tmp_path)
    known = identities(store)
    keys = {name: known.task(task) for name, task in CATALOG.items()}
    assert len(set(keys.values())) == 28
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


def test_every_tag_that_is_inside_something_can_also_begin_it():
    for task in CATALOG.values():
        if isinstance(task.form, Tag):
            labels = set(task.form.labels)
            assert {f"B-{one[2:]}" for one in labels if one.startswith("I-")} <= labels
