"""The study, a set of runs with claims, and the fine-tuning grid that evaluates their results."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

from biphase.errors import SpecError, nearest
from biphase.records import added, ranged, record
from biphase.specs.claims import Claim
from biphase.specs.sources import check_name
from biphase.specs.tasks import FAMILIES, Task
from biphase.specs.training import INHERIT, AdamW, Pretrain

# The names that `Study.papers` may have: the folders of biphase/papers.
PAPERS = tuple(
    sorted(path.parent.name for path in (Path(__file__).parents[1] / "papers").glob("*/__init__.py"))
)


@record
class Fewer:
    """A subset of the fine-tuning grid, for intermediate checkpoints that do not justify the whole grid."""

    tasks: tuple[str, ...]  # by name
    lrs: tuple[float, ...]
    seeds: tuple[int, ...]


def _check_distinct(grid: Fewer | Finetune | Discard, where: str, *names: str) -> None:
    for name in names or ("tasks", "lrs", "seeds"):
        values = getattr(grid, name)
        if not values or len(set(values)) != len(values):
            shown = "" if name == "tasks" else f", not {values}"
            raise SpecError(f"{where}.{name} must be distinct and not empty{shown}")


@record
class Discard:
    """Early discarding: screen all learning rates with a short schedule, fine-tune only the best `keep` in full.

    Screening fine-tunes every rate with `seeds` for a `share` of the task's steps and scores it on validation only.
    The `keep` rates with the best mean are fine-tuned with the seeds of the grid, which are other seeds, so intervals
    over these hold for the kept rates. Where a kept rate is the lowest or highest of the grid, one more rate beyond it
    is screened, once at each end.
    """

    keep: int = ranged(2, least=1)  # learning rates, the same number for every model and task
    seeds: tuple[int, ...] = ranged((1000, 1001), least=0, below=2**31)  # to screen only, never reported
    share: float = ranged(0.25, above=0, below=1)  # of the steps of a full fine-tuning
    # Retrieval among all documents: screening searches those that validation judges and so many others; 0: all.
    documents: int = ranged(0, least=0, added=True)

    def check(self) -> None:
        _check_distinct(self, "Discard", "seeds")


@record
class Finetune:
    """The fine-tuning grid: every result of the study × tasks × learning rates × seeds.

    Two protocols share splits, texts, steps and the SC, TC and IR heads:
    - "paper": weights and optimizer state in bf16, QA as token tagging, retrieval among judged documents only, and the
      learning rate selected by the paper's own metrics;
    - "standard": fp32 weights, QA by start and end with windows over long contexts, retrieval among all documents,
      and the learning rate selected by entity F1, SQuAD F1 and NDCG@10 in their usual definitions.
    Both sets of metrics are computed under either protocol.
    """

    tasks: tuple[Task, ...]
    lrs: tuple[float, ...] = ranged((1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4), above=0, below=1)
    seeds: tuple[int, ...] = ranged((0, 1, 2, 3, 4), least=0, below=2**31)
    protocol: Literal["paper", "standard"] = "paper"
    # INHERIT, under the paper's protocol: pure-bf16 and judged; under the standard one: bf16 over fp32 weights and all.
    precision: Literal["pure-bf16", "bf16", "fp32"] = INHERIT
    documents: Literal["judged", "all"] = INHERIT
    length: int = ranged(0, least=0)  # the longest input in tokens; 0: 99% of the model's context
    warmup: float = ranged(0.1, least=0, below=1)  # share of the steps; then linear decay to 0
    optimizer: AdamW = AdamW()  # no weight decay on biases and LayerNorms, as in transformers' Trainer
    on_the_way: Fewer | None = None  # subset for intermediate checkpoints (`Pretrain.keep`); None: whole grid
    causal: bool = False  # keep causal attention: a baseline for adapting a decoder to an encoder
    discard: Discard | None = added(None)  # fine-tune only the best learning rates in full; None: all of them
    # Score validation after every epoch and the last step, and keep the weights of the best; else those of the last step.
    best_epoch: bool = added(False)

    def settle(self) -> None:
        paper = self.protocol == "paper"
        if self.precision is INHERIT:
            object.__setattr__(self, "precision", "pure-bf16" if paper else "bf16")
        if self.documents is INHERIT:
            object.__setattr__(self, "documents", "judged" if paper else "all")

    def check(self) -> None:
        _check_distinct(self, "Finetune")
        if len({task.name for task in self.tasks}) != len(self.tasks):
            raise SpecError("Finetune.tasks has two tasks of one name; rename one")
        for task in self.tasks:
            if task.trained_on:
                self._check_lender(task)
        if self.on_the_way:
            self._check_fewer(self.on_the_way)
        if self.discard:
            self._check_discard(self.discard)

    def _check_lender(self, task: Task) -> None:
        known = {task.name: task for task in self.tasks}
        where = f"task {task.name!r} cannot be scored with the model of {task.trained_on!r}"
        lender = known.get(task.trained_on)
        if lender is None:
            raise SpecError(f"{where}, which is not among Finetune.tasks; {nearest(task.trained_on, known)}")
        if lender.trained_on or lender.family != task.family:
            raise SpecError(f"{where}: that one must be trained itself and be of the family {task.family}")
        if getattr(lender.form, "labels", ()) != getattr(task.form, "labels", ()):
            raise SpecError(f"{where}, which has other labels; give both the same labels, in the same order")

    def _check_fewer(self, fewer: Fewer) -> None:
        _check_distinct(fewer, "Finetune.on_the_way")
        known = {"tasks": [task.name for task in self.tasks], "lrs": self.lrs, "seeds": self.seeds}
        for name, values in known.items():
            for value in getattr(fewer, name):
                if value not in values:
                    raise SpecError(
                        f"Finetune.on_the_way: {value!r} is not among the grid's {name}; known: "
                        f"{', '.join(map(str, values))}"
                    )
        for task in self.tasks:
            if task.name in fewer.tasks and self.lender(task).name not in fewer.tasks:
                raise SpecError(
                    f"Finetune.on_the_way: {task.name!r} is scored with the model of {task.trained_on!r}; name that too"
                )

    def _check_discard(self, discard: Discard) -> None:
        if shared := sorted({*discard.seeds} & {*self.seeds}):
            raise SpecError(
                f"Finetune.discard: seed {shared[0]} screens learning rates and is among Finetune.seeds, which are "
                "reported; a rate that was chosen by a seed looks too good at it. Report other seeds (--seeds), or screen with others: Discard(seeds=…)"
            )
        if discard.keep >= len(self.lrs):
            raise SpecError(
                f"Finetune.discard keeps {discard.keep} of {len(self.lrs)} learning rates, so none is discarded; "
                "keep fewer: Discard(keep=…), on the command line --discard K"
            )
        if self.on_the_way and len(self.on_the_way.lrs) < discard.keep:
            raise SpecError(
                f"Finetune.on_the_way has {len(self.on_the_way.lrs)} learning rates, fewer than the {discard.keep} that "
                "discard keeps for every model; name more, or lower Discard(keep=…)"
            )

    def lender(self, task: Task) -> Task:
        """Return the task whose fine-tuned model scores `task`: `task` itself unless it has `trained_on`."""
        return next(one for one in self.tasks if one.name == (task.trained_on or task.name))

    def metric(self, task: Task) -> str:
        """Return the metric that selects the learning rate of a task."""
        return FAMILIES[task.family].selects[self.protocol]

    def sampled(self, share: float = 1.0) -> int:
        """Return how many documents without a judgment a fine-tuning of this `share` of the steps searches; 0: all."""
        screens = self.discard if share < 1 and self.documents == "all" else None
        return screens.documents if screens else 0

    def pool(self, task: Task, share: float = 1.0) -> str:
        """Return which documents a retrieval task searches; empty for other tasks."""
        if "corpus" not in task.form.files:
            return ""
        sampled = self.sampled(share)
        return f"judged and {sampled} sampled" if sampled else self.documents

    def part(self, *, on_the_way: bool) -> Finetune:
        """Return the grid for one result: the subset for an intermediate checkpoint, else the whole grid."""
        fewer = self.on_the_way
        if fewer is None or not on_the_way:
            return self
        tasks = tuple(task for task in self.tasks if task.name in fewer.tasks)
        discard = self.discard if self.discard and self.discard.keep < len(fewer.lrs) else None
        return replace(self, tasks=tasks, lrs=fewer.lrs, seeds=fewer.seeds, on_the_way=None, discard=discard)

    @property
    def rates(self) -> int:
        """The number of learning rates that are fine-tuned in full."""
        return self.discard.keep if self.discard else len(self.lrs)

    @property
    def screenings(self) -> int:
        """The number of short fine-tunings per result that screen learning rates, before any grid is extended."""
        trained = sum(task.is_trained for task in self.tasks)
        return trained * len(self.lrs) * len(self.discard.seeds) if self.discard else 0

    @property
    def finetunings(self) -> int:
        """The number of full fine-tunings per result; tasks with `trained_on` add none."""
        own = {task.trained_on or task.name for task in self.tasks}
        return len(own) * self.rates * len(self.seeds)

    @property
    def scores(self) -> int:
        return len(self.tasks) * self.rates * len(self.seeds)


@record
class Study:
    """A set of runs, the fine-tuning grid for their results, and claims about them."""

    name: str
    runs: tuple[Pretrain, ...]
    finetune: Finetune | None = None
    claims: tuple[Claim, ...] = ()  # your own
    papers: tuple[str, ...] = added(())  # papers whose claims are tested too, where the runs allow it
    # Percentage points that are worth finding where no paper gives an effect; decides what counts as underpowered
    effect: float = ranged(1.0, above=0, below=100, added=True)
    # Numbers of seeds at which the study is judged, such as (3, 5, 10): each look spends a part of the error rate
    looks: tuple[int, ...] = added(())
    # Pretraining seeds kept for confirmation: no choice between models uses their scores
    confirm: tuple[int, ...] = added(())

    def check(self) -> None:
        check_name("Study", self.name)
        for paper in self.papers:
            if paper not in PAPERS:
                raise SpecError(f"Study {self.name!r}: there is no paper {paper!r}; {nearest(paper, PAPERS)}")
        if any(seeds < 2 for seeds in self.looks) or sorted(set(self.looks)) != list(self.looks):
            raise SpecError(
                f"Study {self.name!r}: looks are increasing numbers of two seeds or more: looks=(3, 5, 10)"
            )
        if not self.runs:
            raise SpecError(f"Study {self.name!r} has no runs: runs=(Pretrain(…),)")
        names = [name for run in self.runs for name in run.results]
        for name in names:
            if names.count(name) > 1:
                raise SpecError(f"Study {self.name!r} has two results called {name!r}; rename one")
        seeds = {run.root.seed for run in self.runs}
        for seed in self.confirm:
            if seed not in seeds:
                raise SpecError(
                    f"Study {self.name!r}: confirm names the pretraining seed {seed}, which no run has; known: "
                    f"{', '.join(map(str, sorted(seeds)))}"
                )
        if seeds <= set(self.confirm):
            raise SpecError(
                f"Study {self.name!r}: confirm names every pretraining seed, so none is left to choose by; leave one out: "
                f"confirm={tuple(sorted(seeds))[1:]}"
            )
        tasks = {task.name: task.family for task in self.finetune.tasks} if self.finetune else {}
        claimed = [claim.name for claim in self.claims]
        for claim in self.claims:
            if claimed.count(claim.name) > 1:
                raise SpecError(f"Study {self.name!r} has two claims called {claim.name!r}; rename one")
            claim.check_within(names, tasks)
