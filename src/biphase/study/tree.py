"""A plan as text: the tree, what it costs, what is done and what to type next.

Columns line up at any depth. A deep tree is drawn with narrower branches and then with its trunks upright,
each child that reaches deepest on the level of its parent, until it fits the page.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from typing import Any

from biphase.keys import act_at, label
from biphase.presets import corpus_of
from biphase.specs import Chunks, Pretrain
from biphase.study.costs import Costs, costs
from biphase.study.plan import Plan, Root, State
from biphase.wording import counted, short, si

PAGE = 110
SHORTEST_KEY = 6


@dataclass(frozen=True)
class _Row:
    text: str  # branches and what is trained
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
    device: str,
    efficiency: float,
    command_path: str,
    claims: list[str],
) -> str:
    """What `biphase plan` prints. `tuned` is how many fine-tunings are done; `claims` stand between tree and costs."""
    name, question = plan.study.name, plan.question
    head = textwrap.wrap(f"{name}: {question}" if question else name, PAGE, subsequent_indent="  ")
    body = _tree(plan, done)
    body += ["", *claims] if claims else []
    return "\n".join([*head, "", *body, "", *_summary(plan, done, tuned, device, efficiency, command_path)])


def plan_json(
    plan: Plan, *, done: Collection[str], tuned: int, device: str, efficiency: float
) -> dict[str, Any]:
    """The same for a program."""
    every, left = costs(plan), costs(plan, plan.left(done))

    def numbers(some: Costs) -> dict[str, Any]:
        hours = some.device_hours(device, efficiency)
        return {"tokens": some.tokens, "flops": some.flops, "device_hours": hours, "disk_bytes": some.disk}

    trainings, scores = _leaves(plan)
    return plan.to_json() | {
        "done": [key for key in plan.states if key in done],
        "device": device,
        "efficiency": efficiency,
        "costs": numbers(every),
        "costs_left": numbers(left),
        "notes": list(every.notes),
        "finetunings": trainings,
        "finetunings_done": tuned,
        "scores": scores,
    }


def key_length(keys: Collection[str]) -> int:
    """The shortest prefix length, from 6 on, at which all keys differ."""
    length = SHORTEST_KEY
    while len({key[:length] for key in keys}) < len(set(keys)):
        length += 1
    return length


# ---------------------------------------------------------------- the tree


def _tree(plan: Plan, done: Collection[str]) -> list[str]:
    below: dict[str, list[State]] = {}
    for state in plan.states.values():
        below.setdefault(state.root if state.parent is None else state.parent, []).append(state)
    in_thousands = all(step % 1000 == 0 for state in plan.states.values() for step in state.span)
    digits = key_length({*plan.roots, *plan.states, *done})

    def steps(count: int) -> str:
        return f"{count // 1000:,}k" if in_thousands else f"{count:,}"

    def row(text: str, state: State) -> _Row:
        first, until = state.span
        mark = "✓" if state.key in done else ""
        return _Row(text, steps(first), steps(until), state.key[:digits], mark, ", ".join(state.results))

    named = titles(list(plan.roots.values()), trained=set(below))
    lines: list[str] = []
    for branch, flat in ((3, False), (2, False), (2, True), (1, True)):
        rows: list[_Row] = []
        for key, root in plan.roots.items():
            rows.append(_Row(named[key], "", "", key[:digits], "", ", ".join(root.results)))
            rows.extend(row(text, state) for text, state in _branches(below, key, branch, flat))
        lines = _aligned(rows)
        if max(map(len, lines)) <= PAGE:
            break
    return lines


def _branches(
    below: dict[str, list[State]], root: str, branch: int, flat: bool
) -> Iterator[tuple[str, State]]:
    """Each state below a root with its line's text, depth first."""
    signs = {3: ("├─ ", "└─ ", "│  ", "   "), 2: ("├ ", "└ ", "│ ", "  "), 1: ("├", "└", "│", " ")}
    fork, last, line, blank = signs[branch]
    depths = _depths(below, root) if flat else {}

    def expand(key: str, prefix: str) -> list[tuple[State, str, str]]:
        """Children, last first, each with the text before it and before what is below it."""
        children = below.get(key, [])
        trunk = max(children, key=lambda child: depths[child.key], default=None) if flat else None
        beside = [child for child in children if child is not trunk]
        made = [(child, prefix + fork, prefix + line) for child in beside]
        if trunk:  # it goes on at its own level, after what leaves it
            made.append((trunk, prefix, prefix))
        elif made:
            made[-1] = (beside[-1], prefix + last, prefix + blank)
        return made[::-1]

    waiting = expand(root, "")
    while waiting:
        state, before, beneath = waiting.pop()
        base = act_at(state.run, state.first).rope_base
        turned = f", rope {base:g}" if base else ""
        yield before + label(state.objective) + turned + (" ↘" if state.decaying else ""), state
        waiting.extend(expand(state.key, beneath))


