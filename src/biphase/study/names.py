"""Names on the command line, resolved to records: corpora and tokenizers, models, and tasks.

`corpus_named` and `tokenizer_named` resolve --corpus and --tokenizer; `texts_of` says how many tokens a plan reads
of each corpus. `run_named` resolves a model: a folder, owner/name, owner/name@commit, or the first digits of a
checkpoint's key. `tasks_named` resolves --tasks: catalog names, local copies of catalog tasks, or the user's own
files, whose splits, columns, labels and family are inferred from file names and content.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from biphase.catalog import CATALOG, TASKS
from biphase.data.corpus import Absent, shards_key
from biphase.errors import BiphaseError, SpecError, nearest
from biphase.metadata import read_card, read_checkpoint_file
from biphase.presets import CORPORA, LLAMA3, TOKENS, corpus_of
from biphase.protocol import KEY_DIGITS
from biphase.records import decode
from biphase.specs import (
    BPE,
    WSD,
    Answer,
    Classify,
    Corpus,
    Hub,
    Pretrain,
    Pretrained,
    Retrieve,
    Splits,
    Stage,
    Tag,
    Task,
)
from biphase.specs.tasks import FAMILIES
from biphase.store import Store
from biphase.study.load import commit_of
from biphase.study.plan import Plan
from biphase.tasks.files import (
    ABOUT,
    COLUMNS,
    KINDS,
    SIGN,
    HubPlace,
    column_names,
    kind_of,
    local_files,
    matching,
    read,
)
from biphase.tasks.labels import Numbering, are_places, in_order, is_number, named, values_of
from biphase.text import counted, short

REPEATED = 1.05  # epochs; above this a corpus counts as repeated (a few repeated rows change little)
MASK_RULES = {"own": "its own", "reserved": "a reserved slot", "added": "added"}


def corpus_named(
    name: str, *, tokenizer: str | BPE | Pretrained = "", text: str = "", heldout: str = ""
) -> Corpus:
    """Return a known corpus by name, or a corpus at a path, with the given tokenizer and text field."""
    if name in CORPORA:
        base = CORPORA[name]
        words = tokenizer_named(tokenizer) if tokenizer else base.tokenizer
        return Corpus(
            base.name,
            base.source,
            words,
            text=text or base.text,
            heldout=heldout or base.heldout,
            bos=base.bos,
            tokens=base.tokens,
        )
    pattern = any(sign in name for sign in "*?[")
    if not name.startswith("hf://") and not pattern and not Path(name).expanduser().exists():
        raise SpecError(f"there is no corpus and no file {name!r}; {nearest(name, CORPORA)}")
    if not tokenizer:
        raise SpecError(
            f"say which tokenizer reads {name}: --tokenizer bpe:32000, or one of yours: --tokenizer FOLDER"
        )
    short = re.sub(r"[^\w.-]+", "-", Path(name.split("@")[0]).name) or "corpus"
    return Corpus(short, name, tokenizer_named(tokenizer), text=text or "text", heldout=heldout)


def tokenizer_named(name: str | BPE | Pretrained) -> BPE | Pretrained:
    """Return the tokenizer for "bpe:32000", "llama3", a folder or tokenizer.json, or owner/name@revision."""
    if not isinstance(name, str):
        return name
    if name.startswith("bpe:"):
        if not name[4:].isdigit():
            raise SpecError(f"--tokenizer {name}: type bpe: and a vocabulary size, e.g. bpe:32000")
        return BPE(int(name[4:]))
    if name == "llama3":
        return LLAMA3
    if Path(name).expanduser().exists():
        return Pretrained(name if name.startswith((".", "/", "~")) else f"./{name}")
    source, _, revision = name.partition("@")
    return Pretrained(source, revision=revision)


def shards_text(shards: Any, folder: Path) -> str:
    """Return what `biphase tokenize` prints at the end."""
    card = shards.card
    lines = [
        f"{folder}",
        f"  {len(shards.train):,} training tokens from {card['train_documents']:,} documents, "
        f"{len(shards.heldout):,} held out from {card['heldout_documents']:,}",
        f"  vocabulary {shards.vocab:,}; mask token {card['mask_token']} = {shards.mask_id} ({MASK_RULES[card['mask_rule']]})",
    ]
    if card["left_out_documents"]:
        lines.append(f"  left out, beyond the held-out million: {card['left_out_documents']:,} documents")
    for reason, count in card["skipped"].items():
        lines.append(f"  skipped {count:,} records, {reason}; the first: {card['first_skipped'][reason]}")
    return "\n".join(lines)


# ---------------------------------------------------------------- corpus sizes


@dataclass(frozen=True)
class Text:
    """How many tokens a corpus has, and how many of them the runs of a plan read."""

    corpus: Corpus
    tokens: int | None  # training tokens; None: unknown before tokenization
    exact: bool  # counted in this store
    read: dict[str, int]  # run → tokens read by it and the runs it continues

    @property
    def bytes(self) -> int | None:
        """Size of its shards: two bytes per token if the vocabulary fits into 16 bits, else four."""
        vocab = self.corpus.tokenizer.vocab
        return None if self.tokens is None else self.tokens * (2 if 0 < vocab <= 2**16 else 4)

    def repeats(self) -> str:
        """Name the runs that read the corpus more than once; empty if none does or its size is unknown."""
        if not self.tokens:
            return ""
        again = {run: tokens for run, tokens in self.read.items() if tokens > REPEATED * self.tokens}
        if not again:
            return ""
        most = max(again, key=lambda run: again[run])
        others = f", and {counted(len(again) - 1, 'other run')} more than once" if len(again) > 1 else ""
        return (
            f"text repeats: {most} reads {short(again[most])} tokens of {self.corpus.name}, which has "
            f"{'' if self.exact else 'about '}{short(self.tokens)} ({again[most] / self.tokens:.1f} epochs){others}"
        )


def texts_of(plan: Plan, store: Store) -> list[Text]:
    """Return the size and use of each corpus of a plan."""
    read: dict[Corpus, dict[str, int]] = {}
    for run in plan.study.runs:
        for job in plan.path(plan.results[run.name]):
            tokens = read.setdefault(corpus_of(job.run), {})
            tokens[run.name] = tokens.get(run.name, 0) + job.tokens
    found = []
    for corpus, tokens in read.items():
        counted = card_of(corpus, store)[1].get("train_tokens")
        about = TOKENS.get(corpus.name) if CORPORA.get(corpus.name) == corpus else None
        found.append(Text(corpus, counted or corpus.tokens or about, bool(counted), tokens))
    return found


def card_of(corpus: Corpus, store: Store) -> tuple[str, dict[str, Any]]:
    """Return the key of a corpus's shards and their card, as far as known on this machine (else "" and {})."""
    try:
        at = shards_key(corpus, store)
        place = store.readable(store.shards / at)
        return at, read_card(place) if store.has(place) else {}
    except BiphaseError:
        return "", {}


