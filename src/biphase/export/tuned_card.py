"""The card of a fine-tuned model: what it was taught, what it reached, and how a text must be written for it."""

from __future__ import annotations

import json
from typing import Any

from biphase.export import loading
from biphase.export.again import Again
from biphase.export.card import Card, base_of, escaped, place, start_words, table, titled
from biphase.export.card import recipe as how_trained
from biphase.export.scores import Grid, grids_of
from biphase.export.sentences import prompts_of
from biphase.export.state import limits_of
from biphase.export.writing import Written
from biphase.files import Store
from biphase.specs import Answer, Classify, Retrieve, Tag

LIBRARIES = {"sentence-similarity": "sentence-transformers"}


def tuned_card(
    again: Again, store: Store, written: Written, *, pipeline: str, labels: tuple[str, ...], onnx: bool
) -> Card:
    recipe = again.recipe
    task, form = recipe.trained_on, recipe.trained_on.form
    blocks = [loading.embeddings(prompts_of(form))] if isinstance(form, Retrieve) else []
    if pipeline in ("text-classification", "token-classification"):
        blocks = [loading.pipeline(pipeline)]
    if pipeline == "question-answering":
        blocks = [loading.answers()]
    made_of = titled(recipe.state) if recipe.state else recipe.run.name
    sections = [
        ("What it was fine-tuned on", _taught(again, labels)),
        ("Scores", _reached(again, store)),
    ]
    if recipe.state is not None:
        sections.append(("How the encoder was trained", how_trained(recipe.state)))
    else:
        start: Any = recipe.run.start
        sections.append(("The encoder", [f"{start_words(start)}."]))
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
        loading=[*blocks, *([loading.graph("logits" if labels else "last_hidden_state")] if onnx else [])],
        sections=sections,
        limits=[
            *limits_of(written),
            f"Texts must be written as in training, see above, and are cut at {recipe.words.context:,} tokens.",
            "It knows the texts and the labels it was shown, their errors and slants too.",
        ],
    )


def _taught(again: Again, labels: tuple[str, ...]) -> list[str]:
    recipe = again.recipe
    task, about = recipe.trained_on, recipe.leaf.about
    rows = [
        ("task", f"{escaped(task.name)}, from {escaped(place(task.source))}"),
        ("texts", _texts(task.form)),
        *([("labels", ", ".join(escaped(one) for one in labels))] if labels else []),
        ("steps", f"{about['steps']:,} of {task.batch} examples"),
        ("learning rate, seed", f"{about['lr']:g}, {about['seed']}"),
        ("protocol, precision", f"{recipe.spec.protocol}, {recipe.spec.precision}"),
        ("key", f"`{recipe.leaf.key}`"),
    ]
    return table(rows, ("what", "which"))


def _texts(form: Classify | Tag | Answer | Retrieve) -> str:
    """How an input is written, as Python would show it."""
    match form:
        case Classify(text=text):
            return escaped(json.dumps(text, ensure_ascii=False))
        case Tag():
            return "words with one space between them"
        case Answer(text=text):
            return escaped(json.dumps(f"{text}{{context}}", ensure_ascii=False))
        case Retrieve(query=query, document=document):
            return " and ".join(escaped(json.dumps(one, ensure_ascii=False)) for one in (query, document))


def _reached(again: Again, store: Store) -> list[str]:
    about = again.recipe.leaf.about
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
            f"Over {len(grid.seeds)} seeds the test {escaped(grid.metric)} is {grid.words()}% (95% interval).",
        ]
    return lines


def _grid(again: Again, store: Store) -> Grid | None:
    cell = again.recipe.leaf.about["lr"], again.recipe.leaf.about["seed"]
    found = (
        grid
        for grid in grids_of(again.recipe.leaf.about["model"], store)
        if grid.leaves.get(cell) is not None
    )
    return next((grid for grid in found if grid.leaves[cell].key == again.recipe.leaf.key), None)
