"""Export a fine-tuned model: retrain it from its trial, verify its score, and write it as a transformers folder.

Weights of fine-tuned models are not stored, but everything that determines them is: a trial records the model, task,
learning rate and seed. `retrain` repeats the fine-tuning and compares the validation score with the trial's. It is
identical on the same kind of CPU; elsewhere it may differ by the effect of another summation order.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
)

from biphase.attention import varlen_works
from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, ModelError, SpecError
from biphase.export import card
from biphase.export.card import (
    Card,
    TaskScores,
    base_of,
    describe_start,
    escaped,
    grids_of,
    table,
    titled,
    without_folders,
)
from biphase.export.card import recipe_lines as how_trained
from biphase.export.checkpoint import last_hidden, limits_of, shards_of
from biphase.export.folder import SavedCheckpoint, SavedTrial, Say, building, saved_checkpoint
from biphase.export.writing import (
    Exported,
    ExportedTokenizer,
    Form,
    Readback,
    Written,
    check_tokenizer,
    edits_for,
    ours,
    ours_tuned,
    probe_texts,
    prompts_of,
    tokenizer_of,
    tokenizer_of_hub,
    write_model,
    write_onnx,
    write_sentences,
    write_tokenizer,
)
from biphase.finetune.encoder import (
    EncoderUnderTest,
    TaskModel,
    TuningOptions,
    encoder_of_checkpoint,
    encoder_of_hub,
)
from biphase.finetune.families import Family, family_of
from biphase.finetune.trial import FineTuner, score
from biphase.keys import finetuning_key, trial_key
from biphase.models.native import as_eurobert
from biphase.presets import corpus_of
from biphase.progress import Live
from biphase.records import decode
from biphase.specs import BPE, Answer, Classify, Finetune, Hub, Pretrain, Retrieve, Tag, Task
from biphase.store import Store, read_checked
from biphase.study.load import load as load_study
from biphase.study.names import refuse_metadata_only
from biphase.study.plan import PLAN, identities, make_plan
from biphase.tasks.files import task_key
from biphase.tasks.load import load
from biphase.training import distributed

# The allowed difference of the validation score, and the number of examples that may always differ.
SCORE_TOLERANCE, FEW_EXAMPLES = 0.03, 3


@dataclass(frozen=True)
class TrialRecipe:
    """Everything that determines a fine-tuned model, and the encoder it starts from."""

    trial: SavedTrial
    spec: Finetune
    task: Task  # the task it was scored on
    trained_on: Task
    run: Pretrain  # the run that made the encoder
    state: SavedCheckpoint | None  # None: a start without further training
    subject: EncoderUnderTest
    words: ExportedTokenizer

    @property
    def metric(self) -> str:
        return self.trial.about["metric"]

    @property
    def recorded(self) -> float:
        """The validation score that chose the learning rate."""
        return self.trial.about["scores"]["validation"][self.metric]


@dataclass(frozen=True)
class Retrained:
    """A retrained model and its validation score."""

    recipe: TrialRecipe
    model: TaskModel
    validation: float

    def comparison(self) -> str:
        """Compare the validation score with the one that the trial recorded, as text."""
        now, then = (f"{one * 100:.2f}%" for one in (self.validation, self.recipe.recorded))
        if self.validation == self.recipe.recorded:
            return f"validation {self.recipe.metric} {now}, the same as when it was first made"
        return (
            f"validation {self.recipe.metric} {now}, and {then} when it was first made (on another machine sums come "
            "in another order)"
        )


def recipe_of(trial: SavedTrial, store: Store) -> TrialRecipe:
    """Rebuild the recipe of a trial, and load the encoder it starts from."""
    about = trial.about
    task = decode(about["task"])
    trained_on = decode(about["trained_on"]) if about["trained_on"] else task
    tasks = (task,) if trained_on is task else (trained_on, task)
    fields = {name: decode(value) for name, value in about["finetune"].items() if name != "kind"}
    spec = Finetune(tasks, lrs=(about["lr"],), seeds=(about["seed"],), **fields)
    if spec.causal:
        raise ModelError(
            f"{trial.key[:8]} was fine-tuned reading forwards only, as a yardstick; an encoder cannot be made of it: give "
            "the key of a trial that reads in both directions"
        )
    run, saved = _model_of(about["model"], store)
    _refuse_other_data(trial, spec, task, trained_on, store)
    subject, words = _subject(run, saved, store, spec)
    return TrialRecipe(trial, spec, task, trained_on, run, saved, subject, words)


def _refuse_other_data(trial: SavedTrial, spec: Finetune, task: Task, trained_on: Task, store: Store) -> None:
    """Raise if the task's files have changed: the trial's key contains the hash of its data."""
    taught, asked = (task_key(one, store, again=True) for one in (trained_on, task))
    about = trial.about
    training = finetuning_key(about["model"], taught, spec, lr=about["lr"], seed=about["seed"])
    if trial_key(training, asked, spec.documents if task.family == "IR" else "") != trial.key:
        raise DataError(
            f"{trial.key[:8]} was fine-tuned on other data than the files of {trained_on.name!r} in {trained_on.source} are "
            "now; put those files back, or run the study again to score a model on these"
        )


def retrain(recipe: TrialRecipe, say: Say) -> Retrained:
    """Fine-tune the trial's model again, and raise if its score differs too much."""
    about, spec, subject = recipe.trial.about, recipe.spec, recipe.subject

    def family(task: Task) -> Family:
        examples = load(task, documents=spec.documents)
        return family_of(task, examples, subject.reading, protocol=spec.protocol)

    setting = _setting(spec, subject)
    taught = family(recipe.trained_on)
    live = Live(enabled=True)
    say(f"fine-tuning on {recipe.trained_on.name} again, {taught.steps:,} steps")
    tuned, _ = FineTuner(subject.encoder, setting).finetune(
        taught,
        spec,
        lr=about["lr"],
        seed=about["seed"],
        tell=lambda step, steps: live(f"step {step:,} of {steps:,}"),
    )
    live("")
    say(f"scoring it on {recipe.task.name}")
    asked = taught if recipe.task is recipe.trained_on else family(recipe.task)
    reached = score(tuned, asked, setting)["validation"].metrics[recipe.metric]
    again = Retrained(recipe, tuned.float().cpu(), reached)
    _refuse_another(again)
    return again


