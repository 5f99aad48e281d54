"""Tasks as the command line says them: by name, in a local copy, or the user's own data."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

from biphase.catalog import CATALOG, TASKS
from biphase.data.listing import Absent
from biphase.errors import SpecError, nearest
from biphase.specs import Answer, Classify, Family, Retrieve, Splits, Tag, Task
from biphase.tasks.hub import SIGN, HubPlace
from biphase.tasks.labels import in_order, is_number, values_of
from biphase.tasks.places import kind_of, local_files, matching
from biphase.tasks.tables import column_names, read

FAMILIES = get_args(Family)
VALIDATION = ("validation*", "valid*", "dev*")
TEXTS = ("text", "sentence", "content", "review")
LABELS = ("label", "class", "category", "target")
Files = dict[str, tuple[Path, ...]]
WORDS, TAGS, ANSWERS = "tokens|words", "tags|ner_tags|labels", "answers|answer"


@dataclass(frozen=True)
class Own:
    """What the command line says of the user's own data; what is left empty is taken from the data."""

    family: str
    text: str
    label: str
    labels: tuple[str, ...]
    test: Path | None
    trained_on: str


def tasks_named(
    names: str,
    *,
    data: Path | None = None,
    family: str = "",
    text: str = "",  # SC: a template or column; TC: the column of words; QA: before the context; IR: of documents
    label: str = "",  # the column of labels, of tags or of answers
    labels: str = "",  # their names, in the order of their numbers, separated by commas
    test: Path | None = None,
    trained_on: str = "",
    steps: int = 0,
) -> tuple[Task, ...]:
    """The tasks of a comma-separated list: names, `paper`, a family (SC, TC, QA, IR), or paths to own data.

    With `data`, known tasks are read from local copies there, where it has them. A task that is scored with
    another's model brings that one with it. The options after `data` describe own data, but for `steps`.
    """
    listed = tuple(one.strip() for one in labels.split(",")) if labels else ()
    own = Own(family, text, label, listed, test, trained_on)
    found: dict[str, Task] = {}
    wanted = [one.strip() for one in names.split(",") if one.strip()]
    for name in wanted:
        for task in _named(name) or [_own_task(name, own)]:
            lender = CATALOG.get(task.trained_on)
            for one in (lender, task) if lender else (task,):
                known = one is CATALOG.get(one.name)
                made = _copy_of(one, data) if known and data else one
                if found.setdefault(one.name, made) != made:
                    raise SpecError(
                        f"--tasks names two tasks {one.name!r}: {found[one.name].source} and {made.source}; "
                        "rename one of the folders"
                    )
    if not found:
        raise SpecError(
            f"--tasks {names!r} names no task; type --tasks paper, or some of {', '.join(CATALOG)}"
        )
    if own != Own("", "", "", (), None, "") and all(_named(name) for name in wanted):
        raise SpecError(
            "--family, --text, --label, --labels, --test and --trained-on describe data of your own; "
            "name it: --tasks FOLDER"
        )
    return tuple(replace(one, steps=steps, epochs=0) if steps else one for one in found.values())


def _named(name: str) -> list[Task]:
    """The known tasks a word stands for."""
    if name in CATALOG:
        return [CATALOG[name]]
    return [task for task in TASKS if name in ("paper", task.family)]


# ---------------------------------------------------------------- local copies


def _copy_of(task: Task, data: Path) -> Task:
    """The task with its files in `data`: in a folder of its name, else in copies of its repositories, else as it is."""
    if not data.is_dir():
        raise SpecError(f"--data {data} is no folder; name the one that holds a folder for each task")
    copies = [task.at(str(data / task.name))] if (data / task.name).is_dir() else []
    mirrored = _mirrored(task, data)
    copies += [mirrored] if mirrored != task else []
    wrong = None
    for copy in copies:
        try:
            local_files(copy)
        except Absent as absent:
            wrong = wrong or absent
        else:
            return copy
    if wrong:
        raise wrong
    return task


def _mirrored(task: Task, data: Path) -> Task:
    """The task with every repository that `hf download … --local-dir DATA/NAME` copied read from there."""

    def moved(place: str) -> str:
        if not place.startswith(SIGN):
            return place
        there = HubPlace.of(f"task {task.name!r}", place)
        folder = data.expanduser().resolve() / there.name
        return str(folder / there.path) if folder.is_dir() else place

    splits = {part: moved(getattr(task.splits, part)) for part in ("train", "validation", "test")}
    form = task.form
    if isinstance(form, Retrieve):
        places = {name: moved(getattr(form, name)) for name in ("queries", "corpus", "pairs")}
        form = replace(form, **places)
    return replace(task, source=moved(task.source), splits=replace(task.splits, **splits), form=form)


