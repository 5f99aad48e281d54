"""What is done with many runs: the study, and the evaluation of its results."""

from __future__ import annotations

from typing import Literal

from biphase.errors import SpecError, nearest
from biphase.records import record
from biphase.specs.checks import one_name
from biphase.specs.training import Pretrain


@record
class Task:
    """A dataset to fine-tune on. `trained_on` names the task whose fine-tuned model it is scored with."""

    name: str
    family: Literal["SC", "TC", "QA", "IR"]
    trained_on: str = ""


@record
class Finetune:
    """Every result of the study × tasks × learning rates × seeds."""

    tasks: tuple[Task, ...]
    lrs: tuple[float, ...] = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)
    seeds: tuple[int, ...] = (0, 1, 2, 3, 4)
    protocol: Literal["paper", "standard"] = "paper"

    def check(self) -> None:
        for name in ("tasks", "lrs", "seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) != len(values):
                raise SpecError(f"Finetune.{name} must be distinct and not empty")
        if not all(0 < lr < 1 for lr in self.lrs):
            raise SpecError(f"Finetune.lrs must lie between 0 and 1, not {self.lrs}")
        names = [task.name for task in self.tasks]
        for task in self.tasks:
            if task.trained_on and task.trained_on not in names:
                raise SpecError(
                    f"task {task.name!r} is scored with the model of {task.trained_on!r}, which is not among "
                    f"Finetune.tasks; {nearest(task.trained_on, names)}"
                )

    @property
    def trainings(self) -> int:
        """Fine-tunings per result: tasks that borrow another task's model train none of their own."""
        own = {task.trained_on or task.name for task in self.tasks}
        return len(own) * len(self.lrs) * len(self.seeds)

    @property
    def scores(self) -> int:
        return len(self.tasks) * len(self.lrs) * len(self.seeds)


@record
class Study:
    """Many runs, and what is done with their results."""

    name: str
    runs: tuple[Pretrain, ...]
    finetune: Finetune | None = None

    def check(self) -> None:
        one_name("Study", self.name)
        if not self.runs:
            raise SpecError(f"Study {self.name!r} has no runs: runs=(Pretrain(…),)")
        names = [
            name for run in self.runs for name in (run.name, *(f"{run.name}-{step}" for step in run.keep))
        ]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"Study {self.name!r} has two results called {name!r}; rename one")
