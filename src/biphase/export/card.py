"""The model card (README.md) of an exported model: how to load it, how it was made, its scores, licence and limits.

`card.md.j2` is the card; huggingface_hub's `ModelCard` renders it with the data of `Card`. Text from outside (names,
sources, licences) is escaped there, so it is shown but never interpreted. Paths on this machine are reduced to their
last component.
"""

from __future__ import annotations

import html
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import (
    EvalResult,
    EvalResultEntry,
    ModelCard,
    ModelCardData,
    eval_result_entries_to_yaml,
    metadata_load,
)
from huggingface_hub.utils import yaml_dump

from biphase.data.corpus import SUFFIXES
from biphase.data.shards import Shards
from biphase.errors import SpecError, StoreError, nearest
from biphase.export.folder import SavedCheckpoint, SavedTrial
from biphase.export.writing import LEAST, Prompts, Written
from biphase.models.hub import hub_file
from biphase.models.native import is_masked
from biphase.presets import corpus_of, sources_of
from biphase.records import content_key, decode, encode
from biphase.specs import Config, Hub, Merge, Pretrain, Pretrained, Size
from biphase.specs.sources import HUB, HubPlace
from biphase.store import Store
from biphase.study.build import CONVERTED
from biphase.study.ledger import Cell, choose, read_trial, trial_keys, with_interval
from biphase.text import counted, duration, objective_title, short

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

    def test_scores(self) -> list[float]:
        """The test score at that rate of each seed; none while a cell of the grid is missing."""
        chosen = [self.trials[self.rate, seed] for seed in self.seeds] if self.rate is not None else []
        return [trial.about["scores"]["test"][self.metric] for trial in chosen]

    def test_score(self) -> str:
        """The mean test score over seeds at that rate in percent, with its interval."""
        test = self.test_scores()
        return with_interval(test, self.metric) if test else "incomplete"

    def result(self) -> tuple[EvalResult, EvalResultEntry | None] | None:
        """The mean test score in the two forms that the hub reads: of the card, and of a dataset on the hub."""
        if not (test := self.test_scores()):
            return None
        task, value = decode(self.about["task"]), round(100 * sum(test) / len(test), 2)
        protocol = self.about["finetune"]["protocol"]
        how = f"{self.metric}, %: {self.test_score()}, 95% interval over {counted(len(test), 'seed')}"
        how += f" of fine-tuning, {protocol} protocol"
        named: dict[str, Any] = {"dataset_type": self.task, "dataset_split": "test"}
        entry = None
        if task.source.startswith(HUB):
            place = HubPlace.of(f"task {task.name!r}", task.source)
            config = PurePath(place.path).parts[:1] or ("data",)
            split = re.match(r"\w*", PurePath(task.splits.test).name)
            named = {
                "dataset_type": place.repository,
                "dataset_revision": place.revision or None,
                "dataset_config": None if config == ("data",) else config[0],
                "dataset_split": split[0] if split else None,
            }
            entry = EvalResultEntry(
                place.repository,
                named["dataset_config"] or "default",
                value,
                dataset_revision=named["dataset_revision"],
                notes=how,
            )
        pipeline = task.form.pipeline
        result = EvalResult(
            pipeline,
            dataset_name=task.name,
            metric_type=self.metric,
            metric_value=value,
            metric_name=how,
            **named,
        )
        return result, entry


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


@dataclass(frozen=True)
class Base:
    """The existing models that this one was made from: none, one, or those that a merge averages."""

    models: tuple[str, ...] = ()  # hub ids
    names: tuple[str, ...] = ()
    licence: str = ""  # of the only one


def base_of(run: Pretrain) -> Base:
    """The published models that a run started from; of a single one, the licence that its card names."""
    starts = [start for start in starts_of(run) if isinstance(start, Hub)]
    models = dict.fromkeys(start.source for start in starts if not start.local)
    names = dict.fromkeys(without_folders(start.source) for start in starts)
    return Base((*models,), (*names,), _licence(starts[0]) if len(starts) == 1 else "")


def _licence(start: Hub) -> str:
    try:
        licence = (metadata_load(hub_file(start, "README.md")) or {}).get("license")
    except Exception:  # no card, no network, or invalid YAML: the licence is unknown
        licence = None
    if not isinstance(licence, str) or not re.fullmatch(r"[\w.+-]{1,60}", licence):
        return ""  # absent, or not a plain name
    return licence


@dataclass(frozen=True)
class Section:
    """A table with a heading, and a sentence below it."""

    title: str
    heads: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    note: str = ""


