"""What pretraining cost and how its losses fell: pieces, results and curves of a plan, from files alone. No torch.

FLOPs are the model's own, as `costs` counts them: the head only where it runs. Seconds were measured, on whatever
machine computed the piece; so curves over seconds compare objectives only where the machines were alike.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from dataclasses import dataclass, replace
from typing import Any

from biphase.errors import StoreError, one_line
from biphase.keys import decay_start, label, root_of
from biphase.metadata import LINES, WRONG, check_line, read_checkpoint_file
from biphase.presets import corpus_of
from biphase.report.recipes import RecipePhase, recipe_of
from biphase.specs import Corpus, Hub, Pretrain
from biphase.store import Store, read_file, read_verified
from biphase.study import ledger
from biphase.study.costs import flops_of
from biphase.study.plan import Plan, TrainingJob

POINTS = 400  # of a drawn loss curve
ROUNDED = 0.001  # seconds in a line of metrics
SAMPLE = 8  # lines that a point is the mean of, where it stands for more: a run logs every step


@dataclass(frozen=True)
class JobCost:
    """The work between two states."""

    key: str
    parent: str | None
    title: str  # clm 0 → 10,000
    results: tuple[str, ...]
    steps: tuple[int, int]
    decaying: bool
    tokens: int
    flops: float | None
    standing: str
    seconds: float | None  # of this piece alone; None: not computed, or nobody knows when it began
    joules: float | None  # alike
    devices: int
    device: str


@dataclass(frozen=True)
class Cost:
    """What it took to come from the root to a result."""

    tokens: int
    flops: float | None
    seconds: float | None
    device: str


@dataclass(frozen=True)
class Switch:
    """A step at which something changes: another objective, or the decay begins."""

    step: int
    what: str


@dataclass(frozen=True)
class Curve:
    """The losses on the way to a result. Long curves are thinned: a point is the mean of neighbours, or of some."""

    result: str
    steps: list[int]
    tokens: list[int]
    losses: list[float]
    objectives: list[str]  # of each point: losses of two objectives are not one curve
    heldout: dict[str, list[tuple[int, float]]]  # objective → step, loss
    switches: tuple[Switch, ...]
    complete: bool


def job_costs(plan: Plan, store: Store) -> list[JobCost]:
    """Every piece of a plan, in the order in which it is computed."""
    entries = {key: _trusted(entry, store) for key, entry in ledger.survey_jobs(plan, store).items()}
    return [_job_cost(entry, entries, store) for entry in entries.values()]


def _trusted(entry: ledger.JobStatus, store: Store) -> ledger.JobStatus:
    """A done state says what it cost; one that was changed since it was written says nothing."""
    if entry.standing != "done":
        return entry
    try:
        about = read_checkpoint_file(store.told(store.states / entry.state.key))
    except StoreError as wrong:
        return replace(entry, standing="failed", progress=None, error=str(wrong))
    return replace(entry, progress=about["progress"])


def _job_cost(entry: ledger.JobStatus, entries: dict[str, ledger.JobStatus], store: Store) -> JobCost:
    state, progress = entry.state, entry.progress or {}
    parent = (entries[state.parent].progress if state.parent else {"seconds": 0.0, "joules": 0.0}) or {}
    first, until = state.span
    before = parent.get("seconds")
    began = _began(entry, store) if progress and state.parent else before
    same = began is None or before is None or abs(before - began) < ROUNDED  # else: trained again since
    return JobCost(
        key=state.key,
        parent=state.parent,
        title=f"{label(state.objective)} {first:,} → {until:,}",
        results=state.results,
        steps=state.span,
        decaying=state.decaying,
        tokens=state.tokens,
        flops=flops_of(state),
        standing=entry.standing,
        seconds=_difference(progress.get("seconds"), began if before is None or not same else before),
        joules=_difference(progress.get("joules"), parent.get("joules")) if same else None,
        devices=int(progress.get("world", 1)),
        device=progress.get("machine", {}).get("device", ""),
    )


def _began(entry: ledger.JobStatus, store: Store) -> float | None:
    """The seconds on a state's clock where its own piece began, as its own lines have them."""
    with contextlib.suppress(StoreError):
        told = read_verified(store.told(store.states / entry.state.key), LINES)
        at = told.find(b'{"step": %d, "loss"' % entry.state.span[0])
        if at >= 0:
            return parse_line(told[at:].split(b"\n", 1)[0].decode(errors="replace")).get("seconds")
    return None