# ---------------------------------------------------------------- own data


def _own_task(name: str, own: Own) -> Task:
    path = Path(name).expanduser()
    if not path.exists():
        raise SpecError(
            f"there is no task and no file {name!r}; {nearest(name, ['paper', *FAMILIES, *CATALOG])}"
        )
    if own.family and own.family not in FAMILIES:
        raise SpecError(f"--family {own.family}: {nearest(own.family, FAMILIES)}")
    stem = path.resolve().name if path.is_dir() else path.name.split(".")[0]
    short = re.sub(r"[^\w.-]+", "-", stem) or "task"
    whose = f"task {short!r}"
    laid_out = path.is_dir() and matching(path, "corpus*") and matching(path, "queries*")
    if own.family == "IR" and not laid_out:
        raise SpecError(
            f"{whose}: {path} has no corpus* and queries*; lay it out as BEIR does: docs/tasks.md"
        )
    if laid_out and own.family in ("", "IR"):
        return _own_retrieval(whose, short, path, own)
    if own.trained_on:
        raise SpecError(f"--trained-on {own.trained_on}: {path} is no retrieval data; leave it out")
    task = Task(short, Answer(), str(path), _own_splits(path, own))  # its form is not known yet
    files = local_files(task)
    columns = column_names(whose, files["train"][0])
    maker = {"SC": _classify, "TC": _tag, "QA": _answer}[own.family or _family(columns)]
    return replace(task, form=maker(whose, files, columns, own))


def _own_splits(path: Path, own: Own) -> Splits:
    """The parts of own data."""
    if path.is_file():
        if not kind_of(path.name)[0]:
            raise SpecError(f"{path} is no table; give .csv, .tsv, .jsonl or .parquet")
        if own.test is None:
            raise SpecError(
                f"{path} is one file, to train on; name another to be scored by: --test FILE, "
                "or a folder with train and test files"
            )
        return Splits(train=path.name, test=_test(own.test))
    train = _part(path, ("train*",))
    validation = _part(path, VALIDATION)
    test = _test(own.test) if own.test else _part(path, ("test*",))
    if not train or not (test or validation):
        raise SpecError(f"{path} needs files train* and test*, e.g. train.csv and test.csv; put them there")
    if not test:  # as GLUE is used: scored on validation, and validation is cut from train
        test, validation = validation, ""
    return Splits(train=train, validation=validation, test=test)


def _test(path: Path) -> str:
    if not path.expanduser().is_file():
        raise SpecError(f"--test {path} is no file; name one")
    return str(path.expanduser().resolve())


def _part(folder: Path, patterns: Sequence[str]) -> str:
    """The first of the patterns that means something there. Files of different names are not one part."""
    for pattern in patterns:
        found = matching(folder, pattern)
        stems = {re.sub(r"[-_.]?\d+(-of-\d+)?$", "", path.name.split(".")[0]) for path in found}
        if len(stems) > 1:
            raise SpecError(
                f"{folder} has {' and '.join(path.name for path in found[:3])}, of which only one can be the "
                f"{pattern.rstrip('*')} part; move the others away"
            )
        if found:
            return pattern
    return ""


def _family(columns: Sequence[str]) -> str:
    there = set(columns)
    if there & set(WORDS.split("|")) and there & set(TAGS.split("|")):
        return "TC"
    return "QA" if {"question", "context"} <= there and there & set(ANSWERS.split("|")) else "SC"


def _classify(whose: str, files: Files, columns: Sequence[str], own: Own) -> Classify:
    label = own.label or next((one for one in LABELS if one in columns), "")
    if label not in columns:
        raise SpecError(
            f"{whose}: say which column holds the label: --label COLUMN, one of {', '.join(columns)}"
        )
    text = own.text or next((one for one in TEXTS if one in columns), "")
    if not text:
        raise SpecError(
            f"{whose}: say what the text is: --text COLUMN, or a template like --text 'A: {{a}} B: {{b}}', "
            f"of the columns {', '.join(columns)}"
        )
    labels = _listed(whose, own) or in_order(whose, label, values_of(whose, files["train"], label))
    if len(labels) < 2:
        raise SpecError(
            f"{whose}: column {label!r} of the train part holds {f'only {labels[0]!r}' if labels else 'nothing'}, "
            "and there must be two labels or more; name another: --label COLUMN, or say them: --labels NAMES"
        )
    return Classify(_template(whose, text, columns), labels, label=label)


