"""What people read about a study: what `biphase plan`, `run` and `status` print, and the same facts as JSON.

`render` and `plan_json` describe a plan: the tree of training jobs, its costs, its hours on a device (`prices.Bill`),
what is done and what to type next. `opening` and `closing` are the first and last lines of a run, `status_text` and
`status_json` the output of `biphase status`, `tables` the held-out losses and scores that both show. No torch.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from textwrap import wrap
from typing import Any, TextIO

from biphase.data.corpus import shards_key
from biphase.errors import StoreError
from biphase.leases import Holder, Leases
from biphase.metadata import read_card, read_checkpoint_file
from biphase.presets import sources_of
from biphase.progress import columns
from biphase.protocol import HELDOUT_OBJECTIVES, KEY_DIGITS
from biphase.specs import Contrastive, Pretrain
from biphase.store import Store
from biphase.study import ledger
from biphase.study.costs import costs, reading_notes, start_of
from biphase.study.ledger import Count, JobStatus, Row, TuningGrid, score_rows, scores_json, with_interval
from biphase.study.many_gpus import MEMORY, fit_lines, needs
from biphase.study.plan import Plan, Root, TrainingJob, children_of
from biphase.study.prices import Bill
from biphase.study.time_left import TimeLeft
from biphase.text import SHORTEST, apart, counted, duration, fit, objective_title, short, si, sparkline

PAGE = 110  # characters per line
MANY_RUNS = 12  # above, costs are shown by model instead of by run
MASK_RULES = {"own": "its own", "reserved": "a reserved slot", "added": "added"}


# ---------------------------------------------------------------- costs and totals


def summary(
    plan: Plan, done: Collection[str], tuned: Count, bill: Bill, command_path: str, price: float = 0.0
) -> list[str]:
    """Return the lines below the tree; `price`: of one device for an hour."""
    every, left = costs(plan), plan.left(done)
    written, to_compute = plan.steps_written, plan.steps_to_compute
    shared = f" ({written:,} as written, {written - to_compute:,} shared)" if written > to_compute else ""
    parts = [counted(len(plan.study.runs), "run")]
    if plan.jobs:
        parts += [
            counted(plan.job_count, "training job"),
            f"{counted(to_compute, 'step')} to compute{shared}",
            f"{short(every.tokens)} tokens",
        ]
    parts += [f"{every.flops:.2e} FLOPs"] if plan.jobs and every.flops is not None else []
    parts += _hours_parts(plan, bill)
    if plan.jobs and every.disk is not None:
        shards = sum(text.bytes or 0 for text in bill.texts)
        of_it = f", {si(shards)}B of it token shards" if shards else ""
        parts.append(f"{si(every.disk + shards)}B of disk{of_it}")
    if plan.tuned:
        grids = plan.tuned.values()
        short_ones = sum(grid.screenings for grid in grids)
        screened = f" after {short_ones:,} short ones that screen learning rates" if short_ones else ""
        parts.append(f"{counted(sum(grid.finetunings for grid in grids), 'fine-tuning')}{screened}")
        parts.append(counted(sum(grid.scores for grid in grids), "score"))
    below = [
        *_elapsed_line(plan, bill, left),
        *_cost_line(plan, bill, price),
        *(fit_lines(plan, bill.device) if bill.device in MEMORY else ()),
        *_text_notes(bill),
    ]
    wrapped = [line for note in below for line in wrap(note, PAGE, subsequent_indent="  ")]
    return [*_flow(parts), *wrapped, *every.notes, *bill.notes, _next(plan, left, tuned, bill, command_path)]


def brief(plan: Plan, bill: Bill) -> str:
    """Return runs, tokens, hours and disk of the whole plan in one line."""
    every = costs(plan)
    disk = [] if every.disk is None else [f"{si(every.disk)}B of disk"]
    parts = [
        counted(len(plan.study.runs), "run"),
        f"{short(every.tokens)} tokens",
        *_hours_parts(plan, bill),
        *disk,
    ]
    return " · ".join(parts)


def _text_notes(bill: Bill) -> list[str]:
    """Say what is read several times or blended, and which corpora are not in the disk sum."""
    notes = reading_notes(bill.texts)
    if unknown := [text.corpus.name for text in bill.texts if text.tokens is None]:
        names = ", ".join(unknown)
        notes.append(f"not in the disk sum: token shards of {names}, whose tokens are not counted yet")
    return notes


def _elapsed_line(plan: Plan, bill: Bill, left: Collection[str]) -> list[str]:
    took = bill.elapsed(plan, left)
    if took is None:
        return []
    without = ", fine-tunings not counted" if plan.tuned and bill.machine is None else ""
    by = f"{took.workers:,} {bill.device}, a job on each" if took.workers > 1 else f"one {bill.device}"
    chain = f"; the longest chain of jobs takes {duration(took.chain)} ({took.ends})" if took.ends else ""
    ends = f"; started now, it ends on {_ending(took.seconds):%a %d %b %Y at %H:%M}" if bill.dated else ""
    return [f"elapsed: {duration(took.seconds)} on {by}{without}{chain}{ends}"]


def _ending(seconds: float) -> datetime:
    """Return the local time that many seconds from now; at most a century from now."""
    return datetime.now().astimezone() + timedelta(seconds=min(seconds, 36_525 * 86_400))


def _cost_line(plan: Plan, bill: Bill, price: float) -> list[str]:
    """Say what the whole plan costs at `price` per hour of one device, and each run."""
    cost = bill.cost(plan, price)
    if cost is None:
        return []
    pretraining, finetuning, runs = cost["pretraining"], cost["finetuning"], cost["runs"]
    parts = [f"pretraining {_money(pretraining)}", f"fine-tuning {_money(finetuning)}"]
    of = f" ({', '.join(parts)})" if bill.tunings and bill.jobs else ""
    without = ", fine-tunings not counted" if plan.tuned and bill.machine is None else ""
    if len(runs) > MANY_RUNS:
        models: defaultdict[str, float] = defaultdict(float)
        starts = {node.run.name: start_of(node.run) for node in (*plan.roots.values(), *plan.jobs.values())}
        for name, amount in runs.items():
            models[starts[name]] += amount
        runs = dict(models)
    each = ", ".join(f"{name} {_money(amount)}" for name, amount in runs.items())
    split = f"; {each}" if len(runs) > 1 else ""
    return [f"cost at {price:g} an hour: {_money(pretraining + finetuning)}{of}{without}{split}"]


def _money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"


def _hours_parts(plan: Plan, bill: Bill) -> list[str]:
    """Return the hours of the whole plan, as parts of the summary."""
    device = bill.device
    if bill.machine is None:
        hours = bill.hours(plan.jobs) if plan.jobs else None
        return [] if hours is None else [f"{_hours(hours, device)} on {device} at {bill.efficiency:.0%}"]
    parts = [f"pretraining {_hours(bill.pretraining(), device)}"] if bill.jobs else []
    parts += [f"fine-tuning {_hours(bill.finetuning(bill.grids), device)}"] if bill.tunings else []
    return [f"{' and '.join(parts)} on {device} ({bill.machine.when(bill.precisions)})"] if parts else []


def _next(plan: Plan, left: list[str], tuned: Count, bill: Bill, command_path: str) -> str:
    """Say how far the plan is, and what to type next."""
    if not plan.jobs and not tuned.of:
        return "nothing to train."
    if not left and tuned.done == tuned.of:
        return f"{_standing(plan, plan.job_count, tuned)}. See: biphase report {command_path}"
    if len(left) == plan.job_count and not tuned.done:
        return f"nothing computed yet. Next: biphase run {command_path}"
    steps, hours = sum(plan.jobs[key].steps for key in left), bill.hours(left)
    to_go = f", {steps:,} steps left" if left else ""
    if hours is not None and (hours := hours + bill.finetuning(bill.left)):
        to_go += f", {_hours(hours, bill.device)}"
    return f"{_standing(plan, plan.job_count - len(left), tuned)}{to_go}. Next: biphase run {command_path}"


def _standing(plan: Plan, done: int, tuned: Count) -> str:
    """Say how many training jobs (`done`) and fine-tunings are done; what there is none of is left out."""
    counts = ((done, plan.job_count, "training job"), (tuned.done, tuned.of, "fine-tuning"))
    every = all(ready >= of for ready, of, _ in counts)
    parts = [f"{'' if every else f'{ready:,} of '}{counted(of, noun)}" for ready, of, noun in counts if of]
    both = " and ".join(parts) or "nothing to compute"
    return f"all {both} are done" if every and sum(of for _, of, _ in counts) > 1 else f"{both} done"


def _flow(parts: list[str]) -> list[str]:
    """Join parts by dots, with line breaks between parts to fit the page width."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + len(part) + 3 > PAGE:
            lines.append(part)
        else:
            lines[-1] += f" · {part}"
    return lines


