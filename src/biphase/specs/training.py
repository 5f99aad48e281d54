"""How a model is trained: stages, schedule, optimizer, and the run (`Pretrain`) that combines them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, Literal

from biphase.errors import SpecError
from biphase.records import added, record
from biphase.specs.objectives import Objective
from biphase.specs.sources import Chunks, Corpus, Hub, Rows, Size, check_at_least, check_name

INHERIT: Any = None  # not given: taken from the run this one starts from, or else the default


@record
class Stage:
    """An objective for a number of optimizer steps, or of epochs: Stage(MLM(0.4), epochs=2).

    `rope_base` changes the base of the rotary position embedding from this stage on, e.g. for longer texts; 0 leaves it
    unchanged.
    """

    objective: Objective
    steps: int = 0
    rope_base: float = 0.0
    epochs: float = added(0.0)  # converted to steps when a plan is made, which needs the size of the corpus

    def check(self) -> None:
        if self.epochs < 0 or (self.steps > 0) == (self.epochs > 0):
            raise SpecError(
                f"Stage.steps must be at least 1, or epochs above 0, but not both; here steps={self.steps}, "
                f"epochs={self.epochs:g}. Type Stage(CLM(), 1_000) or Stage(CLM(), epochs=2)"
            )
        check_at_least(self, steps=0)
        if self.rope_base and self.rope_base < 1:
            raise SpecError(f"Stage.rope_base must be at least 1, it is {self.rope_base:g}; usual: 160_000.0")


MOST_TURNS = 100


class Alternate(tuple[Stage, ...]):
    """Stages that take turns, as a tuple: Alternate((CLM(), 4), (MLM(0.4), 16), unit="epochs").

    The turns are taken `rounds` times. Every change of objective is a checkpoint that the plan keeps, so for turns of a
    few steps use `Mix`, which has several objectives in each step.
    """

    def __new__(
        cls,
        *turns: tuple[Objective, float],
        unit: Literal["steps", "epochs"] = "steps",
        rounds: int = 1,
    ) -> Alternate:
        if unit not in ("steps", "epochs"):
            raise SpecError(f"Alternate.unit must be 'steps' or 'epochs', not {unit!r}")
        if not turns or any(not isinstance(turn, tuple) or len(turn) != 2 for turn in turns):
            raise SpecError(
                f"Alternate takes an objective and its {unit}: Alternate((CLM(), 4), (MLM(0.4), 16))"
            )
        if rounds < 1 or rounds * len(turns) > MOST_TURNS:
            raise SpecError(
                f"Alternate has {rounds * len(turns):,} turns, and takes from 1 to {MOST_TURNS}, since each ends in a "
                "checkpoint; for short turns mix the objectives: Mix({CLM(): 1, MLM(0.4): 4})"
            )
        stages = tuple(Stage(objective, **dict[str, Any]({unit: length})) for objective, length in turns)
        return super().__new__(cls, stages * rounds)


@record
class WSD:
    """Warmup-stable-decay schedule: linear warmup, constant `peak`, linear decay to 0 over the last `decay` steps.

    An integer is a number of steps, a float below 1 a share of the run's steps.
    """

    peak: float = 5e-4
    warmup: int | float = INHERIT  # default: 2,000 from scratch, 0 after another run; required after Hub
    decay: int | float = 2_000

    def settle(self) -> None:
        if self.warmup is INHERIT:
            object.__setattr__(self, "warmup", -1)

    def check(self) -> None:
        if not 0 < self.peak < 1:
            raise SpecError(f"WSD.peak must lie between 0 and 1, it is {self.peak}; try 5e-4")
        for name in ("warmup", "decay"):
            value = getattr(self, name)
            if value < (-1 if name == "warmup" else 0) or (isinstance(value, float) and value >= 1):
                raise SpecError(f"WSD.{name} must be a count of steps or a share below 1, not {value!r}")


@record
class AdamW:
    """AdamW: weight decay on every parameter, clipping by the global norm.

    With `layer_decay` below 1, each layer's learning rate is that share of the rate of the layer above it; the
    embedding has the lowest.
    """

    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-5
    weight_decay: float = 0.1
    clip: float = 1.0
    layer_decay: float = 1.0

    def check(self) -> None:
        if not all(0 <= beta < 1 for beta in self.betas):
            raise SpecError(f"AdamW.betas must lie in [0, 1), not {self.betas}")
        if self.eps <= 0 or self.weight_decay < 0 or self.clip <= 0:
            raise SpecError("AdamW.eps and clip must be positive and weight_decay not negative")
        if not 0 < self.layer_decay <= 1:
            raise SpecError(f"AdamW.layer_decay must lie in (0, 1], it is {self.layer_decay:g}; 0.9 is usual")


@record
class LoRA:
    """Low-rank adapters (peft's LoRA) beside frozen weights; they are merged when the model is used or exported.

    `targets` are layer names such as q_proj; empty means every matrix of the backbone.
    """

    rank: int = 16
    alpha: int = 32
    targets: tuple[str, ...] = ()

    def settle(self) -> None:
        object.__setattr__(
            self, "targets", tuple(sorted(self.targets))
        )  # their order must not change the key

    def check(self) -> None:
        check_at_least(self, rank=1, alpha=1)


@dataclass(frozen=True)
class Phase:
    """An objective from step `first` up to, not including, step `until`; `rope_base` 0 keeps the model's own."""

    objective: Objective
    first: int
    until: int
    rope_base: float = 0.0


PAPER_BATCH = 2_359_296  # tokens per step: 192 GPUs × 12 chunks of 1,024 tokens on average
PAPER_WARMUP = 2_000


@record
class Pretrain:
    """One run: a start, a corpus, stages and a schedule. Its `name` is for display and does not affect keys.

    With `start=another_run` it continues from the end of that run: fields that are not given are inherited from it,
    there is no warmup, the optimizer state is kept and the data continues where it stopped. A run without stages is its
    start model.
    """

    name: str
    start: Size | Hub | Pretrain
    corpus: str | Corpus = INHERIT
    stages: tuple[Stage, ...] = ()
    schedule: WSD = INHERIT
    optimizer: AdamW = INHERIT
    batch_tokens: int = INHERIT
    packing: Chunks | Rows = INHERIT
    precision: Literal["fp32", "bf16", "fp8"] = INHERIT
    seed: int = INHERIT
    adapter: LoRA | None = INHERIT
    freeze: Literal["nothing", "embeddings"] = INHERIT
    optimizer_state: Literal["keep", "reset"] = "keep"
    data: Literal["continue", "restart"] = "continue"
    keep: tuple[int, ...] = ()  # steps whose checkpoints are results too, named `name-step`
    # Interval in steps and size in tokens of the held-out evaluation. They do not affect training, so are in no key.
    heldout_every: int = 1_000
    heldout_tokens: int = 1_000_000

    def settle(self) -> None:
        defaults = {
            "corpus": "" if isinstance(self.start, Hub) and not self.stages else INHERIT,
            "optimizer": AdamW(),
            "batch_tokens": PAPER_BATCH,
            "packing": Chunks(),
            "precision": self.start.precision if isinstance(self.start, Size) else "bf16",
            "seed": 42,
            "adapter": None,
            "freeze": "nothing",
        }
        for name, value in defaults.items():
            if getattr(self, name) is INHERIT:
                object.__setattr__(self, name, getattr(self.parent, name) if self.parent else value)
        if self.corpus is INHERIT:
            raise SpecError(
                f"Pretrain {self.name!r} needs a corpus: corpus='fineweb-edu', 'builtin' or Corpus(…)"
            )
        object.__setattr__(self, "schedule", self._settled_schedule())

    def _settled_schedule(self) -> WSD:
        """Return the schedule in steps; of a run in epochs as it was given, since its steps are not known yet."""
        inherited = self.schedule is INHERIT
        if inherited and self.parent and (self.in_epochs or self.parent.in_epochs):
            raise SpecError(
                f"Pretrain {self.name!r}: it or {self.parent.name!r} has stages in epochs, so its schedule cannot be "
                "inherited; give it one: schedule=WSD(peak=…, decay=0.1)"
            )
        if self.in_epochs:
            return WSD() if inherited else self.schedule
        return self._schedule_in_steps()

    def _schedule_in_steps(self) -> WSD:
        """Return the schedule with warmup and decay as numbers of steps."""
        schedule, parent = self.schedule, self.parent
        if schedule is INHERIT:
            schedule = WSD(peak=parent.schedule.peak, decay=parent.schedule.decay) if parent else WSD()
        if not self.stages:
            return WSD(schedule.peak, 0, 0)
        warmup = schedule.warmup
        if warmup == -1:
            if isinstance(self.start, Hub):
                raise SpecError(
                    f"Pretrain {self.name!r} starts from a hub model with a new optimizer state: "
                    "state its warmup, e.g. schedule=WSD(peak=1e-4, warmup=0.05)"
                )
            warmup = 0 if parent else PAPER_WARMUP
        shares_or_steps = (warmup, schedule.decay)
        steps = (round(n * self.steps) if isinstance(n, float) else n for n in shares_or_steps)
        return WSD(schedule.peak, *steps)

    def check(self) -> None:
        where = f"Pretrain {self.name!r}"
        check_name(where, self.name)
        longest = math.inf if self.in_epochs else self.steps
        if self.stages and self.schedule.warmup + self.schedule.decay > longest:
            raise SpecError(
                f"{where}: warmup ({self.schedule.warmup:,}) and decay ({self.schedule.decay:,}) are longer than "
                f"its {self.steps:,} steps; type schedule=WSD(warmup=…, decay=…) or shares such as warmup=0.05"
            )
        if self.batch_tokens <= 0 or self.batch_tokens % self.packing.length:
            rows = max(1, round(self.batch_tokens / self.packing.length))
            raise SpecError(
                f"{where}: batch_tokens ({self.batch_tokens:,}) must be whole rows of {self.packing.length:,} tokens; "
                f"try batch_tokens={rows * self.packing.length}"
            )
        if len(set(self.keep)) < len(self.keep) or not all(0 < step < longest for step in self.keep):
            raise SpecError(
                f"{where}: keep={self.keep} must be different steps between its start and its end ({self.steps:,})"
            )
        if self.seed < 0 or self.seed >= 2**31:
            raise SpecError(f"{where}: seed must lie in [0, 2³¹), it is {self.seed}")
        check_at_least(self, heldout_every=1, heldout_tokens=self.packing.length)
        if self.adapter and isinstance(self.start, Size):
            raise SpecError(
                f"{where}: LoRA adapts a model that can do something; a new one has to learn: leave it out"
            )
        if isinstance(self.start, Pretrain):
            self._check_parent(where, self.start)
        elif (self.optimizer_state, self.data) != ("keep", "continue"):
            raise SpecError(
                f"{where}: optimizer_state and data say how another run goes on; this one has none to continue"
            )

    def _check_parent(self, where: str, parent: Pretrain) -> None:
        if not parent.stages:
            raise SpecError(f"{where}: {parent.name!r} trains nothing, so start from its start instead")
        if self.adapter != parent.adapter:
            raise SpecError(
                f"{where}: {parent.name!r} was trained with another adapter; give both the same, or export it and start "
                "from Hub('./folder')"
            )
        if self.data == "continue":
            for name in ("corpus", "packing", "seed"):
                if getattr(self, name) != getattr(parent, name):
                    raise SpecError(
                        f"{where}: the data cannot go on where {parent.name!r} stopped, because {name} differs; "
                        "say data='restart'"
                    )

    # ------------------------------------------------------------ the run alone

    @property
    def steps(self) -> int:
        return sum(stage.steps for stage in self.stages)

    @property
    def in_epochs(self) -> bool:
        """Whether stages are counted in epochs, which a plan has converted to steps."""
        return any(stage.epochs for stage in self.stages)

    def in_steps(self, tokens: int) -> Pretrain:
        """Return the run with its epochs as steps, for a corpus of `tokens` training tokens."""
        if not self.in_epochs:
            return self
        steps_of_epoch = tokens // self.packing.length / self.rows_per_step
        stages, passed = [], 0.0
        for stage in self.stages:
            before, passed = passed, passed + stage.epochs
            steps = stage.steps or max(1, round(passed * steps_of_epoch) - round(before * steps_of_epoch))
            stages.append(replace(stage, steps=steps, epochs=0.0))
        return replace(self, stages=tuple(stages))

    @property
    def rows_per_step(self) -> int:
        return self.batch_tokens // self.packing.length

    @property
    def results(self) -> dict[str, int]:
        """The names of the checkpoints that are results, with their steps, in the order of steps."""
        return {f"{self.name}-{step}": step for step in self.keep} | {self.name: self.steps}

    @property
    def decay_start(self) -> int:
        return self.steps - int(self.schedule.decay)

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0): linear warmup, constant, linear decay to 0."""
        wsd = self.schedule
        if step < wsd.warmup:
            return wsd.peak * (step + 1) / wsd.warmup
        if step < self.decay_start:
            return wsd.peak
        return wsd.peak * (self.steps - step) / wsd.decay

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The run's phases in order.

        Neighbouring stages with the same objective and rope base merge, unless the masking ratio follows a schedule:
        that is counted from the start of its stage, so the boundary matters.
        """
        phases: list[Phase] = []
        step, base = 0, self.initial_rope_base
        for stage in self.stages:
            first, base = step, stage.rope_base or base
            last = phases[-1] if phases else None
            if (
                last
                and (last.objective, last.rope_base) == (stage.objective, base)
                and not last.objective.restarts
            ):
                first = phases.pop().first
            step += stage.steps
            phases.append(Phase(stage.objective, first, step, base))
        return tuple(phases)

    def phase_at(self, step: int) -> Phase:
        """Return the phase that step `step` (counted from 0) belongs to."""
        return next(phase for phase in self.phases if phase.first <= step < phase.until)

    def rope_base_after(self, step: int) -> float:
        """Return the base of the rotary position embedding after `step` steps; 0 if no stage has changed it."""
        bases = [phase.rope_base for phase in self.phases if phase.first < step]
        return bases[-1] if bases else self.initial_rope_base

    def labelled_share(self, first: int, until: int) -> float:
        """Return the share of positions with a label from step `first` to `until`, which are in one phase."""
        phase = self.phase_at(first)
        return phase.objective.labelled_share(self.packing, first - phase.first, until - phase.first)

    def causal_share(self, first: int, until: int) -> float:
        """Return the share of rows with causal attention from step `first` to `until`, which are in one phase."""
        phase = self.phase_at(first)
        return phase.objective.causal_share(first - phase.first, until - phase.first)

    # ------------------------------------------------------------ the chain of runs that it continues

    @property
    def parent(self) -> Pretrain | None:
        return self.start if isinstance(self.start, Pretrain) else None

    @property
    def lineage(self) -> tuple[Pretrain, ...]:
        """The runs that this one continues, oldest first, and itself."""
        return (*self.parent.lineage, self) if self.parent else (self,)

    @property
    def root(self) -> Pretrain:
        """The first run of the chain: the one that starts from a model."""
        return self.lineage[0]

    @property
    def origin_step(self) -> int:
        """The number of steps taken by the runs that this one continues."""
        return sum(run.steps for run in self.lineage[:-1])

    @property
    def origin_sample(self) -> int:
        """The sample index at which this run's data begins: the number of rows the earlier runs have read."""
        if self.parent is None or self.data == "restart":
            return 0
        return self.parent.origin_sample + self.parent.steps * self.parent.rows_per_step

    @property
    def initial_rope_base(self) -> float:
        """The base of the rotary position embedding that this run starts with; 0: the model's own."""
        return self.parent.rope_base_after(self.parent.steps) if self.parent else 0.0

    @property
    def changes_heldout(self) -> bool:
        """Whether its held-out losses are on other text or packing than those of the run it continues."""
        fields = attrgetter("corpus", "packing", "heldout_tokens")
        return self.parent is not None and fields(self) != fields(self.parent)
