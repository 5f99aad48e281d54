"""What an archive of results (a parcel) may say: whoever reads the store later relies on it.

An archive speaks for its own study alone. Its plan is made again from the study that travels in it, so every key in it
must be one of that study's: of a state, a trial, a corpus or a failed job. Metadata is checked by the schema that readers
use (`metadata`), and sizes against what such a plan can leave. Nothing is written here.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from biphase.errors import StoreError
from biphase.keys import Identities
from biphase.metadata import (
    CARD,
    LEAF,
    LINES,
    PARTS,
    ROUNDING,
    STATE,
    check_card,
    check_leaf,
    check_line,
    check_state,
    is_key,
)
from biphase.presets import corpus_of
from biphase.records import decode, key
from biphase.specs import Corpus, Hub, Pretrain, Study, Task
from biphase.specs.claims import RANGES
from biphase.study import parcel
from biphase.study.identities import corpora_of, hub_fingerprint, trained_runs
from biphase.study.leaves import PREDICTIONS, VALUES, trainings
from biphase.study.pins import COMMIT, hubs_of
from biphase.study.plan import Plan, make_plan

LINK = ("source", "heldout", "fingerprint")  # what is said of a corpus that was read from a folder
KINDS = {"task", "hub", "reads", "data"}  # of fingerprints; earlier versions told no `data`
# As safetensors calls them, and as numpy does: what a report can count with.
NUMBERS = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8",
}  # fmt: skip
MEAN = 1e-4  # by which a score may differ from the mean of its values, which are rounded
COUNTS = "entity_counts"  # of each example: entities that are right, that were said, that are true
TRIALS = 1_000_000  # that one study may plan
LINE_BYTES, SPARE_LINES = 1_000, 100  # of metrics: for each step, and beside
HELDOUT_LINES = 500_000  # of a whole archive: `status` parses all of them


class Judge:
    """Hears the files of one archive in their order, and refuses what is not as biphase writes it."""

    def __init__(self, study: str) -> None:
        self.name = study
        self.said: dict[str, Any] = {}  # the plan, as the archive has it
        self.fingerprints: dict[str, dict[str, str]] = {}
        self.states: dict[str, tuple[int, int]] = {}  # key → its step from the root, bytes of its metrics
        self.trials: dict[str, dict[str, Any]] = {}
        self.corpora: dict[str, Corpus] = {}  # by the key of their shards
        self.failed: set[str] = set()
        self.heldout = 0

    def result(self, folder: str, files: dict[str, bytes]) -> None:
        kind, at = folder.split("/")[-2:]
        if kind == "leaves":
            about = check_leaf(json.loads(files[LEAF]), at)
            if VALUES in files:
                _check_values(files[VALUES], about)
            if PREDICTIONS in files:  # which no verb reads
                _arrays(PREDICTIONS, files[PREDICTIONS])
            self.trials[at] = {name: about[name] for name in ("model", "lr", "seed", "metric")}
        elif kind == "states":
            about = check_state(json.loads(files[STATE]), at)
            _need(isinstance(decode(about["run"]), Pretrain), "it has no run")
            step = about["origin_step"] + about["progress"]["step"]
            self.states[at] = step, len(files[LINES])
            self._check_lines(files[LINES], step)
        else:
            self.corpora[at] = decode(check_card(json.loads(files[CARD]), at)["corpus"])

    def _check_lines(self, content: bytes, last: int) -> None:
        for text in io.BytesIO(content):
            line = check_line(json.loads(text))
            _need(line["step"] <= last, f"{LINES} goes on to step {line['step']}, and the state is at {last}")
            self.heldout += "heldout" in line
        _need(self.heldout <= HELDOUT_LINES, f"{LINES} has more than {HELDOUT_LINES:,} held-out losses")

    def loose(self, name: str, content: bytes) -> None:
        said = json.loads(content)
        parcel.as_json(said)  # it must be possible to write it again: no NaN, no depths
        if name == parcel.PLAN:
            made = decode(said["study"])
            _need(isinstance(made, Study) and made.name == self.name, f"{name} is of another study")
            self.study, self.said = made, said
        elif name == parcel.FINGERPRINTS:
            _need(KINDS - {"data"} <= set(said) <= KINDS, f"{name} says something else")
            keys = [one for some in said.values() for pair in some.items() for one in pair]
            # Of a model's tokenizer there may be nothing to say.
            _need(all(is_key(one) or one == "" for one in keys), f"{name} has no keys")
            self.fingerprints = said
        elif name == parcel.PINS:
            _need(all(COMMIT.fullmatch(commit) for commit in said.values()), f"{name} pins to no commit")
            other = set(said) - {model.source for model in hubs_of(self.study) if not model.local}
            _need(not other, f"{name} pins {min(other, default='')}, which the study does not start from")
        elif name.startswith("corpora/"):
            self._check_link(name, said)
        else:
            _need(said["key"] == Path(name).stem and isinstance(said["error"], str), f"{name} is no failure")
            self.failed.add(said["key"])

    def _check_link(self, name: str, said: dict[str, Any]) -> None:
        _need(set(LINK) == set(said), f"{name} is no link")
        _need(all(isinstance(one, str) for one in said.values()), f"{name} is no link")
        _need(is_key(said["fingerprint"]), f"{name} has no fingerprint")
        linked = key({"source": said["source"], "heldout": said["heldout"]})
        _need(Path(name).stem == f"link-{linked}", f"{name} links another corpus")
        own = {(corpus.source, corpus.heldout) for corpus in corpora_of(self.study) if corpus.hub}
        _need((said["source"], said["heldout"]) in own, f"{name} links a corpus that the study does not read")

    # ------------------------------------------------------------ the end: every key is one of the study's

    def finish(self) -> Plan:
        """After the last file: make the plan again, and hold everything that was heard against it. Gives that plan."""
        plan = self._planned()
        keys = {state["key"]: state["parent"] for state in self.said["states"]}
        same = keys == {state.key: state.parent for state in plan.states.values()}
        _need(same and self.said["results"] == plan.results, f"{parcel.PLAN} has other keys than its study")
        every = {one.key: one for one in trainings(plan)}
        leaves = {leaf.key: (one, leaf.metric) for one in every.values() for leaf in one.leaves}
        for at, (step, size) in self.states.items():
            _need(at in plan.states, f"the state {at} is none of the study's")
            _need(step == plan.states[at].span[1], f"the state {at} is at step {step}")
            _need(
                size <= LINE_BYTES * (step + SPARE_LINES),
                f"{LINES} of {at} has {size:,} bytes for {step:,} steps",
            )
        for at, about in self.trials.items():
            _need(at in leaves, f"the scores {at} are none of the study's")
            one, metric = leaves[at]
            planned = {"model": one.model, "lr": one.lr, "seed": one.seed, "metric": metric}
            _need(about == planned, f"the scores {at} are of another model, learning rate, seed or metric")
        others = set(self.corpora) - {self._data(run) for run in trained_runs(self.study)}
        _need(not others, f"the corpus {min(others, default='')} is none of the study's")
        others = self.failed - set(plan.states) - set(every)
        _need(not others, f"the failure {min(others, default='')} is of no job of the study")
        return plan

    def _planned(self) -> Plan:
        tasks = self.study.finetune.tasks if self.study.finetune else ()
        told = {kind: set(some) for kind, some in self.fingerprints.items()}
        local = {key(model) for model in hubs_of(self.study) if model.local}
        own = {"task": {key(task) for task in tasks}, "hub": local, "reads": local}
        own |= {"data": {key(corpus) for corpus in corpora_of(self.study)}} if "data" in told else {}
        _need(told == own, f"{parcel.FINGERPRINTS} is not of this study's tasks, models and corpora")
        spec = self.study.finetune
        steps = sum(len(run.keep) + 1 for run in self.study.runs)
        _need(
            spec is None or steps * len(spec.tasks) * len(spec.lrs) * len(spec.seeds) <= TRIALS,
            f"it plans more than {TRIALS:,} fine-tunings",
        )
        identities = Identities(self._data, self._hub, self._task, self._reads)
        return make_plan(self.study, identities, str(self.said.get("question", "")))

    def _data(self, run: Pretrain) -> str:
        """The key of a run's shards: as the fingerprints say, or as a card of the archive does."""
        corpus = corpus_of(run)
        told = self.fingerprints.get("data", {}).get(key(corpus), "")
        found = told or next((at for at, one in self.corpora.items() if one == corpus), "")
        _need(found, f"it does not say which text the corpus {corpus.name!r} is")
        return found

    def _hub(self, model: Hub) -> str:
        return self.fingerprints["hub"][key(model)] if model.local else hub_fingerprint(model)

    def _reads(self, model: Hub) -> str:
        return self.fingerprints["reads"][key(model)] if model.local else ""

    def _task(self, task: Task) -> str:
        return self.fingerprints["task"][key(task)]