def _hours(hours: float, device: str) -> str:
    word = "hours" if device == "cpu" else "GPU-hours"
    if hours >= 10:
        return f"{hours:,.0f} {word}"
    return f"{hours:.1f} {word}" if hours >= 1 else duration(hours * 3600)


# ---------------------------------------------------------------- the plan


def render(
    plan: Plan,
    *,
    done: Collection[str],
    tuned: Count,
    bill: Bill,
    command_path: str,
    claims: list[str],
    price: float = 0.0,
) -> str:
    """Return what `biphase plan` prints.

    `tuned`: how many fine-tunings are done and planned; `claims`: lines to print between tree and costs; `price`: of
    one device for an hour.
    """
    name, question = plan.study.name, plan.question
    head = wrap(f"{name}: {question}" if question else name, PAGE, subsequent_indent="  ")
    body = _tree(plan, done)
    body += ["", *claims] if claims else []
    below = summary(plan, done, tuned, bill, command_path, price)
    return "\n".join([*head, "", *body, "", *below])


def plan_json(
    plan: Plan, *, done: Collection[str], tuned: Count, bill: Bill, price: float = 0.0
) -> dict[str, Any]:
    """Return the same facts for programs."""
    left = plan.left(done)
    every, took = costs(plan), bill.elapsed(plan, left)
    return plan.to_json() | {
        "done": [key for key in plan.jobs if key in done],
        "device": bill.device,
        "efficiency": bill.efficiency,
        "costs": {
            "tokens": every.tokens,
            "flops": every.flops,
            "device_hours": bill.hours(plan.jobs),
            "disk_bytes": every.disk,
        },
        "prices": bill.prices_json(left),
        "elapsed": asdict(took) | {"ends_at": _ending(took.seconds).isoformat("T", "minutes")}
        if took
        else None,
        "cost": bill.cost(plan, price),
        "memory": {
            "device_bytes": MEMORY[bill.device],
            "jobs": [asdict(need) for need in needs(plan, bill.device)],
        }
        if bill.device in MEMORY
        else None,
        "notes": [*every.notes, *bill.notes, *_text_notes(bill)],
        "finetunings": tuned.of,
        "finetunings_done": tuned.done,
        "scores": sum(grid.scores for grid in plan.tuned.values()),
    }


