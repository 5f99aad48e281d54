"""What a parcel may say: whoever reads the store later relies on it.

A parcel speaks for its own study alone. Its plan comes first, and what its names stand for, why its jobs failed and which
text its corpora are is only heard of that plan's models, jobs and corpora. Nothing is written here.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from biphase.errors import StoreError
from biphase.keys import training_key
from biphase.records import KEY_LENGTH, decode, key
from biphase.specs import Corpus, Pretrain, Study
from biphase.study import parcel
from biphase.study.identities import corpora_of
from biphase.study.leaves import LEAF, PREDICTIONS, VALUES, lenders
from biphase.study.pins import COMMIT, hubs_of

LINK = ("source", "heldout", "fingerprint")  # what is said of a corpus that was read from a folder
PARTS = ("validation", "test")
# As safetensors calls them: what a report can count with.
NUMBERS = {"BOOL", "U8", "I8", "U16", "I16", "U32", "I32", "U64", "I64", "F16", "F32", "F64"}
_KEY = re.compile(rf"[0-9a-f]{{{KEY_LENGTH}}}")


class Judge:
    """Hears the files of one parcel in their order, and refuses what is not as biphase writes it."""

    def __init__(self, study: str) -> None:
        self.name = study
        self.plan: dict[str, Any] = {}
        self.tasks: dict[str, str] = {}  # key of a task → key of its data
        self.jobs: set[str] | None = None

    def result(self, folder: str, files: dict[str, bytes]) -> None:
        kind, at = folder.split("/")[-2:]
        if kind == "leaves":
            _check_leaf(at, files)
        elif kind == "states":
            _check_state(at, files)
        else:
            about = json.loads(files["card.json"])
            _need(isinstance(decode(about["corpus"]), Corpus), "it has no corpus")
            _need_numbers([about["train_tokens"], about["unigram_entropy"]])
            _need_keys([about["fingerprint"], about["tokenizer_fingerprint"]])

    def loose(self, name: str, content: bytes) -> None:
        said = json.loads(content)
        parcel.as_json(said)  # it must be possible to write it again: no NaN, no depths
        if name == parcel.PLAN:
            made = decode(said["study"])
            _need(isinstance(made, Study) and made.name == self.name, f"{name} is of another study")
            _need(all(isinstance(state["key"], str) for state in said["states"]), f"{name} has no keys")
            self.study, self.plan = made, said
        elif name == parcel.FINGERPRINTS:
            _need(set(said) == {"task", "hub", "reads"}, f"{name} says something else")
            _need(
                all(isinstance(one, str) for some in said.values() for one in some.values()),
                f"{name} has no keys",
            )
            self.tasks = said["task"]
        elif name == parcel.PINS:
            _need(all(COMMIT.fullmatch(commit) for commit in said.values()), f"{name} pins to no commit")
            other = set(said) - {model.source for model in hubs_of(self.study) if not model.local}
            _need(not other, f"{name} pins {min(other, default='')}, which the study does not start from")
        elif name.startswith("corpora/"):
            self._check_link(name, said)
        else:
            self._check_failure(name, said)

    def _check_link(self, name: str, said: dict[str, Any]) -> None:
        _need(set(LINK) == set(said), f"{name} is no link")
        _need(all(isinstance(one, str) for one in said.values()), f"{name} is no link")
        _need_keys([said["fingerprint"]])
        linked = key({"source": said["source"], "heldout": said["heldout"]})
        _need(Path(name).stem == f"link-{linked}", f"{name} links another corpus")
        own = {(corpus.source, corpus.heldout) for corpus in corpora_of(self.study) if corpus.hub}
        _need((said["source"], said["heldout"]) in own, f"{name} links a corpus that the study does not read")

    def _check_failure(self, name: str, said: dict[str, Any]) -> None:
        _need(said["key"] == Path(name).stem and isinstance(said["error"], str), f"{name} is no failure")
        if self.jobs is None:
            self.jobs = {state["key"] for state in self.plan["states"]} | self._training_keys()
        _need(said["key"] in self.jobs, f"{name} is of no job of the study")

    def _training_keys(self) -> set[str]:
        """Of every result, as an end and as a step on the way: which of them it is does not matter here."""
        spec = self.study.finetune
        if spec is None:
            return set()
        return {
            training_key(model, self.tasks[key(task)], part, lr=lr, seed=seed)
            for part in (spec.part(on_the_way=False), spec.part(on_the_way=True))
            for task in lenders(part)
            for model in self.plan["results"].values()
            for lr in part.lrs
            for seed in part.seeds
        }


def _check_leaf(at: str, files: dict[str, bytes]) -> None:
    about = json.loads(files[LEAF])
    _need(about["key"] == at, "it is the leaf of another key")
    numbers = [about["lr"], about["seed"], *about["seconds"].values(), *about["examples"].values()]
    for part in PARTS:
        _need(about["metric"] in about["scores"][part], f"it has no {about['metric']}")
        numbers += about["scores"][part].values()
    _need_numbers(numbers)
    _need(all(isinstance(about[name], str) for name in ("model", "metric")), "a name is missing")
    _need({"task", "trained_on", "finetune", "machine"} <= about.keys(), "a field is missing")
    _check_baselines(about)
    if VALUES in files:
        _check_values(files[VALUES], about["examples"])
    if PREDICTIONS in files:  # which no verb reads
        _arrays(PREDICTIONS, files[PREDICTIONS])


def _check_baselines(about: dict[str, Any]) -> None:
    """Baselines by name and metric, and the constant prediction of each part; earlier versions wrote neither."""
    every = [one for by_metric in about.get("baselines", {}).values() for one in by_metric.values()]
    _need(all(isinstance(one["what"], str) for one in every), "a baseline has no name")
    _need_numbers(one[part] for one in every for part in PARTS)
    constant = about.get("constant", {})
    _need(
        set(constant) <= set(PARTS) and all(isinstance(one, str) for one in constant.values()),
        "a constant is odd",
    )


def _check_values(content: bytes, examples: dict[str, int]) -> None:
    """One number for each example of its part; of entities three counts."""
    for name, array in _arrays(VALUES, content):
        part, _, metric = name.partition("/")
        shape = [examples[part], 3] if metric == "entity_counts" else [examples[part]]
        _need(list(array["shape"]) == shape, f"{VALUES}: {name!r} is {array['shape']} and should be {shape}")


def _arrays(file: str, content: bytes) -> Iterable[tuple[str, Any]]:
    """The arrays of a file, each of numbers of a part."""
    from safetensors import SafetensorError, deserialize

    try:
        arrays = deserialize(content)
    except SafetensorError as wrong:
        raise StoreError(f"{file} cannot be read: {wrong}") from None
    for name, array in arrays:
        part, _, what = name.partition("/")
        _need(part in PARTS and what, f"{file} has {name!r}")
        _need(array["dtype"] in NUMBERS, f"{file}: {name!r} is of the type {array['dtype']}")
    return arrays


def _check_state(at: str, files: dict[str, bytes]) -> None:
    about = json.loads(files["state.json"])
    _need(about["key"] == at, "it is the state of another key")
    _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
    _need_numbers(
        [about["origin_step"], about["epochs"], *(about["progress"][name] for name in ("step", "seconds"))]
    )
    lines = [json.loads(line) for line in files["metrics.jsonl"].decode().splitlines()]
    _need_numbers([line["step"] for line in lines])


def _need(true: Any, why: str) -> None:
    if not true:
        raise StoreError(why)


def _need_numbers(values: Iterable[Any]) -> None:
    """Neither NaN nor infinite, nor an integer that no float can hold."""
    largest = sys.float_info.max
    _need(all(type(one) in (int, float) and abs(one) <= largest for one in values), "a number is missing")


def _need_keys(values: Iterable[Any]) -> None:
    _need(all(isinstance(one, str) and _KEY.fullmatch(one) for one in values), "a fingerprint is missing")
