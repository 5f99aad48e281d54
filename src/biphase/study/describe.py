"""What people read about a study: what `biphase plan`, `run` and `status` print, and the same facts as JSON.

`render` and `plan_json` describe a plan: the tree of training jobs, its costs, its hours on a device (`prices.Bill`),
what is done and what to type next. `opening` and `closing` are the first and last lines of a run, `status_text` and
`status_json` the output of `biphase status`, `tables` the held-out losses and scores that both show. No torch.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from biphase.data.corpus import shards_key
from biphase.errors import StoreError
from biphase.leases import Leases
from biphase.metadata import read_card, read_checkpoint_file
from biphase.presets import corpus_of
from biphase.protocol import KEY_DIGITS
from biphase.records import encode
from biphase.specs import Pretrain
from biphase.store import Store
from biphase.study import ledger
from biphase.study.costs import Costs, costs
from biphase.study.ledger import Count, JobStatus, Row, TuningGrid, score_rows, scores_json, with_interval
from biphase.study.plan import Plan, Root, TrainingJob, children_of
from biphase.study.prices import Bill
from biphase.text import counted, duration, short, si

PAGE = 110  # characters per line
MASK_RULES = {"own": "its own", "reserved": "a reserved slot", "added": "added"}


# ---------------------------------------------------------------- costs and totals


def summary(plan: Plan, done: Collection[str], tuned: Count, bill: Bill, command_path: str) -> list[str]:
    """Return the lines below the tree."""
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
        screened = f" ({_screening(plan)})" if any(grid.screenings for grid in grids) else ""
        full = sum(grid.finetunings for grid in grids)
        parts += [
            f"{counted(full, 'fine-tuning')}{screened}",
            counted(sum(grid.scores for grid in grids), "score"),
        ]
    below = [*_elapsed_line(plan, bill, left), *_basis(plan, bill), *_text_notes(bill)]
    wrapped = [line for note in below for line in wrap(note, PAGE, subsequent_indent="  ")]
    return [*_flow(parts), *wrapped, *every.notes, *bill.notes, _next(plan, left, tuned, bill, command_path)]


def _text_notes(bill: Bill) -> list[str]:
    unknown = [text.corpus.name for text in bill.texts if text.tokens is None]
    notes = [note for text in bill.texts if (note := text.repeats())]
    if unknown:
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
    return [f"elapsed: {duration(took.seconds)} on {by}{without}{chain}"]


def _basis(plan: Plan, bill: Bill) -> list[str]:
    """Name the measurements behind the hours, and the model sizes that they are extrapolated to."""
    if bill.machine is None or not bill.precisions:
        return []
    sizes = dict.fromkeys(getattr(root.run.start, "name", "") for root in plan.roots.values())
    beyond = bill.machine.not_measured([size for size in sizes if size])
    extrapolated = f"; extrapolated to {', '.join(beyond)}" if beyond else ""
    return [f"{bill.machine.steps_behind(bill.precisions)}{extrapolated}"]


def _hours_parts(plan: Plan, bill: Bill) -> list[str]:
    """Return the hours of the whole plan, as parts of the summary."""
    device = bill.device
    if bill.machine is None:
        hours = bill.hours() if plan.jobs else None
        return [] if hours is None else [f"{_hours(hours, device)} on {device} at {bill.efficiency:.0%}"]
    parts = [f"pretraining {_hours(bill.pretraining(), device)}"] if bill.jobs else []
    parts += [f"fine-tuning {_hours(bill.finetuning(bill.grids), device)}"] if bill.tunings else []
    return [f"{' and '.join(parts)} on {device} ({bill.machine.when(bill.precisions)})"] if parts else []


def _screening(plan: Plan) -> str:
    """Say how many short fine-tunings screen learning rates, and what both stages cost, before a grid is extended."""
    counts, cost, without = screening_cost(plan)
    return f"after {counts:,} short ones that screen learning rates: the cost of {cost:,.4g}, not {without:,}"


def screening_cost(plan: Plan) -> tuple[int, float, int]:
    """Return how many fine-tunings screen learning rates, the cost of all, and the cost without discarding.

    Costs are in full fine-tunings, and leave out rates that extend a grid.
    """
    grids = plan.tuned.values()
    short = sum(grid.screenings * grid.discard.share for grid in grids if grid.discard)
    without = sum(replace(grid, discard=None).finetunings for grid in grids)
    count = sum(grid.screenings for grid in grids)
    return count, short + sum(grid.finetunings for grid in grids), without


def _next(plan: Plan, left: list[str], tuned: Count, bill: Bill, command_path: str) -> str:
    if not plan.jobs and not tuned.of:
        return "nothing to train."
    if not left and tuned.done == tuned.of:
        every = _jobs_and_tunings(plan.job_count, tuned.of)
        return f"all {every} computed. See: biphase report {command_path}"
    if len(left) == plan.job_count and not tuned.done:
        return f"nothing computed yet. Next: biphase run {command_path}"
    steps, hours = sum(plan.jobs[key].steps for key in left), bill.hours(left)
    done = _jobs_and_tunings(plan.job_count, tuned.of, (plan.job_count - len(left), tuned.done))
    to_go = f", {steps:,} steps left" if left else ""
    if hours is not None and (hours := hours + bill.finetuning(bill.left)):
        to_go += f", {_hours(hours, bill.device)}"
    return f"{done} done{to_go}. Next: biphase run {command_path}"


def _jobs_and_tunings(jobs: int, tunings: int, done: tuple[int, int] | None = None) -> str:
    """Return "2 training jobs and 24 fine-tunings", with how many of each are done; what there is none of is left out."""
    counts = ((jobs, "training job"), (tunings, "fine-tuning"))
    ready = [f"{count:,} of " for count in done] if done else ["", ""]
    return " and ".join(
        before + counted(count, noun) for before, (count, noun) in zip(ready, counts, strict=True) if count
    )


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
) -> str:
    """Return what `biphase plan` prints.

    `tuned`: how many fine-tunings are done and planned; `claims`: lines to print between tree and costs.
    """
    name, question = plan.study.name, plan.question
    head = wrap(f"{name}: {question}" if question else name, PAGE, subsequent_indent="  ")
    body = _tree(plan, done)
    body += ["", *claims] if claims else []
    below = summary(plan, done, tuned, bill, command_path)
    return "\n".join([*head, "", *body, "", *below])


def plan_json(plan: Plan, *, done: Collection[str], tuned: Count, bill: Bill) -> dict[str, Any]:
    """Return the same facts for programs."""
    left = plan.left(done)
    every, took = costs(plan), bill.elapsed(plan, left)

    def numbers(some: Costs, keys: Collection[str] | None) -> dict[str, Any]:
        hours = bill.hours(keys)
        return {"tokens": some.tokens, "flops": some.flops, "device_hours": hours, "disk_bytes": some.disk}

    return plan.to_json() | {
        "done": [key for key in plan.jobs if key in done],
        "device": bill.device,
        "efficiency": bill.efficiency,
        "costs": numbers(every, None),
        "costs_left": numbers(costs(plan, left), left),
        "prices": bill.prices_json(left),
        "elapsed": asdict(took) if took else None,
        "corpora": [
            {
                "name": text.corpus.name,
                "tokens": text.tokens,
                "counted": text.exact,
                "shard_bytes": text.bytes,
            }
            for text in bill.texts
        ],
        "notes": [*every.notes, *bill.notes, *_text_notes(bill)],
        "finetunings": tuned.of,
        "finetunings_done": tuned.done,
        "scores": sum(grid.scores for grid in plan.tuned.values()),
        **(_discard_json(plan) if plan.study.finetune and plan.study.finetune.discard else {}),
    }


def _discard_json(plan: Plan) -> dict[str, Any]:
    count, cost, without = screening_cost(plan)
    return {"discard": {"screenings": count, "cost": cost, "cost_without": without}}


def key_length(keys: Collection[str]) -> int:
    """Return the shortest prefix length, at least 6, at which all keys differ."""
    length = KEY_DIGITS
    while len({key[:length] for key in keys}) < len(set(keys)):
        length += 1
    return length


# ---------------------------------------------------------------- tree
# Columns line up at any depth. A tree that is too wide for the page is drawn flat, with narrow branches: at each fork
# the child with the deepest subtree continues at its parent's indentation.


_Row = tuple[str, str, str, str, str, str]  # branches and objective, first and last step, key, mark, results


def _tree(plan: Plan, done: Collection[str]) -> list[str]:
    below = children_of(plan.jobs.values())
    in_thousands = all(step % 1000 == 0 for job in plan.jobs.values() for step in job.span)
    digits = key_length({*plan.roots, *plan.jobs, *done})

    def steps(count: int) -> str:
        return f"{count // 1000:,}k" if in_thousands else f"{count:,}"

    def row(text: str, job: TrainingJob) -> _Row:
        first, until = job.span
        mark = "✓" if job.key in done else ""
        return (
            text,
            "" if job.merge else steps(first),
            steps(until),
            job.key[:digits],
            mark,
            ", ".join(job.results),
        )

    named = titles(list(plan.roots.values()), trained=set(below))

    def drawn(*, flat: bool) -> list[str]:
        rows: list[_Row] = []
        for key, root in plan.roots.items():
            rows.append((named[key], "", "", key[:digits], "", ", ".join(root.results)))
            rows.extend(row(text, job) for text, job in _branches(below, key, flat=flat))
        return _aligned(rows)

    lines = drawn(flat=False)
    return lines if max(map(len, lines)) <= PAGE else drawn(flat=True)


def _branches(
    below: dict[str, list[TrainingJob]], root: str, *, flat: bool
) -> Iterator[tuple[str, TrainingJob]]:
    """Yield each training job below a root with the text of its line, depth first."""
    fork, last, line, blank = ("├", "└", "│", " ") if flat else ("├─ ", "└─ ", "│  ", "   ")
    depths = _depths(below, root) if flat else {}

    def expand(key: str, prefix: str) -> list[tuple[TrainingJob, str, str]]:
        """Return children in reverse order, each with the prefix of its own line and of the lines below it."""
        children = below.get(key, [])
        trunk = max(children, key=lambda child: depths[child.key], default=None) if flat else None
        lines = [(child, prefix + fork, prefix + line) for child in children if child is not trunk]
        if trunk:  # continues at its parent's indentation, after the other children
            lines.append((trunk, prefix, prefix))
        elif lines:
            lines[-1] = (children[-1], prefix + last, prefix + blank)
        return lines[::-1]

    waiting = expand(root, "")
    while waiting:
        job, before, beneath = waiting.pop()
        base = 0.0 if job.merge else job.run.phase_at(job.first).rope_base
        rope = f", rope {base:g}" if base else ""
        yield before + job.objective.label + rope + (" ↘" if job.decaying else ""), job
        waiting.extend(expand(job.key, beneath))


def _depths(below: dict[str, list[TrainingJob]], root: str) -> dict[str, int]:
    """Return the number of training jobs on the longest path down from each job."""
    order, depths = [root], {}
    for key in order:
        order.extend(child.key for child in below.get(key, []))
    for key in reversed(order):
        depths[key] = 1 + max((depths[child.key] for child in below.get(key, [])), default=0)
    return depths


def _aligned(rows: list[_Row]) -> list[str]:
    wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for text, first, until, key, mark, results in rows:
        arrow = "→" if until else " "
        line = f"{text:<{wide[0]}}  {first:>{wide[1]}} {arrow} {until:>{wide[2]}}  {key} {mark:<{wide[4]}}  {results}"
        lines.append(line.rstrip())
    return lines


def titles(roots: list[Root], trained: set[str]) -> dict[str, str]:
    """Return a title for each root; roots with the same title also name the fields in which they differ."""
    plain = {root.key: _title(root.run, trained=root.key in trained) for root in roots}
    details = {root.key: _details(root.run) for root in roots}
    full = {}
    for key, title in plain.items():
        alike = [details[other] for other in plain if plain[other] == title]
        differing = [
            text for name, text in details[key].items() if any(other.get(name) != text for other in alike)
        ]
        full[key] = ", ".join([title, *differing])
    return full


def _title(run: Pretrain, *, trained: bool) -> str:
    start = getattr(run.start, "name", "") or getattr(run.start, "source", "")
    return f"{start} on {getattr(run.corpus, 'name', run.corpus)}" if trained else f"{start}, as it is"


UNTOLD = ("/kind", "start/name", "start/precision", "corpus/name")  # in the title already, or of no effect


def _details(run: Pretrain) -> dict[str, str]:
    """Return everything that a root's key depends on, as "name value" by the path of the field."""
    parts: dict[str, Any] = {"": run.start}  # an existing model, not trained here
    if run.corpus:
        names = ("seed", "packing", "precision", "adapter", "freeze", "optimizer")
        parts = {"start": run.start, "corpus": corpus_of(run), "lr": run.first_peak}
        parts |= {"warmup": run.schedule.warmup, "batch": run.batch_tokens}
        parts |= {name: getattr(run, name) for name in names}
        parts |= {"z_loss": run.z_loss} if run.z_loss else {}
        parts |= {"warmup from": run.schedule.warmup_from} if run.schedule.warmup_from else {}
    values = {path: value for name, part in parts.items() for path, value in _leaves(encode(part), name)}
    return {
        path: f"{path.removesuffix('/kind').split('/')[-1]} {value:{'g' if isinstance(value, float) else ''}}"
        for path, value in values.items()
        if path not in UNTOLD
    }


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}/{name}")
    else:
        yield path, value if isinstance(value, float) else str(value)


