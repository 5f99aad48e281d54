"""A fine-tuned model → a folder that is ready: a pipeline with label names, or a sentence-transformers model."""

from __future__ import annotations

import copy
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

from biphase.errors import ModelError, SpecError
from biphase.export.again import Again, Recipe, finetune_again, recipe_of
from biphase.export.exported import Exported
from biphase.export.folder import Say, building
from biphase.export.found import SavedLeaf
from biphase.export.onnx import write_onnx
from biphase.export.probes import ours, ours_tuned, probe_texts
from biphase.export.sentences import prompts_of, write_sentences
from biphase.export.state import last_hidden
from biphase.export.tuned_card import tuned_card
from biphase.export.words import check_words, write_words
from biphase.export.writing import Asked, Form, Written, edits_for, write_model
from biphase.files import Store
from biphase.models.native import as_eurobert
from biphase.specs import Answer, Classify, Retrieve, Tag

ANSWERS = "question-answering"


@dataclass(frozen=True)
class Kind:
    """A family of tasks as transformers knows it."""

    pipeline: str
    auto: Any  # what loads it
    native: Any | None  # EuroBERT's class for it
    labels: tuple[str, ...] = ()

    @property
    def output(self) -> str:
        return "logits" if self.labels else "last_hidden_state"


def kind_of(recipe: Recipe) -> Kind:
    """What a fine-tuned model is; refused where transformers has nothing like it."""
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
        case Answer() if recipe.spec.protocol == "paper":  # every token is in the answer or not: two tags
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


def refuse_without_class(recipe: Recipe, kind: Kind) -> None:
    """Refuse before the work where transformers has no class for such a model and such a task."""
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


def export_tuned(leaf: SavedLeaf, store: Store, place: Path, *, onnx: bool, say: Say) -> Exported:
    """Write the model that a leaf scored to `place`, checked; or refuse, and leave nothing."""
    with building(place) as folder:
        say(f"reading {leaf.key[:8]}")
        recipe = recipe_of(leaf, store)
        kind, words = kind_of(recipe), recipe.words
        refuse_without_class(recipe, kind)
        if onnx and kind.pipeline == ANSWERS:
            raise SpecError(
                "a model that answers by start and end has two outputs, not one graph; leave out --onnx"
            )
        again = finetune_again(recipe, say)
        say("writing it, and reading it again")
        written = _write(again, kind, folder)
        write_words(words, folder)
        check_words(words, folder)
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


def _write(again: Again, kind: Kind, folder: Path) -> Written:
    model, words = again.model, again.recipe.words
    trunk: Any = model.encoder.trunk
    texts = probe_texts(trunk.config, words)
    hidden = Asked(AutoModel, ours(model.encoder, texts), last_hidden)
    asked: tuple[Asked, ...] = (hidden,)
    if (
        kind.pipeline == ANSWERS
    ):  # some of these classes keep their trunk under a name that AutoModel does not know
        asked = (Asked(kind.auto, ours_tuned(model, texts), _bounds),)
    elif kind.labels:
        asked = hidden, Asked(kind.auto, ours_tuned(model, texts), _logits)
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


# Where EuroBERT's classes keep what our heads are made of.
_PLACES = {
    "dense.weight": "dense.weight",
    "dense.bias": "dense.bias",
    "out.weight": "classifier.weight",
    "out.bias": "classifier.bias",
}


def _has_own(trunk: Any, kind: Kind) -> bool:
    """Does transformers have a class for it? None of its classifiers of texts but EuroBERT's has a head like ours."""
    if not kind.labels:
        return True
    return (
        kind.auto is not AutoModelForSequenceClassification and type(trunk.config) in kind.auto._model_mapping
    )


def _own(trunk: Any, kind: Kind, head: nn.Module, named: dict[str, Any]) -> Any | None:
    """The class that transformers has for this trunk and this task, filled; None where it has none like ours."""
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
