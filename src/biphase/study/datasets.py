"""The datasets of a study: tasks as the command line names them, and a description of what was understood.

`tasks_named` resolves --tasks: catalog names, local copies of catalog tasks, or the user's own files, whose splits,
columns, labels and family are inferred from file names and content. `describe` reads datasets and describes them by
columns, labels, split sizes, two examples and warnings; the command line prints this before training, so that a wrong
column or label is noticed early. `keep` saves the descriptions beside the plan, and the report shows them (`kept`):

    store/studies/<name>/datasets.json
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from biphase.catalog import CATALOG, TASKS
from biphase.data.corpus import Absent
from biphase.errors import SpecError, StoreError, nearest
from biphase.records import record
from biphase.specs import Answer, Choose, Classify, MultiLabel, Regress, Retrieve, Splits, Tag, Task
from biphase.specs.rows import Numbering, columns_of
from biphase.specs.sources import HUB, HubPlace
from biphase.specs.tasks import FAMILIES, FAMILY_OF, Form
from biphase.store import Store, read_checked, with_checksum, write_json
from biphase.tasks import files as task_files
from biphase.tasks.files import KINDS, column_names, kind_of, local_files, matching, read_rows
from biphase.tasks.load import (
    DOCUMENT_ID,
    Examples,
    Pair,
    Search,
    are_places,
    in_order,
    is_number,
    load,
    named,
    values_of,
)
from biphase.text import counted

# File name patterns of splits: as a whole name, or at the end of others (eng.train, en_ewt-ud-train.iob2).
TRAIN = ("train*", "*[-_.]train*")
VALIDATION = ("validation*", "valid*", "dev*", "val[-_.]*", "val", "*[-_.]valid*", "*[-_.]dev*", "*.testa")
TEST = ("test*", "*.testb", "*[-_.]test*")
TEXTS = ("text", "sentence", "content", "review")
PAIRS = (
    ("premise", "hypothesis"),
    ("sentence1", "sentence2"),
    ("question1", "question2"),
    ("question", "passage"),
    ("question", "sentence"),
)
LABELS = (
    "label", "class", "category", "target", "labels", "sentiment", "intent", "emotion", "topic", "coarse_label",
    "answer",
)  # fmt: skip
NUMBERS = ("label", "score", "similarity_score", "similarity", "rating", "value", "target", "labels")
CONTEXTS, QUESTIONS = (
    ("context", "passage", "article", "premise"),
    ("question", "query", "startphrase", "ctx", "prompt", "goal"),
)
CHOICES, RIGHT = ("choices", "options", "endings"), ("answerkey", "answer", "label", "correct")
CHOICE_COLUMN = re.compile(r"(choice|option|ending|sol)_?([0-9]|[a-eA-E])")
IDS = ("id", "_id", "idx", "index", "guid", "unnamed: 0", "")  # columns that are neither text nor label
Files = dict[str, tuple[Path, ...]]
WORDS, TAGS, ANSWERS = "tokens|words", "tags|ner_tags|labels", "answers|answer"
FORMATS = f"{' '.join(KINDS)}, or CoNLL's columns as {' '.join(task_files.COLUMNS[:5])}"


@dataclass(frozen=True)
class OwnData:
    """What the command-line options say about the user's own data; empty fields are inferred from the data."""

    family: str = ""
    text: str = ""  # SC, SR, IR: template or column; TC: column of tokens; QA: text before the context
    label: str = ""  # column of labels, tags, answers or numbers
    labels: str = ""  # label names in the order of their numbers, separated by commas
    test: Path | None = None
    trained_on: str = ""
    query: str = ""  # IR: query template
    zero_shot: bool = False


ALL_INFERRED = OwnData()