# ---------------------------------------------------------------- models


def run_named(
    model: str, store: Store, *, gguf: str = "", windows: str = "symmetric", note: bool = True
) -> Pretrain:
    """Return the run that ends in a model; for a folder or hub model, a run without stages.

    With `note=False`, nothing is written to the store; otherwise the commit of a hub model is pinned.
    """
    how: dict[str, Any] = {"gguf": gguf, "windows": windows}
    folder = Path(model).expanduser()
    if folder.is_dir():
        if not gguf and not (folder / "config.json").is_file():
            raise SpecError(
                f"{model} has no config.json; give the folder of a transformers model, or the key of a state"
                f"{_gguf_hint(folder)}"
            )
        # Absolute, since the saved plan is read from other working directories.
        start = Hub(str(folder.resolve()), **how)
        if gguf and not (folder / gguf).is_file():
            raise SpecError(
                f"{model} has no file {gguf}{_gguf_hint(folder) or '; give the folder that has it'}"
            )
        return Pretrain(_name(folder.resolve().name), start=start)
    if re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS},}}", model):
        found = store.named(store.checkpoints, model)
        if len(found) == 1:
            if gguf or windows != "symmetric":
                raise SpecError(f"{model} is a model trained here: --gguf and --windows are for others")
            return _run_up_to(found[0], store)
        if not found:
            refuse_metadata_only(model, store)
        said = f"{len(found)} states begin with it; type more digits" if found else "there is no such state"
        raise SpecError(f"{model} names no one state of {store.checkpoints}: {said}")
    if re.fullmatch(r"\w[\w.-]*/\w[\w.-]*(@[\w.-]+)?", model):
        source, _, revision = model.partition("@")
        pinned = revision or commit_of(source, store, note=note)
        return Pretrain(_name(source.split("/")[1]), start=Hub(source, revision=pinned, **how))
    raise SpecError(
        f"there is no model {model!r}: type a local folder, owner/name@commit, or the first digits of a key "
        "that biphase plan shows"
    )


