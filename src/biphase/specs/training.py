"""How a model is trained: stages, schedule, optimizer, and the run (`Pretrain`) that combines them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

from biphase.errors import SpecError
from biphase.records import added, encode, ranged, record
from biphase.specs.objectives import Contrastive, Objective
from biphase.specs.sources import (
    Blend,
    Chunks,
    Config,
    Corpus,
    Hub,
    Packing,
    Rows,
    Size,
    check_name,
)

LAYERS = re.compile(r"layers\[(-?\d+|(?=:))(:?)((?<=:)-?\d+|)\]")  # as Stage.freeze names them

INHERIT: Any = None  # not given: taken from the run this one starts from, or else the default


@record
class Stage:
    """An objective for a number of optimizer steps, or of epochs: Stage(MLM(0.4), epochs=2).

    `rope_base` changes the base of the rotary position embedding from this stage on, e.g. for longer texts; 0 leaves it
    unchanged. The other fields act during this stage alone: `peak` replaces the schedule's peak learning rate (0 keeps
    it), `layer_decay` the optimizer's, and `freeze` names what is not trained: "embeddings", and layers as Python
    slices, such as "layers[:12]", "layers[-2:]" or "layers[3]". `corpus` replaces the run's; a corpus that was read
    before is read on where it stopped.
    """

    objective: Objective
    steps: int = ranged(0, least=0)
    rope_base: float = 0.0
    # Converted to steps when a plan is made, which needs the size of the corpus
    epochs: float = ranged(0.0, least=0, added=True)
    peak: float = ranged(0.0, least=0, below=1, hint="0 keeps the schedule's", added=True)
    freeze: tuple[str, ...] = added(())
    layer_decay: float = ranged(0.0, least=0, most=1, hint="0.9 is usual", added=True)
    corpus: str | Corpus | Blend = added("")

    def settle(self) -> None:
        # "layers[0:4]" is "layers[:4]", and their order means nothing: neither must change the key.
        names = {re.sub(r"\[0:", "[:", name) for name in self.freeze}
        object.__setattr__(self, "freeze", tuple(sorted(names)))

    def check(self) -> None:
        if (self.steps > 0) == (self.epochs > 0):
            raise SpecError(
                f"Stage.steps must be at least 1, or epochs above 0, but not both; here steps={self.steps}, "
                f"epochs={self.epochs:g}. Type Stage(CLM(), 1_000) or Stage(CLM(), epochs=2)"
            )
        if self.epochs and isinstance(self.objective, Contrastive):
            raise SpecError(
                "Stage.epochs are of the corpus, which a contrastive stage does not read; give its steps: "
                "Stage(Contrastive(…), 500)"
            )
        if self.corpus and isinstance(self.objective, Contrastive):
            raise SpecError("Stage.corpus: a contrastive stage reads its pairs; leave the corpus out")
        if self.rope_base and self.rope_base < 1:
            raise SpecError(f"Stage.rope_base must be at least 1, it is {self.rope_base:g}; usual: 160_000.0")
        for name in self.freeze:
            if name != "embeddings" and not LAYERS.fullmatch(name):
                raise SpecError(f"Stage.freeze: {name!r} names no layers; type 'embeddings' or 'layers[:12]'")


def layers_of(freeze: tuple[str, ...], layers: int) -> set[int]:
    """Return the layers that `freeze` names, counted from 0, in a model of `layers` layers."""
    chosen: set[int] = set()
    for name in freeze:
        found = LAYERS.fullmatch(name)
        if found is None:
            continue
        first, colon, until = found.groups()
        bounds = [int(bound) for bound in (first, until) if bound]
        outside = any(not -layers <= bound <= layers for bound in bounds)
        every = range(layers)
        if colon:
            part = [*every[int(first) if first else None : int(until) if until else None]]
        else:
            part = [] if outside or bounds == [layers] else [every[bounds[0]]]
        if outside or not part:
            raise SpecError(
                f"Stage.freeze: {name!r} is not in a model of {layers} layers; type 'layers[:{layers}]' for all of them"
            )
        chosen |= {*part}
    return chosen


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
        if not isinstance(rounds, int) or rounds < 1 or rounds * len(turns) > MOST_TURNS:
            raise SpecError(
                f"Alternate has {rounds * len(turns):,} turns, and takes from 1 to {MOST_TURNS}, since each ends in a "
                "checkpoint; for short turns mix the objectives: Mix({CLM(): 1, MLM(0.4): 4})"
            )
        stages = tuple(Stage(objective, **dict[str, Any]({unit: length})) for objective, length in turns)
        return super().__new__(cls, stages * rounds)


@record
class WSD:
    """Warmup-stable-decay schedule: linear warmup, constant `peak`, decay over the last `decay` steps.

    An integer is a number of steps, a float below 1 a share of the run's steps. The decay has the form `shape` and ends
    at the share `floor` of the peak; the warmup begins at the share `warmup_from`. Both are 0 in the usual schedule.
    """

    peak: float = ranged(5e-4, above=0, below=1, hint="try 5e-4")
    warmup: int | float = INHERIT  # default: 2,000 from scratch, 0 after another run; required after Hub
    decay: int | float = 2_000
    shape: Literal["linear", "cosine", "1-sqrt"] = added("linear")
    floor: float = ranged(0.0, least=0, below=1, hint="a share of the peak: 0.1", added=True)
    warmup_from: float = ranged(0.0, least=0, below=1, hint="a share of the peak: 0.1", added=True)

    def settle(self) -> None:
        if self.warmup is INHERIT:
            object.__setattr__(self, "warmup", -1)

    def check(self) -> None:
        for name in ("warmup", "decay"):
            value = getattr(self, name)
            if value < (-1 if name == "warmup" else 0) or (isinstance(value, float) and value >= 1):
                raise SpecError(f"WSD.{name} must be a count of steps or a share below 1, not {value!r}")

    def rate(self, step: int, steps: int, peak: float) -> float:
        """Return the learning rate of step `step` of `steps`, for warmup and decay in steps and the given peak."""
        if step < self.warmup:
            low = self.warmup_from * peak
            return low + (peak - low) * (step + 1) / self.warmup
        left = steps - step
        if left > self.decay or not self.decay:
            return peak
        low = self.floor * peak
        match self.shape:
            case "linear":
                return low + (peak - low) * left / self.decay
            case "cosine":
                return low + (peak - low) * (1 + math.cos(math.pi * (self.decay - left) / self.decay)) / 2
            case "1-sqrt":
                return low + (peak - low) * (1 - math.sqrt((self.decay - left) / self.decay))

    @property
    def form(self) -> str:
        """The form of the decay as text: "linear to 0", "1-sqrt to 10%"."""
        return f"{self.shape} to {self.floor * 100:g}{'%' if self.floor else ''}"


@record
class AdamW:
    """AdamW: weight decay on every parameter, clipping by the global norm.

    With `layer_decay` below 1, each layer's learning rate is that share of the rate of the layer above it; the
    embedding has the lowest.
    """

    betas: tuple[float, float] = ranged((0.9, 0.95), least=0, below=1)
    eps: float = ranged(1e-5, above=0)
    weight_decay: float = ranged(0.1, least=0)
    clip: float = ranged(1.0, above=0)
    layer_decay: float = ranged(1.0, above=0, most=1, hint="0.9 is usual")


@record
class Muon:
    """Muon (torch.optim.Muon) for the matrices of the layers, AdamW for embeddings, head, norms and biases.

    Both follow the schedule of the run. With `adjust="match_rms_adamw"` Muon's steps have the size of AdamW's, so that
    one peak suits both; "original" scales them by the shape of the matrix alone. Clipping and layer decay are those of
    `adamw` and hold for all.
    """

    momentum: float = ranged(0.95, least=0, below=1, hint="0.95 is usual")
    nesterov: bool = True
    weight_decay: float = ranged(0.1, least=0)
    newton_schulz_steps: int = ranged(5, least=1, below=100, hint="5 is usual")  # torch refuses more
    adjust: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    adamw: AdamW = AdamW()

    @property
    def clip(self) -> float:
        return self.adamw.clip

    @property
    def layer_decay(self) -> float:
        return self.adamw.layer_decay


@record
class LoRA:
    """Low-rank adapters (peft's LoRA) beside frozen weights; they are merged when the model is used or exported.

    `targets` are layer names such as q_proj; empty means every matrix of the backbone.
    """

    rank: int = ranged(16, least=1)
    alpha: int = ranged(32, least=1)
    targets: tuple[str, ...] = ()

    def settle(self) -> None:
        object.__setattr__(
            self, "targets", tuple(sorted(self.targets))
        )  # their order must not change the key


UNUSUAL = ("shape", "floor", "warmup_from")  # fields of a schedule that most leave at their defaults


@dataclass(frozen=True)
class Phase:
    """An objective from step `first` up to, not including, step `until`.

    `rope_base` 0 keeps the model's own, `peak` 0 the schedule's, `layer_decay` 0 the optimizer's, `corpus` "" the
    run's. `freeze` is beside what the run freezes.
    """

    objective: Objective
    first: int
    until: int
    rope_base: float = 0.0
    peak: float = 0.0
    freeze: tuple[str, ...] = ()
    layer_decay: float = 0.0
    corpus: str | Corpus | Blend = ""

    @property
    def how(self) -> tuple[object, ...]:
        return self.rope_base, self.peak, self.freeze, self.layer_decay, self.corpus


Reads = tuple[tuple[int, str | Corpus | Blend], ...]  # sample indices, each with what is read from there on


@record
class Kept:
    """The checkpoint of a run after `step` steps, as a part of a `Merge`; 0 is what the run starts from."""

    run: Pretrain
    step: int

    def check(self) -> None:
        if not 0 <= self.step <= self.run.steps:
            raise SpecError(
                f"Kept: {self.run.name!r} has {self.run.steps:,} steps and no step {self.step:,}; name one of them"
            )

    @property
    def rope_base(self) -> float:
        return self.run.rope_base_after(self.step)

    @cached_property  # as in a merge of merges the same checkpoint is reached on many paths
    def samples(self) -> int:
        """The sample index that follows on this checkpoint."""
        return self.run.origin_sample + self.run.rows_until(self.step)

    @property
    def reads(self) -> Reads:
        """What is read up to this checkpoint."""
        return tuple(read for read in self.run.reads if read[0] < self.samples)

    @cached_property
    def total_steps(self) -> int:
        """The number of steps from the root to this checkpoint."""
        return self.run.origin_step + self.step


@record
class Merge:
    """The weighted mean of the weights of checkpoints, as a start: `Merge((a, 0.5), (Kept(b, 200), 0.5))`.

    Without weights all count alike. A run stands for its end. The optimizer state of what starts here is new.
    """

    parts: tuple[Kept, ...]
    weights: tuple[float, ...]

    def __init__(
        self,
        *merged: Pretrain | Kept | tuple[Pretrain | Kept, float],
        parts: tuple[Kept, ...] = (),
        weights: tuple[float, ...] = (),
    ) -> None:
        pairs = [one if isinstance(one, (tuple, list)) else (one,) for one in merged]
        given = [pair[1] for pair in pairs if len(pair) == 2]
        if len(given) not in (0, len(pairs)) or any(len(pair) not in (1, 2) for pair in pairs):
            raise SpecError(
                "Merge: give every run its weight, or none: Merge((a, 0.5), (b, 0.5)) or Merge(a, b)"
            )
        if pairs:
            parts = tuple(
                Kept(pair[0], pair[0].steps) if isinstance(pair[0], Pretrain) else pair[0] for pair in pairs
            )
            weights = tuple(given) or (1 / len(pairs),) * len(pairs)
        object.__setattr__(self, "parts", parts)
        object.__setattr__(self, "weights", weights)

    def check(self) -> None:
        if (
            len(self.parts) < 2
            or len(self.parts) != len(self.weights)
            or len({*self.parts}) < len(self.parts)
        ):
            raise SpecError(
                "Merge takes two or more different runs or steps: Merge((a, 0.5), (Kept(b, 200), 0.5))"
            )
        if abs(sum(self.weights) - 1) > 1e-6:
            raise SpecError(f"Merge: the weights {self.weights} must sum to 1; leave them out for equal ones")
        first = self.parts[0].run
        for part in self.parts:
            if part.run.adapter:
                raise SpecError(
                    f"Merge: {part.run.name!r} has an adapter, and means of its factors are no mean of weights; "
                    "export it and start from Hub('./folder')"
                )
            if part.run.in_epochs:
                raise SpecError(
                    f"Merge: {part.run.name!r} has stages in epochs, so its steps are not known yet; give its stages steps: "
                    "Stage(CLM(), 1_000)"
                )
            if not part.run.corpus:
                raise SpecError(f"Merge: {part.run.name!r} has no corpus; name one: Pretrain(…, corpus=…)")
            if _shape(part.run) != _shape(first) or part.rope_base != self.parts[0].rope_base:
                raise SpecError(
                    f"Merge: {part.run.name!r} has another shape than {first.name!r}; merge models of one shape"
                )

    @cached_property
    def by_steps(self) -> tuple[Kept, ...]:
        """Its parts, the one with the most steps first; a run that starts here inherits from that one."""
        return tuple(sorted(self.parts, key=lambda part: -part.total_steps))


def _shape(run: Pretrain) -> object:
    """Return what must be equal in models whose weights are averaged, as far as it is known before they are loaded."""
    start = run.root.start
    if isinstance(start, (Size, Config)):
        apart = ("name", "precision", "init_std")
        return {name: value for name, value in encode(start).items() if name not in apart}
    return type(start).__name__, getattr(start, "windows", "")


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
    start: Size | Config | Hub | Merge | Pretrain
    corpus: str | Corpus | Blend = INHERIT
    stages: tuple[Stage, ...] = ()
    schedule: WSD = INHERIT
    optimizer: AdamW | Muon = INHERIT
    batch_tokens: int = INHERIT
    packing: Chunks | Rows = INHERIT
    precision: Literal["fp32", "bf16"] = INHERIT
    seed: int = ranged(INHERIT, least=0, below=2**31)
    adapter: LoRA | None = INHERIT
    freeze: Literal["nothing", "embeddings"] = INHERIT
    optimizer_state: Literal["keep", "reset"] = "keep"
    data: Literal["continue", "restart"] = "continue"
    keep: tuple[int, ...] = ()  # steps whose checkpoints are results too, named `name-step`
    # Interval in steps and size in tokens of the held-out evaluation. They do not affect training, so are in no key.
    heldout_every: int = ranged(1_000, least=1)
    heldout_tokens: int = 1_000_000
    # This many times the squared log-sum-exp of the logits is added to the training loss; 1e-4 is usual
    z_loss: float = ranged(0.0, least=0, below=1, hint="try 1e-4", added=True)

    def settle(self) -> None:
        defaults = {
            "corpus": "" if isinstance(self.start, Hub) and not self.stages else INHERIT,
            "optimizer": AdamW(),
            "batch_tokens": PAPER_BATCH,
            "packing": Chunks(),
            "precision": self.start.precision if isinstance(self.start, (Size, Config)) else "bf16",
            "seed": 42,
            "adapter": None,
            "freeze": "nothing",
        }
        for name, value in defaults.items():
            if getattr(self, name) is INHERIT:
                inherited = getattr(self.sources[0].run, name) if self.sources else value
                object.__setattr__(self, name, inherited)
        if self.corpus is INHERIT:
            raise SpecError(
                f"Pretrain {self.name!r} needs a corpus: corpus='fineweb-edu', 'builtin', Corpus(…) or Blend(…)"
            )
        if isinstance(self.start, Merge):  # it has no optimizer state, so both values mean the same
            object.__setattr__(self, "optimizer_state", "keep")
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
        schedule, before = self.schedule, self.sources[0].run if self.sources else None
        if schedule is INHERIT:
            schedule = replace(before.schedule, warmup=INHERIT) if before else WSD()
        if not self.stages:
            return WSD(schedule.peak, 0, 0)
        warmup = schedule.warmup
        if warmup == -1:
            untrained = isinstance(self.start, Merge) and not self.origin_step
            if isinstance(self.start, Hub) or untrained:
                start = "a hub model" if isinstance(self.start, Hub) else "a merge of untrained starts"
                raise SpecError(
                    f"Pretrain {self.name!r} starts from {start} with a new optimizer state: "
                    "state its warmup, e.g. schedule=WSD(peak=1e-4, warmup=0.05)"
                )
            warmup = 0 if before else PAPER_WARMUP
        shares_or_steps = (warmup, schedule.decay)
        warmup, decay = (round(n * self.steps) if isinstance(n, float) else n for n in shares_or_steps)
        return replace(schedule, warmup=warmup, decay=decay)

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
        if isinstance(start := self.root.start, Size):  # others' layers are counted when they are built
            for stage in self.stages:
                layers_of(stage.freeze, start.layers)
        self._check_pairs(where)
        if self.heldout_tokens < (least := self.packing.length):
            raise SpecError(f"{where}: heldout_tokens must be at least {least}, not {self.heldout_tokens}")
        if self.adapter and isinstance(self.start, (Size, Config)):
            raise SpecError(
                f"{where}: LoRA adapts a model that can do something; a new one has to learn: leave it out"
            )
        if self.adapter and isinstance(self.optimizer, Muon):
            raise SpecError(f"{where}: the matrices of LoRA are trained by AdamW; say optimizer=AdamW()")
        if self.adapter and isinstance(self.start, Merge):
            raise SpecError(
                f"{where}: LoRA cannot start from a Merge; export the merge and start from Hub('./folder')"
            )
        if isinstance(self.start, Merge):
            for part in self.start.parts:
                self._check_data(where, part.run)
            reads = {part.reads for part in self.start.parts if part.samples}
            if self.stages and self.data == "continue" and len(reads) > 1:
                raise SpecError(
                    f"{where}: the stages of the runs that it averages have read different corpora, so the data cannot go on "
                    "where they stopped; say data='restart'"
                )
        elif isinstance(self.start, Pretrain):
            self._check_parent(where, self.start)
        elif (self.optimizer_state, self.data) != ("keep", "continue"):
            raise SpecError(
                f"{where}: optimizer_state and data say how another run goes on; this one has none to continue"
            )

    def _check_pairs(self, where: str) -> None:
        new = isinstance(self.start, (Size, Config))
        if self.stages and new and isinstance(self.stages[0].objective, Contrastive):
            raise SpecError(
                f"{where}: contrastive learning needs a model that can read; begin with another stage: "
                "stages=(Stage(MLM(0.4), 1_000), Stage(Contrastive(…), 500))"
            )
        for stage in self.stages:
            if isinstance(stage.objective, Contrastive) and stage.objective.length > self.packing.length:
                raise SpecError(
                    f"{where}: Contrastive.length is {stage.objective.length:,}, longer than its rows; say "
                    f"length={self.packing.length}, or packing=Chunks({stage.objective.length})"
                )

    def _check_parent(self, where: str, parent: Pretrain) -> None:
        if not parent.stages:
            raise SpecError(f"{where}: {parent.name!r} trains nothing, so start from its start instead")
        if self.adapter != parent.adapter:
            raise SpecError(
                f"{where}: {parent.name!r} was trained with another adapter; give both the same, or export it and start "
                "from Hub('./folder')"
            )
        if self.optimizer_state == "keep" and type(self.optimizer) is not type(parent.optimizer):
            raise SpecError(
                f"{where}: {parent.name!r} was trained by {type(parent.optimizer).__name__}, whose optimizer state "
                f"{type(self.optimizer).__name__} cannot go on with; say optimizer_state='reset'"
            )
        self._check_data(where, parent)

    def _check_data(self, where: str, parent: Pretrain) -> None:
        """Refuse to read on where `parent` stopped if that is not possible."""
        if self.data == "continue":
            for name in ("corpus", "packing", "seed") if self.stages else ():
                if getattr(self, name) != getattr(parent, name):
                    raise SpecError(
                        f"{where}: the data cannot go on where {parent.name!r} stopped, because {name} differs; "
                        f"say data='restart'{', or Stage(…, corpus=…) for the new text' if name == 'corpus' else ''}"
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
        if any(stage.corpus for stage in self.stages):
            raise SpecError(
                f"Pretrain {self.name!r}: it has stages in epochs and stages with a corpus of their own; give all steps: "
                "Stage(CLM(), 1_000)"
            )
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

    def rows_until(self, step: int) -> int:
        """Return the number of rows that the first `step` steps read; those on pairs read none."""
        on_pairs = sum(
            min(step, phase.until) - phase.first
            for phase in self.phases
            if isinstance(phase.objective, Contrastive) and phase.first < step
        )
        return (step - on_pairs) * self.rows_per_step

    def reads_at(self, step: int) -> tuple[Packing, int]:
        """Return the packing and the number of tokens that step `step` reads; of pairs, at most so many."""
        objective = self.phase_at(step).objective
        if isinstance(objective, Contrastive):
            return Rows(objective.length), objective.most_tokens
        return self.packing, self.batch_tokens

    @property
    def results(self) -> dict[str, int]:
        """The names of the checkpoints that are results, with their steps, in the order of steps."""
        return {f"{self.name}-{step}": step for step in self.keep} | {self.name: self.steps}

    @property
    def decay_start(self) -> int:
        return self.steps - int(self.schedule.decay)

    @property
    def first_peak(self) -> float:
        """The peak of the first phase, whether the stage or the schedule says it."""
        return (self.phases[0].peak if self.stages else 0.0) or self.schedule.peak

    @property
    def unusual(self) -> dict[str, Any]:
        """What it says beyond the fields that most runs have: of the form of its rates, its stages and its loss."""
        said = {name: value for name, value in encode(self.schedule).items() if name in UNUSUAL}
        phases = self.phases
        for name in ("freeze", "layer_decay"):
            values = [encode(getattr(phase, name)) for phase in phases]
            if any(values):  # one value where it is the same throughout, whatever the number of phases
                said[name] = values if any(value != values[0] for value in values) else values[0]
        if any(phase.corpus for phase in phases):
            said["corpora"] = [getattr(one := phase.corpus or self.corpus, "name", one) for phase in phases]
        peaks = [phase.peak or self.schedule.peak for phase in phases]
        if len({*peaks}) > 1:
            said["peaks"] = peaks
        return said | ({"z_loss": self.z_loss} if self.z_loss else {})

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of step `step` (from 0)."""
        begun = [0.0, *(phase.peak for phase in self.phases if phase.first <= step)]
        return self.schedule.rate(step, self.steps, begun[-1] or self.schedule.peak)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The run's phases in order.

        Neighbouring stages that differ in their numbers of steps only merge, unless the masking ratio follows a schedule:
        that is counted from the start of its stage, so the boundary matters.
        """
        phases: list[Phase] = []
        step, base = 0, self.initial_rope_base
        already = self.freeze == "embeddings" or self.adapter is not None
        for stage in self.stages:
            base = stage.rope_base or base
            peak = 0.0 if stage.peak == self.schedule.peak else stage.peak
            freeze = tuple(name for name in stage.freeze if not (name == "embeddings" and already))
            layer_decay = 0.0 if stage.layer_decay == self.optimizer.layer_decay else stage.layer_decay
            corpus = "" if stage.corpus == self.corpus else stage.corpus
            how = (base, peak, freeze, layer_decay, corpus)
            last = phases[-1] if phases else None
            if (
                last
                and not last.objective.restarts
                and (last.objective, *last.how) == (stage.objective, *how)
            ):
                phases.pop()
            else:
                last = None
            phase = Phase(stage.objective, last.first if last else step, step + stage.steps, *how)
            step = phase.until
            phases.append(phase)
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

    @cached_property
    def sources(self) -> tuple[Kept, ...]:
        """The checkpoints that it starts from, the one with the most steps first; none if it starts from a model."""
        if isinstance(self.start, Merge):
            return self.start.by_steps
        return (Kept(self.start, self.start.steps),) if isinstance(self.start, Pretrain) else ()

    @property
    def lineage(self) -> tuple[Pretrain, ...]:
        """The runs that this one continues, oldest first, and itself. Of a merge, first those of its longest part."""
        found: dict[int, Pretrain] = {}  # by id, since hashing a run is slow
        waiting: list[Pretrain] = [self]
        while waiting:
            run = waiting[-1]
            before = next((part.run for part in run.sources if id(part.run) not in found), None)
            if before:
                waiting.append(before)
            else:
                found[id(run)] = waiting.pop()
        return tuple(found.values())

    @property
    def root(self) -> Pretrain:
        """The first run of the chain: the one that starts from a model."""
        return self.lineage[0]

    @property
    def origin_step(self) -> int:
        """The number of steps taken by the runs that this one continues; of a merge, those of its longest part."""
        return self.sources[0].total_steps if self.sources else 0

    @property
    def origin_sample(self) -> int:
        """The sample index at which this run's data begins: the number of rows the earlier runs have read."""
        if self.data == "restart":
            return 0
        return max((part.samples for part in self.sources), default=0)

    @cached_property  # as it walks the whole chain
    def reads(self) -> Reads:
        """What is read from the first sample index to the end of this run; the same in a row is one."""
        before = max(self.sources, key=attrgetter("samples"), default=None)
        reads = [*before.reads] if before and self.data == "continue" else []
        for phase in self.phases:
            corpus = phase.corpus or self.corpus
            if isinstance(phase.objective, Contrastive):
                continue  # it reads pairs
            if not reads or reads[-1][1] != corpus:
                reads.append((self.origin_sample + self.rows_until(phase.first), corpus))
        return tuple(reads)

    @property
    def initial_rope_base(self) -> float:
        """The base of the rotary position embedding that this run starts with; 0: the model's own."""
        return self.sources[0].rope_base if self.sources else 0.0

    @property
    def changes_heldout(self) -> bool:
        """Whether its held-out losses are on other text, packing or pairs than those of the run it continues."""
        fields = attrgetter("corpus", "packing", "heldout_tokens")
        if not self.sources:
            return False
        before = self.sources[0].run
        first, last = (
            [stage.objective for stage in stages] for stages in (self.stages[:1], before.stages[-1:])
        )
        other_pairs = any(isinstance(objective, Contrastive) for objective in first) and first != last
        return other_pairs or fields(self) != fields(before)