def tasks_named(
    names: str,
    own: OwnData = ALL_INFERRED,
    *,
    data: Path | None = None,
    steps: int = 0,
    lrs: str = "",
    seeds: str = "",
) -> tuple[Task, ...]:
    """Return the tasks of a comma-separated list: names, `paper`, families, or paths to own data.

    With `data`, catalog tasks are read from their local copies in that folder, where it has them. A task that is
    scored with another task's model adds that task too. `lrs` and `seeds` are only checked against --zero-shot.
    """
    trained_on = own.trained_on
    own = replace(own, text=_unescaped(own.text), query=_unescaped(own.query))
    for option, value in {"steps": steps, "trained-on": trained_on, "lrs": lrs, "seeds": seeds}.items():
        if own.zero_shot and value:
            raise SpecError(f"--zero-shot and --{option} {value} do not go together; leave out one of them")
    tasks: dict[str, Task] = {}
    families: set[str] = set()  # of own data
    for name in filter(None, map(str.strip, names.split(","))):
        chosen = _named(name)
        if not chosen:
            chosen = [_own_task(name, own)]
            families.add(chosen[0].family)
        for task in chosen:
            task = _untrained(task, own) if own.zero_shot else task
            lender = CATALOG.get(task.trained_on)
            for each in (lender, task) if lender else (task,):
                known = each.name in CATALOG and each.source == CATALOG[each.name].source
                each = _copy_of(each, data) if known and data else each
                if tasks.setdefault(each.name, each) != each:
                    raise SpecError(
                        f"--tasks names two tasks {each.name!r}: {tasks[each.name].source} and {each.source}; "
                        "rename one of the folders"
                    )
    if not tasks:
        raise SpecError(
            f"--tasks {names!r} names no task; type --tasks paper, or some of {', '.join(CATALOG)}"
        )
    _refuse_idle(own, families)
    if trained_on and trained_on not in {*CATALOG, *tasks}:
        lenders = [*CATALOG, *(tasks if len(tasks) > 1 else ())]  # a single task cannot use its own model
        raise SpecError(f"--trained-on {trained_on}: there is no such task; {nearest(trained_on, lenders)}")
    return tuple(replace(task, steps=steps, epochs=0) if steps else task for task in tasks.values())


def _refuse_idle(own: OwnData, families: set[str]) -> None:
    """Refuse an option that applies to none of the families of the own data."""
    if not families and replace(own, zero_shot=False) != ALL_INFERRED:
        raise SpecError(
            "--family, --text, --label, --labels, --query, --test and --trained-on describe data of your own; "
            "name it: --tasks FOLDER"
        )
    for option, value in {"--query": own.query, "--labels": own.labels, "--label": own.label}.items():
        readers = {short for short, family in FAMILIES.items() if option in family.options}
        if value and not families & readers:
            raise SpecError(
                f"{option} {value!r} is for {', '.join(sorted(readers))}, and the data are read as "
                f"{', '.join(sorted(families))}; leave it out, or say the family: --family {min(readers)}"
            )


def _unescaped(text: str) -> str:
    """Replace \\n, \\t and \\\\ in an option by the characters they stand for."""
    return re.sub(r"\\([nt\\])", lambda match: {"n": "\n", "t": "\t"}.get(match[1], match[1]), text)


def _untrained(task: Task, own: OwnData) -> Task:
    """Return a zero-shot version of a retrieval task, without prefixes on the texts unless templates are given.

    No learning rate is chosen, so all test queries are reported.
    """
    if not isinstance(task.form, Retrieve):
        raise SpecError(
            f"--zero-shot: {task.name} is {task.family}, whose head has to be trained; only retrieval goes without"
        )
    form, splits = task.form, replace(task.splits, train="", validation=task.splits.test)
    form = form if own.query else replace(form, query=form.query.removeprefix("Query: "))
    form = form if own.text else replace(form, document=form.document.removeprefix("Document: "))
    return replace(task, form=form, splits=splits, steps=0, epochs=0, trained_on="")


def _named(name: str) -> list[Task]:
    """Return the catalog tasks that a name, family or "paper" stands for."""
    if name in CATALOG:
        return [CATALOG[name]]
    of_paper = [task for task in TASKS if name in ("paper", task.family)]
    return of_paper or [task for task in CATALOG.values() if task.family == name]


# ---------------------------------------------------------------- local copies


def _copy_of(task: Task, data: Path) -> Task:
    """Return the task with local files: from `data`/<task>, else from copies of its repositories, else unchanged."""
    if not data.is_dir():
        raise SpecError(f"--data {data} is no folder; name the one that holds a folder for each task")
    copies = [task.at(str(data / task.name))] if (data / task.name).is_dir() else []
    mirrored = _mirrored(task, data)
    copies += [mirrored] if mirrored != task else []
    missing = None
    for copy in copies:
        try:
            local_files(copy)
            return copy
        except Absent as wrong:
            missing = missing or wrong
    if missing:
        raise missing
    return task


