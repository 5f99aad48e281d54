"""What `biphase plan` prints: the tree of training jobs, costs and elapsed time, what is done and what to type next.

`render` makes the text and `plan_json` the same facts for programs. `bill` prices a plan on a device: measured speeds
predict hours, fine-tunings included; for a device that was not measured, hours are FLOPs at a share of its peak.
`elapsed` simulates the plan on several workers, each with one device and one job at a time.
"""

from __future__ import annotations

import heapq
import textwrap
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from textwrap import wrap
from typing import Any

from biphase.presets import DEVICES, corpus_of
from biphase.protocol import KEY_DIGITS
from biphase.specs import Chunks, Pretrain
from biphase.store import Store
from biphase.study.costs import Costs, costs, flops_of, peak_of
from biphase.study.names import Text, texts_of
from biphase.study.plan import Plan, Root, TrainingJob
from biphase.study.prices import (
    MEASURE,
    PLANNED_DEVICE,
    Grid,
    Prices,
    at_hand,
    device_named,
    is_known,
    left_of,
    price,
    prices_json,
)
from biphase.text import counted, duration, short, si


@dataclass(frozen=True)
class Elapsed:
    workers: int
    seconds: float
    chain: float  # seconds of the longest chain of dependent jobs
    ends: str  # names of the results at its end


def elapsed(
    plan: Plan,
    jobs: Mapping[str, float],
    tunings: Mapping[Grid, float],
    counts: Mapping[Grid, int],
    workers: int,
) -> Elapsed:
    """Simulate how long a plan takes on several workers.

    A training job waits for its parent, a fine-tuning for its model. Jobs are chosen as `worker.Worker` does:
    fine-tunings whose model exists first, then training jobs in the order of the plan. With any number of workers,
    a plan takes at least as long as its longest chain of dependent jobs.

    `jobs`: seconds of each training job to run; `tunings`: seconds of one fine-tuning of each grid; `counts`: how
    many fine-tunings of each grid to run.
    """
    grids: dict[str, deque[tuple[float, int]]] = {}
    for grid, seconds in tunings.items():
        if counts.get(grid):
            grids.setdefault(grid[0], deque()).append((seconds, counts[grid]))
    chain, ends = _longest(plan, jobs, grids)
    return Elapsed(workers, _simulated(plan, jobs, grids, workers), chain, ends)


def _longest(
    plan: Plan, jobs: Mapping[str, float], grids: Mapping[str, deque[tuple[float, int]]]
) -> tuple[float, str]:
    until: dict[str, float] = {}
    for key in jobs:  # parents come before children
        until[key] = until.get(plan.jobs[key].parent or "", 0.0) + jobs[key]
    every = {
        model: until.get(model, 0.0) + max((seconds for seconds, _ in grids.get(model, ())), default=0.0)
        for model in (*until, *grids)
    }
    last = max(every, key=lambda model: every[model], default="")
    names = [name for name, key in plan.results.items() if key == last]
    return every.get(last, 0.0), ", ".join(names)


def _simulated(
    plan: Plan, jobs: Mapping[str, float], grids: Mapping[str, deque[tuple[float, int]]], workers: int
) -> float:
    order = {key: number for number, key in enumerate(plan.jobs)}
    below: dict[str | None, list[str]] = {}
    for key in jobs:
        below.setdefault(plan.jobs[key].parent, []).append(key)
    first = [key for key in jobs if plan.jobs[key].parent not in jobs]
    trainable = [(order[key], key) for key in first]
    heapq.heapify(trainable)
    # Fine-tunings of one grid take equally long: (seconds, number left to start).
    tunable = deque(one for model, some in grids.items() if model not in jobs for one in some)
    running: list[tuple[float, str]] = []  # when the job ends, and the key it trains ("" for a fine-tuning)
    now = 0.0
    while trainable or tunable or running:
        while len(running) < workers and (tunable or trainable):
            if tunable:
                seconds, left = tunable.popleft()
                heapq.heappush(running, (now + seconds, ""))
                if left > 1:
                    tunable.appendleft((seconds, left - 1))
            else:
                _, key = heapq.heappop(trainable)
                heapq.heappush(running, (now + jobs[key], key))
        now, done = heapq.heappop(running)
        if done:
            tunable.extend(grids.get(done, ()))
            for child in below.get(done, ()):
                heapq.heappush(trainable, (order[child], child))
    return now


# ---------------------------------------------------------------- costs and totals


