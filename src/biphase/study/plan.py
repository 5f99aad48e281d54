"""A study as a tree of states: equal beginnings are one node, found and not declared.

    root                          a start: a size from scratch or a hub model; nothing to compute
    └─ state ── piece ──► state   a piece is the work between two states that somebody needs

Needed are the ends of runs, their `keep` steps, the switches between objectives and the start of the
decay. Two runs can only part at one of these, so every branch point is among them. A run passes through
each needed state whose key it has at that step; so a trunk is cut where another run leaves it, while no
key depends on where the cuts are. One piece therefore has one objective, and decays or does not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from biphase.errors import SpecError, StoreError
from biphase.files import SEAL, Store, read_sealed, sealed, write_json
from biphase.keys import Identities, Keyring, act_at, acts, decay_start, label, origin_step
from biphase.metadata import text, whole
from biphase.presets import corpus_of
from biphase.records import KEY_LENGTH, encode
from biphase.specs import BPE, Finetune, Hub, Objective, Pretrain, Study

PLAN = "plan.json"
VERSIONS = "plans"  # beside it: all that were ever run under the study's name


@dataclass(frozen=True)
class Root:
    """A start, before any step. Its results are the runs without stages."""

    key: str
    run: Pretrain  # a run that starts here; any other would start alike
    results: tuple[str, ...]


@dataclass(frozen=True)
class State:
    """A state somebody needs, and the piece that leads to it."""

    key: str
    run: Pretrain  # a run that passes through it; any other would train it alike
    step: int  # of that run
    first: int  # the step of that run where the piece begins
    parent: str | None  # the state the piece begins from; None: the start itself
    root: str
    results: tuple[str, ...]

    @property
    def steps(self) -> int:
        return self.step - self.first

    @property
    def tokens(self) -> int:
        return self.steps * self.run.batch_tokens

    @property
    def objective(self) -> Objective:
        return act_at(self.run, self.first).objective

    @property
    def decaying(self) -> bool:
        return self.first >= decay_start(self.run)

    @property
    def span(self) -> tuple[int, int]:
        """First and last step of the piece, counted from the root through all runs before."""
        before = origin_step(self.run)
        return before + self.first, before + self.step


@dataclass(frozen=True)
class Plan:
    """What a study needs, in the order in which it is best computed: depth first."""

    study: Study  # corpora looked up, so that it means the same wherever it is read
    question: str
    roots: dict[str, Root]
    states: dict[str, State]
    results: dict[str, str]  # name → key of a state or a root
    steps_written: int
    tasks: dict[str, str]  # name → key of a dataset to fine-tune on

    @cached_property
    def tuned(self) -> dict[str, Finetune]:
        """What each result is fine-tuned on, by key: the ends of runs on everything, steps on the way perhaps on less."""
        spec, ends = self.study.finetune, {self.results[run.name] for run in self.study.runs}
        if spec is None:
            return {}
        whole, part = spec.part(on_the_way=False), spec.part(on_the_way=True)
        return {model: whole if model in ends else part for model in self.results.values()}

    @property
    def pieces(self) -> int:
        return len(self.states)

    @property
    def steps_to_compute(self) -> int:
        return sum(state.steps for state in self.states.values())

    def left(
        self, done: Collection[str], *, told: Collection[str] = (), unscored: Collection[str] = ()
    ) -> list[str]:
        """The states to compute: what leads only to finished ones need not be there any more.

        One that is only `told`, since its weights stayed on another machine, need not be computed again, unless its
        weights are needed: it is `unscored`, or a state to compute begins from it.
        """
        wanted: set[str] = set()
        begun_from: set[str | None] = set()
        for key, state in reversed(self.states.items()):  # children come before their parents
            asked = key in begun_from or key in unscored or (state.results and key not in told)
            if key not in done and asked:
                wanted.add(key)
                begun_from.add(state.parent)
        return [key for key in self.states if key in wanted]

    def path(self, key: str) -> tuple[State, ...]:
        """The states from the root to this one, in order."""
        found: list[State] = []
        at: str | None = key
        while at in self.states:
            found.append(self.states[at])
            at = found[-1].parent
        return tuple(reversed(found))

    def to_json(self) -> dict[str, Any]:
        states = [
            {
                "key": state.key,
                "parent": state.parent,
                "root": state.root,
                "steps": list(state.span),
                "objective": label(state.objective),
                "decaying": state.decaying,
                "results": list(state.results),
            }
            for state in self.states.values()
        ]
        return {
            "question": self.question,
            "study": encode(self.study),
            "counts": {
                "runs": len(self.study.runs),
                "pieces": self.pieces,
                "steps_written": self.steps_written,
                "steps_to_compute": self.steps_to_compute,
            },
            "roots": [{"key": root.key, "results": list(root.results)} for root in self.roots.values()],
            "states": states,
            "results": self.results,
        }


def make_plan(study: Study, identities: Identities, question: str = "") -> Plan:
    """The tree of a study. The order of its runs decides the order of work and no key."""
    study = resolve(study)
    keyring = Keyring(identities)
    listed = dict.fromkeys(study.runs)
    everyone = dict.fromkeys(one for run in study.runs for one in _lineage(run))

    needed: set[str] = set()
    cuts: dict[str, set[int]] = {}  # by the key at step 0: only runs that start alike can meet
    for run in everyone:
        for step in _own_cuts(run, with_keep=run in listed):
            cuts.setdefault(keyring.at(run, 0), set()).add(step)
            needed.add(keyring.at(run, step))

    names: dict[str, list[str]] = {}
    for run in study.runs:
        for step, name in [*((step, f"{run.name}-{step}") for step in run.keep), (run.steps, run.name)]:
            names.setdefault(keyring.at(run, step), []).append(name)

    roots: dict[str, Root] = {}
    states: dict[str, State] = {}
    for run in everyone:
        parent, root = None, keyring.at(run, 0)
        if isinstance(run.start, Pretrain):
            parent, root = root, states[root].root
        elif root not in roots:
            roots[root] = Root(root, run, tuple(names.get(root, ())))
        first = 0
        for step in sorted(cuts.get(keyring.at(run, 0), ())):
            if step > run.steps or (key := keyring.at(run, step)) not in needed:
                continue
            if key not in states:
                states[key] = State(key, run, step, first, parent, root, tuple(names.get(key, ())))
            parent, first = key, step

    results = {name: key for key, several in names.items() for name in several}
    in_order = {name: results[name] for run in study.runs for name in _result_names(run)}
    written = sum(run.steps for run in everyone)
    tasks = _task_keys(study.finetune, identities) if study.finetune else {}
    return Plan(study, question, roots, dict(_depth_first(roots, states)), in_order, written, tasks)


def _task_keys(finetune: Finetune, identities: Identities) -> dict[str, str]:
    """The key of each dataset. One under two names would be one grid that is planned, counted and titled twice."""
    keys = {task.name: identities.task(task) for task in finetune.tasks}
    known: dict[tuple[str, str], str] = {}
    for task in finetune.tasks:
        name = known.setdefault((keys[finetune.lender(task).name], keys[task.name]), task.name)
        if name != task.name:
            raise SpecError(
                f"tasks {name!r} and {task.name!r} are the same data, asked and trained alike; leave out one of them"
            )
    return keys


def resolve(study: Study) -> Study:
    """The study with every corpus name replaced by the corpus it means."""
    known: dict[Pretrain, Pretrain] = {}

    def resolved(run: Pretrain) -> Pretrain:
        if run not in known:
            start = resolved(run.start) if isinstance(run.start, Pretrain) else run.start
            known[run] = replace(run, start=start, corpus=corpus_of(run) if run.corpus else "")
            if run.stages:
                _check_tokenizer(known[run])
        return known[run]

    return replace(study, runs=tuple(resolved(run) for run in study.runs))


def _check_tokenizer(run: Pretrain) -> None:
    """A model that knows one vocabulary learns nothing from the ids of another."""
    tokenizer = corpus_of(run).tokenizer
    if isinstance(run.start, Hub) and isinstance(tokenizer, BPE):
        raise SpecError(
            f"Pretrain {run.name!r}: {run.start.source} has a vocabulary of its own, and its corpus one trained on "
            f"the text; say Corpus(…, tokenizer=Pretrained({run.start.source!r}, revision=…))"
        )
    if isinstance(run.start, Pretrain) and corpus_of(run.start).tokenizer != tokenizer:
        raise SpecError(
            f"Pretrain {run.name!r}: its corpus is read by another tokenizer than that of {run.start.name!r}, which it "
            "goes on from; give both corpora the same tokenizer"
        )
    if isinstance(run.start, Pretrain) and isinstance(tokenizer, BPE) and run.corpus != run.start.corpus:
        raise SpecError(
            f"Pretrain {run.name!r}: a BPE is trained on each corpus anew, so its ids would mean other words than in "
            f"{run.start.name!r}; give both corpora one tokenizer: Pretrained('./folder')"
        )


def _lineage(run: Pretrain) -> list[Pretrain]:
    """The runs this one goes on from, oldest first, and itself."""
    before = _lineage(run.start) if isinstance(run.start, Pretrain) else []
    return [*before, run]


def _own_cuts(run: Pretrain, *, with_keep: bool) -> set[int]:
    """The steps of a run whose states it needs itself."""
    steps = {act.until for act in acts(run)} | {decay_start(run)}
    if with_keep:  # a run that is only gone on from has no results of its own
        steps |= set(run.keep)
    return steps - {0}


def _result_names(run: Pretrain) -> list[str]:
    return [*(f"{run.name}-{step}" for step in run.keep), run.name]


def _depth_first(roots: dict[str, Root], states: dict[str, State]) -> Iterator[tuple[str, State]]:
    below: dict[str, list[State]] = {}
    for state in states.values():
        below.setdefault(state.root if state.parent is None else state.parent, []).append(state)
    waiting = [state for root in reversed(roots) for state in reversed(below.get(root, []))]
    while waiting:
        state = waiting.pop()
        yield state.key, state
        waiting.extend(reversed(below.get(state.key, [])))


def save_plan(plan: Plan, store: Store) -> None:
    """Leave the resolved study and its tree in the store; `load` reads it back without the study file.

    Every version stays in `plans/`: an edited study, or another version of the code, has other states, and a worker that
    still computes the old ones must find its checkpoints.
    """
    folder = store.studies / plan.study.name
    said = sealed(plan.to_json())
    version = folder / VERSIONS / f"{said[SEAL][:KEY_LENGTH]}.json"
    version.parent.mkdir(parents=True, exist_ok=True)
    write_json(version, said)
    write_json(folder / PLAN, said)


def needed_states(store: Store) -> dict[str, dict[str, Any]]:
    """By key, the states that the studies of this store need, every version of them: what pruning must leave alone.

    A plan that cannot be read is an error and not an empty one, lest its states be pruned.
    """
    needed: dict[str, dict[str, Any]] = {}
    for path in sorted([*store.studies.glob(f"*/{PLAN}"), *store.studies.glob(f"*/{VERSIONS}/*.json")]):
        try:
            for state in read_sealed(path)["states"]:
                first, until = state["steps"]
                if not (whole(first) and whole(until) and text(state["root"]) and text(state["objective"])):
                    raise TypeError
                needed[state["key"]] = state | {"decaying": bool(state["decaying"])}
        except (KeyError, TypeError, ValueError):
            raise StoreError(f"{path} is no plan; make it again (biphase plan STUDY) or remove it") from None
    return needed