def _mirrored(task: Task, data: Path) -> Task:
    """Return the task with the repositories that `hf download … --local-dir DATA/NAME` copied read from there."""

    def moved(record: Any, *names: str) -> Any:
        sources = {name: getattr(record, name) for name in names}
        for name, source in sources.items():
            if source.startswith(HUB):
                place = HubPlace.of(f"task {task.name!r}", source)
                folder = data.expanduser().resolve() / place.name
                sources[name] = str(folder / place.path) if folder.is_dir() else source
        return replace(record, **sources)

    splits = moved(task.splits, "train", "validation", "test")
    return replace(moved(task, "source"), splits=splits, form=moved(task.form, *task.form.files))


# ---------------------------------------------------------------- own data


def _own_task(name: str, own: OwnData) -> Task:
    path = Path(name).expanduser()
    if not path.exists():
        raise SpecError(
            f"there is no task and no file {name!r}; {nearest(name, ['paper', *FAMILIES, *CATALOG])}"
        )
    if own.family and own.family not in FAMILIES:
        raise SpecError(f"--family {own.family}: {nearest(own.family, FAMILIES)}")
    title = _title(path)
    whose = f"task {title!r}"
    laid_out = path.is_dir() and matching(path, "corpus*") and matching(path, "queries*")
    retrieval = FAMILY_OF[Retrieve]
    if own.family == retrieval and not laid_out:
        raise SpecError(
            f"{whose}: {path} has no corpus* and queries*; lay it out as BEIR does: docs/tasks.md"
        )
    if laid_out and own.family in ("", retrieval):
        return _own_retrieval(whose, title, path, own)
    borrowed = "" if own.trained_on == title else own.trained_on
    home = path.parent if path.is_file() else _home(path)
    splits = _own_splits(path, home, own, borrowed=bool(borrowed))
    # With a placeholder form; the real one is inferred below.
    task = Task(title, Answer(), str(home), splits, trained_on=borrowed)
    files = local_files(task)
    columns = column_names(whose, files["train" if "train" in files else "test"][0])
    family = own.family or _family(columns)
    if family not in INFERRED:
        raise SpecError(f"--family {family}: such data is described by a Task in a study file: docs/tasks.md")
    form = INFERRED[family](Folder(whose, home if path.is_file() else path, files, columns), own)
    if "train" in files and not own.test and _unlabelled(whose, form, files["test"]):
        if not splits.validation:
            raise SpecError(f"{whose}: its test part has no labels; name a file that has some: --test FILE")
        splits = replace(splits, test=splits.validation, validation="")
    return replace(task, form=form, splits=splits)


def _title(path: Path) -> str:
    """Return a task name from a folder's name, or a file's; a file named for its split takes its folder's name."""
    path = path.resolve()
    name = path.name
    if path.is_file():
        splits = (*TRAIN, *VALIDATION, *TEST, "data.*")
        named_for_split = any(fnmatch(name.lower(), pattern) for pattern in splits)
        name = path.parent.name if named_for_split else name.split(".")[0]
    return re.sub(r"[^\w.-]+", "-", name) or "task"


# ---------------------------------------------------------------- splits of own data


def _home(path: Path) -> Path:
    """Return the folder with the split files: this one, or the only subfolder that has some, as on the hub."""
    if _has_parts(path):
        return path
    folders = [folder for folder in sorted(path.iterdir()) if folder.is_dir() and folder.name[0] != "."]
    homes = [folder for folder in folders if _has_parts(folder)]
    if len(homes) > 1:
        names = ", ".join(folder.name for folder in homes[:8])
        raise SpecError(f"{path} holds several datasets: {names}; name one: --tasks {homes[0]}")
    return homes[0] if homes else path


def _has_parts(folder: Path) -> bool:
    return any(matching(folder, pattern) for pattern in (*TRAIN, *VALIDATION, *TEST))


def _own_splits(path: Path, home: Path, own: OwnData, *, borrowed: bool) -> Splits:
    """Return the splits of own data; without test files, as is usual for GLUE, the validation files are scored.

    If another task's model is borrowed, nothing is trained, and half of the test rows may serve as validation.
    """
    test = _test(own.test) if own.test else ""
    if path.is_file():
        if not kind_of(path.name)[0]:
            raise SpecError(f"{path} is no table; give {FORMATS}")
        train, validation, test = ("", "", test or path.name) if borrowed else (path.name, "", test)
    else:
        train, test = "" if borrowed else _part(home, TRAIN), test or _part(home, TEST)
        try:
            validation = _part(home, VALIDATION)
        except SpecError:  # several candidates; with --test, validation is cut from train instead
            if not own.test:
                raise
            validation = ""
    if not test:
        test, validation = validation, ""
    if not test or not (train or borrowed):
        raise SpecError(_no_parts(path, home, train, test))
    splits = Splits(train=train, validation=validation, test=test)
    return replace(splits, cut=0.5, cut_from="test") if borrowed else splits