def refuse_metadata_only(digits: str, store: Store) -> None:
    """Raise a `SpecError` if the named checkpoint is here as metadata only, without weights."""
    metadata = store.metadata / store.checkpoints.name
    for key in sorted(path.name for path in metadata.glob(f"{digits}*") if store.has(path)):
        raise SpecError(metadata_only_refusal(key, store))


def metadata_only_refusal(key: str, store: Store) -> str:
    again = shlex.join(["rm", "-r", str(store.metadata_of(store.checkpoints / key))])
    return (
        f"{key[:KEY_DIGITS]} came here without its weights, which stayed on the machine that trained it; ask there, or copy "
        f"checkpoints/{key} of its store into {store.checkpoints}, or train it again here: {again}, then biphase run STUDY"
    )


def _run_up_to(job: str, store: Store) -> Pretrain:
    """Return the run that ends in a checkpoint of the store; its stages are cut at the checkpoint's step."""
    about = read_checkpoint_file(store.checkpoints / job)
    run, step = decode(about["run"]), int(about["progress"]["step"])
    if step == run.steps:
        return replace(run, keep=())  # the other checkpoints that the run kept are not needed
    if step > run.decay_start:
        raise SpecError(
            f"{job[:KEY_DIGITS]} was saved in the middle of a decay; give the key of its beginning or its end"
        )
    stages: list[Stage] = []
    left = step
    for stage in run.stages:
        if left:
            stages.append(replace(stage, steps=min(stage.steps, left)))
            left -= stages[-1].steps
    warmup = min(int(run.schedule.warmup), step)
    schedule = WSD(run.schedule.peak, warmup, 0)
    if warmup != run.schedule.warmup:
        raise SpecError(f"{job[:KEY_DIGITS]} was saved in the middle of a warmup; give a later key")
    return replace(run, name=f"{run.name}-{step}", stages=tuple(stages), schedule=schedule, keep=())


def _gguf_hint(folder: Path) -> str:
    files = sorted(path.name for path in folder.glob("*.gguf"))
    return f"; of the GGUF there: --gguf {files[0]}" if files else ""


def _name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"


# ---------------------------------------------------------------- tasks


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
IDS = ("id", "_id", "idx", "index", "guid", "unnamed: 0", "")  # columns that are neither text nor label
Files = dict[str, tuple[Path, ...]]
WORDS, TAGS, ANSWERS = "tokens|words", "tags|ner_tags|labels", "answers|answer"


@dataclass(frozen=True)
class Own:
    """What the command-line options say about the user's own data; empty fields are inferred from the data."""

    family: str
    text: str
    label: str
    labels: tuple[str, ...]
    test: Path | None
    trained_on: str
    query: str
    zero_shot: bool

    @property
    def says(self) -> bool:
        return any((self.family, self.text, self.label, self.labels, self.test, self.trained_on, self.query))


