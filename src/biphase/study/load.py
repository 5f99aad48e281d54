"""What the command line names, resolved to records: study files, corpora, tokenizers and models.

`load` reads a study file or a plan.json. `corpus_named` and `tokenizer_named` resolve --corpus and --tokenizer,
`run_named` a model: a folder, owner/name, owner/name@commit, or the first digits of a checkpoint's key. (Tasks are
resolved in `study.datasets`.) `pinned` sets the revision of every hub model that a study names without one. The commit
is recorded once per store, so that the study means the same model later:

    store/pins.json     {"owner/name": "<commit>"}

A pin is never replaced. A process that adds one takes a lock, reads the file again and replaces it by a rename, so
that concurrent writers lose nothing. On a file system without locks one of two simultaneous pins may be lost; the
hub is then asked again.
"""

from __future__ import annotations

import ast
import contextlib
import fcntl
import json
import os
import re
import shlex
import traceback
from collections.abc import Generator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from biphase.data.corpus import ASSETS
from biphase.errors import SpecError, StoreError, nearest, one_line
from biphase.metadata import read_checkpoint_file
from biphase.presets import CORPORA, LLAMA3
from biphase.protocol import KEY_DIGITS
from biphase.records import decode
from biphase.remote import COMMIT, explained, patiently
from biphase.specs import BPE, Corpus, Hub, Merge, Pretrain, Pretrained, Stage, Study
from biphase.specs.study import PAPERS
from biphase.store import Store, read_checked, write_json

PINS = "pins.json"
LOCK = ".pins.lock"
ANSWER_SECONDS = 10.0


# ---------------------------------------------------------------- study files
# A study file is a Python program and is run; its variable `study` is the study, and the first line of its
# docstring is the question that the study asks. A plan.json is data and is only read. An error inside the file is
# reported in one line with the file and its line number.


QUICKSTART = "quickstart"  # a link in the repository, a copy in what is built from it
BUNDLED = Path(__file__).parents[1] / "papers"
OF_A_PAPER = re.compile(r"papers/([^/]+?)(?:/([^/]+))?/?")
VARIANTS = {"": "study", "small": "small", "gpu": "gpu"}  # what follows the paper's name → the variable


@dataclass(frozen=True)
class LoadedStudy:
    study: Study
    question: str


def load(path: Path | str) -> LoadedStudy:
    """Load the study at `path`: a Python file, which is run, or a plan.json, which is read.

    papers/NAME is the study of a paper that comes with biphase, papers/NAME/small and papers/NAME/gpu its variants;
    quickstart is studies/quickstart.py, also where only the package is installed.
    """
    path, variable = Path(path), "study"
    if not path.is_file() and (named := OF_A_PAPER.fullmatch(path.as_posix())):
        path, variable = _of_paper(named[1], named[2] or "")
    if str(path) == QUICKSTART and not path.exists():
        path = ASSETS / f"{QUICKSTART}.py"
    if not path.is_file():
        near = [str(file) for folder in (path.parent, Path("studies")) for file in folder.glob("*.py")]
        hint = f"; {nearest(str(path), near)}" if near else "; write one: docs/studies.md"
        raise SpecError(f"no file {path}{' (it is a folder)' if path.is_dir() else ''}{hint}")
    if path.suffix not in (".py", ".json"):
        raise SpecError(f"{path} is no study: a study is a Python file (.py), or the plan.json made of one")
    study, question = _from_plan(path) if path.suffix == ".json" else _from_file(path, variable)
    if not isinstance(study, Study):
        plan = path.suffix == ".json"
        remedy = "make it again: biphase run STUDY.py" if plan else "type study = Study('name', runs=(…))"
        raise SpecError(f"{path}: its `{variable}` is {type(study).__name__}, not a Study; {remedy}")
    return LoadedStudy(study, question)


def studies_of(paper: str) -> list[str]:
    """Return what to type for the studies that come with a paper: papers/NAME, papers/NAME/small, papers/NAME/gpu."""
    return [f"papers/{paper}{variant and '/'}{variant}" for variant in VARIANTS]


def _of_paper(paper: str, variant: str) -> tuple[Path, str]:
    """Return the file and the variable of a paper's study."""
    if paper not in PAPERS:
        raise SpecError(f"there is no study of a paper {paper!r}; {nearest(paper, PAPERS)}")
    if variant not in VARIANTS:
        kinds = [name for name in VARIANTS if name]
        raise SpecError(f"papers/{paper} has no variant {variant!r}; {nearest(variant, kinds)}")
    return BUNDLED / paper / "study.py", VARIANTS[variant]