def _test(path: Path) -> str:
    if not path.expanduser().is_file():
        raise SpecError(f"--test {path} is no file; name one")
    return str(path.expanduser().resolve())


def _part(folder: Path, patterns: Sequence[str]) -> str:
    """Return the first pattern that matches files; refuse it if they are not shards of one split."""
    for pattern in patterns:
        files = matching(folder, pattern)
        kinds = sorted({kind_of(path.name)[0] for path in files}, key=(*KINDS, *task_files.COLUMNS).index)
        if len(kinds) > 1:  # the same rows in several formats
            pattern += kinds[0]
            files = matching(folder, pattern)
        # Shards are one split: train-00000-of-00002, also with the hash of older files; versions (v1, v2) are not.
        shard = r"(?<!v)[-_.]?\d+(-of-\d+(-[0-9a-f]{16})?)?$"
        stems = {re.sub(shard, "", path.name.split(".")[0]) for path in files}
        if len(stems) > 1:
            part = re.sub(r"\W", "", pattern.split("]")[-1].removesuffix(kinds[0]))
            option = f"--test {files[0]}" if part != "train" else f"--tasks {files[0]} --test FILE"
            raise SpecError(
                f"{folder} has {_names(files)}, of which only one can be the {part} part; name it: {option}"
            )
        if files:
            return pattern
    return ""


def _no_parts(path: Path, home: Path, train: str, test: str) -> str:
    """Say which split is missing, which files are there, and what to type."""
    missing = " and ".join(part for part, found in (("train*", train), ("test*", test)) if not found)
    others = [file for file in sorted(home.iterdir()) if file.is_file() and file.name[0] != "."]
    has = f", but {_names(others)}" if others else ""
    return (
        f"{path}: there are no files {missing}{has}; put files to train on and to be scored by there ({FORMATS}), "
        f"name them: --tasks {home}/FILE --test {home}/FILE, or score another task's model: --trained-on TASK"
    )


def _names(files: Sequence[Path]) -> str:
    return " and ".join(path.name for path in files[:3])


def _cells(whose: str, files: Sequence[Path], column: str) -> Iterator[Any]:
    return (cell for _, (cell,) in read_rows(whose, files, (column,)))


def _unlabelled(whose: str, form: Form, files: Sequence[Path]) -> bool:
    """Whether a test split has no labels, as in GLUE and many competitions."""
    column = form.columns[-1]
    if not set(column.split("|")) & set(column_names(whose, files[0])):
        return True
    cells = _cells(whose, files, column)
    values = (value for cell in cells for value in (cell if isinstance(cell, list) else (cell,)))
    return not isinstance(form, Answer) and all(value in (-1, "-1", None, "") for value in values)


# ---------------------------------------------------------------- forms of own data


@dataclass(frozen=True)
class Folder:
    """Own data: its files, and the columns of the first one."""

    whose: str
    root: Path  # as the user typed it
    files: Files
    columns: tuple[str, ...]

    @property
    def source(self) -> tuple[Path, ...]:
        """The files that labels are collected from."""
        return self.files.get("train", self.files["test"])

    def first(self, names: Sequence[str]) -> str:
        """Return the first of `names` that is a column, ignoring case."""
        columns = {column.lower(): column for column in reversed(self.columns)}
        return next((columns[name] for name in names if name in columns), "")

    def other_than(self, *taken: str) -> str:
        """Return the only column that is neither an id nor in `taken`, or ""."""
        left = [name for name in self.columns if name not in taken and name.lower() not in IDS]
        return left[0] if len(left) == 1 else ""


def _family(columns: Sequence[str]) -> str:
    names = set(columns)
    if names & set(WORDS.split("|")) and names & set(TAGS.split("|")):
        return FAMILY_OF[Tag]
    lower = {name.lower() for name in columns}
    chooses = lower & set(CHOICES) or len(_choice_columns(columns)) > 1
    if chooses and lower & {*CONTEXTS, *QUESTIONS}:
        return FAMILY_OF[Choose]
    asks = {"question", "context"} <= names and names & set(ANSWERS.split("|"))
    return FAMILY_OF[Answer if asks else Classify]


