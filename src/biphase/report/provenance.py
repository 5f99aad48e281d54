"""Where the numbers of a report come from: data and keys, protocol, machines, versions, time, energy, missing parts.

`provenance` and `missing` read everything from the store. The only exception is the version of biphase that
writes the report.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from biphase.presets import sources_of
from biphase.records import content_key, encode
from biphase.report.evidence import Evidence, ScoreGrid
from biphase.report.pretraining import Epochs
from biphase.specs import Finetune
from biphase.store import Store
from biphase.study import ledger
from biphase.study.costs import REPEATED
from biphase.study.datasets import kept
from biphase.study.plan import Plan, card_of, corpora_of
from biphase.text import counted, duration, listed, rate, short
from biphase.version import code_version


@dataclass(frozen=True)
class Data:
    """A corpus or a dataset."""

    name: str
    what: str  # "corpus", or the family of a task
    source: str
    key: str  # of its shards, or of the task; empty: not known here
    note: str
    about: tuple[tuple[str, str], ...] = ()  # how it was loaded, if this store has the description


@dataclass(frozen=True)
class MachineUsed:
    """A device and its software, with the number of jobs and trials it computed."""

    device: str
    software: str
    jobs: int
    trials: int


@dataclass(frozen=True)
class Provenance:
    """Where the numbers of a report come from."""

    version: str
    study: str  # the hash of the study record
    data: tuple[Data, ...]
    machines: tuple[MachineUsed, ...]
    protocol: tuple[tuple[str, str], ...]
    spent: tuple[tuple[str, str], ...]


def provenance(evidence: Evidence) -> Provenance:
    """Collect the provenance of a report from the store."""
    plan, store = evidence.plan, evidence.store
    finetune = plan.study.finetune
    return Provenance(
        version=code_version(),
        study=content_key(encode(plan.study)),
        data=(*_corpora(plan, store), *_datasets(evidence)),
        machines=_machines(evidence),
        protocol=_protocol(finetune, evidence) if finetune else (),
        spent=_spent(evidence),
    )


# ---------------------------------------------------------------- data


def _corpora(plan: Plan, store: Store) -> Iterable[Data]:
    epochs = Epochs(plan, store)
    mixed = [run.name for run in plan.study.runs if run.corpus and len(sources_of(run)) > 1]
    for corpus in corpora_of(plan.study):
        key, card = card_of(corpus, store)
        note = f"{card['train_tokens']:,} tokens to train on" if card else "its shards are not in this store"
        for run in mixed:
            if (at := epochs.by_corpus(run).get(corpus, 0.0)) > 0:
                note += f"; {run} reads it {at:.2f} times{': repeated' if at > REPEATED else ''}"
        yield Data(corpus.name, "corpus", corpus.source, key, note)


def _datasets(evidence: Evidence) -> Iterable[Data]:
    described = kept(evidence.plan.study.name, evidence.store)
    for name, task in evidence.tasks.items():
        examples = max((grid.examples for (_, on), grid in evidence.grids.items() if on == name), default=0)
        note = counted(examples, "test example") if examples else "not scored yet"
        if task.trained_on:
            note += f"; scored with the model of {task.trained_on}"
        description = described.get(name)
        about = (
            (*description.about, *(("warning", text) for text in description.warnings)) if description else ()
        )
        yield Data(name, task.family, task.source, evidence.plan.tasks[name], note, about)


# ---------------------------------------------------------------- machines, time, energy


def _machines(evidence: Evidence) -> tuple[MachineUsed, ...]:
    """The machines by device and software; most used first, then by name."""
    entries = ledger.survey_jobs(evidence.plan, evidence.store).values()
    trained = Counter(machine for entry in entries if entry.progress for machine in _trained_on(entry))
    tuned = Counter(_machine(machine) for grid in evidence.grids.values() for machine in grid.machines)
    every = sorted({*trained, *tuned}, key=lambda machine: (-trained[machine] - tuned[machine], machine))
    return tuple(MachineUsed(*machine, trained[machine], tuned[machine]) for machine in every)


def _trained_on(entry: ledger.JobStatus) -> set[tuple[str, str]]:
    """The machines that computed the steps of a training job."""
    progress = entry.progress or {}
    segments = progress.get("segments") or [{"machine": progress.get("machine", {})}]
    ends = [*(segment["first_step"] for segment in segments[1:]), entry.job.span[1]]
    used = zip(segments, ends, strict=True)
    return {_machine(segment["machine"]) for segment, end in used if end > entry.job.span[0]}


def _machine(facts: dict[str, Any]) -> tuple[str, str]:
    """The device and the software of a machine."""
    other = ("device", "compiled", "path", "joules")
    software = [f"{name} {facts[name]}" for name in sorted(facts) if name not in other]
    if facts.get("compiled") == "True" or facts.get("path") == "compiled":
        software.append("compiled")
    if facts.get("path") == "fused":
        software.append("fused kernels")
    return facts.get("device") or "not recorded", ", ".join(software)


def _spent(evidence: Evidence) -> tuple[tuple[str, str], ...]:
    costs = evidence.job_costs
    done = [cost for cost in costs if cost.standing == "done"]
    trained = [cost.seconds * cost.devices for cost in costs if cost.seconds is not None]
    tuned = sum(float(np.nansum(grid.seconds)) + grid.screening_seconds for grid in evidence.grids.values())
    tokens, flops = sum(cost.tokens for cost in done), [cost.flops for cost in done]
    joules = [cost.joules for cost in costs if cost.joules is not None]
    spent = []
    if trained:
        jobs = counted(len(trained), "training job")
        spent.append(("Pretraining", f"{_hours(sum(trained))} over all processes, {jobs}"))
    if tokens:
        counts = "" if None in flops else f", {sum(count for count in flops if count):.3g} model FLOPs"
        spent.append(("Trained on", f"{short(tokens)} tokens{counts}"))
    if tuned:
        scores = f"{evidence.count[0]:,} scores"
        spent.append(("Fine-tuning", f"{_hours(tuned)} over all processes, {scores}"))
    if sum(joules):
        part = "" if len(joules) == len(done) else f" of {len(joules):,} of {len(done):,} training jobs"
        energy = f"{sum(joules) / 3.6e6:,.2f} kWh for the pretraining{part}"
        spent.append(
            ("Energy", f"{energy}, as the GPUs reported it, including everything else that ran on them")
        )
    return tuple(spent)


def _hours(seconds: float) -> str:
    """Seconds as text; hours from 10 hours on, because devices are billed by the hour."""
    return duration(seconds) if seconds < 36_000 else f"{seconds / 3600:,.0f} h"


# ---------------------------------------------------------------- protocol


def _protocol(spec: Finetune, evidence: Evidence) -> tuple[tuple[str, str], ...]:
    metrics = dict.fromkeys(grid.metric for grid in evidence.grids.values() if grid.metric)
    return (
        ("Protocol", spec.protocol),
        ("Precision", spec.precision),
        ("Learning rates", ", ".join(rate(lr) for lr in spec.lrs)),
        ("Fine-tuning seeds", ", ".join(str(seed) for seed in spec.seeds)),
        *_discarding(spec, evidence),
        (
            "Choice of the rate",
            "for each seed the rate with the best validation score; ties go to the lowest rate. Test scores are not used",
        ),
        ("Scores that choose", listed(list(metrics)) or "none yet"),
        ("Retrieval among", "judged documents only" if spec.documents == "judged" else "all documents"),
        ("Warm-up", f"{spec.warmup * 100:g}% of the steps, then linear decay to 0"),
        *(
            [("Early choice", "of each fine-tuning, the weights of the epoch with the best validation score")]
            if spec.best_epoch
            else []
        ),
        ("Longest input", f"{spec.length:,} tokens" if spec.length else "99% of the model's context"),
    )


def _discarding(spec: Finetune, evidence: Evidence) -> Iterable[tuple[str, str]]:
    if spec.discard is None:
        return
    keep, seeds = spec.discard.keep, ", ".join(map(str, spec.discard.seeds))
    extended = [
        f"{result} on {task} ({', '.join(map(rate, grid.extended))})"
        for (result, task), grid in evidence.grids.items()
        if grid.extended
    ]
    yield (
        "Discarded learning rates",
        f"all rates were screened for {spec.discard.share:.0%} of the steps with seeds {seeds}, which are not reported; "
        f"of each model and task the best {keep} of {len(spec.lrs)} on validation were kept. Scores and intervals are "
        "of the kept rates, with other seeds",
    )
    yield "Extended grids", listed(extended) or "none: no rate at an end of the grid was kept"


# ---------------------------------------------------------------- missing


@dataclass(frozen=True)
class Unusable:
    """A trial or checkpoint that failed or cannot be read."""

    title: str  # "result · task · lr · seed", or the results or run of a checkpoint
    key: str
    why: str


@dataclass(frozen=True)
class Missing:
    """What is missing from a report, and why."""

    done: int
    of: int
    gaps: tuple[ScoreGrid, ...]  # incomplete ones
    failed: tuple[Unusable, ...]
    unreadable: tuple[Unusable, ...]
    untrained: tuple[str, ...]  # results whose pretraining is not finished
    bare: int = 0  # trials imported as metadata only, without per-example values

    @property
    def count(self) -> int:
        return self.of - self.done

    @property
    def any(self) -> bool:
        return bool(self.count or self.failed or self.unreadable or self.untrained or self.bare)

    def words(self) -> str:
        """One line for the top of a report; empty if nothing is missing."""
        if not self.any:
            return ""
        parts = []
        if self.count:
            parts.append(
                f"{self.done:,} of {counted(self.of, 'score')}; {self.count:,} missing. "
                "The report uses complete seeds only; nothing is imputed."
            )
        if self.untrained:
            parts.append(f"{counted(len(self.untrained), 'result')} not pretrained yet.")
        if self.failed:
            parts.append(f"{counted(len(self.failed), 'job')} failed.")
        if self.unreadable:
            count = "counts" if len(self.unreadable) == 1 else "count"
            parts.append(f"{counted(len(self.unreadable), 'file')} cannot be read and {count} as missing.")
        if self.bare:
            parts.append(
                f"{counted(self.bare, 'score')} came without {'its' if self.bare == 1 else 'their'} values by example, "
                "so they have no interval over test examples."
            )
        return " ".join(parts)


def missing(evidence: Evidence) -> Missing:
    """What is missing from a study, in the order of its results and tasks."""
    summaries, (done, of) = evidence.runs, evidence.count
    titles: dict[str, str] = {}
    failed = [*_failed_jobs(evidence), *_failed_screening(evidence)]
    for grid in evidence.grids.values():
        for key, title in _titles(grid).items():
            titles[key] = title
            if key in grid.missing and key not in evidence.unreadable:
                failed.append(Unusable(title, key, grid.missing[key]))
    order = [run.name for run in summaries]
    grids = sorted(evidence.grids.values(), key=lambda grid: order.index(grid.result))
    unreadable = [Unusable(run.name, run.key, run.wrong) for run in summaries if run.wrong]
    unreadable += [Unusable(titles.get(key, key), key, why) for key, why in evidence.unreadable.items()]
    return Missing(
        done=done,
        of=of,
        gaps=tuple(grid for grid in grids if grid.done < grid.of),
        failed=tuple(failed),
        unreadable=tuple(unreadable),
        untrained=tuple(run.name for run in summaries if run.standing != "done" and not run.wrong),
        bare=len(evidence.bare),
    )


def _failed_jobs(evidence: Evidence) -> list[Unusable]:
    """Training jobs that failed. The jobs that depend on them only wait, so they are not listed."""
    store = evidence.store
    return [
        Unusable(", ".join(entry.job.results) or entry.job.run.name, key, entry.error)
        for key, entry in ledger.survey_jobs(evidence.plan, store).items()
        if entry.standing == "failed" and not store.knows(store.checkpoints / key)
    ]


def _failed_screening(evidence: Evidence) -> Iterable[Unusable]:
    """Fine-tunings that failed to screen a learning rate; the reported ones of their grids wait for them."""
    plan, store = evidence.plan, evidence.store
    failed = ledger.failures(plan, store)
    for training in ledger.finetunings(plan, store) if failed else ():
        if training.share < 1 and training.key in failed and not ledger.finished(training, store):
            yield Unusable(training.title(plan), training.key, failed[training.key]["error"])


def _titles(grid: ScoreGrid) -> dict[str, str]:
    return {
        grid.keys[row][column]: f"{grid.result} · {grid.task.name} · lr {lr:g} · seed {seed}"
        for row, lr in enumerate(grid.lrs)
        for column, seed in enumerate(grid.seeds)
        if grid.keys[row][column]
    }