def tasks_named(
    names: str,
    *,
    data: Path | None = None,
    family: str = "",
    text: str = "",  # SC: template or column; TC: column of tokens; QA: text before the context; IR: document template
    label: str = "",  # column of labels, tags or answers
    labels: str = "",  # label names in the order of their numbers, separated by commas
    test: Path | None = None,
    trained_on: str = "",
    query: str = "",  # IR: query template
    lrs: str = "",  # lrs and seeds are only checked against --zero-shot here
    seeds: str = "",
    steps: int = 0,
    zero_shot: bool = False,
) -> tuple[Task, ...]:
    """Return the tasks of a comma-separated list: names, `paper`, families (SC, TC, QA, IR), or paths to own data.

    With `data`, catalog tasks are read from their local copies in that folder, where it has them. A task that is
    scored with another task's model adds that task too. The options from `family` to `query` describe own data.
    """
    listed = tuple(one.strip() for one in labels.split(",")) if labels else ()
    own = Own(family, _unescaped(text), label, listed, test, trained_on, _unescaped(query), zero_shot)
    for option, said in (
        ("--steps", steps),
        ("--trained-on", trained_on),
        ("--lrs", lrs),
        ("--seeds", seeds),
    ):
        if zero_shot and said:
            raise SpecError(f"--zero-shot and {option} {said} do not go together; leave out one of them")
    found: dict[str, Task] = {}
    wanted = [one.strip() for one in names.split(",") if one.strip()]
    for name in wanted:
        for task in _named(name) or [_own_task(name, own)]:
            task = _untrained(task, own) if zero_shot else task
            lender = CATALOG.get(task.trained_on)
            for one in (lender, task) if lender else (task,):
                known = one.name in CATALOG and one.source == CATALOG[one.name].source
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
    if own.says and all(_named(name) for name in wanted):
        raise SpecError(
            "--family, --text, --label, --labels, --query, --test and --trained-on describe data of your own; "
            "name it: --tasks FOLDER"
        )
    _refuse_idle(own, {one.family for one in found.values() if one.name not in CATALOG})
    if trained_on and trained_on not in {*CATALOG, *found}:
        lenders = [*CATALOG, *(found if len(found) > 1 else ())]  # a single task cannot use its own model
        raise SpecError(f"--trained-on {trained_on}: there is no such task; {nearest(trained_on, lenders)}")
    return tuple(replace(one, steps=steps, epochs=0) if steps else one for one in found.values())


def _refuse_idle(own: Own, families: set[str]) -> None:
    """Refuse an option that applies to none of the families of the own data."""
    for option, said, readers in (
        ("--query", own.query, {"IR"}),
        ("--labels", ",".join(own.labels), {"SC", "TC"}),
        ("--label", own.label, {"SC", "TC", "QA"}),
    ):
        if said and not families & readers:
            raise SpecError(
                f"{option} {said!r} is for {', '.join(sorted(readers))}, and the data are read as "
                f"{', '.join(sorted(families))}; leave it out, or say the family: --family {min(readers)}"
            )


def _unescaped(text: str) -> str:
    """Replace \\n, \\t and \\\\ in an option by the characters they stand for."""
    return re.sub(r"\\([nt\\])", lambda found: {"n": "\n", "t": "\t"}.get(found[1], found[1]), text)


def _untrained(task: Task, own: Own) -> Task:
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
    return [task for task in TASKS if name in ("paper", task.family)]


# ---------------------------------------------------------------- local copies


def _copy_of(task: Task, data: Path) -> Task:
    """Return the task with local files: from `data`/<task>, else from copies of its repositories, else unchanged."""
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
    """Return the task with the repositories that `hf download … --local-dir DATA/NAME` copied read from there."""

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
    short = _short_name(path)
    whose = f"task {short!r}"
    laid_out = path.is_dir() and matching(path, "corpus*") and matching(path, "queries*")
    if own.family == "IR" and not laid_out:
        raise SpecError(
            f"{whose}: {path} has no corpus* and queries*; lay it out as BEIR does: docs/tasks.md"
        )
    if laid_out and own.family in ("", "IR"):
        return _own_retrieval(whose, short, path, own)
    borrowed = "" if own.trained_on == short else own.trained_on
    home = path.parent if path.is_file() else _home(path)
    splits = _borrowing(path, home, own) if borrowed else _own_splits(path, home, own)
    # With a placeholder form; the real one is inferred below.
    task = Task(short, Answer(), str(home), splits, trained_on=borrowed)
    files = local_files(task)
    columns = column_names(whose, files["train" if "train" in files else "test"][0])
    maker = {"SC": _classify, "TC": _tag, "QA": _answer}[own.family or _family(columns)]
    form = maker(Folder(whose, home if path.is_file() else path, files, columns), own)
    if "train" in files and not own.test and _unlabelled(whose, form, files["test"]):
        if not splits.validation:
            raise SpecError(f"{whose}: its test part has no labels; name a file that has some: --test FILE")
        splits = replace(splits, test=splits.validation, validation="")
    return replace(task, form=form, splits=splits)


def _short_name(path: Path) -> str:
    """Return a task name from a folder's name, or a file's; a file named for its split takes its folder's name."""
    place = path.resolve()
    stem = place.name if path.is_dir() else place.name.split(".")[0]
    if not path.is_dir() and any(
        fnmatch(place.name.lower(), one) for one in (*TRAIN, *VALIDATION, *TEST, "data.*")
    ):
        stem = place.parent.name
    return re.sub(r"[^\w.-]+", "-", stem) or "task"


