"""Export a fine-tuned model: retrain it from its trial, verify its score, and write it as a transformers folder.

Weights of fine-tuned models are not stored, but everything that determines them is: a trial records the model, task,
learning rate and seed. `retrain` repeats the fine-tuning with `finetune.tune` and compares the validation score with the
trial's. It is identical on the same kind of CPU; elsewhere it may differ by the effect of another summation order.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForMultipleChoice,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    EuroBertForSequenceClassification,
    EuroBertForTokenClassification,
    EuroBertModel,
)

from biphase.errors import DataError, ModelError, SpecError
from biphase.export import card, writing
from biphase.export.card import Card, Section, TaskScores
from biphase.export.checkpoint import limits_of, shards_of, tokenizer_for
from biphase.export.folder import SavedCheckpoint, SavedTrial, Say, building, saved_checkpoint
from biphase.export.writing import Exported, ExportedTokenizer, Readback, Written, WrittenForm
from biphase.finetune.encoder import EncoderUnderTest, TaskModel, encoder_of
from biphase.finetune.tune import Tuner
from biphase.keys import finetuning_key, trial_key
from biphase.models.native import as_eurobert
from biphase.progress import Live
from biphase.records import decode
from biphase.specs import (
    Answer,
    Choose,
    Classify,
    Finetune,
    Hub,
    MultiLabel,
    Pretrain,
    Regress,
    Retrieve,
    Tag,
    Task,
)
from biphase.specs.tasks import Form
from biphase.store import Store, read_checked
from biphase.study.load import load as load_study
from biphase.study.load import refuse_metadata_only
from biphase.study.plan import PLAN, identities, make_plan
from biphase.tasks.files import task_key
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
    checkpoint: SavedCheckpoint | None  # None: a start without further training
    encoder: EncoderUnderTest
    tokenizer: ExportedTokenizer

    def compare(self, validation: float) -> str:
        """Compare a validation score with the recorded one, which chose the learning rate, as text."""
        text = f"validation {self.trial.about['metric']} {validation * 100:.2f}%"
        if validation == self.recorded:
            return f"{text}, the same as when it was first made"
        return f"{text}, and {self.recorded * 100:.2f}% when it was first made (on another machine sums come in another order)"

    @property
    def recorded(self) -> float:
        return self.trial.about["scores"]["validation"][self.trial.about["metric"]]


@dataclass(frozen=True)
class Retrained:
    """A retrained model, and how its validation score compares with the trial's."""

    recipe: TrialRecipe
    model: TaskModel
    comparison: str


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
    encoder = encoder_of(run, saved.key if saved else None, store, lambda run: shards_of(run, store), spec)
    texts = encoder.tokenization
    if saved is None and isinstance(run.start, Hub):
        tokenizer = writing.tokenizer_of_hub(run.start, texts)
    else:
        tokenizer = tokenizer_for(run, shards_of(run, store), texts.length)
    return TrialRecipe(trial, spec, task, trained_on, run, saved, encoder, tokenizer)


def _refuse_other_data(trial: SavedTrial, spec: Finetune, task: Task, trained_on: Task, store: Store) -> None:
    """Raise if the task's files have changed: the trial's key contains the hash of its data."""
    trained_key, scored_key = (task_key(each, store, again=True) for each in (trained_on, task))
    about = trial.about
    training = finetuning_key(about["model"], trained_key, spec, lr=about["lr"], seed=about["seed"])
    if trial_key(training, scored_key, spec.pool(task)) != trial.key:
        raise DataError(
            f"{trial.key[:8]} was fine-tuned on other data than the files of {trained_on.name!r} in {trained_on.source} are "
            "now; put those files back, or run the study again to score a model on these"
        )


