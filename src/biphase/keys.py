"""What a state is, as a hash: everything that determines the model after some step of a run, and nothing else.

A run is read as *acts* (an objective over a span of steps, equal neighbours merged) under a learning-rate
law. The key of the state at step s looks only at what has happened by s, so runs that begin alike share the
keys of their common beginning, and no key depends on which other runs a study holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from biphase.records import content_key, encode
from biphase.specs import (
    CLM,
    MLM,
    AdamW,
    Corpus,
    Cosine,
    Finetune,
    Hub,
    Linear,
    Objective,
    Pretrain,
    Size,
    Task,
)

# Raised when the meaning of a record changes without any field changing (e.g. another hash for masks).
GENERATION = 1
HUB_GENERATION = 2  # the same for how a hub model is made ready to be trained
TRIAL_GENERATION = 1  # the same for fine-tuning and scoring


@dataclass(frozen=True)
class Phase:
    """An objective from step `first` up to, not including, step `until`; `rope_base` 0: as the model has it."""

    objective: Objective
    first: int
    until: int
    rope_base: float = 0.0


@dataclass(frozen=True)
class Identities:
    """The fingerprints of what lies outside the study file. Asked once per corpus, hub model and task."""

    data: Callable[[Pretrain], str]  # the key of the run's shards
    hub: Callable[[Hub], str]
    task: Callable[[Task], str] = content_key  # the key of a dataset as it is asked
    reads: Callable[[Hub], str] = lambda model: ""  # the tokenizer beside a model, where no revision pins it


def phases(run: Pretrain) -> tuple[Phase, ...]:
    """The run's objectives in order. Neighbours merge if what they do cannot tell where one began."""
    merged: list[Phase] = []
    step, base = 0, last_rope_base(run.start) if isinstance(run.start, Pretrain) else 0.0
    for stage in run.stages:
        until, base = step + stage.steps, stage.rope_base or base
        last = merged[-1] if merged else None
        alike = last is not None and (last.objective, last.rope_base) == (stage.objective, base)
        if last and alike and not _counts_from_its_start(stage.objective):
            merged[-1] = Phase(last.objective, last.first, until, base)
        else:
            merged.append(Phase(stage.objective, step, until, base))
        step = until
    return tuple(merged)


def last_rope_base(run: Pretrain) -> float:
    """The base of the rotary positions at the end of a run; 0: as the model came."""
    return phases(run)[-1].rope_base if run.stages else 0.0


def _counts_from_its_start(objective: Objective) -> bool:
    return isinstance(objective, MLM) and not isinstance(objective.ratio, float)


def phase_at(run: Pretrain, step: int) -> Phase:
    """The act that step `step` (counted from 0) belongs to."""
    return next(act for act in phases(run) if act.first <= step < act.until)


def decay_start(run: Pretrain) -> int:
    return run.steps - int(run.schedule.decay)


def root_of(run: Pretrain) -> Pretrain:
    """The run that this one goes on from in the end: the one with a start of its own."""
    return root_of(run.start) if isinstance(run.start, Pretrain) else run


def origin_step(run: Pretrain) -> int:
    """Steps taken before this run by the runs it goes on from."""
    return origin_step(run.start) + run.start.steps if isinstance(run.start, Pretrain) else 0


def origin_sample(run: Pretrain) -> int:
    """Rows drawn before this run: where its data begins."""
    if not isinstance(run.start, Pretrain) or run.data == "restart":
        return 0
    return origin_sample(run.start) + run.start.steps * run.start.rows_per_step


def checkpoint_key(run: Pretrain, step: int, identities: Identities) -> str:
    """The key of the run's state after `step` steps."""
    return Keyring(identities).at(run, step)


