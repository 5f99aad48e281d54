"""The whole way of one family: from a folder on disk to an encoder on disk, and what became of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from families.build import CannotBuild, Family, build, reaches
from families.exporting import check_exported, export, opened
from families.reading import check_own_forward, check_segments, check_sight
from families.table import Verdict
from families.training import check_kill_and_resume, check_training, run_of
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.utils.logging import disable_progress_bar

from biphase.data.shards import Shards
from biphase.errors import ModelError
from biphase.training.pretrain import starting_model

if TYPE_CHECKING:
    from families.conftest import Reading

INTERNAL = ("Error", "object has no attribute", "Traceback", "NoneType")  # what no user should have to read


def examine(family: Family, reading: Reading, folder: Path) -> Verdict:
    """All checks, in order. What is not as it should be is an AssertionError, what the product refuses a verdict."""
    disable_progress_bar()
    try:
        built = build(family)
    except CannotBuild as wrong:
        return Verdict(str(family), "", "not built", str(wrong))
    kind = type(built).__name__
    start = _saved(built, reading, folder / "start")
    run = run_of(start, reading.corpus)
    try:
        model = starting_model(run, Shards.open(reading.shards), probed=True).eval()
    except ModelError as wrong:
        return Verdict(str(family), kind, "refused", _reason(wrong, built, start))
    assert not _experts(built), "a mixture of experts is not refused"
    own = (AutoModelForMaskedLM if family.masked else AutoModelForCausalLM).from_pretrained(start)
    check_own_forward(model, own, causal=not family.masked)
    check_sight(model)
    check_segments(model)
    once, twice = (reading.store(folder / name) for name in ("once", "twice"))
    check_training(run, once)
    check_kill_and_resume(run, twice, as_in=once)
    try:
        exported = export(run, once, folder / "exported")
    except ModelError as wrong:
        return Verdict(str(family), kind, "not exported", str(wrong))
    check_exported(run, once, folder / "exported")
    if any(reaches(built.config)) and not family.masked:
        otherwise = opened(built, reading.shards / "tokenizer", folder / "opened")
        exported += "" if otherwise == exported else f"; without windows {otherwise}"
    return Verdict(str(family), kind, "passed", exported=exported)


def _saved(model: Any, reading: Reading, folder: Path) -> Path:
    """A folder as the hub has it."""
    model.save_pretrained(folder)
    for file in reading.tokenizer.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _reason(wrong: ModelError, model: Any, folder: Path) -> str:
    """The one line of a refusal, which must be one that a user understands."""
    line = str(wrong).replace(str(folder), "it")
    assert "\n" not in line
    assert not [word for word in INTERNAL if word in line], f"the reason is not clear: {line}"
    if _experts(model):
        assert "mixture of experts" in line, line
    return line


def _experts(model: Any) -> bool:
    return any("expert" in type(module).__name__.lower() for module in model.modules())