PAGE = 110
LONG = 24.0  # hours on a CPU above which a GPU is suggested
EFFICIENCY = 0.4  # share of a device's peak assumed where nothing was measured


@dataclass(frozen=True)
class Bill:
    """How a plan is priced: by measured speeds, or by FLOPs at a share of the device's peak."""

    device: str
    efficiency: float | None  # None: priced by measured speeds, or not at all
    prices: Prices | None = None
    tunings_left: dict[Grid, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    texts: tuple[Text, ...] = ()  # the corpora that the plan reads
    workers: int = 1  # each with its own device


def bill(
    plan: Plan,
    store: Store,
    device: str,
    efficiency: float | None,
    *,
    tuned: int,
    measure: str = MEASURE,
    workers: int = 1,
) -> Bill:
    """Price a plan on `device`, by default the one of this machine.

    If `efficiency` is given, hours are FLOPs at that share of the peak, even where speeds were measured. `measure`: the
    command that measures a device into this store, for messages.
    """
    here = "" if device else at_hand()
    if here and not is_known(here, store):
        why = f"{here}, the GPU here, was not measured, so there are no hours. Type: {measure}. Or: --device {PLANNED_DEVICE}"
        made = Bill(here, None, notes=(why,))
    else:
        made = _bill(plan, store, device or here, efficiency, tuned, measure)
    if here == "cpu" and (_pretraining_hours(made, costs(plan), None) or 0.0) > LONG:
        note = f"these are hours of the processor here; of a GPU: --device {PLANNED_DEVICE}"
        made = replace(made, notes=(*made.notes, note))
    return replace(made, texts=tuple(texts_of(plan, store)), workers=max(1, workers))


def _bill(plan: Plan, store: Store, device: str, efficiency: float | None, tuned: int, measure: str) -> Bill:
    machine = device_named(device, store, measure=measure)
    if efficiency is not None:
        return Bill(device, efficiency)
    if machine is None:
        without = ", without fine-tunings" if plan.study.finetune else ""
        why = f"{device} was not measured: hours are FLOPs at a share of its peak{without}. There, type: {measure}"
        return Bill(device, EFFICIENCY, notes=(why,))
    made = price(plan, machine, measure=measure)
    nothing = plan.jobs and not made.jobs and not made.tunings
    if nothing and made.unmeasured and device in DEVICES and costs(plan).flops is not None:
        why = f"hours are FLOPs at a share of the peak: steps like these were not measured on {device}"
        others = (note for note in made.notes if note not in made.unmeasured)
        return Bill(device, EFFICIENCY, notes=(why, *others))
    return Bill(device, None, made, left_of(plan, store) if tuned else made.grids, made.notes)


def bill_json(plan: Plan, made: Bill, left: Collection[str]) -> dict[str, Any]:
    """Return the costs of the whole plan and of what is left, for programs."""
    every, rest = costs(plan), costs(plan, left)

    def numbers(some: Costs, keys: Collection[str] | None) -> dict[str, Any]:
        hours = _pretraining_hours(made, some, keys)
        return {"tokens": some.tokens, "flops": some.flops, "device_hours": hours, "disk_bytes": some.disk}

    took = _elapsed(plan, made, left)
    return {
        "device": made.device,
        "efficiency": made.efficiency,
        "costs": numbers(every, None),
        "costs_left": numbers(rest, left),
        "prices": prices_json(made.prices, left, made.tunings_left) if made.prices else None,
        "elapsed": asdict(took) if took else None,
        "corpora": [
            {"name": one.corpus.name, "tokens": one.tokens, "counted": one.exact, "shard_bytes": one.bytes}
            for one in made.texts
        ],
        "notes": [*every.notes, *made.notes, *_text_notes(made)],
    }


def summary(plan: Plan, done: Collection[str], tuned: int, made: Bill, command_path: str) -> list[str]:
    """Return the lines below the tree."""
    every, left = costs(plan), plan.left(done)
    finetunings, scores = trials_line(plan)
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
    parts += _hours_parts(plan, made, every)
    parts += [_disk(every.disk, made)] if plan.jobs and every.disk is not None else []
    if finetunings:
        parts += [counted(finetunings, "fine-tuning"), counted(scores, "score")]
    below = [*_elapsed_line(plan, made, left), *_basis(plan, made), *_text_notes(made)]
    wrapped = [line for one in below for line in wrap(one, PAGE, subsequent_indent="  ")]
    return [*_flow(parts), *wrapped, *every.notes, *made.notes, _next(plan, left, tuned, made, command_path)]


def _disk(states: int, made: Bill) -> str:
    shards = sum(one.bytes or 0 for one in made.texts)
    of_it = f", {si(shards)}B of it token shards" if shards else ""
    return f"{si(states + shards)}B of disk{of_it}"


def _text_notes(made: Bill) -> list[str]:
    unknown = [one.corpus.name for one in made.texts if one.tokens is None]
    notes = [note for one in made.texts if (note := one.repeats())]
    if unknown:
        notes.append(
            f"not in the disk sum: token shards of {', '.join(unknown)}, whose tokens are not counted yet"
        )
    return notes


def _elapsed(plan: Plan, made: Bill, left: Collection[str]) -> Elapsed | None:
    """Simulate what is left to do; None if a job has no price."""
    if made.prices is not None:
        jobs = {key: made.prices.jobs.get(key) for key in left}
        tunings = made.prices.tunings
    elif made.efficiency:
        rate = peak_of(made.device) * made.efficiency
        flops = {key: flops_of(plan.jobs[key]) for key in left}
        jobs = {key: None if some is None else some / rate for key, some in flops.items()}
        tunings = {}
    else:
        return None
    known = {key: seconds for key, seconds in jobs.items() if seconds is not None}
    if len(known) < len(jobs) or not (known or made.tunings_left):
        return None
    return elapsed(plan, known, tunings, made.tunings_left, made.workers)


def _elapsed_line(plan: Plan, made: Bill, left: Collection[str]) -> list[str]:
    took = _elapsed(plan, made, left)
    if took is None:
        return []
    without = ", fine-tunings not counted" if plan.tuned and made.prices is None else ""
    by = f"{took.workers:,} {made.device}, a job on each" if took.workers > 1 else f"one {made.device}"
    chain = f"; the longest chain of jobs takes {duration(took.chain)} ({took.ends})" if took.ends else ""
    return [f"elapsed: {duration(took.seconds)} on {by}{without}{chain}"]


def _basis(plan: Plan, made: Bill) -> list[str]:
    """Name the measurements behind the hours, and the model sizes that they are extrapolated to."""
    if made.prices is None or not made.prices.precisions:
        return []
    machine, precisions = made.prices.machine, made.prices.precisions
    sizes = dict.fromkeys(getattr(root.run.start, "name", "") for root in plan.roots.values())
    beyond = machine.not_measured([one for one in sizes if one])
    extrapolated = f"; extrapolated to {', '.join(beyond)}" if beyond else ""
    return [f"{machine.steps_behind(precisions)}{extrapolated}"]


def _hours_parts(plan: Plan, made: Bill, every: Costs) -> list[str]:
    """Return the hours of the whole plan, as parts of the summary."""
    device = made.device
    if made.prices is None:
        hours = _pretraining_hours(made, every, None)
        if not plan.jobs or hours is None:
            return []
        return [f"{_hours(hours, device)} on {device} at {made.efficiency:.0%}"]
    parts = []
    if made.prices.jobs:
        parts.append(f"pretraining {_hours(made.prices.pretraining() / 3600, device)}")
    if made.prices.tunings:
        parts.append(f"fine-tuning {_hours(made.prices.finetuning() / 3600, device)}")
    return (
        [f"{' and '.join(parts)} on {device} ({made.prices.machine.when(made.prices.precisions)})"]
        if parts
        else []
    )


def _pretraining_hours(made: Bill, some: Costs, keys: Collection[str] | None) -> float | None:
    """Return the hours of these training jobs (`keys`, None: all), or None if unknown for some of them."""
    if made.prices is None:
        return some.device_hours(made.device, made.efficiency) if made.efficiency else None
    every = made.prices.priced if keys is None else set(keys) <= made.prices.jobs.keys()
    return made.prices.pretraining(keys) / 3600 if every else None


def _next(plan: Plan, left: list[str], tuned: int, made: Bill, command_path: str) -> str:
    finetunings, _ = trials_line(plan)
    if not plan.jobs and not finetunings:
        return "nothing to train."
    if not left and tuned == finetunings:
        every = [counted(plan.job_count, "training job")] if plan.jobs else []
        every += [counted(finetunings, "fine-tuning")] if finetunings else []
        return f"all {' and '.join(every)} computed. See: biphase report {command_path}"
    if len(left) == plan.job_count and not tuned:
        return f"nothing computed yet. Next: biphase run {command_path}"
    steps = sum(plan.jobs[key].steps for key in left)
    hours = _pretraining_hours(made, costs(plan, left), left)
    if made.prices and hours is not None:
        hours += made.prices.finetuning(made.tunings_left) / 3600
    time = _hours(hours, made.device) if hours else ""
    done = (
        [f"{plan.job_count - len(left):,} of {counted(plan.job_count, 'training job')}"] if plan.jobs else []
    )
    done += [f"{tuned:,} of {counted(finetunings, 'fine-tuning')}"] if finetunings else []
    to_go = ", ".join(one for one in (f"{steps:,} steps left" if left else "", time) if one)
    return f"{' and '.join(done)} done{', ' + to_go if to_go else ''}. Next: biphase run {command_path}"


def trials_line(plan: Plan) -> tuple[int, int]:
    """Return the numbers of fine-tunings and scores; two names of one checkpoint share theirs."""
    parts = plan.tuned.values()
    return sum(part.finetunings for part in parts), sum(part.scores for part in parts)


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


# ---------------------------------------------------------------- text
# Columns line up at any depth. A tree that is too wide for the page is drawn with narrower branches, then flat: at each
# fork the child with the deepest subtree continues at its parent's indentation.


@dataclass(frozen=True)
class _Row:
    text: str  # tree branches and the objective
    first: str
    until: str
    key: str
    mark: str
    results: str


def render(
    plan: Plan,
    *,
    done: Collection[str],
    tuned: int,
    bill: Bill,
    command_path: str,
    claims: list[str],
) -> str:
    """Return what `biphase plan` prints.

    `tuned`: how many fine-tunings are done; `claims`: lines to print between tree and costs.
    """
    name, question = plan.study.name, plan.question
    head = textwrap.wrap(f"{name}: {question}" if question else name, PAGE, subsequent_indent="  ")
    body = _tree(plan, done)
    body += ["", *claims] if claims else []
    below = summary(plan, done, tuned, bill, command_path)
    return "\n".join([*head, "", *body, "", *below])


def plan_json(plan: Plan, *, done: Collection[str], tuned: int, bill: Bill) -> dict[str, Any]:
    """Return the same facts for programs."""
    finetunings, scores = trials_line(plan)
    return (
        plan.to_json()
        | {"done": [key for key in plan.jobs if key in done]}
        | bill_json(plan, bill, plan.left(done))
        | {"finetunings": finetunings, "finetunings_done": tuned, "scores": scores}
    )


def key_length(keys: Collection[str]) -> int:
    """Return the shortest prefix length, at least 6, at which all keys differ."""
    length = KEY_DIGITS
    while len({key[:length] for key in keys}) < len(set(keys)):
        length += 1
    return length


# ---------------------------------------------------------------- tree


def _tree(plan: Plan, done: Collection[str]) -> list[str]:
    below: dict[str, list[TrainingJob]] = {}
    for job in plan.jobs.values():
        below.setdefault(job.root if job.parent is None else job.parent, []).append(job)
    in_thousands = all(step % 1000 == 0 for job in plan.jobs.values() for step in job.span)
    digits = key_length({*plan.roots, *plan.jobs, *done})

    def steps(count: int) -> str:
        return f"{count // 1000:,}k" if in_thousands else f"{count:,}"

    def row(text: str, job: TrainingJob) -> _Row:
        first, until = job.span
        mark = "✓" if job.key in done else ""
        return _Row(text, steps(first), steps(until), job.key[:digits], mark, ", ".join(job.results))

    named = titles(list(plan.roots.values()), trained=set(below))
    lines: list[str] = []
    for branch, flat in ((3, False), (2, False), (2, True), (1, True)):
        rows: list[_Row] = []
        for key, root in plan.roots.items():
            rows.append(_Row(named[key], "", "", key[:digits], "", ", ".join(root.results)))
            rows.extend(row(text, job) for text, job in _branches(below, key, branch, flat))
        lines = _aligned(rows)
        if max(map(len, lines)) <= PAGE:
            break
    return lines


def _branches(
    below: dict[str, list[TrainingJob]], root: str, branch: int, flat: bool
) -> Iterator[tuple[str, TrainingJob]]:
    """Yield each training job below a root with the text of its line, depth first."""
    signs = {3: ("├─ ", "└─ ", "│  ", "   "), 2: ("├ ", "└ ", "│ ", "  "), 1: ("├", "└", "│", " ")}
    fork, last, line, blank = signs[branch]
    depths = _depths(below, root) if flat else {}

    def expand(key: str, prefix: str) -> list[tuple[TrainingJob, str, str]]:
        """Return children in reverse order, each with the prefix of its own line and of the lines below it."""
        children = below.get(key, [])
        trunk = max(children, key=lambda child: depths[child.key], default=None) if flat else None
        beside = [child for child in children if child is not trunk]
        made = [(child, prefix + fork, prefix + line) for child in beside]
        if trunk:  # continues at its parent's indentation, after the other children
            made.append((trunk, prefix, prefix))
        elif made:
            made[-1] = (beside[-1], prefix + last, prefix + blank)
        return made[::-1]

    waiting = expand(root, "")
    while waiting:
        job, before, beneath = waiting.pop()
        base = job.run.phase_at(job.first).rope_base
        turned = f", rope {base:g}" if base else ""
        yield before + job.objective.label + turned + (" ↘" if job.decaying else ""), job
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
    text, first, until, mark = (
        max(len(getattr(r, c)) for r in rows) for c in ("text", "first", "until", "mark")
    )
    lines = []
    for row in rows:
        arrow = "→" if row.until else " "
        line = f"{row.text:<{text}}  {row.first:>{first}} {arrow} {row.until:>{until}}  {row.key}"
        lines.append(f"{line} {row.mark:<{mark}}  {row.results}".rstrip())
    return lines


def titles(roots: list[Root], trained: set[str]) -> dict[str, str]:
    """Return a title for each root; roots with the same title also name the fields in which they differ."""
    plain = {root.key: _title(root.run, trained=root.key in trained) for root in roots}
    alike: dict[str, list[dict[str, str]]] = {}
    for root in roots:
        alike.setdefault(plain[root.key], []).append(_particulars(root.run))
    made = {}
    for root in roots:
        others = alike[plain[root.key]]
        mine = _particulars(root.run)
        differing = [words for what, words in mine.items() if any(one.get(what) != words for one in others)]
        made[root.key] = ", ".join([plain[root.key], *differing])
    return made


def _title(run: Pretrain, *, trained: bool) -> str:
    start = getattr(run.start, "name", "") or getattr(run.start, "source", "")
    return f"{start} on {getattr(run.corpus, 'name', run.corpus)}" if trained else f"{start}, as it is"


def _particulars(run: Pretrain) -> dict[str, str]:
    """Return everything that a root's key depends on, as text by field."""
    if not run.corpus:  # an existing model, not trained here
        return _fields(run.start)
    corpus, tokenizer = corpus_of(run), corpus_of(run).tokenizer
    optimizer, packing = run.optimizer, run.packing
    words = {
        **{f"start {name}": words for name, words in _fields(run.start, but=("name", "precision")).items()},
        "source": f"from {corpus.source}",
        "heldout": f"heldout {corpus.heldout}" if corpus.heldout else "1 in 1,000 held out",
        "text": f"text {corpus.text}",
        "tokens": f"{short(corpus.tokens)} tokens at most" if corpus.tokens else "all tokens",
        "bos": "bos" if corpus.bos else "no bos",
        "tokenizer": f"{type(tokenizer).__name__} {', '.join(_fields(tokenizer).values())}",
        "seed": f"seed {run.seed}",
        "lr": f"lr {run.schedule.peak:g}",
        "warmup": f"warmup {run.schedule.warmup:,}",
        "batch": f"batch {run.batch_tokens:,}",
        "packing": f"{type(packing).__name__.lower()} of {packing.length:,}",
        "shortest": f"shortest {getattr(packing, 'shortest', 0)}",
        "apart": "documents apart" if getattr(packing, "document_mask", False) else "documents together",
        "precision": run.precision,
        "adapter": f"LoRA of rank {run.adapter.rank}" if run.adapter else "all weights",
        "freeze": f"{run.freeze} frozen",
        **_fields(optimizer),
    }
    if not isinstance(packing, Chunks):
        del words["shortest"]
    return words


def _fields(record: Any, but: Collection[str] = ()) -> dict[str, str]:
    """Return the fields of a record as "name value" by name."""

    def value(of: Any) -> str:
        return f"{of:g}" if isinstance(of, float) else str(of)

    return {
        one.name: f"{one.name} {value(getattr(record, one.name))}"
        for one in fields(record)
        if one.name not in but
    }
