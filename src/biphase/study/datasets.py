"""Descriptions of the datasets of a study: columns, labels, split sizes, two examples and warnings.

`describe` reads datasets and describes them; the command line prints this before training, so that a wrong column or
label is noticed early. `keep` saves the descriptions beside the plan, and the report shows them (`kept`):

    store/studies/<name>/datasets.json
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from biphase.errors import StoreError
from biphase.specs import Classify, Task
from biphase.specs.tasks import FAMILIES, columns_of, filled
from biphase.store import Store, read_checked, with_checksum, write_json
from biphase.study.names import LABELS, VALIDATION
from biphase.tasks.files import column_names, files_of, on_hub, refuse_unpinned
from biphase.tasks.labels import is_number
from biphase.tasks.load import (
    DOCUMENT_ID,
    Examples,
    LabelledText,
    Pair,
    Question,
    Search,
    TaggedSentence,
    load,
)
from biphase.text import counted

DATASETS = "datasets.json"
SHOWN = 160  # characters shown of an example
LISTED = 12  # labels listed
FEW = 100  # training rows below which a warning is given


@dataclass(frozen=True)
class Description:
    """A dataset as text; non-printable characters are escaped, a line break as \\n."""

    name: str
    about: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        rows = [*self.about, *(("warning", one) for one in self.warnings)]
        return [self.name, *(f"  {word:<10}  {said}" for word, said in rows)]


def describe(tasks: Iterable[Task], *, download: bool) -> list[Description]:
    """Read whole datasets and describe them; a bad row raises an error.

    Without `download`, hub datasets are described from their task record alone.
    """
    return [_describe(task, download=download) for task in tasks]


def keep(made: Sequence[Description], study: str, store: Store) -> None:
    """Save descriptions beside the plan; those of the study's other datasets are kept."""
    path = store.studies / study / DATASETS
    known = {name: asdict(one) for name, one in kept(study, store).items()}
    known |= {one.name: asdict(one) for one in made}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum({"datasets": list(known.values())}))


def kept(study: str, store: Store) -> dict[str, Description]:
    """Return the saved descriptions of a study by name; empty if the file is missing or damaged."""
    with contextlib.suppress(StoreError, KeyError, TypeError, ValueError):
        every = read_checked(store.studies / study / DATASETS)["datasets"]
        made = [
            Description(
                str(one["name"]),
                tuple((str(word), str(said)) for word, said in one["about"]),
                tuple(str(warning) for warning in one["warnings"]),
            )
            for one in every
        ]
        return {one.name: one for one in made}
    return {}


# ---------------------------------------------------------------- one dataset


def _describe(task: Task, *, download: bool) -> Description:
    places = on_hub(task)
    for place in places:
        refuse_unpinned(f"task {task.name!r}", place)
    about = [("family", f"{task.family}, {FAMILIES[task.family].name}"), ("source", task.source)]
    if places and not download:
        about += [*_asked(task, ()), ("rows", "on the hub; read when the first model is fine-tuned")]
        return _printable(task.name, about, ())
    files = files_of(task)
    examples = load(task, documents="judged")
    source = next(part for part in ("corpus", "train", "test") if part in files)
    columns = column_names(f"task {task.name!r}", files[source][0])
    about += [*_asked(task, columns), *_parts(task, examples)]
    about += [("example", one) for one in _examples(task, examples)]
    return _printable(task.name, about, _warnings(task, examples, columns))


def _printable(name: str, about: Iterable[tuple[str, str]], warnings: Iterable[str]) -> Description:
    def plain(text: str) -> str:
        return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)

    return Description(name, tuple((word, plain(said)) for word, said in about), tuple(map(plain, warnings)))