@dataclass(frozen=True)
class Card:
    """The data of a card."""

    title: str
    summary: str
    kind: str  # "encoder", or transformers' pipeline of a fine-tuned model
    written: Written
    sections: list[Section]
    limits: list[str]
    base: Base = field(default_factory=Base)
    prompts: Prompts | None = None  # it is a sentence-transformers model
    fills: bool = False  # its head was trained to fill masks
    graph: str = ""  # the output of the ONNX graph, if there is one
    several: bool = False  # a text may have several labels
    grids: list[TaskScores] = field(default_factory=list)  # its scores, for the hub

    def write(self, folder: Path) -> None:
        """Write the card, and a file for each score on a dataset of the hub, which shows it beside others."""
        (folder / "README.md").write_text(self.text(), encoding="utf-8")
        entries: dict[str, list[EvalResultEntry]] = defaultdict(list)
        for grid in self.grids:
            if (result := grid.result()) and result[1]:
                entries[grid.task].append(result[1])
        for task, some in entries.items():
            path = folder / ".eval_results" / f"{task}.yaml"
            path.parent.mkdir(exist_ok=True)
            path.write_text(yaml_dump(eval_result_entries_to_yaml(some)), encoding="utf-8")

    def text(self) -> str:
        masked = is_masked(self.written.architecture)
        pipeline, tags = self.kind, ["biphase"]
        if self.kind == "encoder":
            pipeline = "fill-mask" if self.fills and masked else "feature-extraction"
            tags += ["sentence-transformers", "feature-extraction"]
        sentences = self.kind == "sentence-similarity"
        results = [result[0] for grid in self.grids if (result := grid.result())]
        metadata = ModelCardData(
            library_name="sentence-transformers" if sentences else "transformers",
            pipeline_tag=pipeline,
            tags=tags + ["sentence-transformers"] * sentences + ["onnx"] * bool(self.graph),
            license=self.base.licence or None,
            base_model=self.base.models[0] if len(self.base.models) == 1 else [*self.base.models] or None,
            model_name=" ".join(self.title.split()) if results else None,
            eval_results=results or None,
        )
        return str(
            ModelCard.from_template(
                metadata,
                template_path=str(Path(__file__).with_name("card.md.j2")),
                **vars(self),
                needs=self.written.needs,
                edited=bool(self.written.edits),
                masked=masked,
                least=LEAST,
                text=escaped,
                json=partial(json.dumps, ensure_ascii=False),
            )
        )


def escaped(text: str) -> str:
    """Escape outside text into one line of Markdown without markup."""
    line = html.escape(" ".join(str(text).split()), quote=False)
    return re.sub(r"([\\`*_\[\]|#~!])", r"\\\1", line)


def without_folders(source: str) -> str:
    """A source without the folders of this machine."""
    if source.startswith((HUB, "builtin:")):
        return source
    local = source.startswith((".", "/", "~")) or source.endswith((".json", *SUFFIXES))
    return PurePath(source).name if local else source


def lineage(run: Pretrain) -> list[Pretrain]:
    """The runs that led to this one, oldest first, and itself; of a merge, those of its longest part."""
    return [*(lineage(run.sources[0].run) if run.sources else []), run]


def starts_of(run: Pretrain) -> list[Size | Config | Hub]:
    """The models that a run started from: several only if it continues a merge."""
    starts = (one.start for one in run.lineage if isinstance(one.start, Size | Config | Hub))
    return [*dict.fromkeys(starts)]


def titled(checkpoint: SavedCheckpoint) -> str:
    """The name of the run, with the step if it is not the last."""
    run, step = checkpoint.run, checkpoint.step
    return run.name if step == run.steps else f"{run.name}, step {step:,}"


def describe_start(start: Any) -> str:
    """The start of a run as text: its shape, or the published model."""
    if isinstance(start, Size | Config):
        return f"from scratch, {start}"
    revision = f" at {start.revision}" if start.revision else ""
    windows = ", sliding windows opened" if start.windows == "full" else ""
    return f"{without_folders(start.source)}{revision}{start.gguf and f', {start.gguf}'}{windows}"


# Fields of a run and of a phase that say nothing of how the weights were trained, or are shown in another way.
BESIDE = ("name", "start", "corpus", "stages", "keep", "heldout_every", "heldout_tokens")
SPAN = ("objective", "first", "until")


def set_in(record: Any, beside: tuple[str, ...]) -> list[tuple[str, str]]:
    """The fields of a record that have a value, but those named in `beside`, as a study file writes them."""
    given = ((one.name, getattr(record, one.name)) for one in fields(record) if one.name not in beside)
    return [(name, _written(value)) for name, value in given if value or name == "seed"]