def _refuse_another(again: Retrained) -> None:
    trial = again.recipe.trial
    allowed = max(SCORE_TOLERANCE, FEW_EXAMPLES / trial.about["examples"]["validation"])
    if abs(again.validation - again.recipe.recorded) > allowed:
        raise ModelError(
            f"{trial.key[:8]}: {again.comparison()}: more than {allowed * 100:.1f} points apart, so this is not the model "
            "that was scored; look whether the data has changed, or run the study again to score it here"
        )


def _setting(spec: Finetune, subject: EncoderUnderTest) -> TuningOptions:
    device = distributed.join().device
    varlen = varlen_works(device, "fp32" if spec.precision == "fp32" else "bf16")
    return TuningOptions.of(device, spec.precision, varlen=varlen, encoder=subject.encoder)


def _model_of(key: str, store: Store) -> tuple[Pretrain, SavedCheckpoint | None]:
    """The run of the fine-tuned model, and its checkpoint unless it was a start without further training."""
    if store.has(store.checkpoints / key):
        saved = saved_checkpoint(key, store)
        return saved.run, saved
    store.refuse_debris(store.checkpoints / key)
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        said = read_checked(path)
        if any(root["key"] == key for root in said.get("roots", ())):
            roots = make_plan(load_study(path).study, identities(store)).roots
            if key in roots:
                return roots[key].run, None
    refuse_metadata_only(key, store)
    raise SpecError(
        f"the model {key[:8]} that was fine-tuned is not in {store.checkpoints}; run the study again to make it"
    )