def _from_file(path: Path, variable: str) -> tuple[object, str]:
    # `compile` gets this name, so that `_line` finds the frames of this file in a traceback.
    name = str(path)
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"), name)
        code = compile(tree, name, "exec")
    except (OSError, UnicodeDecodeError) as wrong:
        raise SpecError(f"{path} cannot be read: {one_line(wrong)}") from None
    except (SyntaxError, ValueError) as wrong:  # older Python versions raise ValueError for a null byte
        line, what = getattr(wrong, "lineno", None) or 1, getattr(wrong, "msg", str(wrong))
        raise SpecError(f"{name}:{line}: SyntaxError: {what}") from None
    variables: dict[str, object] = {"__name__": "study", "__file__": name}
    try:
        exec(code, variables)
    except (Exception, SystemExit) as wrong:
        raise SpecError(f"{name}:{_line(wrong, name)}: {one_line(wrong)}") from None
    docstring = (ast.get_docstring(tree) or "").strip()
    return variables.get(variable), docstring.partition("\n")[0].strip()


def _from_plan(path: Path) -> tuple[object, str]:
    try:
        plan = read_checked(path)
        return decode(plan.get("study")), str(plan.get("question", ""))
    except StoreError as wrong:
        raise SpecError(f"{one_line(wrong)}: biphase run STUDY.py") from None
    except (SpecError, TypeError, RecursionError) as wrong:
        raise SpecError(f"{path}: {one_line(wrong)}") from None


def _line(wrong: BaseException, name: str) -> int:
    """Return the deepest line of file `name` in the traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(wrong.__traceback__) if frame.filename == name]
    return lines[-1] or 1 if lines else 1


# ---------------------------------------------------------------- corpora and tokenizers


def corpus_named(
    name: str, *, tokenizer: str | BPE | Pretrained = "", text: str = "", heldout: str = ""
) -> Corpus:
    """Return a known corpus by name, or a corpus at a path, with the given tokenizer and text field."""
    if name in CORPORA:
        base = CORPORA[name]
        return replace(
            base,
            tokenizer=tokenizer_named(tokenizer) if tokenizer else base.tokenizer,
            text=text or base.text,
            heldout=heldout or base.heldout,
        )
    pattern = any(sign in name for sign in "*?[")
    if not name.startswith("hf://") and not pattern and not Path(name).expanduser().exists():
        raise SpecError(f"there is no corpus and no file {name!r}; {nearest(name, CORPORA)}")
    if not tokenizer:
        raise SpecError(
            f"say which tokenizer reads {name}: --tokenizer bpe:32000, or one of yours: --tokenizer FOLDER"
        )
    title = re.sub(r"[^\w.-]+", "-", Path(name.split("@")[0]).name) or "corpus"
    return Corpus(title, name, tokenizer_named(tokenizer), text=text or "text", heldout=heldout)


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
        needed = gguf or "config.json"
        # Absolute, since the saved plan is read from other working directories.
        start = Hub(str(folder.resolve()), **how)
        if not (folder / needed).is_file():
            files = sorted(path.name for path in folder.glob("*.gguf"))
            hint = f"; of the GGUF there: --gguf {files[0]}" if files else ""
            raise SpecError(
                f"{model} has no {needed}; give the folder of a transformers model, or the key of a checkpoint{hint}"
            )
        return Pretrain(_name(folder.resolve().name), start=start)
    if re.fullmatch(rf"[0-9a-f]{{{KEY_DIGITS},}}", model):
        keys = store.named(store.checkpoints, model)
        if not keys:
            refuse_metadata_only(model, store)
            raise SpecError(
                f"there is no checkpoint {model} in {store.checkpoints}; biphase plan STUDY marks those that are done with ✓ "
                "(a start without training is none)"
            )
        if len(keys) > 1:
            raise SpecError(
                f"{len(keys)} checkpoints of {store.checkpoints} begin with {model}; type more digits"
            )
        if gguf or windows != "symmetric":
            raise SpecError(f"{model} is a model trained here: --gguf and --windows are for others")
        return _run_up_to(keys[0], store)
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
    remove = shlex.join(["rm", "-r", str(store.metadata_of(store.checkpoints / key))])
    return (
        f"{key[:KEY_DIGITS]} came here without its weights, which stayed on the machine that trained it; ask there, or copy "
        f"checkpoints/{key} of its store into {store.checkpoints}, or train it again here: {remove}, then biphase run STUDY"
    )


def _run_up_to(key: str, store: Store) -> Pretrain:
    """Return the run that ends in a checkpoint of the store; its stages are cut at the checkpoint's step."""
    about = read_checkpoint_file(store.checkpoints / key)
    run, step = decode(about["run"]), int(about["progress"]["step"])
    if step == run.steps:
        return replace(run, keep=())  # the other checkpoints that the run kept are not needed
    if not run.schedule.warmup <= step <= run.decay_start:
        raise SpecError(
            f"{key[:KEY_DIGITS]} was saved in the middle of a warmup or decay; give the key of a checkpoint between "
            "them, or of the end"
        )
    stages: list[Stage] = []
    left = step
    for stage in run.stages:
        if left:
            stages.append(replace(stage, steps=min(stage.steps, left)))
            left -= stages[-1].steps
    schedule = replace(run.schedule, decay=0)
    return replace(run, name=f"{run.name}-{step}", stages=tuple(stages), schedule=schedule, keep=())


