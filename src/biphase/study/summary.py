"""What `run` and `status` say of a study: where it stands, what came out, what to type next. No torch."""

from __future__ import annotations

from typing import Any

from biphase.data.identity import CARD, shards_key
from biphase.errors import BiphaseError
from biphase.files import Store, read_json
from biphase.leases import Leases
from biphase.presets import corpus_of
from biphase.study import ledger
from biphase.study.costs import piece_flops, shape_of
from biphase.study.ledger import Entry
from biphase.study.plan import Plan, State
from biphase.wording import duration

BAR = 20
CURVE = 20  # columns of a curve
BLOCKS = "█▇▆▅▄▃▂▁"


def opening(plan: Plan, store: Store) -> str:
    """The first lines of a run."""
    done = len(ledger.done_keys(plan, store))
    question = f": {plan.question}" if plan.question else ""
    return f"{plan.study.name}{question}\n  {plan.pieces} pieces, {done} done"


def closing(plan: Plan, store: Store, failed: dict[str, str], *, stopped: bool, command_path: str) -> str:
    """The last lines of a run: results, and how to go on."""
    done = ledger.done_keys(plan, store)
    left = plan.left(done)
    lines = results_table(plan, store)
    lines += [f"failed  {key[:6]}  {error}" for key, error in failed.items()]
    again = f"To go on: biphase run {command_path}"
    if stopped:
        lines.append(f"stopped. {len(done)} of {plan.pieces} pieces done, nothing lost. {again}")
    elif failed:
        lines.append(f"{len(done)} of {plan.pieces} pieces done, {len(failed)} failed. {again}")
    elif left:
        lines.append(f"{len(done)} of {plan.pieces} pieces done. {again}")
    else:
        lines.append(f"all {plan.pieces} pieces are done; checkpoints are in {store.states}")
        if plan.study.finetune:
            count = plan.study.finetune.trainings * len(plan.results)
            lines.append(f"its {count:,} fine-tunings are planned but cannot be run by this version yet")
    return "\n".join(lines)


def results_table(plan: Plan, store: Store) -> list[str]:
    """Held-out losses of every finished result, with the curve that led there."""
    rows = []
    for name in plan.results:
        measured = ledger.heldout(ledger.curve(plan, store, name))
        if plan.results[name] in plan.states and store.has(store.states / plan.results[name]) and measured:
            last = measured[max(measured)]
            curves = {
                objective: [one[objective] for one in measured.values() if objective in one]
                for objective in last
            }
            progress = read_json(store.states / plan.results[name] / "state.json")
            rows.append((name, last, curves, progress["epochs"]))
    if not rows:
        return []
    wide = max(len("held-out loss, nats"), *(len(name) for name, *_ in rows))
    cell = 6 + CURVE
    lines = ["", f"  {'held-out loss, nats':<{wide}}  {'causal':<{cell}}  {'masked 40%':<{cell}}  epochs"]
    for name, last, curves, epochs in rows:
        cells = [f"{last[what]:.3f} {sparkline(curves[what]):<{CURVE}}" for what in ("clm", "mlm40")]
        lines.append(f"  {name:<{wide}}  {'  '.join(cells)}  {epochs:.2f}")
    return [*lines, *_entropy_line(plan, store), ""]


def _entropy_line(plan: Plan, store: Store) -> list[str]:
    lines = []
    for corpus in dict.fromkeys(corpus_of(run) for run in plan.study.runs):
        card = store.shards / shards_key(corpus, store) / CARD
        if card.is_file():
            nats = read_json(card)["unigram_entropy"]
            lines.append(
                f"  {corpus.name}: a model that knows only how often each token occurs reaches {nats:.3f}"
            )
    return lines


def sparkline(values: list[float]) -> str:
    """A curve in one line of blocks, from its highest value to its lowest."""
    if len(values) > CURVE:
        values = [values[round(i * (len(values) - 1) / (CURVE - 1))] for i in range(CURVE)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((high - value) / span * 8))] for value in values)


def status_text(plan: Plan, store: Store, *, command_path: str) -> str:
    """What `biphase status` prints."""
    entries = ledger.survey(plan, store)
    done = sum(entry.standing == "done" for entry in entries.values())
    filled = round(BAR * done / max(1, len(entries)))
    left = ledger.seconds_left(entries, _cost)
    unfinished = plan.left([key for key, entry in entries.items() if entry.standing == "done"])
    to_go = f"   about {duration(left)} left" if left and unfinished else ""
    lines = [f"{plan.study.name}   {'█' * filled}{'░' * (BAR - filled)}  {done}/{len(entries)} pieces{to_go}"]
    for key, entry in entries.items():
        name = ", ".join(entry.state.results) or entry.state.run.name
        if entry.standing == "running" and entry.holder:
            lines.append(f"  running {key[:6]}  {name}  on {entry.holder.host}, process {entry.holder.pid}")
        if entry.standing == "failed":
            lines.append(f"  failed  {key[:6]}  {name}  {entry.error}")
    takeovers = len(Leases(store.leases).takeovers())
    if takeovers:
        lines.append(f"  {takeovers} jobs of this store were taken over from workers that died or stalled")
    if unfinished:
        lines.append(f"next: biphase run {command_path}")
    return "\n".join([*lines, *results_table(plan, store)])


def status_json(plan: Plan, store: Store) -> dict[str, Any]:
    """The same for a program."""
    entries = ledger.survey(plan, store)
    return {
        "study": plan.study.name,
        "seconds_left": ledger.seconds_left(entries, _cost),
        "takeovers": len(Leases(store.leases).takeovers()),
        "states": [_entry_json(entry) for entry in entries.values()],
        "heldout": {name: ledger.heldout(ledger.curve(plan, store, name)) for name in plan.results},
    }


def _entry_json(entry: Entry) -> dict[str, Any]:
    return {
        "key": entry.state.key,
        "results": list(entry.state.results),
        "standing": entry.standing,
        "steps": list(entry.state.span),
        "progress": entry.progress,
        "worker": f"{entry.holder.host}:{entry.holder.pid}" if entry.holder else None,
        "error": entry.error or None,
    }


def _cost(state: State) -> float | None:
    try:
        shape = shape_of(state.run)
    except BiphaseError:
        return None
    return piece_flops(state, shape) if shape else None