def _choice_columns(columns: Sequence[str]) -> tuple[str, ...]:
    return tuple(sorted(filter(CHOICE_COLUMN.fullmatch, columns)))


def _label_and_text(data: Folder, own: OwnData, usual: Sequence[str], what: str) -> tuple[str, str]:
    """Return the column of labels or numbers, and the template of the text."""
    whose, columns = data.whose, data.columns
    label = own.label or data.first(usual) or data.other_than(data.first(TEXTS))
    if label not in columns:
        raise SpecError(
            f"{whose}: say which column holds the {what}: --label COLUMN, one of {', '.join(columns)}"
        )
    text = own.text or _usual_text(data, label)
    if not text:
        raise SpecError(
            f"{whose}: say what the text is: --text COLUMN, or a template like --text 'A: {{a}} B: {{b}}', "
            f"of the columns {', '.join(columns)}"
        )
    return label, _template(whose, text, columns)


def _regress(data: Folder, own: OwnData) -> Regress:
    number, text = _label_and_text(data, own, NUMBERS, "number")
    return Regress(text, number)


def _multilabel(data: Folder, own: OwnData) -> MultiLabel:
    """A column of lists; or, if there is none, a column of 0 and 1 for each label."""
    whose, columns, given = data.whose, data.columns, _given_labels(data.whose, own, MultiLabel)
    text = own.text or data.first(TEXTS)
    if not text:
        raise SpecError(f"{whose}: say what the text is: --text COLUMN, one of {', '.join(columns)}")
    text = _template(whose, text, columns)
    column = own.label or ("" if given and set(given) <= set(columns) else data.first(LABELS))
    if not column:
        others = [name for name in columns if name not in columns_of("", text) and name.lower() not in IDS]
        names = given or tuple(
            name for name in others if {str(value) for value in _cells(whose, data.source, name)} <= MARKS
        )
        if len(names) < 2:
            raise SpecError(
                f"{whose}: say which column holds the list of labels: --label COLUMN, or which columns hold 0 or 1 for a "
                f"label each: --labels NAMES, of {', '.join(columns)}"
            )
        return MultiLabel(text, names, label="")
    return MultiLabel(text, _labels(data, own, MultiLabel, column)[0], label=column)


MARKS = {"0", "1", "0.0", "1.0", "False", "True", "false", "true"}


def _choose(data: Folder, own: OwnData) -> Choose:
    whose, columns = data.whose, data.columns
    choices = (data.first(CHOICES),) if data.first(CHOICES) else _choice_columns(columns)
    answer = own.label or data.first(RIGHT)
    asked = [name for name in (data.first(CONTEXTS), data.first(QUESTIONS)) if name]
    text = own.text or "\n".join(f"{{{name}}}" for name in asked)
    if not choices or answer not in columns or not text:
        raise SpecError(
            f"{whose}: of the columns {', '.join(columns)} one must hold the list of choices (choices, options or endings), "
            "or one each a choice (choice1, choice2, …), one the right one (--label COLUMN), and one the question "
            "(--text COLUMN, or a template like --text '{question} {choice}')"
        )
    text = text if "{" in text else f"{{{text}}}"
    text = text if "{choice}" in text else f"{text}\n{{choice}}"
    return Choose(_template(whose, text, (*columns, "choice")) if own.text else text, choices, answer)


def _classify(data: Folder, own: OwnData) -> Classify:
    label, text = _label_and_text(data, own, LABELS, "label")
    labels, numbered = _labels(data, own, Classify, label)
    return Classify(text, labels, label=label, numbered=numbered)


def _labels(
    data: Folder, own: OwnData, kind: type[Classify | MultiLabel], column: str
) -> tuple[tuple[str, ...], bool]:
    """Return the labels as given, or else as the column has them, and whether its values are places of names."""
    whose, labels, numbered = data.whose, _given_labels(data.whose, own, kind), False
    if not labels:
        values = values_of(whose, data.source, column, lists=kind is MultiLabel)
        labels = named(whose, data.source, data.root, column, values)
        numbered = are_places(labels, values)
        labels = labels or _in_every_part(data, column, in_order(whose, column, values))
    if len(labels) < 2:
        raise SpecError(
            f"{whose}: column {column!r} of the train part holds {f'only {labels[0]!r}' if labels else 'nothing'}, "
            "and there must be two labels or more; name another: --label COLUMN, or say them: --labels NAMES"
        )
    return labels, numbered