def _subject(
    run: Pretrain, saved: SavedCheckpoint | None, store: Store, spec: Finetune
) -> tuple[EncoderUnderTest, ExportedTokenizer]:
    if saved is None and isinstance(run.start, Hub):
        subject = encoder_of_hub(run.start, spec)
        reading = subject.reading
        return subject, tokenizer_of_hub(run.start, reading.before, reading.after, reading.length)
    shards = shards_of(run, store)
    subject = encoder_of_checkpoint(run, saved.key if saved else None, store, shards, spec)
    tokenizer = load_saved(shards.tokenizer)
    corpus = corpus_of(run)
    return subject, tokenizer_of(
        tokenizer,
        bos=corpus.bos,
        context=subject.reading.length,
        trained_here=isinstance(corpus.tokenizer, BPE),
    )


# ---------------------------------------------------------------- card


LIBRARIES = {"sentence-similarity": "sentence-transformers"}


def tuned_card(
    again: Retrained, store: Store, written: Written, *, pipeline: str, labels: tuple[str, ...], onnx: bool
) -> Card:
    """The card of a fine-tuned model: its task, its scores, and how its inputs must be written."""
    recipe = again.recipe
    task, form = recipe.trained_on, recipe.trained_on.form
    blocks = [card.embeddings(prompts_of(form))] if isinstance(form, Retrieve) else []
    if pipeline in ("text-classification", "token-classification"):
        blocks = [card.pipeline_snippet(pipeline)]
    if pipeline == "question-answering":
        blocks = [card.answers()]
    made_of = titled(recipe.state) if recipe.state else recipe.run.name
    sections = [
        ("What it was fine-tuned on", _taught(again, labels)),
        ("Scores", _reached(again, store)),
    ]
    if recipe.state is not None:
        sections.append(("How the encoder was trained", how_trained(recipe.state)))
    else:
        start: Any = recipe.run.start
        sections.append(("The encoder", [f"{describe_start(start)}."]))
    return Card(
        title=f"{made_of}, {task.name}",
        summary=(
            f"{escaped(made_of)}, fine-tuned with biphase on {escaped(task.name)}, as {written.architecture}."
        ),
        pipeline=pipeline,
        library=LIBRARIES.get(pipeline, "transformers"),
        tags=[
            *(["sentence-transformers"] if isinstance(form, Retrieve) else []),
            *(["onnx"] if onnx else []),
        ],
        base=base_of(recipe.run),
        needs=written.needs,
        loading=[*blocks, *([card.graph("logits" if labels else "last_hidden_state")] if onnx else [])],
        sections=sections,
        limits=[
            *limits_of(written),
            f"Texts must be written as in training, see above, and are cut at {recipe.words.context:,} tokens.",
            "It knows the texts and the labels it was shown, their errors and slants too.",
        ],
    )


def _taught(again: Retrained, labels: tuple[str, ...]) -> list[str]:
    recipe = again.recipe
    task, about = recipe.trained_on, recipe.trial.about
    rows = [
        ("task", f"{escaped(task.name)}, from {escaped(without_folders(task.source))}"),
        ("texts", _texts(task.form)),
        *([("labels", ", ".join(escaped(one) for one in labels))] if labels else []),
        ("steps", f"{about['steps']:,} of {task.batch} examples"),
        ("learning rate, seed", f"{about['lr']:g}, {about['seed']}"),
        ("protocol, precision", f"{recipe.spec.protocol}, {recipe.spec.precision}"),
        ("key", f"`{recipe.trial.key}`"),
    ]
    return table(rows, ("what", "which"))


def _texts(form: Classify | Tag | Answer | Retrieve) -> str:
    """The template of an input, quoted as JSON."""
    match form:
        case Classify(text=text):
            return escaped(json.dumps(text, ensure_ascii=False))
        case Tag():
            return "words with one space between them"
        case Answer(text=text):
            return escaped(json.dumps(f"{text}{{context}}", ensure_ascii=False))
        case Retrieve(query=query, document=document):
            return " and ".join(escaped(json.dumps(one, ensure_ascii=False)) for one in (query, document))