def _difference(end: float | None, begin: float | None) -> float | None:
    return None if end is None or begin is None or end < begin else end - begin


def cost(plan: Plan, store: Store, result: str) -> Cost:
    """The whole way from the root to a result."""
    path = plan.path(plan.results[result])
    flops = [flops_of(state) for state in path]
    try:
        progress = about_state(plan, store, result).get("progress", {})
    except StoreError:  # what was measured cannot be trusted; what was planned is known
        progress = {}
    return Cost(
        tokens=sum(state.tokens for state in path),
        flops=None if None in flops else sum(one for one in flops if one is not None),
        seconds=progress.get("seconds"),
        device=progress.get("machine", {}).get("device", ""),
    )


def about_state(plan: Plan, store: Store, result: str) -> dict[str, Any]:
    """What a finished result's state.json says; empty for a start, and before it is computed."""
    folder = store.told(store.states / plan.results[result])
    return read_checkpoint_file(folder) if store.has(folder) else {}


def curve(plan: Plan, store: Store, result: str, *, live: bool = False) -> Curve:
    """The losses on the way to a result, as far as they are known; `live` also reads what a worker is writing now."""
    found = texts(plan, store, result, live=live)
    try:
        return _curve(plan, result, found)
    except StoreError:  # a line that cannot be read: the file says nothing that can be trusted
        return _curve(plan, result, [])


def _curve(plan: Plan, result: str, found: list[str]) -> Curve:
    trained = _thinned([text for text in found if '"heldout"' not in text])
    heldout: dict[str, list[tuple[int, float]]] = {}
    for step, measured in ledger.heldout([parse_line(text) for text in found if '"heldout"' in text]).items():
        for objective, loss in measured.items():
            heldout.setdefault(objective, []).append((step, loss))
    end = plan.path(plan.results[result])
    return Curve(
        result,
        steps=[one.step for one in trained],
        tokens=[one.tokens for one in trained],
        losses=[one.loss for one in trained],
        objectives=[one.objective for one in trained],
        heldout=heldout,
        switches=switches(plan, result),
        complete=bool(end) and _last_step(found) >= end[-1].span[1],
    )


def switches(plan: Plan, result: str) -> tuple[Switch, ...]:
    """Where the objective changes on the way to a result, and where decays begin."""
    found = []
    path = plan.path(plan.results[result])
    for before, state in zip((None, *path), path, strict=False):
        if before and label(before.objective) != label(state.objective):
            found.append(Switch(state.span[0], label(state.objective)))
        if state.decaying and state.first == decay_start(state.run):  # later pieces only go on with it
            found.append(Switch(state.span[0], "decay"))
    return tuple(found)


# ---------------------------------------------------------------- lines of metrics


def texts(plan: Plan, store: Store, result: str, *, live: bool) -> list[str]:
    """The lines on the way to a result, not yet parsed. A file that was changed since it was written is passed over."""
    path = plan.path(plan.results[result])
    found: list[str] = []
    for state in reversed(path):  # a state holds the lines of its whole path
        folder = store.told(store.states / state.key)
        if not found and store.has(folder):
            with contextlib.suppress(StoreError):
                found = read_verified(folder, LINES).decode(errors="replace").splitlines()
    for state in path if live else ():
        # There is none, or the piece was finished a moment ago, or it is damaged: it is only looked at.
        with contextlib.suppress(OSError, UnicodeDecodeError, StoreError):
            told = read_file(ledger.live_file(plan, store, state.key)).decode().splitlines()
            for text in told[:-1]:  # the last one may be on its way to the disk
                parse_line(text)
            found = max(found, told, key=_last_step)  # it too begins at the root
    return [text for text in found if text.endswith("}")]  # the last one may be on its way to the disk


def _last_step(texts: list[str]) -> int:
    return next((parse_line(text)["step"] for text in reversed(texts) if text.endswith("}")), 0)


