"""The model card (README.md) of an exported model: how to load it, how it was made, its scores, licence and limits.

The file has the licence of the base model, code snippets for loading, the scores that a store holds of a model, and
`Card`, which huggingface_hub's `ModelCard` renders. Text from outside (names, sources, licences) is escaped, so it is
shown but never interpreted. Paths on this machine are reduced to their last component.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from huggingface_hub import ModelCard, ModelCardData, metadata_load

from biphase.data.shards import Shards
from biphase.errors import SpecError, StoreError, nearest
from biphase.export.folder import SavedCheckpoint, SavedTrial
from biphase.export.writing import LEAST, Prompts, Written
from biphase.models.hub import hub_file
from biphase.models.native import is_masked
from biphase.presets import corpus_of
from biphase.records import content_key, decode, encode
from biphase.specs import AdamW, Hub, Merge, Muon, Pretrain, Pretrained, Size
from biphase.store import Store
from biphase.study.build import CONVERTED
from biphase.study.ledger import Cell, choose, read_trial, trial_keys, with_interval
from biphase.text import duration, objective_title, short

# ---------------------------------------------------------------- snippets
# FOLDER stands for the folder or the repository.


_HIDDEN_STATES = """\
from transformers import AutoModel, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModel.from_pretrained("FOLDER")
hidden = model(**tokenizer("A text.", return_tensors="pt")).last_hidden_state"""

# Asserts bidirectional attention: the first token's vector must depend on a later token.
_BIDIRECTIONAL = f"""
other = model(**tokenizer("A word.", return_tensors="pt")).last_hidden_state
assert hidden[0, 0].ne(other[0, 0]).any(), "it reads forwards only: pip install 'transformers>={LEAST}'\""""

_FILL_MASK = """\
from transformers import pipeline

fill = pipeline("fill-mask", model="FOLDER")
fill(f"The cat {fill.tokenizer.mask_token} on the mat.")"""

_FILL_MASK_HERE = """\
import biphase  # transformers has no class with a masked head for it

model = biphase.load("FOLDER")
model.fill_mask(f"The cat {model.mask_token} on the mat.")"""


def loading(written: Written, prompts: Prompts, *, fills: bool) -> list[str]:
    """Python snippets for an encoder; `fills`: its head was trained to fill masks."""
    blocks = [_HIDDEN_STATES + (_BIDIRECTIONAL if written.edits else "")]
    if fills:
        blocks.append(_FILL_MASK if is_masked(written.architecture) else _FILL_MASK_HERE)
    return [*blocks, embeddings(prompts)]


def embeddings(prompts: Prompts) -> str:
    return f"""\
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("FOLDER")
queries = model.encode(["Who sat on the mat?"], prompt_name="query")  # {json.dumps(prompts.query)} before each
documents = model.encode(["The cat sat on the mat."], prompt_name="document")  # {json.dumps(prompts.document)}
model.similarity(queries, documents)"""


def pipeline_snippet(kind: str) -> str:
    return f"""\
from transformers import pipeline

pipeline("{kind}", model="FOLDER")("A text.")"""


ANSWERS = """\
from transformers import AutoModelForQuestionAnswering, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
model = AutoModelForQuestionAnswering.from_pretrained("FOLDER")
output = model(**tokenizer("…", return_tensors="pt"))  # start_logits and end_logits of each token"""

_GRAPH = """\
import onnxruntime
from transformers import AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER")
session = onnxruntime.InferenceSession("FOLDER/onnx/model.onnx")
inputs = tokenizer(["A text."], padding=True, return_tensors="np")
OUTPUT = session.run(None, dict(inputs))[0]"""


# ---------------------------------------------------------------- scores
# Read from the store; nothing is recomputed. Learning rates are chosen by validation scores.


@dataclass(frozen=True)
class TaskScores:
    """One model on one task, fine-tuned in one way: all its finished learning rates and seeds."""

    trials: dict[Cell, SavedTrial]

    @property
    def about(self) -> dict[str, Any]:
        """The metadata of one of its trials; task and fine-tuning options are the same in all."""
        return next(iter(self.trials.values())).about

    @property
    def task(self) -> str:
        return self.about["task"]["name"]

    @property
    def metric(self) -> str:
        return self.about["metric"]

    @property
    def rate(self) -> float | None:
        """The learning rate with the best mean validation score; None while a cell of the grid is missing."""
        scores = {cell: trial.about["scores"] for cell, trial in self.trials.items()}
        choice = choose({cell: parts["validation"][self.metric] for cell, parts in scores.items()})
        return None if choice is None else choice.by_mean

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.trials})

    def chosen(self) -> SavedTrial | None:
        """The trial of that rate and the first seed."""
        return None if self.rate is None else self.trials[self.rate, self.seeds[0]]

    def test_score(self) -> str:
        """The mean test score over seeds at that rate in percent, with its interval."""
        if self.rate is None:
            return "incomplete"
        test = [self.trials[self.rate, seed].about["scores"]["test"][self.metric] for seed in self.seeds]
        return with_interval(test)


