"""A task's files → its examples: read, checked row by row, cut into parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from biphase.errors import DataError
from biphase.specs import Answer, Classify, Retrieve, Splits, Tag, Task
from biphase.specs.tasks import columns_of, filled, optional_columns
from biphase.tasks.cuts import cut
from biphase.tasks.examples import Examples, Question, Span, Text, Words
from biphase.tasks.labels import Numbering
from biphase.tasks.places import files_of
from biphase.tasks.retrieval import load_retrieval
from biphase.tasks.tables import Rows, read

PARTS = ("train", "validation", "test")


def load(task: Task, *, documents: Literal["judged", "all"]) -> Examples:
    """The examples of a task. Retrieval searches `documents`: those that are judged at all, or the whole corpus."""
    files = files_of(task)
    if isinstance(task.form, Retrieve):
        return load_retrieval(task, files, documents)
    parts: dict[str, list[Any]] = {part: _read(task, paths) for part, paths in files.items()}
    places: dict[str, Sequence[int]] = {part: range(len(rows)) for part, rows in parts.items()}
    if "validation" not in parts:
        donor = task.splits.cut_from
        first, rest = cut(len(parts[donor]), task.splits)
        rows = parts[donor]
        parts |= {"validation": [rows[place] for place in first], donor: [rows[place] for place in rest]}
        places |= {"validation": first, donor: rest}
    if not task.is_trained:
        parts["train"] = []
    limited = [parts[part][: limit or None] for part, limit in zip(PARTS, task.splits.rows, strict=True)]
    for part, rows in zip(PARTS, limited, strict=True):
        if not rows and (part != "train" or task.is_trained):
            raise DataError(f"task {task.name!r}: its {part} part has no rows; {_more(task.splits, part)}")
    kept = {part: places.get(part, ())[: len(rows)] for part, rows in zip(PARTS, limited, strict=True)}
    return Examples(*limited, rows=kept)


def _more(splits: Splits, part: str) -> str:
    if splits.validation or part not in ("validation", splits.cut_from):
        return "put rows into its files"
    return f"it is cut at {splits.cut:g} from the {splits.cut_from} part, which is too small; add rows, or change Splits.cut"


def _read(task: Task, files: Sequence[Path]) -> list[Any]:
    whose = f"task {task.name!r}"
    if isinstance(task.form, Classify):
        return _texts(whose, task.form, files)
    if isinstance(task.form, Tag):
        return _sentences(whose, task.form, files)
    assert isinstance(task.form, Answer)
    return _questions(whose, task.form, files)


# ---------------------------------------------------------------- sequence classification


def _texts(whose: str, form: Classify, files: Sequence[Path]) -> list[Text]:
    columns, optional = columns_of("Classify.text", form.text), optional_columns(form.text)
    number = Numbering(form.labels, numbered=form.numbered)
    made = []
    for rows in read(whose, files, (*columns, form.label)):
        values = zip(*(rows.columns[name] for name in columns), strict=True)
        for row, (texts, label) in enumerate(zip(values, rows.columns[form.label], strict=True)):
            found = number(label)
            if found is None:
                raise DataError(f"{whose}: {rows.place(row)} {number.refusal(label)}")
            for name, value in zip(columns, texts, strict=True):
                if not isinstance(value, (str, int, float)) and (value is not None or name not in optional):
                    raise DataError(f"{whose}: {rows.place(row)} has no text in {name!r}; correct the row")
            text = filled(form.text, dict(zip(columns, texts, strict=True)))
            if not text or text.isspace():
                raise DataError(f"{whose}: {rows.place(row)} has no text; correct or remove the row")
            made.append(Text(text, found))
    return made


# ---------------------------------------------------------------- token classification


def _sentences(whose: str, form: Tag, files: Sequence[Path]) -> list[Words]:
    number = Numbering(form.labels)
    made = []
    for rows in read(whose, files, (form.words, form.tags)):
        for row, (words, tags) in enumerate(
            zip(rows.columns[form.words], rows.columns[form.tags], strict=True)
        ):
            wrong = _wrong_sentence(words, tags)
            if wrong:
                raise DataError(f"{whose}: {rows.place(row)} {wrong}")
            numbers = tuple(found for found in map(number, tags) if found is not None)
            if len(numbers) < len(tags):
                unknown = next(tag for tag in tags if number(tag) is None)
                raise DataError(f"{whose}: {rows.place(row)} {number.refusal(unknown)}")
            made.append(Words(tuple(words), numbers))
    return made


def _wrong_sentence(words: Any, tags: Any) -> str:
    if not isinstance(words, list) or not isinstance(tags, list):
        return "does not hold a list of words and one of tags; write them as lists, in jsonl or parquet"
    if len(words) != len(tags):
        return f"has {len(words)} words and {len(tags)} tags; give each word its tag"
    if not words:
        return "has no words; remove the row"
    if not all(isinstance(word, str) and word for word in words):
        return "has a word that is empty or no text; correct or remove the row"
    return ""


# ---------------------------------------------------------------- question answering


def _questions(whose: str, form: Answer, files: Sequence[Path]) -> list[Question]:
    made = []
    wanted, name = (form.question, form.context, form.answers), "id|_id|qid|query_id"
    for rows in read(whose, files, wanted, optional=(name,)):
        columns = zip(*(rows.columns[one] for one in (*wanted, name)), strict=True)
        for row, (question, context, answers, known) in enumerate(columns):
            try:
                if not isinstance(question, str) or not isinstance(context, str) or not context.strip():
                    raise ValueError("has no question or no context; correct or remove the row")
                spans = spans_of(answers, context)
                if not spans and not form.unanswerable:
                    raise ValueError(
                        "has no answer; remove the row, or type Answer(unanswerable=True) if that is right"
                    )
            except ValueError as wrong:
                raise DataError(f"{whose}: {rows.place(row)} {wrong}") from None
            before = form.text.format(question=question)
            made.append(Question(_name(known, rows, row), before, context, spans))
    return made


def _name(known: Any, rows: Rows, row: int) -> str:
    return rows.place(row) if known is None else str(known)


def spans_of(answers: Any, context: str) -> tuple[Span, ...]:
    """The answers of one row, in any of the ways they are written, or ValueError with the reason."""
    texts: list[Any]
    starts: list[Any]
    if isinstance(answers, dict) and {"text", "answer_start"} <= set(answers):
        texts, starts = _listed(answers["text"]), _listed(answers["answer_start"])
    else:
        each = [one for one in _listed(answers) if one not in ("", None)]
        texts = [one.get("text") if isinstance(one, dict) else one for one in each]
        starts = [one.get("answer_start") if isinstance(one, dict) else None for one in each]
    if len(texts) != len(starts):
        raise ValueError(f"has {len(texts)} answers and {len(starts)} starts; give each its own")
    return tuple(_span(text, start, context) for text, start in zip(texts, starts, strict=True))


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _span(text: Any, start: Any, context: str) -> Span:
    if not isinstance(text, str) or not text:
        raise ValueError("has an answer without text; correct the row")
    if start is None:
        start = context.find(text)
        if start < 0:
            raise ValueError(f"has the answer {_short(text)}, which is not in its context; correct the row")
    if not isinstance(start, int) or isinstance(start, bool) or start < 0:
        raise ValueError(f"has an answer that starts at {start!r}; give the number of its first character")
    there = context[start : start + len(text)]
    if there != text:
        raise ValueError(
            f"has the answer {_short(text)} at {start}, where the context says {_short(there)}; correct answer_start"
        )
    return Span(text, start)


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:39]}…")
