"""What can be known to be wrong with a study's tasks before anything is computed.

A bad row that is found when the first fine-tuning begins may be found after days of pretraining. So tasks whose files
are on this machine are read once, whole, before the first job; those on the hub must at least be pinned.
"""

from __future__ import annotations

from biphase.files import Store
from biphase.study.leaves import trainings
from biphase.study.plan import Plan
from biphase.tasks.hub import refuse_unpinned
from biphase.tasks.load import load
from biphase.tasks.places import on_hub, refuse_changed


def check_tasks(plan: Plan, store: Store) -> None:
    """Refuse what the tasks that are still to be scored would be refused for."""
    asked = {
        task.name: task
        for training in trainings(plan)
        for leaf in training.leaves
        if not store.knows(store.leaves / leaf.key)
        for task in (training.task, leaf.task)
    }
    for task in asked.values():
        places = on_hub(task)
        for place in places:
            refuse_unpinned(f"task {task.name!r}", place)
        if not places:
            load(task, documents="judged")
            refuse_changed(task, plan.tasks[task.name], store)
