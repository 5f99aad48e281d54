"""A study file, or the plan.json that was made of one, as records.

A study file is Python and is run; its variable `study` is the study and the first line of its docstring
the question it asks. A plan.json is data and is only read. Whatever goes wrong inside the file becomes
one line that names the file and the line in it.
"""

from __future__ import annotations

import ast
import json
import traceback
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path

from biphase.errors import SpecError, StoreError, one_line
from biphase.files import read_sealed
from biphase.records import decode
from biphase.specs import Study


@dataclass(frozen=True)
class Loaded:
    study: Study
    question: str
    path: Path


def load(path: Path | str) -> Loaded:
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


def _from_file(path: Path, text: str) -> Loaded:
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
    return Loaded(study, words.splitlines()[0].strip() if words else "", path)


def _from_plan(path: Path, text: str) -> Loaded:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise SpecError(f"{path} is not JSON ({wrong}); make it again: biphase run STUDY.py") from None
    if isinstance(data, dict):
        try:
            data = read_sealed(path)
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
    return Loaded(study, str(data.get("question", "")), path)


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
