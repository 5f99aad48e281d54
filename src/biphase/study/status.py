"""What `run` and `status` print about a study: progress, results so far, and what to type next. No torch.

`opening` and `closing` are the first and last lines of a run, `status_text` and `status_json` the output of `biphase
status`, `tables` the held-out losses and scores that both show.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from biphase.data.corpus import shards_key
from biphase.errors import StoreError
from biphase.leases import Leases
from biphase.metadata import read_card, read_checkpoint_file
from biphase.presets import corpus_of
from biphase.store import Store
from biphase.study import ledger, scores
from biphase.study.costs import flops_of
from biphase.study.ledger import JobStatus
from biphase.study.plan import Plan
from biphase.text import counted, duration

BAR = 20
CURVE = 20  # width of a curve in characters
BLOCKS = "█▇▆▅▄▃▂▁"


def opening(plan: Plan, store: Store) -> str:
    """Return the first lines of a run."""
    done = len(ledger.done_keys(plan, store))
    question = f": {plan.question}" if plan.question else ""
    parts = [f"{counted(plan.job_count, 'training job')}, {done} done"] if plan.job_count else []
    if plan.study.finetune:
        tuned = ledger.count(plan, store)
        parts.append(f"{counted(tuned.of, 'fine-tuning')}, {tuned.done:,} done")
    return f"{plan.study.name}{question}\n  {'; '.join(parts)}"


def closing(
    plan: Plan,
    store: Store,
    failed: dict[str, str],
    *,
    stopped: bool,
    command: str,
    study: str,
    tuned: ledger.TrialSurvey | None = None,
    unsaved: float = 0.0,
) -> str:
    """Return the last lines of a run: results, and how to continue.

    Results that cannot be read are added to `failed`. `tuned`: the survey of fine-tunings, if already made. `unsaved`:
    seconds of fine-tuning that a stop has lost.
    """
    tuned = tuned or ledger.survey_trials(plan, store)
    failed |= tuned.damaged
    done = ledger.settled(plan, store, tuned)
    left = plan.left(done)
    damaged: dict[str, str] = {}
    lines = tables(plan, store, damaged)
    told = set(failed.values())  # a damaged trial is already listed under its fine-tuning
    failed |= {key: error for key, error in damaged.items() if error not in told}
    lines += [f"failed  {key[:6]}  {error}" for key, error in failed.items()]
    where = [f"{len(done)} of {plan.job_count} training jobs"] if plan.job_count else []
    where += [f"{tuned.done:,} of {tuned.of:,} fine-tunings"] if tuned.of else []
    standing, again = f"{' and '.join(where)} done", f"To go on: biphase {command}"
    if stopped:
        kept = [step for _, step in ledger.kept(plan, store).values()]
        at = f"at step {kept[0]:,}" if len(kept) == 1 else "at their last checkpoints"
        under_way = f", {counted(len(kept), 'fine-tuning')} kept {at}" if kept else ""
        cost = (
            f"{duration(max(1, unsaved))} of fine-tuning to be computed again" if unsaved else "nothing lost"
        )
        lines.append(f"stopped. {standing}{under_way}, {cost}. {again}")
    elif failed:
        lines.append(f"{standing}, {len(failed)} failed. {again}")
    elif left or tuned.done < tuned.of:
        lines.append(f"{standing}. {again}")
    else:
        every = [counted(plan.job_count, "training job")] if plan.job_count else []
        every += [counted(tuned.of, "fine-tuning")] if tuned.of else []
        several = plan.job_count + tuned.of > 1
        words = f"all {' and '.join(every)} are done; they are" if several else f"{every[0]} is done; it is"
        lines.append(f"{words} in {store.root}")
        lines.append(f"What {'they show' if several else 'it shows'}: biphase report {study}")
    return "\n".join(lines)


def work_left(plan: Plan, store: Store, results: Collection[str] | None = None) -> bool:
    """Whether anything is left to compute, for the whole plan or for the models `results` (keys) only."""
    tuned = ledger.count(plan, store, results)
    left = plan.left(ledger.done_keys(plan, store))
    if results is not None:
        wanted = {job.key for key in results for job in plan.path(key)}
        left = [key for key in left if key in wanted]
    return bool(left) or tuned.done < tuned.of


def tables(plan: Plan, store: Store, damaged: dict[str, str]) -> list[str]:
    """Return held-out losses, then scores, each table followed by a blank line.

    A result that cannot be read has no row; the reason is added to `damaged` by its key.
    """
    lines = [*results_table(plan, store, damaged), *scores.table(plan, store, damaged)]
    return ["", *lines] if lines else []


def results_table(plan: Plan, store: Store, damaged: dict[str, str]) -> list[str]:
    """Return a table of held-out losses of every finished result, with their curves."""
    rows, corpora = [], _corpus_lines(plan, store, damaged)
    for name, key in plan.results.items():
        if key not in plan.jobs or not store.knows(store.checkpoints / key):
            continue
        measured = _measured(plan, store, name, damaged)
        try:
            epochs = read_checkpoint_file(store.readable(store.checkpoints / key))["epochs"]
        except StoreError as wrong:
            damaged[key] = str(wrong)
            continue
        if measured:
            last = measured[max(measured)]
            curves = {what: [one[what] for one in measured.values() if what in one] for what in last}
            rows.append((name, last, curves, epochs))
    if not rows:
        return []
    wide = max(len("held-out loss, nats"), *(len(name) for name, *_ in rows))
    cell = 6 + CURVE
    lines = [f"  {'held-out loss, nats':<{wide}}  {'causal':<{cell}}  {'masked 40%':<{cell}}  epochs"]
    for name, last, curves, epochs in rows:
        cells = [
            f"{last[what]:.3f} {sparkline(curves[what]):<{CURVE}}" if what in last else " " * cell
            for what in ("clm", "mlm40")
        ]
        lines.append(f"  {name:<{wide}}  {'  '.join(cells)}  {epochs:.2f}")
    return [*lines, *corpora, ""]


def _corpus_lines(plan: Plan, store: Store, damaged: dict[str, str]) -> list[str]:
    lines = []
    for corpus in dict.fromkeys(corpus_of(run) for run in plan.study.runs if run.corpus):
        key = shards_key(corpus, store)
        if fault := store.fault(store.shards / key):
            damaged[key] = fault
        if not store.knows(store.shards / key):
            continue
        try:
            nats = read_card(store.readable(store.shards / key))["unigram_entropy"]
        except StoreError as wrong:
            damaged[key] = str(wrong)
            continue
        lines.append(
            f"  {corpus.name}: a model that knows only how often each token occurs reaches {nats:.3f}"
        )
    return lines


def sparkline(values: list[float]) -> str:
    """Draw a curve in one line of block characters, from its highest value to its lowest."""
    if len(values) > CURVE:
        values = [values[round(i * (len(values) - 1) / (CURVE - 1))] for i in range(CURVE)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((high - value) / span * 8))] for value in values)


def status_text(plan: Plan, store: Store, *, command_path: str, cluster: Sequence[str] = ()) -> str:
    """Return what `biphase status` prints; `cluster`: lines about Slurm's queue."""
    entries = ledger.survey_jobs(plan, store)
    tuned = ledger.survey_trials(plan, store)
    damaged: dict[str, str] = {}
    below = tables(plan, store, damaged)
    done = sum(entry.standing == "done" for entry in entries.values())
    broken = {key for key, entry in entries.items() if entry.standing == "failed"}
    unfinished = plan.left(ledger.settled(plan, store, tuned) - broken)
    lines = [plan.study.name]
    if entries:
        left = ledger.seconds_left(entries, flops_of) if unfinished else None
        lines.append(_bar(done, len(entries), "training jobs", left))
    if tuned.of:
        lines.append(_bar(tuned.done, tuned.of, "fine-tunings", tuned.seconds_left))
    for key, entry in entries.items():
        name = ", ".join(entry.job.results) or entry.job.run.name
        if entry.holder:
            told = ledger.latest(plan, store, entry.job)
            where = f"on {entry.holder.host}, process {entry.holder.pid}"
            lines.append("  ".join(filter(None, (f"  running {key[:6]}", name, where, told))))
        if entry.standing == "failed":
            lines.append(f"  failed  {key[:6]}  {name}  {entry.error}")
    for key, (training, holder) in tuned.running.items():
        lines.append(f"  running {key[:6]}  {training.title(plan)}  on {holder.host}, process {holder.pid}")
    for key, (training, error) in tuned.failed.items():
        lines.append(f"  failed  {key[:6]}  {training.title(plan)}  {error}")
    for key, (training, step) in tuned.kept.items():
        lines.append(f"  kept    {key[:6]}  {training.title(plan)}  at step {step:,}")
    told = {entry.error for entry in entries.values()} | {error for _, error in tuned.failed.values()}
    lines += [f"  failed  {key[:6]}  {error}" for key, error in damaged.items() if error not in told]
    bare = sum(not entry.weights for entry in entries.values())
    if bare:
        lines.append(
            f"  {counted(bare, 'training job')} came without weights from another machine; trained again only if needed here"
        )
    takeovers = len(Leases(store.leases).takeovers())
    if takeovers:
        lines.append(f"  {takeovers} jobs of this store were taken over from workers that died or stalled")
    lines += cluster
    if unfinished or tuned.done < tuned.of:
        lines.append(f"next: biphase run {command_path}")
    return "\n".join([*lines, *below])


