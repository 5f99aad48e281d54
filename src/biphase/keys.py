"""Keys of checkpoints, trials and tokenized corpora: hashes of everything that determines a result, and nothing else.

A run is a sequence of phases (`Pretrain.phases`: an objective over a span of steps) under a learning-rate schedule. The key of the checkpoint at step s covers only what has happened up to s. Runs that begin
alike therefore share the keys of their common steps, and no key depends on which other runs a study contains.

`Keyring` gives the checkpoint keys of many runs, `finetuning_key` and `trial_key` those of fine-tuned models and their
scores, `data_key` that of tokenized shards. `Identities` supplies the fingerprints of what lies outside the study
file.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from biphase.presets import shares_of
from biphase.records import content_key, encode
from biphase.specs import (
    Blend,
    Config,
    Contrastive,
    Corpus,
    Finetune,
    Hub,
    Merge,
    Pairs,
    Phase,
    Pretrain,
    Size,
    Task,
)

# Incremented when the meaning of a record changes although its fields do not (e.g. another hash for masks).
GENERATION = 1
HUB_GENERATION = 2  # the same for how a hub model is prepared for training
TRIAL_GENERATION = 1  # the same for fine-tuning and scoring


@dataclass(frozen=True)
class Identities:
    """Functions that return the fingerprints of the inputs outside the study file."""

    data: Callable[[Corpus], str]  # the key of a corpus's shards
    hub: Callable[[Hub], str]
    # The key of a dataset and how its examples are presented, or of text pairs.
    task: Callable[[Task | Pairs], str] = content_key
    reads: Callable[[Hub], str] = lambda model: ""  # the model's tokenizer, if no revision pins it
    tokens: Callable[[Corpus], int] = lambda corpus: (
        0
    )  # training tokens, for stages in epochs; 0: not tokenized


def checkpoint_key(run: Pretrain, step: int, identities: Identities) -> str:
    """Return the key of the run's checkpoint after `step` steps."""
    return Keyring(identities).at(run, step)