def _in_every_part(data: Folder, column: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the train split, after checking that no other split uses numbers for them.

    Numbers in another split are refused, since the order of the names is not known.
    """
    number = Numbering(labels)
    # The order of numbers, and of false and true, is known.
    if any(map(is_number, labels)) or {label.lower() for label in labels} <= {"false", "true"}:
        return labels
    for part, files in data.files.items():
        if files == data.source or not set(column.split("|")) & set(column_names(data.whose, files[0])):
            continue
        for place, (value,) in read_rows(data.whose, files, (column,)):
            label = next(filter(number.by_place, value if isinstance(value, list) else (value,)), None)
            if label is not None:
                raise SpecError(
                    f"{data.whose}: {place} of the {part} part has the label {label!r}, and the train part "
                    f"has names ({', '.join(labels[:8])}); say which is which: --labels NAMES in the order of their numbers"
                )
    return labels


def _usual_text(data: Folder, label: str) -> str:
    """Return a template of two columns that usually form a pair, else of a usual text column or the only one left."""
    for pair in PAIRS:
        if set(pair) <= set(data.columns) - {label}:
            titles = {column: re.sub(r"(\d)", r" \1", column).capitalize() for column in pair}
            return "\n".join(
                f"{title}: {{{column}}}" for column, title in titles.items()
            )  # Sentence 1: {sentence1}
    return data.first([name for name in TEXTS if name != label]) or data.other_than(label)


def _given_labels(whose: str, own: OwnData, kind: type[Classify | Tag | MultiLabel]) -> tuple[str, ...]:
    """Return the labels that --labels lists, else those of the catalog task whose model is scored, if any."""
    labels = tuple(name.strip() for name in own.labels.split(",")) if own.labels else ()
    if labels and (len(set(labels)) < max(2, len(labels)) or "" in labels):
        raise SpecError(
            f"{whose}: --labels {own.labels!r} must be two names or more, all different; correct it"
        )
    form = CATALOG[own.trained_on].form if own.trained_on in CATALOG else None
    return labels or (form.labels if isinstance(form, kind) else ())


def _template(whose: str, text: str, columns: Sequence[str]) -> str:
    """Return a template; the name of a column becomes a template of that column."""
    bare = text.replace("{{", "").replace("}}", "")  # doubled braces are literal braces
    for name in re.findall(r"\{([^{}]*)\}", bare) if "{" in text else [text]:
        if not name.isidentifier() and name in columns:
            raise SpecError(
                f"{whose}: the column {name!r} cannot stand in a template, where a column is one word; "
                f"rename it in the files, e.g. {re.sub(r'[^0-9a-zA-Z]+', '_', name)}"
            )
        if not name.isidentifier():
            raise SpecError(f"{whose}: --text {text!r}: {name!r} is no column; {nearest(name, columns)}")
    if "{" not in text:
        return f"{{{text}}}"
    # Move punctuation between two columns into the first one's field: it is left out if that column is empty.
    return re.sub(r"(?<!\})\}([^\w{}]+)(?=\{\w)", r":\1}", text)


def _tag(data: Folder, own: OwnData) -> Tag:
    whose, tags = data.whose, own.label or TAGS
    column = next((name for name in tags.split("|") if name in data.columns), tags)
    labels = _given_labels(whose, own, Tag)
    source = "--labels" if labels else f"column {column!r} of the train part"
    if not labels:
        values = values_of(whose, data.source, tags, lists=True)
        labels = named(whose, data.source, data.root, column, values) or _iob_labels(data, tags, values)
    try:
        return Tag(labels, words=own.text or WORDS, tags=tags)
    except SpecError as wrong:
        raise SpecError(f"{whose}: {source}: {wrong}; or name another column: --label COLUMN") from None


def _iob_labels(data: Folder, tags: str, values: Iterable[Any]) -> tuple[str, ...]:
    """Return the IOB2 labels of the tags in the train split, in order: O, then B- and I- of each kind."""
    if any(is_number(value) for value in values):
        raise SpecError(
            f"{data.whose}: its tags are numbers; say their names in order: --labels O,B-PER,I-PER,…"
        )
    names = {str(value) for value in values}
    kinds = sorted({name[2:] for name in names if name[:2] in ("B-", "I-")})
    iob = ["O", *(f"{side}-{kind}" for kind in kinds for side in "BI")]
    return _in_every_part(data, tags, (*iob, *sorted(names.difference(iob))))


def _answer(data: Folder, own: OwnData) -> Answer:
    answers = own.label or ANSWERS
    files = [path for paths in data.files.values() for path in paths]
    cells = _cells(data.whose, files, answers)
    texts = (cell.get("text") if isinstance(cell, dict) else cell for cell in cells)
    unanswerable = any(not any(text) if isinstance(text, list) else not text for text in texts)
    form = Answer(answers=answers, unanswerable=unanswerable)
    return replace(form, text=own.text) if own.text else form


# The families whose form is read from the columns.
INFERRED = {
    FAMILY_OF[Classify]: _classify,
    FAMILY_OF[Tag]: _tag,
    FAMILY_OF[Answer]: _answer,
    FAMILY_OF[Regress]: _regress,
    FAMILY_OF[MultiLabel]: _multilabel,
    FAMILY_OF[Choose]: _choose,
}


def _own_retrieval(whose: str, name: str, folder: Path, own: OwnData) -> Task:
    train, pairs = _part(folder, ("qrels/train*",)), _part(folder, ("pairs*",))
    test = _test(own.test) if own.test else _part(folder, ("qrels/test*",))
    if not test:
        others = matching(folder, "qrels/*")
        hint = f"; to be scored by {others[0].name}: --test {others[0]}" if others else ""
        raise SpecError(f"{whose}: {folder} has no judgments to be scored by; put qrels/test.tsv there{hint}")
    borrowed = "" if own.trained_on == name else own.trained_on
    if borrowed or own.zero_shot:  # the folder's training data is not used
        train, pairs = "", ""
    elif not (train or pairs):
        raise SpecError(
            f"{whose}: {folder} has nothing to train on; put qrels/train.tsv or pairs.jsonl there, score the model as it "
            "is: --zero-shot, or score another task's model on it: --trained-on msmarco"
        )
    columns = column_names(whose, matching(folder, "corpus*")[0])
    usual = "Document: {title}. {text}" if "title" in columns else "Document: {text}"
    form = Retrieve(document=_template(whose, own.text or usual, columns), pairs=pairs)
    if own.query:
        columns = column_names(whose, matching(folder, "queries*")[0])
        form = replace(form, query=_template(whose, own.query, columns))
    splits = Splits(train, _part(folder, [f"qrels/{pattern}" for pattern in VALIDATION]), test)
    if pairs or not train:  # the only judgments are those of the test split
        splits = replace(splits, cut=0.5, cut_from="test")
    steps = {"steps": 0} if own.zero_shot else {}
    return Task(name, form, str(folder), splits, trained_on=borrowed, **steps)


# ---------------------------------------------------------------- descriptions


DATASETS = "datasets.json"
SHOWN = 160  # characters shown of an example
LISTED = 12  # labels listed
LARGE = 100  # size of a number to predict, above which a warning is given
FEW = 100  # training rows below which a warning is given


@record
class Description:
    """A dataset as text; non-printable characters are escaped, a line break as \\n."""

    name: str
    about: tuple[tuple[str, str], ...]
    warnings: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        rows = [*self.about, *(("warning", warning) for warning in self.warnings)]
        return [self.name, *(f"  {title:<10}  {text}" for title, text in rows)]


def keep(descriptions: Sequence[Description], study: str, store: Store) -> None:
    """Save descriptions beside the plan; those of the study's other datasets are kept."""
    path = store.studies / study / DATASETS
    every = kept(study, store) | {description.name: description for description in descriptions}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, with_checksum({"datasets": [asdict(description) for description in every.values()]}))