def _reached(again: Retrained, store: Store) -> list[str]:
    about = again.recipe.trial.about
    parts = [part for part in ("validation", "test") if part in about["scores"]]
    names = list(about["scores"][parts[0]])
    lines = [
        f"On {escaped(again.recipe.task.name)}, as measured when it was first made; learning rates were chosen by validation "
        "scores alone.",
        "",
        f"| metric | {' | '.join(f'{part}, %' for part in parts)} |",
        f"|{'---|' * (len(parts) + 1)}",
    ]
    for name in names:
        cells = " | ".join(f"{about['scores'][part][name] * 100:.2f}" for part in parts)
        lines.append(f"| {escaped(name)} | {cells} |")
    lines += [
        "",
        f"Its weights were not kept: it was fine-tuned again for this folder, {again.comparison()}.",
    ]
    grid = _grid(again, store)
    if grid is not None and len(grid.seeds) > 1 and grid.rate == about["lr"]:
        lines += [
            "",
            f"Over {len(grid.seeds)} seeds the test {escaped(grid.metric)} is {grid.test_score()}% (95% interval).",
        ]
    return lines


def _grid(again: Retrained, store: Store) -> TaskScores | None:
    cell = again.recipe.trial.about["lr"], again.recipe.trial.about["seed"]
    found = (
        grid
        for grid in grids_of(again.recipe.trial.about["model"], store)
        if grid.trials.get(cell) is not None
    )
    return next((grid for grid in found if grid.trials[cell].key == again.recipe.trial.key), None)


# ---------------------------------------------------------------- export


ANSWERS = "question-answering"


@dataclass(frozen=True)
class Kind:
    """A task family in transformers' terms."""

    pipeline: str
    auto: Any  # the auto class that loads it
    native: Any | None  # EuroBERT's class for it
    labels: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        return "logits" if self.labels else "last_hidden_state"


def kind_of(recipe: TrialRecipe) -> Kind:
    """The transformers class for a fine-tuned model."""
    match recipe.trained_on.form:
        case Classify(labels=labels):
            return Kind(
                "text-classification",
                AutoModelForSequenceClassification,
                EuroBertForSequenceClassification,
                labels,
            )
        case Tag(labels=labels):
            return Kind(
                "token-classification",
                AutoModelForTokenClassification,
                EuroBertForTokenClassification,
                labels,
            )
        case Answer() if recipe.spec.protocol == "paper":  # each token is in the answer or not: two tags
            return Kind(
                "token-classification",
                AutoModelForTokenClassification,
                EuroBertForTokenClassification,
                ("O", "ANSWER"),
            )
        case Answer():
            return Kind(ANSWERS, AutoModelForQuestionAnswering, None, ("start", "end"))
        case Retrieve():
            return Kind("sentence-similarity", AutoModel, EuroBertModel)


def refuse_without_class(recipe: TrialRecipe, kind: Kind) -> None:
    """Raise before the work if transformers has no class for this model and task."""
    encoder = recipe.subject.encoder
    trunk: Any = encoder.trunk
    ids: dict[str, Any] = recipe.words.native_ids
    if kind.native and as_eurobert(encoder, recipe.words.context, EuroBertModel, {}, **ids) is not None:
        return
    if _has_own(trunk, kind):
        return
    raise ModelError(
        f"transformers has no class that does {kind.pipeline} on {type(trunk).__name__} as it was fine-tuned here; "
        "export the encoder instead, by the key of its state, or fine-tune another one"
    )


def export_tuned(trial: SavedTrial, store: Store, place: Path, *, onnx: bool, say: Say) -> Exported:
    """Write the model that a trial scored to `place` and verify it; if that fails, raise and leave nothing behind."""
    with building(place) as folder:
        say(f"reading {trial.key[:8]}")
        recipe = recipe_of(trial, store)
        kind, words = kind_of(recipe), recipe.words
        refuse_without_class(recipe, kind)
        if onnx and kind.pipeline == ANSWERS:
            raise SpecError(
                "a model that answers by start and end has two outputs, not one graph; leave out --onnx"
            )
        again = retrain(recipe, say)
        say("writing it, and reading it again")
        written = _write(again, kind, folder)
        write_tokenizer(words, folder)
        check_tokenizer(words, folder)
        form = recipe.trained_on.form
        if isinstance(form, Retrieve):
            width = again.model.encoder.width
            write_sentences(folder, width=width, context=words.context, prompts=prompts_of(form))
        if onnx:
            say("writing ONNX, and running it")
            write_onnx(folder, words, auto=kind.auto, output=kind.output)
        card = tuned_card(again, store, written, pipeline=kind.pipeline, labels=kind.labels, onnx=onnx)
        (folder / "README.md").write_text(card.text(), encoding="utf-8")
    return Exported(place, written, onnx, note=f"fine-tuned again: {again.comparison()}")