def _name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text).strip(".-") or "model"


# ---------------------------------------------------------------- pins


def pinned(study: Study, store: Store, *, ask: bool) -> Study:
    """Return the study with every hub model at its pinned commit.

    With `ask`, the hub is asked for models that have no pin yet; without, these stay as they are.
    """
    known = _known(store)

    @cache
    def of_run(run: Pretrain) -> Pretrain:
        start = run.start
        if isinstance(start, Pretrain):
            start = of_run(start)
        elif isinstance(start, Merge):
            parts = tuple(replace(part, run=of_run(part.run)) for part in start.parts)
            start = start if parts == start.parts else replace(start, parts=parts)
        elif isinstance(start, Hub) and not start.local and not start.revision:
            if ask and start.source not in known:
                known[start.source] = commit_of(start.source, store)
            start = replace(start, revision=known[start.source]) if start.source in known else start
        return run if start is run.start else replace(run, start=start)

    runs = tuple(of_run(run) for run in study.runs)
    return study if runs == study.runs else replace(study, runs=runs)


def commit_of(source: str, store: Store, *, note: bool = True) -> str:
    """Return the commit a hub model is pinned to; if none, ask the hub and, with `note`, record the answer."""
    commit = _known(store).get(source)
    if commit is None:
        commit = remember(source, _ask(source), store) if note else _ask(source)
    return commit


def _known(store: Store) -> dict[str, str]:
    path = store.root / PINS
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # no store yet; writing to it reports problems
        return {}
    except (OSError, ValueError) as wrong:
        raise StoreError(
            f"{path} cannot be read ({one_line(wrong)}); put it back, or remove it and models are pinned anew"
        ) from None
    if not isinstance(pins, dict):
        pins = {"": pins}
    for source, commit in pins.items():
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise StoreError(
                f"{path} pins {source!r} to {commit!r}, which is no commit of 40 hex digits; correct that line, or "
                "remove the file and models are pinned anew"
            )
    return pins


def pins_of(study: Study, store: Store) -> dict[str, str]:
    """Return the store's pins of the models that a study starts from."""
    sources = {model.source for model in hubs_of(study)}
    return {source: commit for source, commit in sorted(_known(store).items()) if source in sources}


def hubs_of(study: Study) -> set[Hub]:
    """Return the models, on the hub or in local folders, that a study's runs start from."""
    starts = {ancestor.start for run in study.runs for ancestor in run.lineage}
    return {start for start in starts if isinstance(start, Hub)}


def remember(source: str, commit: str, store: Store) -> str:
    """Record a pin and return it; if the model is already pinned, return the existing commit."""
    store.root.mkdir(parents=True, exist_ok=True)
    with _alone(store):
        known = _known(store)
        if source not in known:
            write_json(store.root / PINS, dict(sorted((known | {source: commit}).items())))
        return known.get(source, commit)


@contextlib.contextmanager
def _alone(store: Store) -> Generator[None]:
    """Hold the store's pin lock; the kernel releases it when the process ends."""
    handle = os.open(store.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):  # the file system has no locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _ask(source: str) -> str:
    """Ask the hub for a model's newest commit; if it cannot be reached, use the one in the hub library's cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    pin = _how_to_pin(source)
    try:
        commit = patiently(lambda: HfApi().model_info(source, timeout=ANSWER_SECONDS).sha)
    except (HfHubHTTPError, HFValidationError) as wrong:  # the hub refused, or the name is invalid
        raise _refusal(source, explained(wrong, source, pin)) from None
    except Exception as wrong:  # offline; the library raises many kinds of errors
        commit = _cached(source)
        if not commit:
            why = f"the hub cannot be asked, and no copy is in its cache: {explained(wrong, source, pin)}"
            raise _refusal(source, why) from None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _refusal(source, f"the hub says {commit!r}; {pin}")
    return commit


def _cached(source: str) -> str:
    """Return the newest commit that the cache knows, or ""."""
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.file_download import repo_folder_name

    newest = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=source, repo_type="model") / "refs" / "main"
    try:
        return newest.read_text(encoding="utf-8").strip()
    except (OSError, ValueError):
        return ""


def _refusal(source: str, why: str) -> SpecError:
    return SpecError(f"which commit of {source} is meant cannot be found out: {why}")


def _how_to_pin(source: str) -> str:
    return (
        f"type the commit that its page shows: {source}@<commit>, in a study Hub({source!r}, revision='<commit>'), or "
        "give a local folder"
    )