def _asked(task: Task, columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the columns that are read, the templates and the labels."""
    form = task.form
    if columns:
        read = [next((one for one in column.split("|") if one in columns), column) for column in form.columns]
        ids = DOCUMENT_ID.split("|") if "corpus" in form.files else ()
        unread = [one for one in columns if one not in (*read, *ids)]
        yield "columns", ", ".join(read) + (f"; not read: {', '.join(unread)}" if unread else "")
    yield from form.templates.items()
    if labels := getattr(form, "labels", ()):
        more = f", … ({len(labels)} in all)" if len(labels) > LISTED else ""
        yield "labels", ", ".join(labels[:LISTED]) + more


def _parts(task: Task, examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield the size and purpose of each split."""
    asks = "corpus" in task.form.files
    splits, what = task.splits, "query" if asks else "row"

    def rows(part: Any, word: str = what) -> str:
        return counted(len(part), word, "queries" if word == "query" else "")

    if task.trained_on:
        yield "train", f"none; scored with the model of {task.trained_on}"
    elif task.zero_shot:
        yield "train", "none; the model is scored as it is"
    else:
        length = counted(task.epochs, "epoch") if task.epochs else f"{task.steps:,} steps"
        pairs = rows(examples.train, "pair" if asks else "row")
        yield "train", f"{pairs}; {length} of {task.batch} at a time"
    if not task.zero_shot:
        share = "half" if splits.cut == 0.5 else f"{splits.cut:.0%}"
        cut = "" if splits.validation else f" ({share} of {splits.cut_from})"
        yield "validation", f"{rows(examples.validation)}{cut}; chooses the learning rate"
    place = splits.test.removeprefix("qrels/")
    stands_in = any(place == one or place.startswith(f"{one}.") for one in VALIDATION)
    why = "; the validation files, as there is no test part with labels" if stands_in else ""
    yield "test", f"{rows(examples.test)}{why}"


# ---------------------------------------------------------------- examples


def _examples(task: Task, examples: Examples) -> Iterator[str]:
    """Yield two examples as the model gets them, without the tokenizer's special tokens; two labels if possible."""
    labels = getattr(task.form, "labels", ())
    rows = _rows_of(examples.train if len(examples.train) else examples.test)
    other = (one for one in rows[1:] if isinstance(one, LabelledText) and one.label != rows[0].label)
    for one in (*rows[:1], *(next(other, second) for second in rows[1:2])):
        match one:
            case LabelledText():
                yield f"{_shown(one.text)} → {labels[one.label]}"
            case TaggedSentence():
                tagged = zip(one.words, one.tags, strict=True)
                yield _shown(" ".join(f"{word}/{labels[tag]}" for word, tag in tagged))
            case Question():
                answer = _shown(one.answers[0].text) if one.answers else "no answer"
                yield f"{_shown(one.before + one.context)} → {answer}"
            case Pair():
                yield f"{_shown(one.query)} → {_shown(one.document)}"


def _rows_of(part: Any) -> Sequence[Any]:
    """Return the examples of a split; for a `Search`, the first two queries with their best documents."""
    if not isinstance(part, Search):
        return part
    best = [max(judged, key=judged.__getitem__) for judged in part.judged[:2]]
    return [
        Pair(query, part.library.texts[document]) for query, document in zip(part.queries, best, strict=False)
    ]


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")


# ---------------------------------------------------------------- warnings


def _warnings(task: Task, examples: Examples, columns: Sequence[str]) -> Iterator[str]:
    train, form = examples.train, task.form
    if isinstance(form, Classify):
        yield from _odd_texts(form, examples, columns)
    if task.is_trained and len(train) < FEW:
        yield f"only {counted(len(train), 'row')} to train on; scores of so few depend on chance"
    if task.is_trained:
        taught = {_input(one) for one in train}
        asked = [_input(one) for one in _inputs(examples.test)]
        shared = sum(one in taught for one in asked)
        if shared:
            yield (
                f"{shared:,} of {len(asked):,} inputs of the test part ({shared / len(asked):.1%}) are in the train part "
                "too; a model may know their answers by heart"
            )


def _odd_texts(form: Classify, examples: Examples, columns: Sequence[str]) -> Iterator[str]:
    read = columns_of("", form.text)
    could = [
        one for one in columns if (one.lower() in LABELS or one.lower().endswith("label")) and one not in read
    ]
    first, *others = sorted(could, key=lambda one: (*LABELS, one.lower()).index(one.lower())) or [""]
    if others and form.label == first:  # the label column was not chosen by an option
        yield f"column {others[0]!r} could be the label too; if it is, type --label {others[0]}"
    header = filled(form.text, {one: one for one in read})
    for part in ("train", "validation", "test"):
        if any(isinstance(one, LabelledText) and one.text == header for one in getattr(examples, part)):
            yield f"a row of the {part} part repeats the header, {_shown(header)}; remove it"
    texts = [one.text for one in examples.train if isinstance(one, LabelledText)]
    if texts and form.text == f"{{{read[0]}}}" and all(map(is_number, texts)):
        yield f"the texts are numbers, e.g. {_shown(texts[0])}; if the text is elsewhere, type --text COLUMN"
    if texts and len(form.labels) * 2 > len(texts):
        yield (
            f"{len(form.labels)} labels for {counted(len(texts), 'row')} of train; if {form.label!r} is not the label, "
            "type --label COLUMN"
        )


def _inputs(part: Any) -> Sequence[Any]:
    return part.queries if isinstance(part, Search) else part


def _input(one: Any) -> Any:
    """Return the model input of an example, without the label or answer; for a pair, the query."""
    match one:
        case LabelledText():
            return one.text
        case TaggedSentence():
            return one.words
        case Question():
            return one.before, one.context
        case Pair():
            return one.query
    return one