def _write(again: Retrained, kind: Kind, folder: Path) -> Written:
    model, words = again.model, again.recipe.words
    trunk: Any = model.encoder.trunk
    texts = probe_texts(trunk.config, words)
    hidden = Readback(AutoModel, ours(model.encoder, texts), last_hidden)
    asked: tuple[Readback, ...] = (hidden,)
    if (
        kind.pipeline == ANSWERS
    ):  # some of these classes store the trunk under a name that AutoModel does not know
        asked = (Readback(kind.auto, ours_tuned(model, texts), _bounds),)
    elif kind.labels:
        asked = hidden, Readback(kind.auto, ours_tuned(model, texts), _logits)
    numbers = {name: number for number, name in enumerate(kind.labels)}
    named: dict[str, Any] = {"label2id": numbers, "id2label": dict(enumerate(kind.labels))} if numbers else {}

    def forms() -> Iterator[Form]:
        if kind.native is not None:
            head = {_PLACES[name]: one for name, one in model.head.state_dict().items()}
            native = as_eurobert(
                model.encoder,
                words.context,
                kind.native,
                head,
                classifier_pooling="mean",
                **named,
                **words.native_ids,
            )
            if native is not None:
                yield Form(native(), asked, native=True)
        own = _own(trunk, kind, model.head, named)
        if own is not None:
            yield Form(own, asked, ({}, *edits_for(trunk.config, windows=model.encoder.windows)))

    return write_model(folder, forms(), words, title=f"{type(trunk).__name__} for {kind.pipeline}")


# The names of our head's parameters in EuroBERT's classes.
_PLACES = {
    "dense.weight": "dense.weight",
    "dense.bias": "dense.bias",
    "out.weight": "classifier.weight",
    "out.bias": "classifier.bias",
}


def _has_own(trunk: Any, kind: Kind) -> bool:
    """Whether transformers has a class for it. Of its text classifiers, only EuroBERT's has a head like ours."""
    if not kind.labels:
        return True
    return (
        kind.auto is not AutoModelForSequenceClassification and type(trunk.config) in kind.auto._model_mapping
    )


def _own(trunk: Any, kind: Kind, head: nn.Module, named: dict[str, Any]) -> Any | None:
    """The transformers class for this trunk and task, with our weights; None if there is none like ours."""
    if not _has_own(trunk, kind):
        return None
    if not kind.labels:
        return trunk
    config = copy.deepcopy(trunk.config)
    for name, value in named.items():
        setattr(config, name, value)
    made = kind.auto.from_config(config, attn_implementation="eager").float()
    inside = {id(module) for module in made.base_model.modules()}
    matrices = [one for one in made.modules() if isinstance(one, nn.Linear) and id(one) not in inside]
    out = getattr(head, "out", None)
    fits = len(matrices) == 1 and isinstance(out, nn.Linear) and matrices[0].weight.shape == out.weight.shape
    if not fits or matrices[0].bias is None:
        return None
    with torch.no_grad():
        matrices[0].weight.copy_(out.weight)
        matrices[0].bias.copy_(out.bias)
    missing, unexpected = made.base_model.load_state_dict(trunk.state_dict(), strict=False)
    return None if unexpected or any(not name.startswith("pooler.") for name in missing) else made


def _logits(said: Any) -> Tensor:
    return said.logits


def _bounds(said: Any) -> Tensor:
    return torch.stack([said.start_logits, said.end_logits], dim=-1)
