"""The model card: what it is, how to load it, how it was made, what it is worth, where its limits are.

What comes from outside (names, sources, licences) is escaped: it is told, never interpreted. Places on this machine
are told by their last name alone.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from biphase.data.shards import Shards
from biphase.export.found import SavedState
from biphase.export.licence import licence_of
from biphase.export.scores import Grid
from biphase.keys import acts, decay_start, label
from biphase.presets import corpus_of
from biphase.specs import Hub, Pretrain, Pretrained, Size
from biphase.study.adaptation import CONVERTED
from biphase.wording import duration, short, spoken

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Base:
    """The existing model that another was made from, if any."""

    model: str = ""  # a hub id
    name: str = ""
    licence: str = ""

    def words(self) -> str:
        if not self.name:
            return "Made from scratch: whoever publishes it says under which licence."
        said = (
            f"is under the licence {escaped(self.licence)}"
            if self.licence
            else "does not say in its card under which licence it is; look before you publish"
        )
        return f"The model it was made from, {escaped(self.name)}, {said}."


def base_of(run: Pretrain) -> Base:
    start = lineage(run)[0].start
    if not isinstance(start, Hub):
        return Base()
    return Base("" if start.local else start.source, place(start.source), licence_of(start))


@dataclass(frozen=True)
class Card:
    """The parts of a card, each ready to be written."""

    title: str
    summary: str
    pipeline: str  # transformers' name of what it can do
    library: str
    loading: list[str]  # blocks of Python
    sections: list[tuple[str, list[str]]]
    limits: list[str]
    tags: list[str] = field(default_factory=list)
    base: Base = field(default_factory=lambda: Base())
    needs: str = ""  # which version of transformers

    def text(self) -> str:
        front: dict[str, Any] = {
            "library_name": self.library,
            "pipeline_tag": self.pipeline,
            "tags": ["biphase", *self.tags],
        }
        if self.base.licence:
            front["license"] = self.base.licence
        if self.base.model:
            front["base_model"] = self.base.model
        # JSON is YAML: nothing in a value can end it.
        lines = ["---", *(f"{name}: {json.dumps(value)}" for name, value in front.items()), "---", ""]
        lines += [f"# {escaped(self.title)}", "", self.summary, ""]
        lines += [self.needs, ""] if self.needs else []
        lines += ["## How to load it", ""]
        for block in self.loading:
            lines += ["```python", block, "```", ""]
        for heading, body in self.sections:
            lines += [f"## {heading}", "", *body, ""]
        lines += [
            "## Licence",
            "",
            self.base.words(),
            "",
            "## Limits",
            "",
            *(f"- {one}" for one in self.limits),
        ]
        return "\n".join(lines) + "\n"


def escaped(text: str) -> str:
    """Text from outside as one line of Markdown that shows it and does nothing."""
    one = " ".join(str(text).split())
    one = one.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", one)


def table(rows: Rows, heads: tuple[str, ...] = ("", "")) -> list[str]:
    """Rows whose cells are escaped already."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def place(source: str) -> str:
    """Where something came from, without the folders of this machine."""
    here = source.startswith((".", "/", "~")) or source.endswith(
        (".json", ".jsonl", ".txt", ".parquet", ".zst")
    )
    return PurePath(source).name if here and not source.startswith(("hf://", "builtin:")) else source


# ---------------------------------------------------------------- recipe


def lineage(run: Pretrain) -> list[Pretrain]:
    """The runs that led to this one, oldest first, and itself."""
    return [*(lineage(run.start) if isinstance(run.start, Pretrain) else []), run]


def titled(state: SavedState) -> str:
    """The run, and the step where it is not its end."""
    return state.run.name if state.step == state.run.steps else f"{state.run.name}, step {state.step:,}"


def start_words(start: Size | Hub) -> str:
    if isinstance(start, Size):
        return (
            f"from scratch, {escaped(start.name)}: {start.layers} layers of width {start.hidden}, {start.heads} heads "
            f"({start.kv_heads} for keys), feed-forward {start.ffn}"
        )
    pinned = f" at {escaped(start.revision)}" if start.revision else ""
    more = [escaped(start.gguf)] if start.gguf else []
    more += ["sliding windows opened"] if start.windows == "full" else []
    return ", ".join([f"{escaped(place(start.source))}{pinned}", *more])


def recipe(state: SavedState) -> list[str]:
    """How the weights came about, run after run."""
    every = lineage(state.run)
    rows: Rows = [("start", start_words(every[0].start))]  # ty: ignore[invalid-argument-type]  (the first has no run before it)
    for run in every:
        until = state.step if run is every[-1] else run.steps
        rows += [
            (
                f"{escaped(run.name)}, steps {act.first + 1:,} to {min(act.until, until):,}",
                label(act.objective) + (f", rotary base {act.rope_base:,.0f}" if act.rope_base else ""),
            )
            for act in acts(run)
            if act.first < until
        ]
    return table([*rows, *_manner(state)], ("what", "how"))