# ---------------------------------------------------------------- tree
# Columns line up at any depth.


_Row = tuple[str, str, str, str, str, str]  # branches and objective, first and last step, key, mark, results


def _tree(plan: Plan, done: Collection[str]) -> list[str]:
    below = children_of(plan.jobs.values())
    in_thousands = all(step % 1000 == 0 for job in plan.jobs.values() for step in job.span)

    def steps(count: int) -> str:
        return f"{count // 1000:,}k" if in_thousands else f"{count:,}"

    def row(text: str, job: TrainingJob) -> _Row:
        first, until = job.span
        mark = "✓" if job.key in done else ""
        return (
            text,
            "" if job.merge else steps(first),
            steps(until),
            job.key[:KEY_DIGITS],
            mark,
            ", ".join(job.results),
        )

    titles = _titles(list(plan.roots.values()), trained=set(below))
    rows: list[_Row] = []
    for key, root in plan.roots.items():
        rows.append((titles[key], "", "", key[:KEY_DIGITS], "", ", ".join(root.results)))
        rows.extend(row(text, job) for text, job in _branches(below, key))
    return _aligned(rows)


def _branches(below: dict[str, list[TrainingJob]], root: str) -> Iterator[tuple[str, TrainingJob]]:
    """Yield each training job below a root with the text of its line, depth first."""
    waiting = [(root, job, "") for job in reversed(below.get(root, []))]
    while waiting:
        parent, job, prefix = waiting.pop()
        last = job is below[parent][-1]
        base = 0.0 if job.merge else job.run.phase_at(job.first).rope_base
        corpus = "" if job.corpus == job.run.corpus else f", {getattr(job.corpus, 'name', job.corpus)}"
        rope = f", rope {base:g}" if base else ""
        branch = "└─ " if last else "├─ "
        yield prefix + branch + job.objective.label + rope + corpus + (" ↘" if job.decaying else ""), job
        beneath = prefix + ("   " if last else "│  ")
        waiting.extend((job.key, child, beneath) for child in reversed(below.get(job.key, [])))