# ---------------------------------------------------------------- runs and status


BAR = 20
LISTED = 5  # extended grids that `status` names
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
    where = [f"{len(done)} of {plan.job_count} training jobs"] if plan.job_count else []
    where += [f"{tuned.done:,} of {tuned.of:,} fine-tunings"] if tuned.of else []
    standing, resume = f"{' and '.join(where)} done", f"To go on: biphase {command}"
    if stopped:
        kept = [step for _, step in ledger.kept(plan, store).values()]
        at = f"at step {kept[0]:,}" if len(kept) == 1 else "at their last checkpoints"
        saved = f", {counted(len(kept), 'fine-tuning')} kept {at}" if kept else ""
        lost = (
            f"{duration(max(1, unsaved))} of fine-tuning to be computed again" if unsaved else "nothing lost"
        )
        lines.append(f"stopped. {standing}{saved}, {lost}. {resume}")
    elif failed:
        lines.append(f"{standing}, {len(failed)} failed. {resume}")
    elif plan.left(done) or tuned.done < tuned.of:
        lines.append(f"{standing}. {resume}")
    else:
        every, several = _jobs_and_tunings(plan.job_count, tuned.of), plan.job_count + tuned.of > 1
        done_text = f"all {every} are done; they are" if several else f"{every} is done; it is"
        lines.append(f"{done_text} in {store.root}")
        lines.append(f"What {'they show' if several else 'it shows'}: biphase report {study}")
    return "\n".join(lines)


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
    """Return held-out losses, then scores, each table followed by a blank line.

    A result that cannot be read has no row; the reason is added to `damaged` by its key.
    """
    lines = [*results_table(plan, store, damaged), *score_table(plan, tuned)]
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
            losses = measured.values()
            curves = {name: [loss[name] for loss in losses if name in loss] for name in last}
            rows.append((name, last, curves, epochs))
    if not rows:
        return []
    wide = max(len("held-out loss, nats"), *(len(name) for name, *_ in rows))
    cell = 6 + CURVE
    lines = [f"  {'held-out loss, nats':<{wide}}  {'causal':<{cell}}  {'masked 40%':<{cell}}  epochs"]
    for name, last, curves, epochs in rows:
        cells = [
            f"{last[loss]:.3f} {sparkline(curves[loss]):<{CURVE}}" if loss in last else " " * cell
            for loss in ("clm", "mlm40")
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


def score_table(plan: Plan, tuned: ledger.TrialSurvey) -> list[str]:
    """Return scores as a table, with notes below and a blank line; empty before any trial is done."""
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
    body = ["  " + "  ".join(f"{line[at]:<{wide[at]}}" for at in shown).rstrip() for line in lines]
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
        f"{(_percent if zero_shot else with_interval)(selected.test)}{' !' if any(selected.constant) else ''}"
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
    below = tables(plan, store, tuned, damaged)
    done = sum(entry.standing == "done" for entry in entries.values())
    broken = {key for key, entry in entries.items() if entry.standing == "failed"}
    unfinished = plan.left(ledger.settled(plan, store, tuned) - broken)
    lines = [plan.study.name]
    if entries:
        left = ledger.seconds_left(entries) if unfinished else None
        lines.append(_bar(done, len(entries), "training jobs", left))
    if tuned.of:
        lines.append(_bar(tuned.done, tuned.of, "fine-tunings", tuned.seconds_left))
        lines += screening_lines(plan, tuned.grids)
    for key, entry in entries.items():
        name = ", ".join(entry.job.results) or entry.job.run.name
        if entry.holder:
            progress = ledger.latest(plan, store, entry.job)
            where = f"on {entry.holder.host}, process {entry.holder.pid}"
            lines.append("  ".join(filter(None, (f"  running {key[:KEY_DIGITS]}", name, where, progress))))
        if entry.standing == "failed":
            lines.append(f"  failed  {key[:KEY_DIGITS]}  {name}  {entry.error}")
    for key, (tuning, holder) in tuned.running.items():
        lines.append(
            f"  running {key[:KEY_DIGITS]}  {tuning.title(plan)}  on {holder.host}, process {holder.pid}"
        )
    for key, (tuning, error) in tuned.failed.items():
        lines.append(f"  failed  {key[:KEY_DIGITS]}  {tuning.title(plan)}  {error}")
    for key, (tuning, step) in tuned.kept.items():
        lines.append(f"  kept    {key[:KEY_DIGITS]}  {tuning.title(plan)}  at step {step:,}")
    listed = {entry.error for entry in entries.values()} | {error for _, error in tuned.failed.values()}
    lines += [
        f"  failed  {key[:KEY_DIGITS]}  {error}" for key, error in damaged.items() if error not in listed
    ]
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


def screening_lines(plan: Plan, grids: Sequence[TuningGrid]) -> list[str]:
    """Say how far learning rates are screened, and which grids were extended; nothing without `Finetune.discard`."""
    screened = [grid for grid in grids if grid.screening]
    spec = plan.study.finetune
    if not screened or not spec or not spec.discard:
        return []
    done = sum(not grid.pending for grid in screened)
    seeds = ", ".join(map(str, spec.discard.seeds))
    line = (
        f"  learning rates screened by {counted(len(spec.discard.seeds), 'seed')} ({seeds}) for "
        f"{done:,} of {counted(len(screened), 'grid')}; the best {spec.discard.keep} of each are kept"
    )
    extended = [f"{_result_of(plan, grid.model)} on {grid.task.name}" for grid in screened if grid.extended]
    more = f" and {len(extended) - LISTED} more" if len(extended) > LISTED else ""
    return [line, *([f"  grids extended: {', '.join(extended[:LISTED])}{more}"] if extended else [])]


def _result_of(plan: Plan, model: str) -> str:
    return next(name for name, key in plan.results.items() if key == model)


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
        "seconds_left": ledger.seconds_left(entries),
        "takeovers": len(Leases(store.leases).takeovers()),
        "jobs": [_entry_json(entry) for entry in entries.values()],
        "heldout": {name: _measured(plan, store, name, damaged) for name in plan.results},
        "finetunings": {
            "done": tuned.done,
            "of": tuned.of,
            "seconds_left": tuned.seconds_left,
            "grids": [
                {
                    "result": _result_of(plan, grid.model),
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
