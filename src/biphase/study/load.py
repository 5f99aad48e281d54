"""Loading a study from its file, and pinning its hub models to commits.

`load` reads a study file or a plan.json. `pinned` sets the revision of every hub model that a study names without
one. The commit is recorded once per store, so that the study means the same model later:

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
import traceback
from collections.abc import Generator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from biphase.errors import SpecError, StoreError, one_line
from biphase.records import decode
from biphase.specs import Hub, Pretrain, Size, Study
from biphase.store import Store, read_checked, write_json

PINS = "pins.json"
LOCK = ".pins.lock"
COMMIT = re.compile(r"[0-9a-f]{40}")
ANSWER_SECONDS = 10.0


def pinned(study: Study, store: Store, *, ask: bool) -> Study:
    """Return the study with every hub model at its pinned commit.

    With `ask`, the hub is asked for models that have no pin yet; without, these stay as they are.
    """
    known = _known(store)
    made: dict[Pretrain, Pretrain] = {}

    def of_run(run: Pretrain) -> Pretrain:
        if run not in made:
            start = of_run(run.start) if isinstance(run.start, Pretrain) else of_start(run.start)
            made[run] = run if start is run.start else replace(run, start=start)
        return made[run]

    def of_start(start: Size | Hub) -> Size | Hub:
        if not isinstance(start, Hub) or start.local or start.revision:
            return start
        if ask and start.source not in known:
            known[start.source] = commit_of(start.source, store)
        return replace(start, revision=known[start.source]) if start.source in known else start

    runs = tuple(of_run(run) for run in study.runs)
    return (
        study
        if all(one is was for one, was in zip(runs, study.runs, strict=True))
        else replace(study, runs=runs)
    )


def commit_of(source: str, store: Store, *, note: bool = True) -> str:
    """Return the commit a hub model is pinned to; if none, ask the hub and, with `note`, record the answer."""
    known = _known(store)
    if source in known:
        return known[source]
    return remember(source, _ask(source), store) if note else _ask(source)


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
        raise StoreError(f"{path} is no list of pins; put it back, or remove it and models are pinned anew")
    for source, commit in pins.items():
        if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
            raise StoreError(
                f"{path} pins {source} to {commit!r}, which is no commit of 40 hex digits; correct that line"
            )
    return pins


def pins_of(study: Study, store: Store) -> dict[str, str]:
    """Return the store's pins of the models that a study starts from."""
    sources = {model.source for model in hubs_of(study)}
    return {source: commit for source, commit in sorted(_known(store).items()) if source in sources}


def hubs_of(study: Study) -> set[Hub]:
    """Return the models, on the hub or in local folders, that a study's runs start from."""
    return {run.root.start for run in study.runs if isinstance(run.root.start, Hub)}


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

    try:
        commit = HfApi().model_info(source, timeout=ANSWER_SECONDS).sha
    except (HfHubHTTPError, HFValidationError) as wrong:  # the hub refused, or the name is invalid
        raise _refusal(source, one_line(wrong)) from None
    except Exception as wrong:  # offline; the library raises many kinds of errors
        commit = _cached(source)
        if not commit:
            raise _refusal(
                source, f"the hub cannot be asked, and no copy is in its cache: {one_line(wrong)}"
            ) from None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _refusal(source, f"the hub says {commit!r}")
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
    return SpecError(
        f"which commit of {source} is meant cannot be found out ({why}); type the one that its page shows: "
        f"{source}@<commit>, in a study Hub({source!r}, revision='<commit>'), or give a local folder"
    )


# ---------------------------------------------------------------- study files
# A study file is a Python program and is run; its variable `study` is the study, and the first line of its
# docstring is the question that the study asks. A plan.json is data and is only read. An error inside the file is
# reported in one line with the file and its line number.


@dataclass(frozen=True)
class LoadedStudy:
    study: Study
    question: str
    path: Path


