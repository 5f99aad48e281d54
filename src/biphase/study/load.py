"""A hub model without a revision is pinned once per store: the commit that the hub showed is noted, and stays.

    store/pins.json     {"owner/name": "<commit>"}

So a study that names a model means the same one tomorrow, as if the commit had been written in it. The first pin wins:
a pin is never replaced. Who adds one holds a lock, reads the file anew and puts a new one in its place by a rename, so
that two processes lose nothing of each other's; where the file system has no locks, the later of two at one instant may
take the other's place, and that model is asked again.
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
    """The study with every hub model at its commit, where the store knows it; with `ask`, where the hub does."""
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
    """The commit that a hub model is pinned to in this store, asked from the hub (and noted) if there is none yet."""
    known = _known(store)
    if source in known:
        return known[source]
    return remember(source, _ask(source), store) if note else _ask(source)


def _known(store: Store) -> dict[str, str]:
    path = store.root / PINS
    try:
        pins = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):  # what is wrong with a store is said by who writes there
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
    """The pins of a store that a study's models stand on."""
    sources = {model.source for model in hubs_of(study)}
    return {source: commit for source, commit in sorted(_known(store).items()) if source in sources}


def hubs_of(study: Study) -> set[Hub]:
    """The models, on the hub or in folders here, that a study's runs start from."""
    starts = set()
    for run in study.runs:
        at: Pretrain | Size | Hub = run
        while isinstance(at, Pretrain):
            at = at.start
        starts.add(at)
    return {one for one in starts if isinstance(one, Hub)}


def remember(source: str, commit: str, store: Store) -> str:
    """Note a pin; or take the one that is noted already, or that somebody else noted meanwhile."""
    store.root.mkdir(parents=True, exist_ok=True)
    with _alone(store):
        known = _known(store)
        if source not in known:
            write_json(store.root / PINS, dict(sorted((known | {source: commit}).items())))
        return known.get(source, commit)


@contextlib.contextmanager
def _alone(store: Store) -> Generator[None]:
    """One writer at a time. The lock goes with its process, however that ends."""
    handle = os.open(store.root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with contextlib.suppress(OSError):  # no locks here
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _ask(source: str) -> str:
    """The commit that the hub shows; where it cannot be reached, that of the copy in the hub library's cache."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        commit = HfApi().model_info(source, timeout=ANSWER_SECONDS).sha
    except (HfHubHTTPError, HFValidationError) as wrong:  # it was reached, and says no; or it is no name
        raise _refusal(source, one_line(wrong)) from None
    except Exception as wrong:  # offline, or no way there: the library passes on many kinds
        commit = _cached(source)
        if not commit:
            raise _refusal(
                source, f"the hub cannot be asked, and no copy is in its cache: {one_line(wrong)}"
            ) from None
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        raise _refusal(source, f"the hub says {commit!r}")
    return commit


def _cached(source: str) -> str:
    """What the cache took for the newest commit when it last looked."""
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


# ---------------------------------------------------------------- load
# A study file, or the plan.json that was made of one, as records.
#
# A study file is Python and is run; its variable `study` is the study and the first line of its docstring
# the question it asks. A plan.json is data and is only read. Whatever goes wrong inside the file becomes
# one line that names the file and the line in it.


@dataclass(frozen=True)
class LoadedStudy:
    study: Study
    question: str
    path: Path


def load(path: Path | str) -> LoadedStudy:
    """The study at `path`: a Python file that is run, or a plan.json that is read."""
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
    # The name marks the frames of this file in a traceback, whatever folder it was typed from.
    name = str(path)
    try:
        tree = ast.parse(text, name)
        code = compile(tree, name, "exec")
    except (SyntaxError, ValueError) as wrong:  # older Pythons refuse a null byte with the latter
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
    """The deepest line of the file `name` that was running."""
    lines = [frame.lineno for frame in traceback.extract_tb(wrong.__traceback__) if frame.filename == name]
    return lines[-1] or 1 if lines else 1


def _examples(folder: Path) -> str:
    files = sorted(folder.glob("*.py"))
    return f", e.g. {files[0]}" if files else ""


def _did_you_mean(path: Path) -> str:
    """The file that was probably meant: beside it, or among the studies here."""
    files = [*path.parent.glob("*.py"), *path.parent.glob("*.json"), *Path("studies").glob("*.py")]
    by_stem: dict[str, Path] = {}
    for file in files:
        by_stem.setdefault(file.name, file)
        by_stem.setdefault(file.stem, file)
    close = get_close_matches(path.name, by_stem, n=1) or get_close_matches(path.stem, by_stem, n=1)
    if close:
        return f"; did you mean {by_stem[close[0]]}?"
    return "; write one, or see studies/ for examples" if not files else f"; there is {files[0]}"