# ---------------------------------------------------------------- splits of own data


def _home(path: Path) -> Path:
    """Return the folder with the split files: this one, or the only subfolder that has some, as on the hub."""
    if _has_parts(path):
        return path
    homes = [one for one in sorted(path.iterdir()) if one.is_dir() and one.name[0] != "." and _has_parts(one)]
    if len(homes) > 1:
        names = ", ".join(one.name for one in homes[:8])
        raise SpecError(f"{path} holds several datasets: {names}; name one: --tasks {homes[0]}")
    return homes[0] if homes else path


def _has_parts(folder: Path) -> bool:
    return any(matching(folder, pattern) for pattern in (*TRAIN, *VALIDATION, *TEST))


def _own_splits(path: Path, home: Path, own: Own) -> Splits:
    if path.is_file():
        if not kind_of(path.name)[0]:
            raise SpecError(f"{path} is no table; give {_formats()}")
        if own.test is None:
            raise SpecError(
                f"{path} is one file, to train on; name another to be scored by: --test FILE, "
                "or a folder with train and test files"
            )
        return Splits(train=path.name, test=_test(own.test))
    train, test = _part(home, TRAIN), _test(own.test) if own.test else _part(home, TEST)
    try:
        validation = _part(home, VALIDATION)
    except SpecError:  # several candidates; --test is given, so validation is cut from train
        if not own.test:
            raise
        validation = ""
    if not train or not (test or validation):
        raise SpecError(_no_parts(path, home, train, test or validation))
    if not test:  # as is usual for GLUE: score on validation, and cut validation from train
        test, validation = validation, ""
    return Splits(train=train, validation=validation, test=test)


def _borrowing(path: Path, home: Path, own: Own) -> Splits:
    """Return the splits of data that is only scored; without validation files, half of the test rows are used."""
    if path.is_file():
        validation, test = "", path.name
    else:
        validation, test = _part(home, VALIDATION), _part(home, TEST)
    test = _test(own.test) if own.test else test
    if not test and not validation:
        raise SpecError(
            f"{path} has no files test* to be scored by; put them there, or name one: --test FILE"
        )
    if not test:
        test, validation = validation, ""
    return Splits(train="", validation=validation, test=test, cut=0.5, cut_from="test")


def _test(path: Path) -> str:
    if not path.expanduser().is_file():
        raise SpecError(f"--test {path} is no file; name one")
    return str(path.expanduser().resolve())


def _part(folder: Path, patterns: Sequence[str]) -> str:
    """Return the first pattern that matches files; refuse it if they are not shards of one split."""
    for pattern in patterns:
        found = matching(folder, pattern)
        kinds = sorted({kind_of(path.name)[0] for path in found}, key=(*KINDS, *COLUMNS).index)
        if len(kinds) > 1:  # the same rows in several formats
            pattern += kinds[0]
            found = matching(folder, pattern)
        # Shards are one split: train-00000-of-00002, also with the hash of older files; versions (v1, v2) are not.
        shard = r"(?<!v)[-_.]?\d+(-of-\d+(-[0-9a-f]{16})?)?$"
        stems = {re.sub(shard, "", path.name.split(".")[0]) for path in found}
        if len(stems) > 1:
            part = re.sub(r"\W", "", pattern.split("]")[-1].removesuffix(kinds[0]))
            files = f"--test {found[0]}" if part != "train" else f"--tasks {found[0]} --test FILE"
            raise SpecError(
                f"{folder} has {' and '.join(path.name for path in found[:3])}, of which only one can be the "
                f"{part} part; name it: {files}"
            )
        if found:
            return pattern
    return ""


