"""What can be known to be wrong with a study's tasks before anything is computed.

A bad row that is found when the first fine-tuning begins may be found after days of pretraining. So tasks whose files
are on this machine are read once, whole, before the first job; those on the hub must at least be pinned.
"""

from __future__ import annotations

from biphase.files import Store
from biphase.study.datasets import Description, describe, keep
from biphase.study.leaves import trainings
from biphase.study.plan import Plan
from biphase.tasks.places import on_hub, refuse_changed


def check_tasks(plan: Plan, store: Store, *, download: bool = False) -> list[Description]:
    """Refuse what the tasks that are still to be scored would be refused for, and say what they were read as."""
    asked = {
        task.name: task
        for training in trainings(plan)
        for leaf in training.leaves
        if not store.knows(store.leaves / leaf.key)
        for task in (training.task, leaf.task)
    }
    made = describe(asked.values(), download=download)
    for task in asked.values():
        if not on_hub(task):
            refuse_changed(task, plan.tasks[task.name], store)
    if made:
        keep(made, plan.study.name, store)
    return made