def load(path: Path | str) -> LoadedStudy:
    """Load the study at `path`: a Python file, which is run, or a plan.json, which is read."""
    path = Path(path)
    if path.is_dir():
        raise SpecError(f"{path} is a folder; type a study file in it{_examples(path)}")
    if not path.exists():
        raise SpecError(f"no file {path}{_did_you_mean(path)}")
    if path.suffix not in (".py", ".json"):
        raise SpecError(f"{path} is no study: a study is a Python file (.py), or the plan.json made of one")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as wrong:
        raise SpecError(f"{path} cannot be read: {one_line(wrong)}") from None
    return _from_plan(path, text) if path.suffix == ".json" else _from_file(path, text)


def _from_file(path: Path, text: str) -> LoadedStudy:
    # `compile` gets this name, so that `_line` finds the frames of this file in a traceback.
    name = str(path)
    try:
        tree = ast.parse(text, name)
        code = compile(tree, name, "exec")
    except (SyntaxError, ValueError) as wrong:  # older Python versions raise ValueError for a null byte
        line, what = getattr(wrong, "lineno", None) or 1, getattr(wrong, "msg", str(wrong))
        raise SpecError(f"{name}:{line}: SyntaxError: {what}") from None
    variables: dict[str, object] = {"__name__": "study", "__file__": name}
    try:
        exec(code, variables)
    except (Exception, SystemExit) as wrong:
        raise SpecError(f"{name}:{_line(wrong, name)}: {one_line(wrong)}") from None
    if "study" not in variables:
        raise SpecError(f"{path} has no variable `study`; end it with study = Study('name', runs=(…))")
    study = variables["study"]
    if not isinstance(study, Study):
        raise SpecError(
            f"{path}: `study` is a {type(study).__name__}, not a Study; type study = Study('name', runs=(…))"
        )
    words = (ast.get_docstring(tree) or "").strip()
    return LoadedStudy(study, words.splitlines()[0].strip() if words else "", path)


def _from_plan(path: Path, text: str) -> LoadedStudy:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise SpecError(f"{path} is not JSON ({wrong}); make it again: biphase run STUDY.py") from None
    if isinstance(data, dict):
        try:
            data = read_checked(path)
        except StoreError as wrong:
            raise SpecError(f"{one_line(wrong)}: biphase run STUDY.py") from None
    if not isinstance(data, dict) or "study" not in data:
        raise SpecError(f'{path} is no plan: it has no "study"; make it again: biphase run STUDY.py')
    try:
        study = decode(data["study"])
    except (SpecError, TypeError, RecursionError) as wrong:
        raise SpecError(f"{path}: {one_line(wrong)}") from None
    if not isinstance(study, Study):
        raise SpecError(f'{path}: its "study" is no Study; make it again: biphase run STUDY.py')
    return LoadedStudy(study, str(data.get("question", "")), path)


def _line(wrong: BaseException, name: str) -> int:
    """Return the deepest line of file `name` in the traceback."""
    lines = [frame.lineno for frame in traceback.extract_tb(wrong.__traceback__) if frame.filename == name]
    return lines[-1] or 1 if lines else 1


def _examples(folder: Path) -> str:
    files = sorted(folder.glob("*.py"))
    return f", e.g. {files[0]}" if files else ""


def _did_you_mean(path: Path) -> str:
    """Suggest the file that was probably meant, from the same folder or from studies/."""
    files = [*path.parent.glob("*.py"), *path.parent.glob("*.json"), *Path("studies").glob("*.py")]
    by_stem: dict[str, Path] = {}
    for file in files:
        by_stem.setdefault(file.name, file)
        by_stem.setdefault(file.stem, file)
    close = get_close_matches(path.name, by_stem, n=1) or get_close_matches(path.stem, by_stem, n=1)
    if close:
        return f"; did you mean {by_stem[close[0]]}?"
    return "; write one, or see studies/ for examples" if not files else f"; there is {files[0]}"