class Keyring:
    """The state keys of many runs. What does not depend on the step is worked out once per run."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._runs: dict[int, tuple[Pretrain, dict[str, object], list[Phase]]] = {}
        self._keys: dict[tuple[int, int], str] = {}

    def at(self, run: Pretrain, step: int) -> str:
        """The key of the run's state after `step` steps."""
        if isinstance(run.start, Pretrain) and step == 0:
            return self.at(run.start, run.start.steps)
        if isinstance(run.start, Hub) and not run.stages:  # a model as it is: nothing else has touched it
            reads = self._identities.reads(run.start)
            return content_key({"generation": GENERATION, "start": self._start(run), "reads": reads})
        place = (id(run), step)
        if place not in self._keys:
            _, fixed, spans = self._of(run)
            done = [_span(act, step) for act in spans if act.first < step]
            self._keys[place] = content_key(
                {**fixed, "rate": _rate_until(run, step), "acts": done, "step": step}
            )
        return self._keys[place]

    def _of(self, run: Pretrain) -> tuple[Pretrain, dict[str, object], list[Phase]]:
        if id(run) not in self._runs:
            fixed = {
                "generation": GENERATION,
                "start": self._start(run),
                "data": self._identities.data(run),
                "first_draw": origin_sample(run),
                "moments": run.moments if isinstance(run.start, Pretrain) else "new",
                "packing": encode(run.packing),
                "batch_tokens": run.batch_tokens,
                "optimizer": _optimizer(run.optimizer),
                "precision": run.precision,
                "seed": run.seed,
            }
            # What not every run has counts only where it is said.
            if run.adapter:
                fixed["adapter"] = encode(run.adapter)
            if run.freeze != "nothing" and not run.adapter:  # beside which everything is frozen
                fixed["freeze"] = run.freeze
            self._runs[id(run)] = (run, fixed, list(phases(run)))  # holding the run keeps its id its own
        return self._runs[id(run)]

    def _start(self, run: Pretrain) -> object:
        match run.start:
            case Size():
                # Its name and its habitual precision do not determine the weights.
                return {k: v for k, v in encode(run.start).items() if k not in ("name", "precision")}
            case Hub():
                windows = {"windows": run.start.windows} if run.start.windows != "symmetric" else {}
                rules = {"rules": HUB_GENERATION} if run.stages else {}
                return {"hub": self._identities.hub(run.start), **windows, **rules}
            case Pretrain():
                return {"state": self.at(run.start, run.start.steps)}


def _span(act: Phase, step: int) -> list[object]:
    """An act as far as step `step` has felt it."""
    span = [encode(act.objective), act.first, min(act.until, step)]
    return [*span, act.rope_base] if act.rope_base else span


def _optimizer(spec: AdamW) -> dict[str, object]:
    """A field that came later counts only where it says something else."""
    said = encode(spec)
    if spec.layer_decay == 1:
        del said["layer_decay"]
    return said


def _rate_until(run: Pretrain, step: int) -> list[object]:
    """The learning-rate law as far as step `step` has felt it."""
    wsd, decay = run.schedule, decay_start(run)
    law: list[object] = [wsd.peak, wsd.warmup]
    if step > decay:
        law += [decay, run.steps]
    return law


def finetuning_key(model: str, task: str, spec: Finetune, *, lr: float, seed: int) -> str:
    """The key of a fine-tuned model: which model, on which dataset, how."""
    return content_key(
        {
            "generation": TRIAL_GENERATION,
            "model": model,
            "task": task,
            "lr": lr,
            "seed": seed,
            "protocol": spec.protocol,
            "precision": spec.precision,
            "length": spec.length,
            "warmup": spec.warmup,
            "optimizer": _optimizer(spec.optimizer),
            **({"causal": True} if spec.causal else {}),
        }
    )


def trial_key(training: str, task: str, documents: str) -> str:
    """The key of the scores of a fine-tuned model on a dataset; `documents` is empty where nothing is retrieved."""
    return content_key({"training": training, "task": task, "documents": documents})


def label(objective: Objective) -> str:
    """An objective as a person says it: clm, mlm 40%, mntp 40→20%."""
    if isinstance(objective, CLM):
        return "clm"
    ratio = objective.ratio
    moves = isinstance(ratio, (Linear, Cosine))
    percent = f"{ratio.first * 100:g}→{ratio.last * 100:g}%" if moves else f"{ratio * 100:.6g}%"
    word = type(objective).__name__.lower()
    rule = (
        ""
        if objective.replace == (1.0, 0.0, 0.0)
        else f" {'/'.join(f'{one * 100:g}' for one in objective.replace)}"
    )
    return f"{word} {percent}{rule}"


def data_key(corpus: Corpus, corpus_fingerprint: str, tokenizer_fingerprint: str) -> str:
    """The key of a tokenized corpus: its content, its tokenizer, and the rules between them."""
    rules = {k: v for k, v in encode(corpus).items() if k in ("text", "bos", "tokens")}
    return content_key(
        {"generation": GENERATION, "content": corpus_fingerprint, "tokenizer": tokenizer_fingerprint, **rules}
    )