def _listed(whose: str, own: Own) -> tuple[str, ...]:
    """The labels that are said, if any."""
    if own.labels and (len(set(own.labels)) < max(2, len(own.labels)) or "" in own.labels):
        raise SpecError(
            f"{whose}: --labels {','.join(own.labels)!r} must be two names or more, all different; correct it"
        )
    return own.labels


def _template(whose: str, text: str, columns: Sequence[str]) -> str:
    """A template, or the one that is nothing but a column."""
    bare = text.replace("{{", "").replace("}}", "")  # they stand for braces
    named = re.findall(r"\{([^{}]*)\}", bare) if "{" in text else [text]
    for name in named:
        if not name.isidentifier() and name in columns:
            raise SpecError(
                f"{whose}: the column {name!r} cannot stand in a template, where a column is one word; "
                f"rename it in the files, e.g. {re.sub(r'[^0-9a-zA-Z]+', '_', name)}"
            )
        if not name.isidentifier():
            raise SpecError(f"{whose}: --text {text!r}: {name!r} is no column; {nearest(name, columns)}")
    return text if "{" in text else f"{{{text}}}"


def _tag(whose: str, files: Files, columns: Sequence[str], own: Own) -> Tag:
    tags = own.label or TAGS
    there = next((one for one in tags.split("|") if one in columns), tags)
    labels = _listed(whose, own)
    source = "--labels" if labels else f"column {there!r} of the train part"
    if not labels:
        found = values_of(whose, files["train"], tags, lists=True)
        if any(is_number(one) for one in found):
            raise SpecError(
                f"{whose}: its tags are numbers; say their names in order: --labels O,B-PER,I-PER,…"
            )
        names = {str(one) for one in found}
        kinds = sorted({one[2:] for one in names if one[:2] in ("B-", "I-")})
        iob = ["O", *(f"{side}-{kind}" for kind in kinds for side in "BI")]
        labels = (*iob, *sorted(names.difference(iob)))
    strange = [one for one in labels if one != "O" and one[:2] not in ("B-", "I-")]
    if strange or len(labels) < 2 or "O" not in labels:
        said = (
            f"holds {', '.join(strange[:8])}" if strange else "lacks O" if len(labels) > 1 else "holds O only"
        )
        raise SpecError(
            f"{whose}: {source} {said}; write tags in IOB2 (O, B-PER, I-PER, …), "
            "or name another column: --label COLUMN"
        )
    return Tag(labels, words=own.text or WORDS, tags=tags)


def _answer(whose: str, files: Files, columns: Sequence[str], own: Own) -> Answer:
    answers = own.label or ANSWERS
    every = [path for paths in files.values() for path in paths]
    found = (one for rows in read(whose, every, (answers,)) for one in rows.columns[answers])
    texts = (one.get("text") if isinstance(one, dict) else one for one in found)
    empty = any(not any(one) if isinstance(one, list) else not one for one in texts)
    form = Answer(answers=answers, unanswerable=empty)
    return replace(form, text=own.text) if own.text else form


def _own_retrieval(whose: str, name: str, folder: Path, own: Own) -> Task:
    train, pairs = _part(folder, ("qrels/train*",)), _part(folder, ("pairs*",))
    test = _test(own.test) if own.test else _part(folder, ("qrels/test*",))
    if not test:
        raise SpecError(f"{whose}: {folder} has no judgments to be scored by; put qrels/test.tsv there")
    borrowed = "" if own.trained_on == name else own.trained_on
    if borrowed:  # what the folder has to train on is not used
        train, pairs = "", ""
    if not (train or pairs or borrowed):
        raise SpecError(
            f"{whose}: {folder} has nothing to train on; put qrels/train.tsv or pairs.jsonl there, or score another "
            "task's model on it: --trained-on msmarco"
        )
    columns = column_names(whose, matching(folder, "corpus*")[0])
    usual = "Document: {title}. {text}" if "title" in columns else "Document: {text}"
    document = _template(whose, own.text or usual, columns)
    splits = Splits(train, _part(folder, [f"qrels/{one}" for one in VALIDATION]), test)
    if pairs or not train:  # there are no judgments to spare but those of the test
        splits = replace(splits, cut=0.5, cut_from="test")
    return Task(name, Retrieve(document=document, pairs=pairs), str(folder), splits, trained_on=borrowed)