def _no_parts(path: Path, home: Path, train: str, scored: str) -> str:
    """Say why a folder lacks the splits it needs, and what to type."""
    if scored and not train:
        return (
            f"{path} has nothing to train on; put train files there, or score another task's model on it: "
            "--trained-on TASK"
        )
    every = sorted(one for one in home.iterdir() if one.is_file() and one.name[0] != ".")
    tables = [one for one in every if kind_of(one.name)[0]]
    others = [
        one.name for one in every if one not in tables and one.name not in ABOUT and one.suffix != ".md"
    ]
    if len(tables) > 1 and not train:
        names = " and ".join(one.name for one in tables[:3])
        return (
            f"{path} has {names}, which do not say what they are for; name the one to train on and the one to be scored by: "
            f"--tasks {home}/FILE --test {home}/FILE"
        )
    trained = matching(home, train) if train else ()
    kinds = {kind_of(one.name)[0] for one in trained}
    unused = [one for one in tables if kind_of(one.name)[0] in kinds and one not in trained]
    if unused:
        names = " and ".join(one.name for one in unused[:3])
        said = unused[0] if len(unused) == 1 else f"{home}/FILE"
        return f"{path} has {names} beside its train part, which is not called test*; to be scored by it: --test {said}"
    if others and not tables:
        names = " and ".join(others[:3])
        return (
            f"{path} has {names}, of which none can be read; write them as train and test files: {_formats()}"
        )
    there = f"has {tables[0].name}, and " if tables else ""
    return f"{path} {there}needs files train* and test*, e.g. train.csv and test.csv; put them there: {_formats()}"


def _formats() -> str:
    return f"{' '.join(KINDS)}, or CoNLL's columns as {' '.join(COLUMNS[:5])}"


def _unlabelled(whose: str, form: Classify | Tag | Answer, files: Sequence[Path]) -> bool:
    """Whether a test split has no labels, as in GLUE and many competitions."""
    column = (
        form.label if isinstance(form, Classify) else form.tags if isinstance(form, Tag) else form.answers
    )
    if not set(column.split("|")) & set(column_names(whose, files[0])):
        return True
    every = (one for rows in read(whose, files, (column,)) for one in rows.columns[column])
    values = (inner for one in every for inner in (one if isinstance(one, list) else (one,)))
    return not isinstance(form, Answer) and all(one in (-1, "-1", None, "") for one in values)


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
        there = {one.lower(): one for one in reversed(self.columns)}
        return next((there[one] for one in names if one in there), "")

    def other_than(self, *taken: str) -> str:
        """Return the only column that is neither an id nor in `taken`, or ""."""
        left = [one for one in self.columns if one not in taken and one.lower() not in IDS]
        return left[0] if len(left) == 1 else ""


def _family(columns: Sequence[str]) -> str:
    there = set(columns)
    if there & set(WORDS.split("|")) and there & set(TAGS.split("|")):
        return "TC"
    return "QA" if {"question", "context"} <= there and there & set(ANSWERS.split("|")) else "SC"


def _classify(data: Folder, own: Own) -> Classify:
    whose, columns = data.whose, data.columns
    label = own.label or data.first(LABELS) or data.other_than(data.first(TEXTS))
    if label not in columns:
        raise SpecError(
            f"{whose}: say which column holds the label: --label COLUMN, one of {', '.join(columns)}"
        )
    text = own.text or _usual_text(data, label)
    if not text:
        raise SpecError(
            f"{whose}: say what the text is: --text COLUMN, or a template like --text 'A: {{a}} B: {{b}}', "
            f"of the columns {', '.join(columns)}"
        )
    labels, numbered = _listed(whose, own) or _labels_of_lender(own, Classify), False
    if not labels:
        values = values_of(whose, data.source, label)
        labels = named(whose, data.source, data.root, label, values)
        numbered = are_places(labels, values)
        labels = labels or _in_every_part(data, label, in_order(whose, label, values))
    if len(labels) < 2:
        raise SpecError(
            f"{whose}: column {label!r} of the train part holds {f'only {labels[0]!r}' if labels else 'nothing'}, "
            "and there must be two labels or more; name another: --label COLUMN, or say them: --labels NAMES"
        )
    return Classify(_template(whose, text, columns), labels, label=label, numbered=numbered)