def _aligned(rows: list[_Row]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for text, first, until, key, mark, results in rows:
        arrow = "→" if until else " "
        line = f"{text:<{wide[0]}}  {first:>{wide[1]}} {arrow} {until:>{wide[2]}}  {key} {mark:<{wide[4]}}  {results}"
        lines.append(line.rstrip())
    return lines


def _titles(roots: list[Root], trained: set[str]) -> dict[str, str]:
    """Return a title for each root; where several have the same one, with the name of a run that starts there."""
    plain = {root.key: _title(root.run, trained=root.key in trained) for root in roots}
    alike = Counter(plain.values())
    return {
        root.key: plain[root.key] + (f", as {root.run.name} starts" if alike[plain[root.key]] > 1 else "")
        for root in roots
    }


def _title(run: Pretrain, *, trained: bool) -> str:
    start = start_of(run)
    return f"{start} on {getattr(run.corpus, 'name', run.corpus)}" if trained else f"{start}, as it is"


# ---------------------------------------------------------------- runs and status


BAR = 20
CURVE = 20  # width of a curve in characters
# Columns of the table of scores that a narrow terminal does without, the first one first.
BASELINE, SPARE = 4, (8, 6, 7, 4, 5, 2)


def opening(plan: Plan, store: Store) -> str:
    """Return the first lines of a run."""
    question = f": {plan.question}" if plan.question else ""
    standing = _standing(plan, len(ledger.done_keys(plan, store)), ledger.count(plan, store))
    return _folded([f"{plan.study.name}{question}", f"  {standing}"], sys.stderr)


def closing(
    plan: Plan,
    store: Store,
    failed: dict[str, str],
    *,
    stopped: bool,
    command: str,
    study: str,
    unsaved: float = 0.0,
) -> str:
    """Return the last lines of a run: results, and how to continue.

    Results that cannot be read are added to `failed`. `unsaved`: seconds of fine-tuning that a stop has lost.
    """
    tuned = ledger.survey_trials(plan, store)
    failed |= tuned.damaged
    done = ledger.settled(plan, store, tuned)
    damaged: dict[str, str] = {}
    lines = tables(plan, store, tuned, damaged)
    listed = set(failed.values())  # a fine-tuning may have failed for the same reason
    failed |= {key: error for key, error in damaged.items() if error not in listed}
    lines += [f"failed  {key[:KEY_DIGITS]}  {error}" for key, error in failed.items()]
    standing, resume = _standing(plan, len(done), tuned), f"To go on: biphase {command}"
    if stopped:
        kept = len(ledger.kept(plan, store))
        saved = f", {counted(kept, 'fine-tuning')} kept at the last checkpoint" if kept else ""
        lost = f"{duration(max(1, unsaved))} of fine-tuning lost" if unsaved else "nothing lost"
        lines.append(f"stopped. {standing}{saved}, {lost}. {resume}")
    elif failed:
        lines.append(f"{standing}, {len(failed)} failed. {resume}")
    elif plan.left(done) or tuned.done < tuned.of:
        lines.append(f"{standing}. {resume}")
    else:
        lines.append(f"{standing}; they are in {store.root}")
        lines.append(f"What they show: biphase report {study}")
    return _folded(lines)


def work_left(plan: Plan, store: Store, results: Collection[str] | None = None) -> bool:
    """Whether anything is left to compute, for the whole plan or for the models `results` (keys) only."""
    tuned = ledger.count(plan, store, results)
    left = plan.left(ledger.done_keys(plan, store))
    if results is not None:
        wanted = plan.needed_for(results)
        left = [key for key in left if key in wanted]
    return bool(left) or tuned.done < tuned.of


def shards_text(shards: Any, folder: Path) -> str:
    """Return what `biphase tokenize` prints at the end."""
    card = shards.card
    lines = [
        f"{folder}",
        f"  {len(shards.train):,} training tokens from {card['train_documents']:,} documents, "
        f"{len(shards.heldout):,} held out from {card['heldout_documents']:,}",
        f"  vocabulary {shards.vocab:,}; mask token {card['mask_token']} = {shards.mask_id} ({MASK_RULES[card['mask_rule']]})",
    ]
    if card["left_out_documents"]:
        lines.append(f"  left out, beyond the held-out million: {card['left_out_documents']:,} documents")
    for reason, count in card["skipped"].items():
        lines.append(f"  skipped {count:,} records, {reason}; the first: {card['first_skipped'][reason]}")
    return "\n".join(lines)


def tables(plan: Plan, store: Store, tuned: ledger.TrialSurvey, damaged: dict[str, str]) -> list[str]:
    """Return held-out losses, then scores, each table followed by a blank line, as wide as the terminal at most.

    A result that cannot be read has no row; the reason is added to `damaged` by its key.
    """
    width = columns(sys.stdout)
    lines = [*results_table(plan, store, damaged, width), *score_table(plan, tuned, width)]
    return ["", *lines] if lines else []


def results_table(plan: Plan, store: Store, damaged: dict[str, str], width: int = 0) -> list[str]:
    """Return a table of held-out losses of every finished result, with their curves."""
    rows, corpora = [], _corpus_lines(plan, store, damaged)
    for name, key in plan.results.items():
        if key not in plan.jobs or not store.knows(store.checkpoints / key):
            continue
        measured = _measured(plan, store, name, damaged)
        try:
            about = read_checkpoint_file(store.readable(store.checkpoints / key))
        except StoreError as wrong:
            damaged[key] = str(wrong)
            continue
        if measured:
            last = measured[max(measured)]
            losses = measured.values()
            curves = {name: [loss[name] for loss in losses if name in loss] for name in last}
            read = (f"{source} {by['epochs']:.2f}" for source, by in about.get("sources", {}).items())
            rows.append((name, last, curves, ", ".join(read) or f"{about['epochs']:.2f}"))
    if not rows:
        return []
    wide = max(len("held-out loss, nats"), *(len(name) for name, *_ in rows))
    titles = {objective.column: objective_title(objective.column) for objective in HELDOUT_OBJECTIVES}
    if any(Contrastive.column in last for _, last, *_ in rows):
        titles[Contrastive.column] = Contrastive.column
    beside = max(len("epochs"), *(len(epochs) for *_, epochs in rows)) + 4  # characters of the other columns
    curve = CURVE if not width else max(CURVE // 3, min(CURVE, (width - beside - wide) // len(titles) - 8))
    if width:
        wide = min(wide, max(len("held-out loss, nats"), width - beside - len(titles) * (curve + 8)))
    cell = 6 + curve
    heads = "".join(f"{title[:cell]:<{cell}}  " for title in titles.values())
    lines = [f"  {'held-out loss, nats':<{wide}}  {heads}epochs"]
    short_names = apart([name for name, *_ in rows], wide)
    for name, last, curves, epochs in rows:
        cells = [
            f"{last[loss]:.3f} {sparkline(curves[loss], curve):<{curve}}" if loss in last else " " * cell
            for loss in titles
        ]
        lines.append(f"  {short_names[name]:<{wide}}  {'  '.join(cells)}  {epochs}")
    return [*lines, *corpora, ""]


def _corpus_lines(plan: Plan, store: Store, damaged: dict[str, str]) -> list[str]:
    lines = []
    for corpus in dict.fromkeys(one for run in plan.study.runs if run.corpus for one in sources_of(run)):
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


def score_table(plan: Plan, tuned: ledger.TrialSurvey, width: int = 0) -> list[str]:
    """Return scores as a table, with notes below and a blank line; empty before any trial is done.

    Where it is wider than `width` characters (0: any), the columns `SPARE` are left out, baselines are listed below, and
    names are shortened.
    """
    rows = score_rows(plan, tuned.trials)
    if not any(row.done for row in rows):
        return []
    untrained = {task.name for spec in plan.tuned.values() for task in spec.tasks if task.zero_shot}
    bare = all(row.task in untrained for row in rows)
    head = (
        "test score, %", "task", "metric", "score" if bare else "mean ± 95%", "baseline", "lr", "with an lr per seed",
        "time", "other metrics",
    )  # fmt: skip
    lines = [head, *(_cells(row, zero_shot=row.task in untrained) for row in rows)]
    wide = [max(len(line[column]) for line in lines) for column in range(len(head))]
    shown = [column for column in range(len(head)) if any(line[column] for line in lines[1:])]
    spare, below = [column for column in SPARE if column in shown], []
    while width and sum(wide[at] + 2 for at in shown) > width and spare:
        shown.remove(dropped := spare.pop(0))
        if dropped == BASELINE:
            known = {line[1]: line[BASELINE] for line in lines[1:] if line[BASELINE]}
            below = [f"{task}: {what}" for task, what in known.items()]
    if width and (beyond := sum(wide[at] + 2 for at in shown) - width) > 0:
        wide[0] = max(SHORTEST, len(head[0]), wide[0] - beyond)
    short_names = {head[0]: head[0]} | apart([row.result for row in rows], wide[0])
    lines = [(short_names[line[0]], *line[1:]) for line in lines]
    body = ["  " + "  ".join(f"{line[at]:<{wide[at]}}" for at in shown).rstrip() for line in lines]
    body += ["  baselines", *(f"    {line}" for line in below)] if below else []
    seeds = len(plan.study.finetune.seeds) if plan.study.finetune else 0
    over = f"intervals are over {seeds} fine-tuning seeds" if seeds > 1 else "one seed has no interval"
    how = f"Learning rates are chosen on validation scores; {over}."
    notes = ["  Models are scored as they are, without training." if bare else f"  {how}"]
    return [*body, *notes, *filter(None, map(_collapse, rows)), ""]


def _cells(row: Row, *, zero_shot: bool) -> tuple[str, ...]:
    about = (row.result, row.task, row.metric)
    baseline = ", ".join(f"{test * 100:.2f} {what}" for what, test in row.known_baselines)
    if row.by_mean is None or row.by_seed is None:
        return (*about, f"{row.done}/{row.of} done", baseline, "", "", duration(row.seconds), "")
    mean, by_seed = (
        f"{_percent(selected.test) if zero_shot else with_interval(selected.test, row.metric)}{' !' if any(selected.constant) else ''}"
        for selected in (row.by_mean, row.by_seed)
    )
    rates = ("", "") if zero_shot else (f"{row.by_mean.lr:g}", by_seed)
    others = [
        f"{name} {_percent(scores)}" for name, scores in (row.metrics or {}).items() if name != row.metric
    ]
    return (*about, mean, baseline, *rates, duration(row.seconds), ", ".join(others))


def _percent(scores: list[float]) -> str:
    return f"{sum(scores) / len(scores) * 100:.2f}"


def _collapse(row: Row) -> str:
    """Return a note on seeds whose model predicts the same for every test example, or ""."""
    constant = [list(filter(None, selected.constant)) for selected in (row.by_mean, row.by_seed) if selected]
    predictions = dict.fromkeys(text for texts in constant for text in texts)
    if not predictions or row.by_mean is None:
        return ""
    return (
        f"  ! {row.result} on {row.task}: with {max(map(len, constant))} of {counted(len(row.by_mean.test), 'seed')} "
        f"the model predicts the same for every test example ({', '.join(predictions)})"
    )


def status_text(plan: Plan, store: Store, *, command_path: str, cluster: Sequence[str] = ()) -> str:
    """Return what `biphase status` prints; `cluster`: lines about Slurm's queue."""
    entries = ledger.survey_jobs(plan, store)
    tuned = ledger.survey_trials(plan, store)
    damaged: dict[str, str] = {}
    below = tables(plan, store, tuned, damaged)
    done = sum(entry.standing == "done" for entry in entries.values())
    broken = {key for key, entry in entries.items() if entry.standing == "failed"}
    unfinished = plan.left(ledger.settled(plan, store, tuned) - broken)
    lines = [plan.study.name]
    if entries:
        lines.append(_bar(done, len(entries), "training jobs"))
    if tuned.of:
        lines.append(_bar(tuned.done, tuned.of, "fine-tunings"))
        lines += _screening_lines(plan, tuned.grids)
    if (unfinished or tuned.done < tuned.of) and (left := TimeLeft(plan, store).estimate()):
        about, rest = ("about ", "") if left.complete else ("", "; not all was timed yet")
        lines.append(f"  {about}{left.text()} left for all, with {counted(left.workers, 'worker')}{rest}")
    width = columns(sys.stdout)

    def line(standing: str, key: str, name: str, *facts: str) -> None:
        head = f"  {standing:<7} {key[:KEY_DIGITS]}"
        whole = "  ".join((head, name, *filter(None, facts)))
        if 0 < width < len(whole):  # the facts go below
            lines.extend((fit((head, name), width, name=1), f"{'':10}{'  '.join(filter(None, facts))}"))
        else:
            lines.append(whole)

    for key, entry in entries.items():
        name = ", ".join(entry.job.results) or entry.job.run.name
        if entry.holder:
            line("running", key, name, _where(entry.holder), ledger.latest(plan, store, entry.job))
        if entry.standing == "failed":
            line("failed", key, name, entry.error)
    for key, (tuning, holder) in tuned.running.items():
        line("running", key, tuning.title(plan), _where(holder))
    for key, (tuning, error) in tuned.failed.items():
        line("failed", key, tuning.title(plan), error)
    for key, (tuning, step) in tuned.kept.items():
        line("kept", key, tuning.title(plan), f"at step {step:,}")
    listed = {entry.error for entry in entries.values()} | {error for _, error in tuned.failed.values()}
    for key, error in damaged.items():
        if error not in listed:
            line("failed", key, error)
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
    return _folded([*lines, *below])


def _folded(lines: Sequence[str], stream: TextIO | None = None) -> str:
    """Join lines; those that are longer than a line of the terminal are continued with an indent.

    Commands stay whole, so that they can be copied. `stream`: where they are printed; default: stdout.
    """
    width, folded = columns(stream or sys.stdout), []
    for line in lines:
        if 0 < width < len(line) and ": biphase " not in line:
            indent = " " * max(4, len(line) - len(line.lstrip()))
            folded += wrap(
                line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
            )
        else:
            folded.append(line)
    return "\n".join(folded)


def _where(holder: Holder) -> str:
    return f"on {holder.host}, process {holder.pid}"


def _screening_lines(plan: Plan, grids: Sequence[TuningGrid]) -> list[str]:
    """Say how far learning rates are screened; nothing without `Finetune.discard`."""
    screened = [grid for grid in grids if grid.screening]
    spec = plan.study.finetune
    if not screened or not spec or not spec.discard:
        return []
    done, seeds = sum(not grid.pending for grid in screened), ", ".join(map(str, spec.discard.seeds))
    return [
        f"  learning rates screened by seeds {seeds} for {done:,} of {counted(len(screened), 'grid')}; "
        f"the best {spec.discard.keep} of each are kept"
    ]


def _bar(done: int, of: int, what: str) -> str:
    filled = round(BAR * done / max(1, of))
    return f"  {'█' * filled}{'░' * (BAR - filled)}  {done:,}/{of:,} {what}"


def status_json(plan: Plan, store: Store) -> dict[str, Any]:
    """Return the same facts for programs."""
    entries = ledger.survey_jobs(plan, store)
    tuned = ledger.survey_trials(plan, store)
    damaged: dict[str, str] = {}
    _corpus_lines(plan, store, damaged)
    left = TimeLeft(plan, store).estimate()
    names = {key: name for name, key in reversed(plan.results.items())}
    return {
        "study": plan.study.name,
        "seconds_left": left.seconds if left else None,
        "takeovers": len(Leases(store.leases).takeovers()),
        "jobs": [_entry_json(entry) for entry in entries.values()],
        "heldout": {name: _measured(plan, store, name, damaged) for name in plan.results},
        "finetunings": {
            "done": tuned.done,
            "of": tuned.of,
            "seconds_left": left.tuning if left else None,
            "grids": [
                {
                    "result": names[grid.model],
                    "task": grid.task.name,
                    "screened": grid.screened,
                    "extended": grid.extended,
                    "kept": sorted({tuning.lr for tuning in grid.reported}),
                }
                for grid in tuned.grids
                if grid.screening
            ],
            "running": [tuning.title(plan) for tuning, _ in tuned.running.values()],
            "failed": {tuning.title(plan): error for tuning, error in tuned.failed.values()},
            "kept": {tuning.title(plan): step for tuning, step in tuned.kept.values()},
        },
        "scores": scores_json(score_rows(plan, tuned.trials)),
        "damaged": damaged | tuned.unreadable,  # key → why an existing result cannot be used
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