def kept(study: str, store: Store) -> dict[str, Description]:
    """Return the saved descriptions of a study by name; empty if the file is missing or damaged."""
    with contextlib.suppress(StoreError, SpecError, KeyError, TypeError):
        saved = read_checked(store.studies / study / DATASETS)["datasets"]
        return {description["name"]: Description(**description) for description in saved}
    return {}


def describe(task: Task, *, download: bool) -> Description:
    """Read a whole dataset and describe it; a bad row raises an error.

    Without `download`, a hub dataset is described from its task record alone.
    """
    places = task_files.on_hub(task)
    for place in places:
        task_files.refuse_unpinned(f"task {task.name!r}", place)
    about = [("family", f"{task.family}, {FAMILIES[task.family].name}"), ("source", task.source)]
    if places and not download:
        about += [*_fields_read(task, ()), ("rows", "on the hub; read when the first model is fine-tuned")]
        warnings: list[str] = []
    else:
        files, examples = task_files.files_of(task), load(task, documents="judged")
        source = next(part for part in ("corpus", "train", "test") if part in files)
        columns = column_names(f"task {task.name!r}", files[source][0])
        about += [*_fields_read(task, columns), *_parts(task, examples)]
        about += [("example", text) for text in _examples(task, examples)]
        warnings = list(_warnings(task, examples))
    shown = tuple((title, _printable(text)) for title, text in about)
    return Description(task.name, shown, tuple(map(_printable, warnings)))