class Keyring:
    """Computes the checkpoint keys of many runs, caching per run what does not depend on the step."""

    def __init__(self, identities: Identities) -> None:
        self._identities = identities
        # By id(), since hashing a run is slow. The run itself is kept, so that its id stays unique.
        self._runs: dict[int, tuple[Pretrain, dict[str, object], tuple[Phase, ...]]] = {}
        self._keys: dict[tuple[int, int], str] = {}
        self._means: dict[int, tuple[Merge, str]] = {}

    def at(self, run: Pretrain, step: int) -> str:
        """Return the key of the run's checkpoint after `step` steps."""
        if run.parent and step == 0:
            return self.at(run.parent, run.parent.steps)
        if isinstance(run.start, Merge) and step == 0:
            return self._merged(run.start)
        if isinstance(run.start, Hub) and not run.stages:  # an untrained hub model: only its files matter
            tokenizer = self._identities.reads(run.start)
            return content_key({"generation": GENERATION, "start": self._start(run), "tokenizer": tokenizer})
        position = (id(run), step)
        if position not in self._keys:
            _, constant, phases = self._constant(run)
            peak = run.first_peak  # rates have one form, whether the schedule or a stage says them
            done = [self._span(run, peak, phase, step) for phase in phases if phase.first < step]
            rate = _rate_until(run, peak, step)
            self._keys[position] = content_key(
                {**constant, "learning_rate": rate, "phases": done, "step": step}
            )
        return self._keys[position]

    def _constant(self, run: Pretrain) -> tuple[Pretrain, dict[str, object], tuple[Phase, ...]]:
        if id(run) not in self._runs:
            constant = {
                "generation": GENERATION,
                "start": self._start(run),
                "data": self._data(run, run.corpus),
                "first_sample": run.origin_sample,
                "optimizer_state": run.optimizer_state if run.parent else "new",
                "packing": encode(run.packing),
                "batch_tokens": run.batch_tokens,
                "optimizer": encode(run.optimizer),
                "precision": run.precision,
                "seed": run.seed,
                "adapter": encode(run.adapter),
                "freeze": "nothing" if run.adapter else run.freeze,  # with an adapter all weights are frozen
            }
            if run.z_loss:
                constant["z_loss"] = run.z_loss
            self._runs[id(run)] = run, constant, run.phases
        return self._runs[id(run)]

    def _merged(self, merge: Merge) -> str:
        """Return the key of a mean: its parts' keys and weights, in the order in which they are summed."""
        if id(merge) not in self._means:
            key = content_key({"generation": GENERATION, "merge": self.summands(merge)})
            self._means[id(merge)] = merge, key
        return self._means[id(merge)][1]

    def summands(self, merge: Merge) -> list[list[object]]:
        """Return [key, weight] of each part of a mean, ordered by key, so that the written order means nothing."""
        keys = (self.at(part.run, part.step) for part in merge.parts)
        return sorted([key, weight] for key, weight in zip(keys, merge.weights, strict=True))

    def _start(self, run: Pretrain) -> object:
        match run.start:
            case Size() | Config():
                # Its name and default precision do not determine the weights.
                return {k: v for k, v in encode(run.start).items() if k not in ("name", "precision")}
            case Hub():
                rules = {"generation": HUB_GENERATION} if run.stages else {}
                return {"hub": self._identities.hub(run.start), "windows": run.start.windows, **rules}
            case Pretrain():
                return {"checkpoint": self.at(run.start, run.start.steps)}
            case Merge():
                return {"checkpoint": self.at(run, 0)}

    def _data(self, run: Pretrain, corpus: str | Corpus | Blend) -> str:
        """Return the key of what is read; that of a blend follows from the keys and shares of its corpora."""
        keys = [[self._identities.data(source), share] for source, share in shares_of(corpus, run).items()]
        return content_key({"blend": sorted(keys)}) if isinstance(corpus, Blend) else str(keys[0][0])

    def _span(self, run: Pretrain, first_peak: float, phase: Phase, step: int) -> list[object]:
        """Return the part of a phase that lies before step `step`, as JSON values; what is usual is left out."""
        objective = encode(phase.objective)
        if isinstance(phase.objective, Contrastive):  # what the pairs are, not where they lie
            objective["pairs"] = [self._identities.task(pairs) for pairs in phase.objective.pairs]
        span: list[object] = [objective, phase.first, min(phase.until, step), phase.rope_base]
        unusual: dict[str, object] = {}
        peak = phase.peak or run.schedule.peak
        if peak != first_peak:
            unusual["peak"] = peak
        unusual |= {name: getattr(phase, name) for name in ("freeze", "layer_decay") if getattr(phase, name)}
        if phase.corpus:
            unusual["data"] = self._data(run, phase.corpus)
        return [*span, unusual] if unusual else span


def _rate_until(run: Pretrain, first_peak: float, step: int) -> list[object]:
    """Return what determines the learning rates up to step `step`; the decay counts only after it has begun."""
    wsd, decay = run.schedule, run.decay_start
    rate: list[object] = [first_peak, wsd.warmup]
    unusual: dict[str, object] = {}
    if wsd.warmup and wsd.warmup_from:
        unusual["warmup_from"] = wsd.warmup_from
    if step > decay:
        rate += [decay, run.steps]
        unusual |= {name: getattr(wsd, name) for name in ("shape", "floor") if name in encode(wsd)}
    return [*rate, unusual] if unusual else rate


def finetuning_key(model: str, task: str, spec: Finetune, *, lr: float, seed: int, share: float = 1.0) -> str:
    """Return the key of a fine-tuned model: the pretrained model, the dataset and the hyperparameters.

    `share`: of the task's steps that are trained; below 1 when learning rates are screened (`Finetune.discard`).
    """
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
            **({"share": share} if share < 1 else {}),
            **({"best_epoch": True} if spec.best_epoch else {}),
        }
    )


def trial_key(training: str, task: str, documents: str) -> str:
    """Return the key of a fine-tuned model's scores on a dataset; `documents` is empty except for retrieval."""
    return content_key({"training": training, "task": task, "documents": documents})


def data_key(corpus: Corpus, corpus_fingerprint: str, tokenizer_fingerprint: str) -> str:
    """Return the key of a tokenized corpus: its content, its tokenizer and the options of tokenization."""
    rules = {k: v for k, v in encode(corpus).items() if k in ("text", "bos", "tokens")}
    return content_key(
        {"generation": GENERATION, "content": corpus_fingerprint, "tokenizer": tokenizer_fingerprint, **rules}
    )
