"""Keys of checkpoints, trials and tokenized corpora: hashes of everything that determines a result, and nothing else.

A run is read as a sequence of phases (`Phase`: an objective over a span of steps; equal neighbours are merged) under
a learning-rate schedule. The key of the checkpoint at step s covers only what has happened up to s. Runs that begin
alike therefore share the keys of their common steps, and no key depends on which other runs a study contains.

`Keyring` gives the checkpoint keys of many runs, `finetuning_key` and `trial_key` those of fine-tuned models and their
scores, `data_key` that of tokenized shards. `Identities` supplies the fingerprints of what lies outside the study
file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from biphase.records import content_key, encode
from biphase.specs import (
    CLM,
    MLM,
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

# Incremented when the meaning of a record changes although its fields do not (e.g. another hash for masks).
GENERATION = 1
HUB_GENERATION = 2  # the same for how a hub model is prepared for training
TRIAL_GENERATION = 1  # the same for fine-tuning and scoring


@dataclass(frozen=True)
class Phase:
    """An objective from step `first` up to, not including, step `until`; `rope_base` 0 keeps the model's own."""

    objective: Objective
    first: int
    until: int
    rope_base: float = 0.0


@dataclass(frozen=True)
class Identities:
    """Functions that return the fingerprints of the inputs outside the study file."""

    data: Callable[[Pretrain], str]  # the key of the run's shards
    hub: Callable[[Hub], str]
    task: Callable[[Task], str] = content_key  # the key of a dataset and how its examples are presented
    reads: Callable[[Hub], str] = lambda model: ""  # the model's tokenizer, if no revision pins it


def phases(run: Pretrain) -> tuple[Phase, ...]:
    """Return the run's phases in order.

    Neighbouring stages with the same objective and rope base merge, unless the masking ratio follows a schedule: that
    is counted from the start of its stage, so the boundary matters.
    """
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
    """Return the base of the rotary position embedding at the end of a run; 0 if no stage changes it."""
    return phases(run)[-1].rope_base if run.stages else 0.0


def _counts_from_its_start(objective: Objective) -> bool:
    return isinstance(objective, MLM) and not isinstance(objective.ratio, float)


def phase_at(run: Pretrain, step: int) -> Phase:
    """Return the phase that step `step` (counted from 0) belongs to."""
    return next(phase for phase in phases(run) if phase.first <= step < phase.until)


def decay_start(run: Pretrain) -> int:
    return run.steps - int(run.schedule.decay)


def root_of(run: Pretrain) -> Pretrain:
    """The run that this one goes on from in the end: the one with a start of its own."""
    return root_of(run.start) if isinstance(run.start, Pretrain) else run


def origin_step(run: Pretrain) -> int:
    """Return the number of steps taken by the chain of runs that this one continues."""
    return origin_step(run.start) + run.start.steps if isinstance(run.start, Pretrain) else 0


def origin_sample(run: Pretrain) -> int:
    """Return the sample index at which this run's data begins: the number of rows the earlier runs have read."""
    if not isinstance(run.start, Pretrain) or run.data == "restart":
        return 0
    return origin_sample(run.start) + run.start.steps * run.start.rows_per_step


def checkpoint_key(run: Pretrain, step: int, identities: Identities) -> str:
    """Return the key of the run's checkpoint after `step` steps."""
    return Keyring(identities).at(run, step)


class Keyring:
    """Computes the checkpoint keys of many runs, caching per run what does not depend on the step."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        self._runs: dict[int, tuple[Pretrain, dict[str, object], list[Phase]]] = {}
        self._keys: dict[tuple[int, int], str] = {}

    def at(self, run: Pretrain, step: int) -> str:
        """Return the key of the run's checkpoint after `step` steps."""
        if isinstance(run.start, Pretrain) and step == 0:
            return self.at(run.start, run.start.steps)
        if isinstance(run.start, Hub) and not run.stages:  # an untrained hub model: only its files matter
            tokenizer = self._identities.reads(run.start)
            return content_key({"generation": GENERATION, "start": self._start(run), "tokenizer": tokenizer})
        place = (id(run), step)
        if place not in self._keys:
            _, fixed, spans = self._of(run)
            done = [_span(phase, step) for phase in spans if phase.first < step]
            self._keys[place] = content_key(
                {**fixed, "learning_rate": _rate_until(run, step), "phases": done, "step": step}
            )
        return self._keys[place]

    def _of(self, run: Pretrain) -> tuple[Pretrain, dict[str, object], list[Phase]]:
        if id(run) not in self._runs:
            fixed = {
                "generation": GENERATION,
                "start": self._start(run),
                "data": self._identities.data(run),
                "first_sample": origin_sample(run),
                "optimizer_state": run.optimizer_state if isinstance(run.start, Pretrain) else "new",
                "packing": encode(run.packing),
                "batch_tokens": run.batch_tokens,
                "optimizer": encode(run.optimizer),
                "precision": run.precision,
                "seed": run.seed,
                "adapter": encode(run.adapter),
                "freeze": "nothing" if run.adapter else run.freeze,  # with an adapter all weights are frozen
            }
            self._runs[id(run)] = (
                run,
                fixed,
                list(phases(run)),
            )  # keeps the run alive: its id() stays unique
        return self._runs[id(run)]

    def _start(self, run: Pretrain) -> object:
        match run.start:
            case Size():
                # Its name and default precision do not determine the weights.
                return {k: v for k, v in encode(run.start).items() if k not in ("name", "precision")}
            case Hub():
                rules = {"generation": HUB_GENERATION} if run.stages else {}
                return {"hub": self._identities.hub(run.start), "windows": run.start.windows, **rules}
            case Pretrain():
                return {"checkpoint": self.at(run.start, run.start.steps)}


def _span(phase: Phase, step: int) -> list[object]:
    """Return the part of a phase that lies before step `step`, as JSON values."""
    return [encode(phase.objective), phase.first, min(phase.until, step), phase.rope_base]


def _rate_until(run: Pretrain, step: int) -> list[object]:
    """Return what determines the learning rates up to step `step`; the decay counts only after it has begun."""
    wsd, decay = run.schedule, decay_start(run)
    law: list[object] = [wsd.peak, wsd.warmup]
    if step > decay:
        law += [decay, run.steps]
    return law


def finetuning_key(model: str, task: str, spec: Finetune, *, lr: float, seed: int) -> str:
    """Return the key of a fine-tuned model: the pretrained model, the dataset and the hyperparameters."""
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
            "optimizer": encode(spec.optimizer),
            "causal": spec.causal,
        }
    )


def trial_key(training: str, task: str, documents: str) -> str:
    """Return the key of a fine-tuned model's scores on a dataset; `documents` is empty except for retrieval."""
    return content_key({"training": training, "task": task, "documents": documents})


def label(objective: Objective) -> str:
    """Return a readable name of an objective: clm, mlm 40%, mntp 40→20%."""
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
    """Return the key of a tokenized corpus: its content, its tokenizer and the options of tokenization."""
    rules = {k: v for k, v in encode(corpus).items() if k in ("text", "bos", "tokens")}
    return content_key(
        {"generation": GENERATION, "content": corpus_fingerprint, "tokenizer": tokenizer_fingerprint, **rules}
    )