def _written(value: Any) -> str:
    # Of a corpus its name alone: its record has folders of this machine.
    if not is_dataclass(value) or hasattr(value, "name"):
        return str(getattr(value, "name", value))
    fields = (name for name in encode(value) if name != "kind")
    return f"{type(value).__name__}({', '.join(f'{name}={getattr(value, name)!r}' for name in fields)})"


def recipe(checkpoint: SavedCheckpoint) -> Section:
    """How the weights were trained, run by run."""
    runs, progress = lineage(checkpoint.run), checkpoint.about["progress"]
    rows = [("start", describe_start(start)) for start in starts_of(checkpoint.run)]
    for run, after in zip(runs, (*runs[1:], None), strict=True):
        if isinstance(run.start, Merge):
            parts = zip(run.start.weights, run.start.parts, strict=True)
            mean = ", ".join(
                f"{weight:.4g} × {part.run.name} at step {part.step:,}" for weight, part in parts
            )
            rows.append((f"{run.name}, start", f"weighted mean of {mean}; new optimizer state"))
        until = after.sources[0].step if after else checkpoint.step
        for phase in run.phases:
            if phase.first < until:
                steps = f"steps {phase.first + 1:,} to {min(phase.until, until):,}"
                how = [phase.objective.label, *map(" ".join, set_in(phase, SPAN))]
                rows.append((f"{run.name}, {steps}", ", ".join(how)))
    rows += set_in(checkpoint.run, BESIDE)
    if checkpoint.step <= checkpoint.run.decay_start:
        rows.append(("learning rate", "not decayed at this step"))
    if checkpoint.run.adapter:
        rows.append(("adapter weights", "merged into these"))
    machine = progress["machine"].get("device", "") or "one machine"
    rows += [
        ("tokens", short(progress["tokens"])),
        ("time", f"{duration(progress['seconds'])} of training on {machine}"),
        ("key", checkpoint.key),
    ]
    return Section("How it was trained", ("what", "how"), rows)


def data(checkpoint: SavedCheckpoint, shards: Shards) -> Section:
    """The corpus, its token counts and its tokenizer."""
    run = checkpoint.run
    sources, card = sources_of(run), shards.card
    tokenizer = "byte-level BPE, trained on the corpus"
    if isinstance(trained := sources[0].tokenizer, Pretrained):
        start, name = lineage(run)[0].start, without_folders(trained.source)
        # A converted tokenizer is a copy in the store, named by its hash.
        if PurePath(trained.source).parent.name == CONVERTED and isinstance(start, Hub):
            name = f"of {describe_start(start)}, converted"
        tokenizer = f"{name}, mask token {card['mask_rule']}"
    read = checkpoint.about.get("sources", {}).items()
    each = ", ".join(f"{name} {source['epochs']:.2f} times" for name, source in read)
    rows = [
        ("corpus", corpus_of(run).name),
        ("source", ", ".join(without_folders(source.source) for source in sources)),
        ("read so far", each or f"{checkpoint.about['epochs']:.2f} times"),
        ("tokenizer", f"{tokenizer}, {card['vocab']:,} entries"),
    ]
    if len(sources) == 1:  # the shards are of the first source only
        rows += [
            ("to train on", f"{short(card['train_tokens'])} tokens of {card['train_documents']:,} documents"),
            (
                "held out",
                f"{short(card['heldout_tokens'])} tokens of {card['heldout_documents']:,} documents",
            ),
            ("fingerprint", card["fingerprint"]),
        ]
    return Section("Data", ("what", "which"), rows)


def losses(heldout: dict[int, dict[str, float]]) -> Section:
    """The first and the last held-out losses in nats a token."""
    if not heldout:
        return Section("Losses", note="None were measured.")
    steps = sorted({min(heldout), max(heldout)})
    rows = [
        (
            objective_title(name),
            *(f"{heldout[step][name]:.4f}" if name in heldout[step] else "" for step in steps),
        )
        for name in heldout[steps[-1]]
    ]
    return Section("Losses", ("held-out loss, nats a token", *(f"at step {step:,}" for step in steps)), rows)


def scores(grids: list[TaskScores]) -> Section:
    """Test scores of fine-tuned copies of this model."""
    if not grids:
        return Section("Scores", note="This model has not been fine-tuned in the store it comes from.")
    rows = [
        (
            grid.task,
            grid.metric,
            grid.test_score(),
            grid.about["finetune"]["protocol"],
            "" if grid.rate is None else f"{grid.rate:g}",
            str(len(grid.seeds)),
        )
        for grid in grids
    ]
    return Section(
        "Scores",
        ("task", "metric", "test score, %", "protocol", "learning rate", "seeds"),
        rows,
        "Mean over fine-tuning seeds with its 95% interval. Learning rates were chosen by validation scores alone.",
    )
