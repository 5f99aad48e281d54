"""How often runs read their corpus, and how much easier what they read is than what they never saw. No torch.

A state tells how many rows it drew and how many epochs these were; so the rows of its corpus are known, and the epochs
at every step of every run that reads the same. Reading counts from the root through all runs on the way, a run that
began its data anew included: what matters is how often a model saw a text. Of several corpora the one being read counts.

Masks are new in each epoch and causal targets are not, so a corpus that is read again gives MLM more to learn than CLM.
"""

from __future__ import annotations

from dataclasses import dataclass

from biphase.errors import StoreError
from biphase.files import Store
from biphase.metadata import read_state
from biphase.presets import corpus_of
from biphase.report.pretraining import parse_line, switches, texts
from biphase.report.recipes import Span, recipe_of
from biphase.specs import Corpus, Hub, Pretrain
from biphase.study.plan import Plan, State

LATELY = 50  # steps before a held-out measurement whose training losses are its counterpart
OF_ITS_STAGE = 0.1  # at most: early in a stage, and in a decay, losses fall faster than they scatter

# What rows are counted of: a corpus, the published model whose tokenizer reads it (or none), tokens in a row.
Read = tuple[Corpus, Hub | None, int]


class Epochs:
    """The epochs of a plan's results, as far as any state of the store tells how large its corpus is."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self._states: dict[Read, list[State]] = {}
        for state in plan.states.values():
            self._states.setdefault(_read(state.run), []).append(state)
        self._rows: dict[Read, int | None] = {}

    def at(self, result: str, step: int | None = None) -> float | None:
        """How often a result had read its corpus, by now or by a step counted from the root; None: not known."""
        path = [
            one for one in self._plan.path(self._plan.results[result]) if step is None or one.span[0] < step
        ]
        epochs = 0.0
        for state in path:
            first, until = state.span
            if _read(state.run)[0] == _read(path[-1].run)[0]:
                rows = self._corpus_rows(_read(state.run))
                if rows is None:
                    return None
                steps = (until if step is None else min(until, step)) - first
                epochs += steps * state.run.rows_per_step / rows
        return epochs if path else None

    def tokens(self, result: str) -> int | None:
        """Of one epoch of the corpus that a result reads last: whole rows, as they are drawn."""
        path = self._plan.path(self._plan.results[result])
        rows = self._corpus_rows(_read(path[-1].run)) if path else None
        return None if rows is None else rows * path[-1].run.packing.length

    def _corpus_rows(self, read: Read) -> int | None:
        if read not in self._rows:
            found = (_rows(self._store, state) for state in self._states[read])
            self._rows[read] = next((rows for rows in found if rows), None)
        return self._rows[read]


def _read(run: Pretrain) -> Read:
    root = run
    while isinstance(root.start, Pretrain):
        root = root.start
    return corpus_of(run), root.start if isinstance(root.start, Hub) else None, run.packing.length


def _rows(store: Store, state: State) -> int:
    """In the corpus of a state, by its own account; 0: it gives none, or none that can be trusted."""
    folder = store.told(store.states / state.key)
    if not store.has(folder):
        return 0
    try:
        about = read_state(folder)
    except StoreError:
        return 0
    epochs, drawn = about.get("epochs"), about["progress"].get("draw")
    return round(drawn / epochs) if epochs and drawn else 0


@dataclass(frozen=True)
class Gap:
    """Training and held-out loss of the objective that is being trained, at one step from the root."""

    step: int
    objective: str  # "mlm 40%"
    begins: int  # the step at which that objective began
    training: float
    heldout: float

    @property
    def nats(self) -> float:
        """Below 0: what is trained on is easier than what is held out."""
        return self.training - self.heldout


def gaps(plan: Plan, store: Store, result: str, *, live: bool = False) -> list[Gap]:
    """At every held-out measurement on the way to a result. A moving masking ratio has no counterpart, so no gap."""
    try:
        return _gaps(plan, result, texts(plan, store, result, live=live))
    except StoreError:  # a line that cannot be read: the file says nothing that can be trusted
        return []


def _gaps(plan: Plan, result: str, lines: list[str]) -> list[Gap]:
    spans, turns = recipe_of(plan, result).spans, _turns(plan, result)
    found = []
    for place, text in enumerate(lines):
        if '"heldout"' not in text:
            continue
        measured = parse_line(text)
        step = measured["step"]
        span = next((one for one in spans if one.first < step <= one.until), None)
        heldout = _of(measured.get("heldout", {}), span) if span else None
        if span and heldout is not None:
            since = max(turn for turn in turns if turn < step)
            training = _lately(lines, place, step, since)
            found += [] if training is None else [Gap(step, span.label, span.first, training, heldout)]
    return found


def _turns(plan: Plan, result: str) -> set[int]:
    """The steps from the root at which losses take another course: a run, an objective or a decay begins."""
    path = plan.path(plan.results[result])
    begun = {state.span[0] for state in path if state.first == 0}
    return begun | {one.step for one in switches(plan, result)}


def _of(measured: dict[str, float], span: Span) -> float | None:
    """The held-out loss of an objective: named by its label, or shorter (mlm40 for mlm 40%)."""
    said = span.label
    return measured.get(said, measured.get(said.replace(" ", "").replace("%", "")))


def _lately(lines: list[str], place: int, step: int, since: int) -> float | None:
    """The mean training loss over the steps that lead to a measurement; nothing else of a long curve is parsed."""
    steps = max(1, min(LATELY, int(OF_ITS_STAGE * (step - since))))
    losses = []
    for before in range(place - 1, -1, -1):
        if '"heldout"' in lines[before]:
            continue
        line = parse_line(lines[before])
        if line["step"] <= since or (losses and line["step"] <= step - steps):
            break
        if line.get("loss") is not None:
            losses.append(line["loss"])
    return sum(losses) / len(losses) if losses else None