def _printable(text: str) -> str:
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in text)


def _fields_read(task: Task, columns: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the columns that are read, the templates and the labels."""
    form = task.form
    if columns:
        read = [
            next((name for name in column.split("|") if name in columns), column) for column in form.columns
        ]
        ids = DOCUMENT_ID.split("|") if "corpus" in form.files else ()
        unread = [name for name in columns if name not in (*read, *ids)]
        yield "columns", ", ".join(read) + (f"; not read: {', '.join(unread)}" if unread else "")
    yield from form.templates.items()
    if labels := getattr(form, "labels", ()):
        more = f", … ({len(labels)} in all)" if len(labels) > LISTED else ""
        yield "labels", ", ".join(labels[:LISTED]) + more


def _parts(task: Task, examples: Examples) -> Iterator[tuple[str, str]]:
    """Yield the size and purpose of each split."""
    retrieval = "corpus" in task.form.files
    splits = task.splits

    def rows(part: Any) -> str:
        return counted(len(part), "query", "queries") if retrieval else counted(len(part), "row")

    if task.trained_on:
        yield "train", f"none; scored with the model of {task.trained_on}"
    elif task.zero_shot:
        yield "train", "none; the model is scored as it is"
    else:
        length = counted(task.epochs, "epoch") if task.epochs else f"{task.steps:,} steps"
        pairs = counted(len(examples.train), "pair" if retrieval else "row")
        yield "train", f"{pairs}; {length} of {task.batch} at a time"
    if not task.zero_shot:
        share = "half" if splits.cut == 0.5 else f"{splits.cut:.0%}"
        cut = "" if splits.validation else f" ({share} of {splits.cut_from})"
        yield "validation", f"{rows(examples.validation)}{cut}; chooses the learning rate"
    test = splits.test.removeprefix("qrels/")
    stands_in = any(test == pattern or test.startswith(f"{pattern}.") for pattern in VALIDATION)
    why = "; the validation files, as there is no test part with labels" if stands_in else ""
    yield "test", f"{rows(examples.test)}{why}"


# ---------------------------------------------------------------- examples


def _examples(task: Task, examples: Examples) -> Iterator[str]:
    """Yield two examples as the model gets them, without the tokenizer's special tokens; two labels if possible."""
    labels = getattr(task.form, "labels", ())
    part = examples.train if len(examples.train) else examples.test
    if isinstance(part, Search):  # queries with their best documents
        best = [max(judged, key=judged.__getitem__) for judged in part.judged[:2]]
        texts = (part.library.texts[document] for document in best)
        part = [Pair(query, text) for query, text in zip(part.queries, texts, strict=False)]
    other = (row for row in part[1:] if getattr(row, "label", 0) != getattr(part[0], "label", 0))
    for row in (*part[:1], *(next(other, second) for second in part[1:2])):
        yield row.describe(labels, _shown)


def _shown(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[: SHOWN - 1]}…")


# ---------------------------------------------------------------- warnings


def _warnings(task: Task, examples: Examples) -> Iterator[str]:
    train, test, form = examples.train, examples.test, task.form
    if not task.is_trained:
        return
    if isinstance(form, Regress):
        yield from _large_numbers(form, examples)
    if len(train) < FEW:
        yield f"only {counted(len(train), 'row')} to train on; scores of so few depend on chance"
    tested = test.queries if isinstance(test, Search) else [row.text for row in test]
    trained = {row.text for row in train}
    shared = sum(row in trained for row in tested)
    if shared:
        yield (
            f"{shared:,} of {len(tested):,} inputs of the test part ({shared / len(tested):.1%}) are in the train part "
            "too; a model may know their answers by heart"
        )


def _large_numbers(form: Regress, examples: Examples) -> Iterator[str]:
    numbers = [row.number for row in (*examples.train, *examples.validation, *examples.test)]
    if max(map(abs, numbers)) > LARGE:
        yield (
            f"the numbers in {form.number!r} go from {min(numbers):g} to {max(numbers):g}, and the loss is their squared "
            "error; scale them to the order of 1, as the 0 to 5 of STS-B"
        )