def _manner(state: SavedState) -> Rows:
    run, progress = state.run, state.about["progress"]
    wsd, adam, packing = run.schedule, run.optimizer, run.packing
    decayed = (
        f"down in a line to 0 over the last {wsd.decay:,} steps"
        if state.step > decay_start(run)
        else "not decayed"
    )
    rows: Rows = [
        ("tokens", f"{short(progress['tokens'])} in all, {short(run.batch_tokens)} a step"),
        ("rows", f"{type(packing).__name__.lower()} of {packing.length:,} tokens"),
        ("learning rate", f"{wsd.peak:g} after a warmup of {wsd.warmup:,} steps, {decayed}"),
        (
            "optimizer",
            f"AdamW, betas {adam.betas[0]:g} and {adam.betas[1]:g}, eps {adam.eps:g}, weight decay "
            f"{adam.weight_decay:g}, gradients clipped at {adam.clip:g}"
            + (f", layer decay {adam.layer_decay:g}" if adam.layer_decay != 1 else ""),
        ),
        ("precision, seed", f"{run.precision}, {run.seed}"),
    ]
    if run.adapter:
        rows.append(("adapter", f"LoRA of rank {run.adapter.rank}, alpha {run.adapter.alpha:g}, merged here"))
    if run.freeze != "nothing":
        rows.append(("frozen", escaped(run.freeze)))
    machine = progress["machine"].get("device", "")
    rows.append(
        ("time", f"{duration(progress['seconds'])} of training on {escaped(machine) or 'one machine'}")
    )
    return [*rows, ("key", f"`{state.key}`")]


# ---------------------------------------------------------------- data, losses, scores


def data(state: SavedState, shards: Shards) -> list[str]:
    run = state.run
    corpus, card = corpus_of(run), shards.card
    words = "byte-level BPE, trained on the corpus"
    if isinstance(corpus.tokenizer, Pretrained):
        start, source = lineage(run)[0].start, PurePath(corpus.tokenizer.source)
        of = place(str(source))
        if source.parent.name == CONVERTED and isinstance(
            start, Hub
        ):  # a copy in the store, named by its hash
            of = f"of {place(start.source)}{f', {start.gguf}' if start.gguf else ''}, converted"
        words = f"{escaped(of)}, mask token {card['mask_rule']}"
    rows: Rows = [
        ("corpus", escaped(corpus.name)),
        ("source", escaped(place(corpus.source))),
        ("to train on", f"{short(card['train_tokens'])} tokens of {card['train_documents']:,} documents"),
        ("read so far", f"{state.about['epochs']:.2f} times"),
        ("held out", f"{short(card['heldout_tokens'])} tokens of {card['heldout_documents']:,} documents"),
        ("tokenizer", f"{words}, {card['vocab']:,} entries"),
        ("fingerprint", f"`{escaped(card['fingerprint'])}`"),
    ]
    return table(rows, ("what", "which"))


def losses(heldout: dict[int, dict[str, float]]) -> list[str]:
    """The last held-out losses, in nats a token; beside those of before the first step, where they were measured."""
    if not heldout:
        return ["None were measured."]
    (first, before), (step, last) = min(heldout.items()), max(heldout.items())
    columns = {f"at step {step:,}": last}
    if first == 0 < step:
        columns = {"before": before} | columns
    rows: Rows = [
        (escaped(spoken(name)), *(f"{one[name]:.4f}" if name in one else "" for one in columns.values()))
        for name in last
    ]
    return [*table(rows, ("held-out loss, nats a token", *columns))]


def scores(grids: list[Grid]) -> list[str]:
    """Test scores of fine-tuned copies of this model."""
    if not grids:
        return ["This model has not been fine-tuned in the store it comes from."]
    lines = [
        "| task | metric | test score, % | protocol | learning rate | seeds |",
        "|---|---|---|---|---|---|",
    ]
    for grid in grids:
        rate = "" if grid.rate is None else f"{grid.rate:g}"
        protocol = grid.about["finetune"]["protocol"]
        lines.append(
            f"| {escaped(grid.task)} | {escaped(grid.metric)} | {grid.words()} | {protocol} | {rate} | {len(grid.seeds)} |"
        )
    note = "Mean over fine-tuning seeds with its 95% interval. Learning rates were chosen by validation scores alone."
    return [*lines, "", note]
