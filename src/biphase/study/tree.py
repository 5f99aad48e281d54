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
from biphase.study.plan import Plan, Root, State
from biphase.study.totals import PAGE, Bill, bill_json, leaves, summary
from biphase.wording import short

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
    bill: Bill,
    command_path: str,
    claims: list[str],
) -> str:
    """What `biphase plan` prints. `tuned` is how many fine-tunings are done; `claims` stand between tree and costs."""
    name, question = plan.study.name, plan.question
    head = textwrap.wrap(f"{name}: {question}" if question else name, PAGE, subsequent_indent="  ")
    body = _tree(plan, done)
    body += ["", *claims] if claims else []
    below = summary(plan, done, tuned, bill, command_path)
    return "\n".join([*head, "", *body, "", *below])


def plan_json(plan: Plan, *, done: Collection[str], tuned: int, bill: Bill) -> dict[str, Any]:
    """The same for a program."""
    trainings, scores = leaves(plan)
    return (
        plan.to_json()
        | {"done": [key for key in plan.states if key in done]}
        | bill_json(plan, bill, plan.left(done))
        | {"finetunings": trainings, "finetunings_done": tuned, "scores": scores}
    )


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