def retrain(recipe: TrialRecipe, say: Say) -> Retrained:
    """Fine-tune the trial's model again, and raise if its score differs too much."""
    about, live = recipe.trial.about, Live(enabled=True)
    tuner = Tuner(recipe.spec, distributed.join().device, lambda model: recipe.encoder, live=live)
    tuner.load(about["model"])
    steps = tuner.family(recipe.trained_on).steps
    say(f"fine-tuning on {recipe.trained_on.name} again, {steps:,} steps, and scoring on {recipe.task.name}")
    tuned = tuner.tune(
        about["model"], recipe.trained_on, lr=about["lr"], seed=about["seed"], scored_on=[recipe.task]
    )
    live("")
    reached = tuned.scores[recipe.task.name].parts["validation"].metrics[about["metric"]]
    comparison = recipe.compare(reached)
    allowed = max(SCORE_TOLERANCE, FEW_EXAMPLES / about["examples"]["validation"])
    if abs(reached - recipe.recorded) > allowed:
        raise ModelError(
            f"{recipe.trial.key[:8]}: {comparison}: more than {allowed * 100:.1f} points apart, so this is not the model "
            "that was scored; look whether the data has changed, or run the study again to score it here"
        )
    return Retrained(recipe, tuned.model.float().cpu(), comparison)


def _model_of(key: str, store: Store) -> tuple[Pretrain, SavedCheckpoint | None]:
    """The run of the fine-tuned model, and its checkpoint unless it was a start without further training."""
    if store.has(store.checkpoints / key):
        saved = saved_checkpoint(key, store)
        return saved.run, saved
    store.refuse_debris(store.checkpoints / key)
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        if any(root["key"] == key for root in read_checked(path).get("roots", ())):
            roots = make_plan(load_study(path).study, identities(store)).roots
            if key in roots:
                return roots[key].run, None
    refuse_metadata_only(key, store)
    raise SpecError(f"the model {key[:8]} that was fine-tuned is not in {store.root}; run the study again")


# ---------------------------------------------------------------- classes of transformers


@dataclass(frozen=True)
class Kind:
    """A task family in transformers' terms."""

    pipeline: str
    auto: Any  # the auto class that loads it
    native: Any | None  # EuroBERT's class for it
    labels: tuple[str, ...] = ()
    problem: str = ""  # transformers' problem_type, by which its pipeline knows what the outputs are

    @property
    def output(self) -> str:
        return "logits" if self.labels else "last_hidden_state"


KINDS: dict[type[Form], Kind] = {
    Classify: Kind(Classify.pipeline, AutoModelForSequenceClassification, EuroBertForSequenceClassification),
    Tag: Kind(Tag.pipeline, AutoModelForTokenClassification, EuroBertForTokenClassification),
    Answer: Kind(Answer.pipeline, AutoModelForQuestionAnswering, None, ("start", "end")),
    Retrieve: Kind(Retrieve.pipeline, AutoModel, EuroBertModel),
    Regress: Kind(
        Regress.pipeline,
        AutoModelForSequenceClassification,
        EuroBertForSequenceClassification,
        labels=("number",),
        problem="regression",
    ),
    MultiLabel: Kind(
        MultiLabel.pipeline,
        AutoModelForSequenceClassification,
        EuroBertForSequenceClassification,
        problem="multi_label_classification",
    ),
    Choose: Kind(Choose.pipeline, AutoModelForMultipleChoice, None, labels=("score",)),
}


def kind_of(recipe: TrialRecipe) -> Kind:
    """The transformers class for a fine-tuned model."""
    form = recipe.trained_on.form
    if isinstance(form, Answer) and recipe.spec.protocol == "paper":  # two tags: in the answer or not
        return replace(KINDS[Tag], labels=("O", "ANSWER"))
    kind = KINDS[type(form)]
    return replace(kind, labels=getattr(form, "labels", kind.labels))


# ---------------------------------------------------------------- card


def tuned_card(retrained: Retrained, store: Store, written: Written, kind: Kind, *, onnx: bool) -> Card:
    """The card of a fine-tuned model: its task, its scores, and how its inputs must be written."""
    recipe = retrained.recipe
    task, form = recipe.trained_on, recipe.trained_on.form
    if recipe.checkpoint is not None:
        base, origin = card.titled(recipe.checkpoint), card.recipe(recipe.checkpoint)
    else:
        base, origin = recipe.run.name, Section("The encoder", note=card.describe_start(recipe.run.start))
    return Card(
        title=f"{base}, {task.name}",
        summary=f"{base}, fine-tuned with biphase on {task.name}, as {written.architecture}.",
        kind=kind.pipeline,
        written=written,
        base=card.base_of(recipe.run),
        prompts=writing.prompts_of(form) if isinstance(form, Retrieve) else None,
        graph=kind.output if onnx else "",
        several=isinstance(form, MultiLabel),
        grids=[TaskScores({(recipe.trial.about["lr"], recipe.trial.about["seed"]): recipe.trial})],
        sections=[_training(retrained, kind.labels), _scores(retrained, store), origin],
        limits=[
            *limits_of(written),
            f"Texts must be written as in training, see above, and are cut at {recipe.tokenizer.context:,} tokens.",
            "It knows the texts and the labels it was shown, their errors and slants too.",
        ],
    )