def _depths(below: dict[str, list[State]], root: str) -> dict[str, int]:
    """How many states lie in a row from each state on."""
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
    """What each root is; roots that read alike also say in what they differ."""
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
    """Everything a root's key looks at, as words by what they tell."""
    if not run.corpus:  # a model as it is
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
    """The fields of a record, each as its name and value."""

    def value(of: Any) -> str:
        return f"{of:g}" if isinstance(of, float) else str(of)

    return {
        one.name: f"{one.name} {value(getattr(record, one.name))}"
        for one in fields(record)
        if one.name not in but
    }


# ---------------------------------------------------------------- the summary


def _summary(
    plan: Plan, done: Collection[str], tuned: int, device: str, efficiency: float, command_path: str
) -> list[str]:
    every = costs(plan)
    hours = every.device_hours(device, efficiency)
    trainings, scores = _leaves(plan)
    written, to_compute = plan.steps_written, plan.steps_to_compute
    shared = f" ({written:,} as written, {written - to_compute:,} shared)" if written > to_compute else ""
    parts = [counted(len(plan.study.runs), "run")]
    if plan.states:
        parts += [
            counted(plan.pieces, "piece"),
            f"{counted(to_compute, 'step')} to compute{shared}",
            f"{short(every.tokens)} tokens",
        ]
    if plan.states and every.flops is not None and hours is not None and every.disk is not None:
        parts += [
            f"{every.flops:.2e} FLOPs",
            f"{_hours(hours, device)} on {device} at {efficiency:.0%}",
            f"{si(every.disk)}B of disk",
        ]
    if trainings:
        parts += [counted(trainings, "fine-tuning"), counted(scores, "score")]
    left = plan.left(done)
    return [*_flow(parts), *every.notes, _next(plan, left, tuned, device, efficiency, command_path)]


def _next(plan: Plan, left: list[str], tuned: int, device: str, efficiency: float, command_path: str) -> str:
    trainings, _ = _leaves(plan)
    if not plan.states and not trainings:
        return "nothing to train."
    if not left and tuned == trainings:
        every = [counted(plan.pieces, "piece")] if plan.states else []
        every += [counted(trainings, "fine-tuning")] if trainings else []
        return f"all {' and '.join(every)} computed. See: biphase report {command_path}"
    if len(left) == plan.pieces and not tuned:
        return f"nothing computed yet. Next: biphase run {command_path}"
    hours = costs(plan, left).device_hours(device, efficiency)
    steps = sum(plan.states[key].steps for key in left)
    time = f", {_hours(hours, device)}" if hours is not None else ""
    done = [f"{plan.pieces - len(left):,} of {counted(plan.pieces, 'piece')}"] if plan.states else []
    done += [f"{tuned:,} of {counted(trainings, 'fine-tuning')}"] if trainings else []
    to_go = f", {steps:,} steps left{time}" if left else ""
    return f"{' and '.join(done)} done{to_go}. Next: biphase run {command_path}"


def _leaves(plan: Plan) -> tuple[int, int]:
    """Fine-tunings and scores: two names of one state share theirs."""
    finetune, models = plan.study.finetune, len(set(plan.results.values()))
    return (finetune.trainings * models, finetune.scores * models) if finetune else (0, 0)


def _flow(parts: list[str]) -> list[str]:
    """Parts joined by dots, broken between them where the page ends."""
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
    return f"{hours:.1f} {word}" if hours >= 1 else f"{max(1, round(hours * 60))} min"