def _bar(done: int, of: int, what: str, left: float | None) -> str:
    filled = round(BAR * done / max(1, of))
    to_go = f"   about {duration(left)} left" if left and done < of else ""
    return f"  {'█' * filled}{'░' * (BAR - filled)}  {done:,}/{of:,} {what}{to_go}"


def status_json(plan: Plan, store: Store) -> dict[str, Any]:
    """Return the same facts for programs."""
    entries = ledger.survey_jobs(plan, store)
    tuned = ledger.survey_trials(plan, store)
    damaged: dict[str, str] = {}
    _corpus_lines(plan, store, damaged)
    return {
        "study": plan.study.name,
        "seconds_left": ledger.seconds_left(entries, flops_of),
        "takeovers": len(Leases(store.leases).takeovers()),
        "jobs": [_entry_json(entry) for entry in entries.values()],
        "heldout": {name: _measured(plan, store, name, damaged) for name in plan.results},
        "finetunings": {
            "done": tuned.done,
            "of": tuned.of,
            "seconds_left": tuned.seconds_left,
            "running": [training.title(plan) for training, _ in tuned.running.values()],
            "failed": {training.title(plan): error for training, error in tuned.failed.values()},
            "kept": {training.title(plan): step for training, step in tuned.kept.values()},
        },
        "scores": scores.as_json(plan, store, damaged),
        "damaged": damaged,  # key → why an existing result cannot be used
    }


def _measured(plan: Plan, store: Store, name: str, damaged: dict[str, str]) -> dict[int, dict[str, float]]:
    try:
        return ledger.measured(plan, store, name)
    except StoreError as wrong:
        damaged[plan.results[name]] = str(wrong)
        return {}


def _entry_json(entry: JobStatus) -> dict[str, Any]:
    return {
        "key": entry.job.key,
        "results": list(entry.job.results),
        "standing": entry.standing,
        "steps": list(entry.job.span),
        "progress": entry.progress,
        "weights": entry.standing == "done" and entry.weights,
        "worker": f"{entry.holder.host}:{entry.holder.pid}" if entry.holder else None,
        "error": entry.error or None,
    }