def parse_line(text: str) -> dict[str, Any]:
    """A line of metrics, checked when it is needed: of long curves few are."""
    try:
        return check_line(json.loads(text))
    except WRONG as wrong:
        raise StoreError(f"a line of metrics is not as biphase writes it ({one_line(wrong)[:200]})") from None


@dataclass(frozen=True)
class _Point:
    step: int
    tokens: int
    loss: float
    objective: str


def _thinned(texts: list[str]) -> list[_Point]:
    """About `POINTS` means over neighbours that have one objective."""
    width = max(1, -(-len(texts) // POINTS))
    points = []
    for first in range(0, len(texts), width):
        group = texts[first : first + width]
        objective = json.dumps(parse_line(group[0]).get("objective", ""))
        if all(objective in text for text in group):
            points += _mean(_spread(group))
        else:
            lines = [parse_line(text) for text in group]
            points += [
                point
                for _, some in itertools.groupby(lines, key=lambda line: line.get("objective", ""))
                for point in _mean(list(some))
            ]
    return points


def _spread(group: list[str]) -> list[dict[str, Any]]:
    """Some lines of a group, evenly spread, its first and last among them."""
    if len(group) <= SAMPLE:
        return [parse_line(text) for text in group]
    return [parse_line(group[round(n * (len(group) - 1) / (SAMPLE - 1))]) for n in range(SAMPLE)]


def _mean(lines: list[dict[str, Any]]) -> list[_Point]:
    """The mean of lines as a point at the last of them; none where no loss was finite."""
    known = [line for line in lines if line.get("loss") is not None]
    if not known:
        return []
    loss, last = sum(line["loss"] for line in known) / len(known), known[-1]
    return [_Point(last["step"], last.get("tokens", 0), loss, last.get("objective", ""))]


# ---------------------------------------------------------------- repetition
# How often runs read their corpus, and how much easier what they read is than what they never saw. No torch.
#
# A state tells how many rows it drew and how many epochs these were; so the rows of its corpus are known, and the epochs
# at every step of every run that reads the same. Reading counts from the root through all runs on the way, a run that
# began its data anew included: what matters is how often a model saw a text. Of several corpora the one being read counts.
#
# Masks are new in each epoch and causal targets are not, so a corpus that is read again gives MLM more to learn than CLM.


LATELY = 50  # steps before a held-out measurement whose training losses are its counterpart
OF_ITS_STAGE = 0.1  # at most: early in a stage, and in a decay, losses fall faster than they scatter

# What rows are counted of: a corpus, the published model whose tokenizer reads it (or none), tokens in a row.
Read = tuple[Corpus, Hub | None, int]


class Epochs:
    """The epochs of a plan's results, as far as any state of the store tells how large its corpus is."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self._plan, self._store = plan, store
        self._states: dict[Read, list[TrainingJob]] = {}
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
    root = root_of(run)
    return corpus_of(run), root.start if isinstance(root.start, Hub) else None, run.packing.length


def _rows(store: Store, state: TrainingJob) -> int:
    """In the corpus of a state, by its own account; 0: it gives none, or none that can be trusted."""
    folder = store.told(store.states / state.key)
    if not store.has(folder):
        return 0
    try:
        about = read_checkpoint_file(folder)
    except StoreError:
        return 0
    epochs, drawn = about.get("epochs"), about["progress"].get("draw")
    return round(drawn / epochs) if epochs and drawn else 0


@dataclass(frozen=True)
class LossGap:
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


def gaps(plan: Plan, store: Store, result: str, *, live: bool = False) -> list[LossGap]:
    """At every held-out measurement on the way to a result. A moving masking ratio has no counterpart, so no gap."""
    try:
        return _gaps(plan, result, texts(plan, store, result, live=live))
    except StoreError:  # a line that cannot be read: the file says nothing that can be trusted
        return []


def _gaps(plan: Plan, result: str, lines: list[str]) -> list[LossGap]:
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
            found += [] if training is None else [LossGap(step, span.label, span.first, training, heldout)]
    return found


def _turns(plan: Plan, result: str) -> set[int]:
    """The steps from the root at which losses take another course: a run, an objective or a decay begins."""
    path = plan.path(plan.results[result])
    begun = {state.span[0] for state in path if state.first == 0}
    return begun | {one.step for one in switches(plan, result)}


def _of(measured: dict[str, float], span: RecipePhase) -> float | None:
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