def _training(retrained: Retrained, labels: tuple[str, ...]) -> Section:
    recipe = retrained.recipe
    task, about = recipe.trained_on, recipe.trial.about
    templates = (json.dumps(template, ensure_ascii=False) for template in task.form.templates.values())
    best = f"; the weights after step {about['best_step']:,} are kept" if "best_step" in about else ""
    rows = [
        ("task", f"{task.name}, from {card.without_folders(task.source)}"),
        ("texts", " and ".join(templates) or "words with one space between them"),
        *([("labels", ", ".join(labels))] if labels else []),
        ("steps", f"{about['steps']:,} of {task.batch} examples{best}"),
        ("learning rate, seed", f"{about['lr']:g}, {about['seed']}"),
        ("protocol, precision", f"{recipe.spec.protocol}, {recipe.spec.precision}"),
        ("key", recipe.trial.key),
    ]
    return Section("What it was fine-tuned on", ("what", "which"), rows)


def _scores(retrained: Retrained, store: Store) -> Section:
    trial = retrained.recipe.trial
    scores = trial.about["scores"]
    names = [name for name in scores["validation"] if all(name in part for part in scores.values())]
    rows = [(name, *(f"{part[name] * 100:.2f}" for part in scores.values())) for name in names]
    note = (
        f"On {retrained.recipe.task.name}, as measured when it was first made; learning rates were chosen by validation "
        f"scores alone. Its weights were not kept: it was fine-tuned again for this folder, {retrained.comparison}."
    )
    for grid in card.grids_of(trial.about["model"], store):
        same = any(other.key == trial.key for other in grid.trials.values())
        if same and len(grid.seeds) > 1 and grid.rate == trial.about["lr"]:
            note += f" Over {len(grid.seeds)} seeds the test {grid.metric} is {grid.test_score()}% (95% interval)."
    return Section("Scores", ("metric", *(f"{part}, %" for part in scores)), rows, note)


# ---------------------------------------------------------------- export


def refuse_without_class(recipe: TrialRecipe, kind: Kind) -> None:
    """Raise before the work if transformers has no class for this model and task."""
    encoder, tokenizer = recipe.encoder.encoder, recipe.tokenizer
    fields = tokenizer.native_ids
    native = kind.native and as_eurobert(encoder, tokenizer.context, EuroBertModel, {}, **fields)
    if not native and not _has_own(encoder.trunk, kind):
        other = "" if kind.auto is AutoModelForMultipleChoice else ", or fine-tune another one"
        raise ModelError(
            f"transformers has no class that does {kind.pipeline} on {type(encoder.trunk).__name__} as it was fine-tuned "
            f"here; export the encoder instead, by the key of its checkpoint{other}"
        )


def export_tuned(trial: SavedTrial, store: Store, place: Path, *, onnx: bool, say: Say) -> Exported:
    """Write the model that a trial scored to `place` and verify it; if that fails, raise and leave nothing behind."""
    with building(place) as folder:
        say(f"reading {trial.key[:8]}")
        recipe = recipe_of(trial, store)
        kind, tokenizer = kind_of(recipe), recipe.tokenizer
        refuse_without_class(recipe, kind)
        if onnx and kind.pipeline == Answer.pipeline:
            raise SpecError("answers by start and end are two outputs, not one graph; leave out --onnx")
        retrained = retrain(recipe, say)
        say("writing it, and reading it again")
        written = _write(retrained, kind, folder)
        writing.write_tokenizer(tokenizer, folder)
        form, prompts = recipe.trained_on.form, None
        if isinstance(form, Retrieve):
            width, prompts = retrained.model.encoder.width, writing.prompts_of(form)
            writing.write_sentences(folder, width=width, context=tokenizer.context, prompts=prompts)
        if onnx:
            say("writing ONNX, and running it")
            writing.write_onnx(folder, tokenizer, auto=kind.auto, output=kind.output)
        config = retrained.model.encoder.trunk.config
        readbacks = partial(_readbacks, retrained.model, kind)
        vectors = writing.vectors_of(tokenizer, config, readbacks, prompts=prompts)
        writing.verify_vectors(folder, vectors, onnx=onnx)
        model_card = tuned_card(retrained, store, written, kind, onnx=onnx)
        model_card.write(folder)
    return Exported(place, written, onnx, note=f"fine-tuned again: {retrained.comparison}")