def grids_of(model: str, store: Store) -> list[TaskScores]:
    """Every grid of trials that the store holds of a model, ordered by task."""
    grids: dict[str, dict[Cell, SavedTrial]] = defaultdict(dict)
    for key in trial_keys(store):
        try:
            about = read_trial(store, key)
        except StoreError:  # `status` reports it; it may belong to any model
            continue
        # Trials fine-tuned with causal attention do not measure the encoder; those that screen rates are not reported.
        if about["model"] == model and not about["finetune"].get("causal") and "share" not in about:
            # Fields of the options that an older trial lacks get their defaults.
            options = decode({**about["finetune"], "tasks": [about["trained_on"] or about["task"]]})
            same = content_key([about["task"], about["trained_on"], encode(options)])
            grids[same][about["lr"], about["seed"]] = SavedTrial(key, about)
    return sorted(
        map(TaskScores, grids.values()), key=lambda grid: (grid.task, grid.about["finetune"]["protocol"])
    )


def trial_for_task(model: str, task: str, store: Store) -> SavedTrial:
    """The trial of a model on the named task, chosen by validation scores alone."""
    every = grids_of(model, store)
    grids = [grid for grid in every if grid.task == task]
    if not grids:
        names = dict.fromkeys(grid.task for grid in every)
        hint = nearest(task, names) if names else "fine-tune it first: biphase evaluate KEY --tasks NAME"
        raise SpecError(f"--task {task}: {model[:8]} has no scores on it in {store.trials}; {hint}")
    if len(grids) > 1:
        keys = ", ".join(trial.key[:8] for grid in grids if (trial := grid.chosen()) is not None)
        raise SpecError(
            f"--task {task}: {model[:8]} was fine-tuned on it in {len(grids)} ways; type the key of a trial instead, "
            f"e.g. {keys or next(iter(grids[0].trials.values())).key[:8]}"
        )
    chosen = grids[0].chosen()
    if chosen is None:
        raise SpecError(
            f"--task {task}: some learning rates or seeds of {model[:8]} are missing, and the best may be among them; "
            "finish the study, or type the key of a trial"
        )
    return chosen


# ---------------------------------------------------------------- card


Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Base:
    """The existing model that this one was made from, if any."""

    model: str = ""  # a hub id
    name: str = ""
    licence: str = ""

    def describe(self) -> str:
        if not self.name:
            return "Made from scratch: whoever publishes it says under which licence."
        terms = "does not say in its card under which licence it is; look before you publish"
        if self.licence:
            terms = f"is under the licence {escaped(self.licence)}"
        return f"The model it was made from, {escaped(self.name)}, {terms}."


def base_of(run: Pretrain) -> Base:
    """The published model that a run started from, with the licence that its card names."""
    start = lineage(run)[0].start
    if not isinstance(start, Hub):
        return Base()
    try:
        licence = (metadata_load(hub_file(start, "README.md")) or {}).get("license")
    except Exception:  # no card, no network, or invalid YAML: the licence is unknown
        licence = None
    if not isinstance(licence, str) or not re.fullmatch(r"[\w.+-]{1,60}", licence):
        licence = ""  # absent, or not a plain name
    return Base("" if start.local else start.source, without_folders(start.source), licence)


_TEMPLATE = """\
---
{{ card_data }}
---

# {{ title }}

{{ summary }}
{% if needs %}
{{ needs }}
{% endif %}
## How to load it
{% for block in loading %}
```python
{{ block }}
```
{% endfor %}
{%- for heading, lines in sections %}
## {{ heading }}

{{ lines | join("\n") }}
{% endfor %}
## Licence

{{ licence }}

## Limits

{% for limit in limits -%}
- {{ limit }}
{% endfor %}
"""