def _in_every_part(data: Folder, column: str, labels: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of the train split, after checking that no other split uses numbers for them.

    Numbers in another split are refused, since the order of the names is not known.
    """
    number = Numbering(labels)
    # The order of numbers, and of false and true, is known.
    if any(map(is_number, labels)) or {one.lower() for one in labels} <= {"false", "true"}:
        return labels
    for part, files in data.files.items():
        if files == data.source or not set(column.split("|")) & set(column_names(data.whose, files[0])):
            continue
        for rows in read(data.whose, files, (column,)):
            for row, value in enumerate(rows.columns[column]):
                found = next(filter(number.by_place, value if isinstance(value, list) else (value,)), None)
                if found is not None:
                    raise SpecError(
                        f"{data.whose}: {rows.place(row)} of the {part} part has the label {found!r}, and the train part "
                        f"has names ({', '.join(labels[:8])}); say which is which: --labels NAMES in the order of their numbers"
                    )
    return labels


def _usual_text(data: Folder, label: str) -> str:
    """Return a template of two columns that usually form a pair, else of a usual text column or the only one left."""
    for pair in PAIRS:
        if set(pair) <= set(data.columns) - {label}:
            words = {one: re.sub(r"(\d)", r" \1", one).capitalize() for one in pair}
            return "\n".join(f"{word}: {{{one}}}" for one, word in words.items())  # Sentence 1: {sentence1}
    return data.first([one for one in TEXTS if one != label]) or data.other_than(label)


def _labels_of_lender(own: Own, kind: type[Classify | Tag]) -> tuple[str, ...]:
    """Return the labels of the catalog task whose model is scored."""
    form = CATALOG[own.trained_on].form if own.trained_on in CATALOG else None
    return form.labels if isinstance(form, kind) else ()


def _listed(whose: str, own: Own) -> tuple[str, ...]:
    """Return the labels given by --labels, if any."""
    if own.labels and (len(set(own.labels)) < max(2, len(own.labels)) or "" in own.labels):
        raise SpecError(
            f"{whose}: --labels {','.join(own.labels)!r} must be two names or more, all different; correct it"
        )
    return own.labels


def _template(whose: str, text: str, columns: Sequence[str]) -> str:
    """Return a template; the name of a column becomes a template of that column."""
    bare = text.replace("{{", "").replace("}}", "")  # doubled braces are literal braces
    named = re.findall(r"\{([^{}]*)\}", bare) if "{" in text else [text]
    for name in named:
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


def _tag(data: Folder, own: Own) -> Tag:
    whose, tags = data.whose, own.label or TAGS
    there = next((one for one in tags.split("|") if one in data.columns), tags)
    labels = _listed(whose, own) or _labels_of_lender(own, Tag)
    source = "--labels" if labels else f"column {there!r} of the train part"
    if not labels:
        found = values_of(whose, data.source, tags, lists=True)
        labels = named(whose, data.source, data.root, there, found)
    if not labels:
        if any(is_number(one) for one in found):
            raise SpecError(
                f"{whose}: its tags are numbers; say their names in order: --labels O,B-PER,I-PER,…"
            )
        names = {str(one) for one in found}
        kinds = sorted({one[2:] for one in names if one[:2] in ("B-", "I-")})
        iob = ["O", *(f"{side}-{kind}" for kind in kinds for side in "BI")]
        labels = _in_every_part(data, tags, (*iob, *sorted(names.difference(iob))))
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


def _answer(data: Folder, own: Own) -> Answer:
    answers = own.label or ANSWERS
    every = [path for paths in data.files.values() for path in paths]
    found = (one for rows in read(data.whose, every, (answers,)) for one in rows.columns[answers])
    texts = (one.get("text") if isinstance(one, dict) else one for one in found)
    empty = any(not any(one) if isinstance(one, list) else not one for one in texts)
    form = Answer(answers=answers, unanswerable=empty)
    return replace(form, text=own.text) if own.text else form


def _own_retrieval(whose: str, name: str, folder: Path, own: Own) -> Task:
    train, pairs = _part(folder, ("qrels/train*",)), _part(folder, ("pairs*",))
    test = _test(own.test) if own.test else _part(folder, ("qrels/test*",))
    if not test:
        there = matching(folder, "qrels/*")
        hint = f"; to be scored by {there[0].name}: --test {there[0]}" if there else ""
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
        asked = column_names(whose, matching(folder, "queries*")[0])
        form = replace(form, query=_template(whose, own.query, asked))
    splits = Splits(train, _part(folder, [f"qrels/{one}" for one in VALIDATION]), test)
    if pairs or not train:  # the only judgments are those of the test split
        splits = replace(splits, cut=0.5, cut_from="test")
    steps = {"steps": 0} if own.zero_shot else {}
    return Task(name, form, str(folder), splits, trained_on=borrowed, **steps)