def _write(retrained: Retrained, kind: Kind, folder: Path) -> Written:
    model, tokenizer = retrained.model, retrained.recipe.tokenizer
    trunk: Any = model.encoder.trunk
    texts = tuple(writing.recorded_texts(tokenizer, trunk.config).values())
    compared = tuple(_readbacks(model, kind, texts).values())
    numbers = {name: number for number, name in enumerate(kind.labels)}
    named: dict[str, Any] = {"label2id": numbers, "id2label": dict(enumerate(kind.labels))} if numbers else {}
    named |= {"problem_type": kind.problem} if kind.problem else {}

    def forms() -> Iterator[WrittenForm]:
        encoder = model.encoder
        if kind.native is not None:
            head = model.head.state_dict()
            head = {
                name.replace("out.", "classifier."): tensor for name, tensor in head.items()
            }  # EuroBERT's names
            fields = named | tokenizer.native_ids
            native = as_eurobert(
                encoder, tokenizer.context, kind.native, head, classifier_pooling="mean", **fields
            )
            if native is not None:
                yield WrittenForm(native(), compared)
        own = _own(trunk, kind, model.head, named)
        if own is not None:
            edits = writing.edits_for(trunk.config, windows=encoder.windows)
            yield WrittenForm(own, compared, ({}, *edits))

    title = f"{type(trunk).__name__} for {kind.pipeline}"
    return writing.write_model(folder, forms(), tokenizer, title=title)


def _readbacks(model: TaskModel, kind: Kind, texts: tuple[np.ndarray, ...]) -> dict[str, Readback]:
    """The hidden states of a fine-tuned model and its logits, where it has them."""
    own = writing.ours_tuned(model, texts) if kind.labels else ()
    if kind.pipeline == Answer.pipeline:
        # Some of these classes store the trunk under a name that AutoModel does not know.
        return {"logits": Readback(kind.auto, texts, own, ("start_logits", "end_logits"))}
    hidden = {"hidden_states": Readback(AutoModel, texts, writing.ours(model.encoder, texts))}
    return hidden | ({"logits": Readback(kind.auto, texts, own, ("logits",))} if kind.labels else {})


def _has_own(trunk: Any, kind: Kind) -> bool:
    """Whether transformers has a class for it. Of its text classifiers, only EuroBERT's has a head like ours.

    EuroBERT has no class for multiple choice, and those of other models pool otherwise.
    """
    known = kind.auto not in (AutoModelForSequenceClassification, AutoModelForMultipleChoice)
    return not kind.labels or (known and type(trunk.config) in kind.auto._model_mapping)


def _own(trunk: Any, kind: Kind, head: nn.Module, named: dict[str, Any]) -> Any | None:
    """The transformers class for this trunk and task, with our weights; None if there is none like ours."""
    if not kind.labels or not _has_own(trunk, kind):
        return None if kind.labels else trunk
    config = copy.deepcopy(trunk.config)
    for name, value in named.items():
        setattr(config, name, value)
    whole = kind.auto.from_config(config, attn_implementation="eager").float()
    inside = {id(module) for module in whole.base_model.modules()}
    matrices = [m for m in whole.modules() if isinstance(m, nn.Linear) and id(m) not in inside]
    out = getattr(head, "out", None)
    fits = len(matrices) == 1 and isinstance(out, nn.Linear) and matrices[0].weight.shape == out.weight.shape
    if not fits or matrices[0].bias is None:
        return None
    with torch.no_grad():
        matrices[0].weight.copy_(out.weight)
        matrices[0].bias.copy_(out.bias)
    missing, unexpected = whole.base_model.load_state_dict(trunk.state_dict(), strict=False)
    return None if unexpected or any(not name.startswith("pooler.") for name in missing) else whole