@dataclass(frozen=True)
class Card:
    """The parts of a card, ready to be written."""

    title: str
    summary: str
    pipeline: str  # transformers' pipeline tag
    library: str
    loading: list[str]  # Python snippets
    sections: list[tuple[str, list[str]]]
    limits: list[str]
    tags: list[str] = field(default_factory=list)
    base: Base = field(default_factory=Base)
    needs: str = ""  # the required version of transformers, as a sentence
    graph: str = ""  # the output of the ONNX graph, if there is one

    def text(self) -> str:
        graph = [_GRAPH.replace("OUTPUT", self.graph)] if self.graph else []
        metadata = ModelCardData(
            library_name=self.library,
            pipeline_tag=self.pipeline,
            tags=["biphase", *self.tags, *(["onnx"] if graph else [])],
            license=self.base.licence or None,
            base_model=self.base.model or None,
        )
        return str(
            ModelCard.from_template(
                metadata,
                template_str=_TEMPLATE,
                title=escaped(self.title),
                summary=self.summary,
                needs=self.needs,
                loading=[*self.loading, *graph],
                sections=self.sections,
                licence=self.base.describe(),
                limits=self.limits,
            )
        )


def escaped(text: str) -> str:
    """Escape outside text into one line of Markdown without markup."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", line)


def table(rows: Rows, heads: tuple[str, ...] = ("", "")) -> list[str]:
    """A Markdown table; its cells must be escaped already."""
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def without_folders(source: str) -> str:
    """A source without the folders of this machine."""
    if source.startswith(("hf://", "builtin:")):
        return source
    files = (".json", ".jsonl", ".txt", ".parquet", ".zst")
    local = source.startswith((".", "/", "~")) or source.endswith(files)
    return PurePath(source).name if local else source


# ---------------------------------------------------------------- recipe


def lineage(run: Pretrain) -> list[Pretrain]:
    """The runs that led to this one, oldest first, and itself; of a merge, those of its longest part."""
    return [*(lineage(run.sources[0].run) if run.sources else []), run]


def titled(checkpoint: SavedCheckpoint) -> str:
    """The name of the run, with the step if it is not the last."""
    run, step = checkpoint.run, checkpoint.step
    return run.name if step == run.steps else f"{run.name}, step {step:,}"


def describe_start(start: Size | Hub) -> str:
    """The start of a run as text: its shape, or the published model."""
    if isinstance(start, Size):
        return (
            f"from scratch, {escaped(start.name)}: {start.layers} layers of width {start.hidden}, {start.heads} heads "
            f"({start.kv_heads} for keys), feed-forward {start.ffn}"
        )
    revision = f" at {escaped(start.revision)}" if start.revision else ""
    parts = [f"{escaped(without_folders(start.source))}{revision}"]
    parts += [escaped(start.gguf)] if start.gguf else []
    parts += ["sliding windows opened"] if start.windows == "full" else []
    return ", ".join(parts)


def recipe_lines(checkpoint: SavedCheckpoint) -> list[str]:
    """How the weights were trained, run by run, as a table."""
    runs = lineage(checkpoint.run)
    rows: Rows = [("start", describe_start(runs[0].start))]  # ty: ignore[invalid-argument-type]  (the first has no run before it)
    for run, after in zip(runs, (*runs[1:], None), strict=True):
        until = after.sources[0].step if after else checkpoint.step
        if isinstance(run.start, Merge):
            rows.append(
                (f"{escaped(run.name)}, start", f"weighted mean of {_parts(run.start)}; new optimizer state")
            )
        rows += [
            (
                f"{escaped(run.name)}, steps {phase.first + 1:,} to {min(phase.until, until):,}",
                phase.objective.label
                + (f", rotary base {phase.rope_base:,.0f}" if phase.rope_base else "")
                + (f", peak {phase.peak:g}" if phase.peak else "")
                + (f", layer decay {phase.layer_decay:g}" if phase.layer_decay else "")
                + (f", frozen {', '.join(phase.freeze)}" if phase.freeze else ""),
            )
            for phase in run.phases
            if phase.first < until
        ]
    return table([*rows, *_training_settings(checkpoint)], ("what", "how"))


def _parts(merge: Merge) -> str:
    parts = zip(merge.weights, merge.parts, strict=True)
    return ", ".join(
        f"{weight:.4g} × {escaped(part.run.name)} at step {part.step:,}" for weight, part in parts
    )


def _training_settings(checkpoint: SavedCheckpoint) -> Rows:
    run, progress, step = checkpoint.run, checkpoint.about["progress"], checkpoint.step
    while not run.stages and run.sources:  # a merge without training: how its longest part was trained
        run, step = run.sources[0].run, run.sources[0].step
    wsd, packing = run.schedule, run.packing
    decayed = "not decayed"
    if step > run.decay_start:
        decayed = f"down {wsd.form} over the last {wsd.decay:,} steps"
    machine = escaped(progress["machine"].get("device", "")) or "one machine"
    rows: Rows = [
        ("tokens", f"{short(progress['tokens'])} in all, {short(run.batch_tokens)} a step"),
        ("rows", f"{type(packing).__name__.lower()} of {packing.length:,} tokens"),
        ("learning rate", f"{wsd.peak:g} after a warmup of {wsd.warmup:,} steps, {decayed}"),
        ("optimizer", _optimizer(run.optimizer)),
        ("precision, seed", f"{run.precision}, {run.seed}"),
    ]
    if run.adapter:
        rows.append(("adapter", f"LoRA of rank {run.adapter.rank}, alpha {run.adapter.alpha:g}, merged here"))
    if run.z_loss:
        rows.append(("z-loss", f"{run.z_loss:g}"))
    if run.freeze != "nothing":
        rows.append(("frozen", escaped(run.freeze)))
    rows.append(("time", f"{duration(progress['seconds'])} of training on {machine}"))
    return [*rows, ("key", f"`{checkpoint.key}`")]


def _optimizer(spec: AdamW | Muon) -> str:
    if isinstance(spec, Muon):
        return (
            f"Muon for the matrices of the layers, momentum {spec.momentum:g}, weight decay {spec.weight_decay:g}, "
            f"steps {spec.adjust}; for the rest {_optimizer(spec.adamw)}"
        )
    return (
        f"AdamW, betas {spec.betas[0]:g} and {spec.betas[1]:g}, eps {spec.eps:g}, weight decay "
        f"{spec.weight_decay:g}, gradients clipped at {spec.clip:g}"
        + (f", layer decay {spec.layer_decay:g}" if spec.layer_decay != 1 else "")
    )


# ---------------------------------------------------------------- data, losses, scores


def data(checkpoint: SavedCheckpoint, shards: Shards) -> list[str]:
    """The corpus, its token counts and its tokenizer, as a table."""
    run = checkpoint.run
    corpus, card = corpus_of(run), shards.card
    tokenizer = "byte-level BPE, trained on the corpus"
    if isinstance(corpus.tokenizer, Pretrained):
        start, source = lineage(run)[0].start, PurePath(corpus.tokenizer.source)
        name = without_folders(str(source))
        # A converted tokenizer is a copy in the store, named by its hash.
        if source.parent.name == CONVERTED and isinstance(start, Hub):
            name = f"of {without_folders(start.source)}{f', {start.gguf}' if start.gguf else ''}, converted"
        tokenizer = f"{escaped(name)}, mask token {card['mask_rule']}"
    rows: Rows = [
        ("corpus", escaped(corpus.name)),
        ("source", escaped(without_folders(corpus.source))),
        ("to train on", f"{short(card['train_tokens'])} tokens of {card['train_documents']:,} documents"),
        ("read so far", f"{checkpoint.about['epochs']:.2f} times"),
        ("held out", f"{short(card['heldout_tokens'])} tokens of {card['heldout_documents']:,} documents"),
        ("tokenizer", f"{tokenizer}, {card['vocab']:,} entries"),
        ("fingerprint", f"`{escaped(card['fingerprint'])}`"),
    ]
    return table(rows, ("what", "which"))


def losses(heldout: dict[int, dict[str, float]]) -> list[str]:
    """The last held-out losses in nats a token, beside those before the first step if they were measured."""
    if not heldout:
        return ["None were measured."]
    (first, before), (step, last) = min(heldout.items()), max(heldout.items())
    columns = {f"at step {step:,}": last}
    if first == 0 < step:
        columns = {"before": before} | columns
    rows: Rows = [
        (
            escaped(objective_title(name)),
            *(f"{losses[name]:.4f}" if name in losses else "" for losses in columns.values()),
        )
        for name in last
    ]
    return table(rows, ("held-out loss, nats a token", *columns))


def scores(grids: list[TaskScores]) -> list[str]:
    """Test scores of fine-tuned copies of this model, as a table."""
    if not grids:
        return ["This model has not been fine-tuned in the store it comes from."]
    rows: Rows = [
        (
            escaped(grid.task),
            escaped(grid.metric),
            grid.test_score(),
            grid.about["finetune"]["protocol"],
            "" if grid.rate is None else f"{grid.rate:g}",
            str(len(grid.seeds)),
        )
        for grid in grids
    ]
    lines = table(rows, ("task", "metric", "test score, %", "protocol", "learning rate", "seeds"))
    note = "Mean over fine-tuning seeds with its 95% interval. Learning rates were chosen by validation scores alone."
    return [*lines, "", note]
