"""A fine-tuned model, made again: its weights were not kept, but everything that determines them was.

The leaf says which model, task, learning rate and seed; the fine-tuning is the one that made its scores. What comes out
is held against the validation score of the leaf: the same on the same kind of CPU, and elsewhere within what sums in
another order may change.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, ModelError, SpecError
from biphase.export.folder import Say
from biphase.export.found import SavedLeaf, SavedState, state
from biphase.export.state import shards_of
from biphase.export.words import Words, words_of, words_of_hub
from biphase.files import Store, read_sealed
from biphase.finetune.families import Family, family_of
from biphase.finetune.leaf import Bench, score
from biphase.finetune.model import Setting, Tuned
from biphase.finetune.subject import Subject, subject_of_hub, subject_of_state
from biphase.keys import leaf_key, training_key
from biphase.models.attention import varlen_works
from biphase.presets import corpus_of
from biphase.progress import Live
from biphase.records import decode
from biphase.specs import BPE, Finetune, Hub, Pretrain, Task
from biphase.study.identities import identities
from biphase.study.load import load as load_study
from biphase.study.model_names import refuse_receipt
from biphase.study.plan import PLAN, make_plan
from biphase.tasks.load import load
from biphase.tasks.places import task_key
from biphase.training import devices

# How far a validation score may lie from the leaf's, and how many examples may be judged otherwise in any case.
SCORE_TOLERANCE, FEW_EXAMPLES = 0.03, 3


@dataclass(frozen=True)
class Recipe:
    """Everything that makes a fine-tuned model, and the model it is made from."""

    leaf: SavedLeaf
    spec: Finetune
    task: Task  # that it was scored on
    trained_on: Task
    run: Pretrain  # that the model came from
    state: SavedState | None  # None: a start as it is
    subject: Subject
    words: Words

    @property
    def metric(self) -> str:
        return self.leaf.about["metric"]

    @property
    def recorded(self) -> float:
        """The validation score that learning rates were chosen by."""
        return self.leaf.about["scores"]["validation"][self.metric]


@dataclass(frozen=True)
class Again:
    """A model that was fine-tuned again, and what it reached."""

    recipe: Recipe
    model: Tuned
    validation: float

    def comparison(self) -> str:
        """How the model at hand compares with the one that the leaf scored."""
        now, then = (f"{one * 100:.2f}%" for one in (self.validation, self.recipe.recorded))
        if self.validation == self.recipe.recorded:
            return f"validation {self.recipe.metric} {now}, the same as when it was first made"
        return (
            f"validation {self.recipe.metric} {now}, and {then} when it was first made (on another machine sums come "
            "in another order)"
        )


def recipe_of(leaf: SavedLeaf, store: Store) -> Recipe:
    """What a leaf says of the model it scored, with that model's beginning loaded."""
    about = leaf.about
    task = decode(about["task"])
    trained_on = decode(about["trained_on"]) if about["trained_on"] else task
    tasks = (task,) if trained_on is task else (trained_on, task)
    fields = {name: decode(value) for name, value in about["finetune"].items() if name != "kind"}
    spec = Finetune(tasks, lrs=(about["lr"],), seeds=(about["seed"],), **fields)
    if spec.causal:
        raise ModelError(
            f"{leaf.key[:8]} was fine-tuned reading forwards only, as a yardstick; an encoder cannot be made of it: give "
            "the key of a leaf that reads in both directions"
        )
    run, saved = _model_of(about["model"], store)
    _refuse_other_data(leaf, spec, task, trained_on, store)
    subject, words = _subject(run, saved, store, spec)
    return Recipe(leaf, spec, task, trained_on, run, saved, subject, words)


def _refuse_other_data(leaf: SavedLeaf, spec: Finetune, task: Task, trained_on: Task, store: Store) -> None:
    """The key of a leaf says which data it was trained and scored on: the files here must give the same."""
    taught, asked = (task_key(one, store, again=True) for one in (trained_on, task))
    about = leaf.about
    training = training_key(about["model"], taught, spec, lr=about["lr"], seed=about["seed"])
    if leaf_key(training, asked, spec.documents if task.family == "IR" else "") != leaf.key:
        raise DataError(
            f"{leaf.key[:8]} was fine-tuned on other data than the files of {trained_on.name!r} in {trained_on.source} are "
            "now; put those files back, or run the study again to score a model on these"
        )


def finetune_again(recipe: Recipe, say: Say) -> Again:
    """The model that a leaf scored."""
    about, spec, subject = recipe.leaf.about, recipe.spec, recipe.subject

    def family(task: Task) -> Family:
        examples = load(task, documents=spec.documents)
        return family_of(task, examples, subject.reading, protocol=spec.protocol)

    setting = _setting(spec, subject)
    taught = family(recipe.trained_on)
    live = Live(enabled=True)
    say(f"fine-tuning on {recipe.trained_on.name} again, {taught.steps:,} steps")
    tuned, _ = Bench(subject.encoder, setting).finetune(
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
    again = Again(recipe, tuned.float().cpu(), reached)
    _refuse_another(again)
    return again


def _refuse_another(again: Again) -> None:
    leaf = again.recipe.leaf
    allowed = max(SCORE_TOLERANCE, FEW_EXAMPLES / leaf.about["examples"]["validation"])
    if abs(again.validation - again.recipe.recorded) > allowed:
        raise ModelError(
            f"{leaf.key[:8]}: {again.comparison()}: more than {allowed * 100:.1f} points apart, so this is not the model "
            "that was scored; look whether the data has changed, or run the study again to score it here"
        )


def _setting(spec: Finetune, subject: Subject) -> Setting:
    device = devices.join().device
    varlen = varlen_works(device, "fp32" if spec.precision == "fp32" else "bf16")
    return Setting.of(device, spec.precision, varlen=varlen, encoder=subject.encoder)


def _model_of(key: str, store: Store) -> tuple[Pretrain, SavedState | None]:
    """The run of the model that was fine-tuned, and its state unless it was a start as it is."""
    if store.has(store.states / key):
        saved = state(key, store)
        return saved.run, saved
    store.refuse_debris(store.states / key)
    for path in sorted(store.studies.glob(f"*/{PLAN}")):
        said = read_sealed(path)
        if any(root["key"] == key for root in said.get("roots", ())):
            roots = make_plan(load_study(path).study, identities(store)).roots
            if key in roots:
                return roots[key].run, None
    refuse_receipt(key, store)
    raise SpecError(
        f"the model {key[:8]} that was fine-tuned is not in {store.states}; run the study again to make it"
    )


def _subject(run: Pretrain, saved: SavedState | None, store: Store, spec: Finetune) -> tuple[Subject, Words]:
    if saved is None and isinstance(run.start, Hub):
        subject = subject_of_hub(run.start, spec)
        reading = subject.reading
        return subject, words_of_hub(run.start, reading.before, reading.after, reading.length)
    shards = shards_of(run, store)
    subject = subject_of_state(run, saved.key if saved else None, store, shards, spec)
    tokenizer = load_saved(shards.tokenizer)
    corpus = corpus_of(run)
    return subject, words_of(
        tokenizer,
        bos=corpus.bos,
        context=subject.reading.length,
        trained_here=isinstance(corpus.tokenizer, BPE),
    )