def _check_values(content: bytes, about: dict[str, Any]) -> None:
    """One number for each example of its part, within the metric's range, that make up its score; of entities three counts."""
    import numpy as np

    for name, array in _arrays(VALUES, content):
        part, _, metric = name.partition("/")
        examples = about["examples"][part]
        shape = [examples, 3] if metric == COUNTS else [examples]
        _need(list(array["shape"]) == shape, f"{VALUES}: {name!r} is {array['shape']} and should be {shape}")
        values = np.frombuffer(array["data"], NUMBERS[array["dtype"]]).astype(np.float64)
        _need(np.isfinite(values).all(), f"{VALUES}: {name!r} has numbers that are not finite")
        score = about["scores"][part].get(metric)
        if metric == COUNTS:
            _need((values >= 0).all(), f"{VALUES}: {name!r} has counts below 0")
        elif score is not None:
            low, high = RANGES.get(metric, (0.0, 1.0))
            inside = (values >= low - ROUNDING) & (values <= high + ROUNDING)
            _need(inside.all(), f"{VALUES}: {name!r} goes beyond {low:g} to {high:g}")
            _need(
                abs(values.mean() - score) <= MEAN,
                f"{VALUES}: {name!r} is {values.mean():.4f} on average, and the score is {score}",
            )


def _arrays(file: str, content: bytes) -> list[tuple[str, Any]]:
    """The arrays of a file, each of numbers of a part."""
    from safetensors import SafetensorError, deserialize

    try:
        arrays = deserialize(content)
    except SafetensorError as wrong:
        raise StoreError(f"{file} cannot be read: {wrong}") from None
    for name, array in arrays:
        part, _, what = name.partition("/")
        _need(part in PARTS and what, f"{file} has {name[:60]!r}")
        _need(array["dtype"] in NUMBERS, f"{file}: {name!r} is of the type {array['dtype']}")
    return arrays


def _need(true: Any, why: str) -> None:
    if not true:
        raise StoreError(why)
