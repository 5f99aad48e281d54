"""Inputs that nobody would write by hand: whatever stands in a file or on the command line, a refusal is our own.

Each property is tried with a few examples in every run of the tests, always the same ones, and with many in the campaign.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from common import write_lines
from faults.tiny import write_study
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from biphase.cluster.launch import checkpoint_rule, seconds
from biphase.data.tokenizer import read
from biphase.errors import BiphaseError
from biphase.export.folder import find
from biphase.models.hub import trunk
from biphase.specs import Hub
from biphase.store import Store, with_checksum
from biphase.study.build import finetuning
from biphase.study.costs import _shape_of_folder
from biphase.study.datasets import tasks_named
from biphase.study.load import corpus_named, load
from biphase.study.plan import identities, make_plan
from biphase.tasks.load import load as load_task

SCALAR = some.none() | some.booleans() | some.integers() | some.floats() | some.text(max_size=8)
ANY = some.recursive(
    SCALAR,
    lambda inner: some.lists(inner, max_size=3) | some.dictionaries(some.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
# No model of any size is built.
SMALL = ANY.filter(lambda one: not isinstance(one, int | float) or abs(one) < 100)
PLACES = some.lists(some.integers(0, 1_000), min_size=1, max_size=3)


def put(data: Any, place: list[int], new: Any) -> Any:
    """JSON with one value, found by going down, replaced by another."""
    inside = (
        list(data) if isinstance(data, dict) else list(range(len(data))) if isinstance(data, list) else []
    )
    if not inside or not place:
        return new
    at = inside[place[0] % len(inside)]
    changed = data.copy()
    changed[at] = put(data[at], place[1:], new)
    return changed


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fuzz") / "input"
    study = write_study(folder, [f"the cat sees the dog {n}" for n in range(40)])
    store = Store(folder / "store")
    return folder, store, make_plan(load(study).study, identities(store))


def only_our_refusals(work: Callable[[], Any]) -> None:
    with contextlib.suppress(BiphaseError):
        work()


def planned(written, place, new):
    """A plan.json of which one value, somewhere in its study, is something else."""
    folder, store, plan = written
    data = plan.to_json()
    data["study"] = put(data["study"], place, new)
    path = folder / "plan.json"
    path.write_text(json.dumps(with_checksum(data)))
    only_our_refusals(lambda: make_plan(load(path).study, identities(store)))


def of_any_bytes(written, content):
    """Rows of a task, a plan, a tokenizer, and weights that are any bytes."""
    folder, _, plan = written
    with tempfile.TemporaryDirectory(dir=folder) as place:
        for name in ("train.jsonl", "plan.json", "model.safetensors", "config.json"):
            (Path(place) / name).write_bytes(content)
        task = replace(plan.study.finetune.tasks[0], source=place)
        only_our_refusals(lambda: load_task(task, documents="judged"))
        only_our_refusals(lambda: load(Path(place) / "plan.json"))
        only_our_refusals(lambda: read({"tokenizer.json": Path(place) / "plan.json"}, "words"))
        _shape_of_folder(Path(place))


def of_a_row(written, data):
    """Rows of a task that are JSON, and hold anything."""
    folder, _, plan = written
    with tempfile.TemporaryDirectory(dir=folder) as place:
        rows = [{"text": "a", "label": 0}, data, {"text": "b", "label": 1}]
        for part in ("train", "validation", "test"):
            write_lines(Path(place) / f"{part}.jsonl", rows)
        task = replace(plan.study.finetune.tasks[0], source=place)
        only_our_refusals(lambda: load_task(task, documents="judged"))


def of_a_configuration(written, field, value):
    """A model whose configuration says anything."""
    with tempfile.TemporaryDirectory(dir=written[0]) as place:
        config = {
            "model_type": "bert", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16,
        }  # fmt: skip
        (Path(place) / "config.json").write_text(json.dumps(config | {field: value}))
        (Path(place) / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
        _shape_of_folder(Path(place))
        only_our_refusals(lambda: trunk(Hub(place)))


def of_words(written, word):
    """Options and keys that are any text."""
    folder, store, plan = written
    word = word.lstrip("~")  # the home of nobody is refused by the command line itself
    for work in (
        lambda: seconds(word),
        lambda: checkpoint_rule(word),
        lambda: find(word, store),
        lambda: corpus_named(word, tokenizer="bpe:300"),
        lambda: corpus_named(str(folder / "text"), tokenizer=word),
        lambda: load(word),
        lambda: finetuning(tasks_named(word or "?"), word, word, "standard", "", "", 0),
        lambda: finetuning(plan.study.finetune.tasks, word, word, word, word, word, 0),
    ):
        only_our_refusals(work)


FIELDS = some.sampled_from([
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "architectures", "auto_map",
    "layer_types",
])  # fmt: skip
PROPERTIES = {
    "plan": (planned, (PLACES, ANY)),
    "bytes": (of_any_bytes, (some.binary(max_size=80),)),
    "row": (of_a_row, (ANY,)),
    "configuration": (of_a_configuration, (FIELDS, SMALL)),
    "words": (of_words, (some.text(max_size=12),)),
}


CASES = [(name, 15) for name in PROPERTIES] + [
    # A configuration loads a model each time.
    pytest.param(name, 200 if name == "configuration" else 2_000, marks=pytest.mark.campaign)
    for name in PROPERTIES
]


@pytest.mark.parametrize(("name", "examples"), CASES)
def test_any_input_is_accepted_or_refused_by_an_error_of_ours(name, examples, written):
    check, strategies = PROPERTIES[name]
    always = {
        "derandomize": True,
        "database": None,
        "deadline": None,
        "suppress_health_check": list(HealthCheck),
    }
    tried = settings(max_examples=examples, **always)
    tried(given(some.tuples(*strategies))(lambda drawn: check(written, *drawn)))()
