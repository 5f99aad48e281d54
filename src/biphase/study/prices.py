"""What a plan takes on a measured device: seconds of each piece, and of each fine-tuning of each grid.

    piece        steps × a step, and the held-out losses on the way
    fine-tuning  steps × a step, the texts it is scored on, and what it costs to begin and to publish one

Not counted: tokenizing, downloads, reading a model and compiling it, checkpoints, and waiting for other processes.
What cannot be priced is left out and said: a precision that was not measured, a model whose shape is not known here, a
dataset whose lengths are not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from biphase.errors import BiphaseError
from biphase.files import Store
from biphase.keys import act_at
from biphase.specs import CLM, MLM, Finetune, Objective, Pretrain, Size, Task
from biphase.study.costs import Shape, labelled_share, shape_of
from biphase.study.leaves import finished, lenders, trainings
from biphase.study.lengths import Sizes, sizes_of
from biphase.study.machines import MEASURE, Machine
from biphase.study.measured import Speeds, speeds_of
from biphase.study.plan import Plan, State
from biphase.wording import counted

DOUBTFUL = 0.15  # measured steps that are off by more than this were not measured alone
LEAF_SECONDS = 0.3  # to put weights back, draw a head, and publish scores
SHARE_OF_CONTEXT = 0.99  # of a model's context is the longest input, unless a study says otherwise
# Tokens of a micro-batch of fine-tuning, for a model of this many layers × width; larger ones get fewer.
TUNED_TOKENS, USUAL = 32_768, 12 * 768

Grid = tuple[str, str]  # the key of a model, the name of a task


@dataclass(frozen=True)
class Prices:
    """Seconds on one device. What is not known is not in here, and said in `notes`."""

    machine: Machine
    pieces: dict[str, float]  # by state
    tunings: dict[Grid, float]  # of one fine-tuning
    grids: dict[Grid, int]  # how many fine-tunings there are; what has no price included
    notes: tuple[str, ...]
    unmeasured: tuple[str, ...]  # those of the notes that are about a precision that was not measured
    precisions: tuple[str, ...]  # whose measured speeds these seconds are
    priced: bool  # every piece

    def pretraining(self, keys: Collection[str] | None = None) -> float:
        """Seconds of the pieces that lead to `keys`, or of all."""
        return sum(seconds for key, seconds in self.pieces.items() if keys is None or key in keys)

    def finetuning(self, counts: Mapping[Grid, int] | None = None) -> float:
        """Seconds of so many fine-tunings of each grid, or of all."""
        counts = self.grids if counts is None else counts
        return sum(seconds * counts.get(grid, 0) for grid, seconds in self.tunings.items())


def price(plan: Plan, machine: Machine, *, measure: str = MEASURE) -> Prices:
    """What every piece and every fine-tuning of a plan takes on a device. `measure`: what to type to measure one."""
    made = _Pricing(plan, machine, measure)
    pieces = {key: took for key, state in plan.states.items() if (took := made.piece(state)) is not None}
    tunings, grids = {}, {}
    runs = {key: one.run for key, one in (*plan.roots.items(), *plan.states.items())}
    for model, part in plan.tuned.items():
        for task, scored in lenders(part).items():
            grids[model, task.name] = len(part.lrs) * len(part.seeds)
            took = made.tuning(runs[model], part, task, list(scored))
            if took is not None:
                tunings[model, task.name] = took
    unmeasured = made.not_measured()
    return Prices(
        machine,
        pieces,
        tunings,
        grids,
        notes=(*made.told(), *unmeasured),
        unmeasured=unmeasured,
        precisions=tuple(made.used),
        priced=len(pieces) == plan.pieces,
    )


def left_of(plan: Plan, store: Store) -> dict[Grid, int]:
    """How many fine-tunings of each grid are still to be made."""
    counts: dict[Grid, int] = {}
    for one in trainings(plan):
        if not finished(one, store):
            counts[one.model, one.task.name] = counts.get((one.model, one.task.name), 0) + 1
    return counts


def prices_json(made: Prices, left: Collection[str], counts: Mapping[Grid, int]) -> dict[str, Any]:
    """The same for a program; `left` and `counts` are the pieces and fine-tunings that are not done."""
    machine = made.machine
    return {
        "measured": {
            "device": machine.title,
            "precisions": {one: asdict(machine.origins[one]) for one in made.precisions},
        },
        "pretraining_hours": made.pretraining() / 3600,
        "finetuning_hours": made.finetuning() / 3600,
        "pretraining_hours_left": made.pretraining(left) / 3600,
        "finetuning_hours_left": made.finetuning(counts) / 3600,
        "pieces": [{"key": key, "seconds": seconds} for key, seconds in made.pieces.items()],
        "grids": [
            {
                "model": model,
                "task": task,
                "finetunings": count,
                "left": counts.get((model, task), 0),
                "seconds_each": made.tunings.get((model, task)),
            }
            for (model, task), count in made.grids.items()
        ],
    }


@dataclass
class _Pricing:
    """Prices, with what was found out on the way and what is to be said."""

    plan: Plan
    machine: Machine
    measure: str  # what to type to measure a device
    used: dict[str, None] = field(default_factory=dict)  # precisions by which something was priced
    notes: dict[str, None] = field(default_factory=dict)
    shapeless: dict[str, None] = field(default_factory=dict)  # names of models
    unmeasured: dict[str, dict[str, None]] = field(default_factory=dict)  # by precision: what was not
    shapes: dict[Any, Shape | None] = field(default_factory=dict)
    sizes: dict[str, Sizes | None] = field(default_factory=dict)
    tunings: dict[tuple[Shape, int, str], float] = field(default_factory=dict)

    def piece(self, state: State) -> float | None:
        run = state.run
        shape, speeds = self._shape(run), self._speeds(run.precision, "pretraining")
        if shape is None or speeds is None:
            return None
        self.used[run.precision] = None
        if not isinstance(_start(run), Size):
            self._say("models from elsewhere are priced as if they were of the shape that was measured")
        if run.adapter or run.freeze != "nothing":
            self._say("LoRA and frozen weights are priced as if all weights were trained: an upper bound")
        act = act_at(run, state.first)
        first, until = state.first - act.first, state.step - act.first
        share = labelled_share(act.objective, run.packing, first, until)
        causal = isinstance(act.objective, CLM)
        step = speeds.step(shape, run.packing, run.batch_tokens, causal=causal, labelled=share)
        return state.steps * step + self._heldout(state, shape, speeds, (first, until))

    def _heldout(self, state: State, shape: Shape, speeds: Speeds, span: tuple[int, int]) -> float:
        """Each measurement reads the held-out text once causally, once at 40%, and once as the run is trained."""
        run, every = state.run, state.run.heldout_every
        often = state.step // every - state.first // every + (state.step % every != 0)
        yardsticks: list[Objective] = [CLM(), MLM(0.4)]
        if isinstance(state.objective, MLM) and state.objective not in yardsticks:
            yardsticks.append(state.objective)
        tokens = run.heldout_tokens // run.packing.length * run.packing.length
        return often * sum(
            speeds.forward(
                shape,
                run.packing,
                tokens,
                causal=isinstance(one, CLM),
                labelled=labelled_share(one, run.packing, *span),
            )
            for one in yardsticks
        )

    def tuning(self, run: Pretrain, spec: Finetune, task: Task, scored: list[Task]) -> float | None:
        """Seconds of one fine-tuning on `task`, and of scoring its model on what asks for it."""
        shape = self._shape(run)
        precision = "fp32" if spec.precision == "fp32" else "bf16"
        speeds = self._speeds(precision, "fine-tuning")
        sizes = [self._sizes(one, spec) for one in (task, *scored)]
        if shape is None or speeds is None or any(one is None for one in sizes):
            return None
        self.used[precision] = None
        context = shape.context if not run.stages and shape.context else run.packing.length
        limit = spec.length or round(SHARE_OF_CONTEXT * context)
        place = shape, limit, task.name
        if place not in self.tunings:
            reading = _Reading(speeds, shape, limit, spec)
            known = [one for one in sizes if one is not None]
            self.tunings[place] = reading.train(task, known[0]) + sum(
                reading.score(one, size) + LEAF_SECONDS for one, size in zip(scored, known[1:], strict=True)
            )
        return self.tunings[place]

    def _shape(self, run: Pretrain) -> Shape | None:
        start = _start(run)
        place = start, run.corpus if isinstance(start, Size) else ""
        if place not in self.shapes:
            try:
                self.shapes[place] = shape_of(run)
            except BiphaseError:  # a size that nothing is trained from: no corpus says its vocabulary
                self.shapes[place] = None
        if self.shapes[place] is None:
            self.shapeless[getattr(start, "source", "") or getattr(start, "name", "")] = None
        return self.shapes[place]

    def _speeds(self, precision: str, what: str) -> Speeds | None:
        speeds = speeds_of(self.machine.model, precision)
        kinds = {"pretraining": ["pretrain"], "fine-tuning": ["finetune", "score"]}[what]
        if speeds and all(getattr(speeds, kind) for kind in kinds):
            if speeds.worst > DOUBTFUL:
                self._say(
                    f"the measured steps of {self.machine.name} contradict each other by up to {speeds.worst:.0%}, so these "
                    f"hours are rough. With nothing else running, type: {self.measure}"
                )
            return speeds
        self.unmeasured.setdefault(precision, {})[what] = None
        return None

    def _sizes(self, task: Task, spec: Finetune) -> Sizes | None:
        if task.name not in self.sizes:
            self.sizes[task.name] = sizes_of(task, spec.documents)
        sizes = self.sizes[task.name]
        countable = sizes is not None and not (task.epochs and sizes.train and not sizes.train[0].rows)
        if not countable:
            self._say(f"lengths of {task.name} are not known: its fine-tunings are left out")
        return sizes if countable else None

    def _say(self, note: str) -> None:
        self.notes[note] = None

    def told(self) -> tuple[str, ...]:
        """What is to be said, a line each, but for precisions."""
        lines = list(self.notes)
        if self.shapeless:
            name, *others = self.shapeless
            these = f"{name} and {counted(len(others), 'other')}" if others else name
            lines.append(f"the shape of {these} is not known here: what is made of it is left out")
        return tuple(lines)

    def not_measured(self) -> tuple[str, ...]:
        """A line for each precision that was not measured."""
        lines = []
        for precision, what in self.unmeasured.items():
            verb = "were" if len(what) > 1 else "was"
            lines.append(
                f"{' and '.join(what)} in {precision} {verb} not measured on {self.machine.name} and left out. "
                f"There, type: {self.measure} --precision {precision}"
            )
        return tuple(lines)


@dataclass(frozen=True)
class _Reading:
    """How one model reads the tasks of a study, and how fast."""

    speeds: Speeds
    shape: Shape
    limit: int
    spec: Finetune

    @property
    def vocab(self) -> int:
        return self.shape.vocab or 2**17  # not known: one so large that its size hardly matters

    def train(self, task: Task, sizes: Sizes) -> float:
        examples, tokens = (
            float(sizes.train[0].rows),
            sum(one.tokens(self.vocab, self.limit) for one in sizes.train),
        )
        if self._in_windows(task):
            windows, tokens = sizes.train[0].windows(self.vocab, self.limit)
            examples *= windows
        steps = math.ceil(examples / task.batch) * task.epochs if task.epochs else task.steps
        batch = min(task.batch, examples) if examples else task.batch
        share = min(1.0, USUAL / (self.shape.layers * self.shape.width))
        micros = math.ceil(batch * tokens / (TUNED_TOKENS * share))
        precision = self.spec.precision
        texts = batch * len(sizes.train)
        return steps * self.speeds.tuning_step(
            self.shape, batch * tokens, texts, precision=precision, micros=micros
        )

    def score(self, task: Task, sizes: Sizes) -> float:
        seconds = 0.0
        for texts in sizes.scored:
            count, tokens = 1.0, texts.tokens(self.vocab, self.limit)
            if self._in_windows(task):
                count, tokens = texts.windows(self.vocab, self.limit)
            seconds += self.speeds.scoring(self.shape, texts.rows * count * tokens, tokens)
        return seconds

    def _in_windows(self, task: Task) -> bool:
        return task.family == "QA" and self.spec.protocol == "standard"


def _start(run: Pretrain) -> Any:
    return _start(run.start) if isinstance(run.start, Pretrain) else run.start
