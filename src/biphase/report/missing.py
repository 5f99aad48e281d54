"""What a report cannot speak of: leaves and pieces that are not there, that failed, or that cannot be trusted, and why."""

from __future__ import annotations

from dataclasses import dataclass

from biphase.report.evidence import Evidence, Grid
from biphase.report.runs import Run
from biphase.study import ledger
from biphase.wording import counted


@dataclass(frozen=True)
class Gap:
    """A result and a task of which some leaves are missing."""

    result: str
    task: str
    missing: int
    of: int


@dataclass(frozen=True)
class Loss:
    """One leaf or state that failed or cannot be read."""

    title: str  # result · task · rate · seed, or the results or the run that a state is for
    key: str
    why: str


@dataclass(frozen=True)
class Missing:
    done: int
    of: int
    gaps: tuple[Gap, ...]
    failed: tuple[Loss, ...]
    unreadable: tuple[Loss, ...]
    untrained: tuple[str, ...]  # results whose pretraining is not done
    bare: int = 0  # scores that are there without their values by example

    @property
    def count(self) -> int:
        return self.of - self.done

    @property
    def any(self) -> bool:
        return bool(self.count or self.failed or self.unreadable or self.untrained or self.bare)

    def words(self) -> str:
        """One line for the top of a report; empty where nothing is missing."""
        if not self.any:
            return ""
        parts = []
        if self.count:
            parts.append(
                f"{self.done:,} of {counted(self.of, 'score')}; {self.count:,} missing. "
                "What is said here rests on the seeds that are complete; nothing is filled in."
            )
        if self.untrained:
            parts.append(f"{counted(len(self.untrained), 'result')} not pretrained yet.")
        if self.failed:
            parts.append(f"{counted(len(self.failed), 'job')} failed.")
        if self.unreadable:
            parts.append(
                f"{counted(len(self.unreadable), 'file')} cannot be read and {'counts' if len(self.unreadable) == 1 else 'count'} as missing."
            )
        if self.bare:
            parts.append(
                f"{counted(self.bare, 'score')} came without {'its' if self.bare == 1 else 'their'} values by example, "
                "so nothing is said of other test examples there."
            )
        return " ".join(parts)


def missing(evidence: Evidence, found: list[Run]) -> Missing:
    """The gaps of a study, in the order of its results and tasks."""
    done, of = evidence.count
    places: dict[str, str] = {}
    failed = _failed_pieces(evidence)
    for grid in evidence.grids.values():
        for key, title in _titles(grid).items():
            places[key] = title
            if key in grid.missing and key not in evidence.unreadable:
                failed.append(Loss(title, key, grid.missing[key]))
    order = [run.name for run in found]
    grids = sorted(evidence.grids.values(), key=lambda grid: order.index(grid.result))
    return Missing(
        done=done,
        of=of,
        gaps=tuple(
            Gap(one.result, one.task.name, one.of - one.done, one.of) for one in grids if one.done < one.of
        ),
        failed=tuple(failed),
        unreadable=(
            *(Loss(run.name, run.key, run.wrong) for run in found if run.wrong),
            *(Loss(places.get(key, key), key, why) for key, why in evidence.unreadable.items()),
        ),
        untrained=tuple(run.name for run in found if run.standing != "done" and not run.wrong),
        bare=len(evidence.bare),
    )


def _failed_pieces(evidence: Evidence) -> list[Loss]:
    """Pieces of pretraining that failed; what depends on them waits, so their reason is the one that counts."""
    store = evidence.store
    return [
        Loss(", ".join(entry.state.results) or entry.state.run.name, key, entry.error)
        for key, entry in ledger.survey(evidence.plan, store).items()
        if entry.standing == "failed" and not store.knows(store.states / key)
    ]


def _titles(grid: Grid) -> dict[str, str]:
    return {
        grid.keys[row][column]: f"{grid.result} · {grid.task.name} · lr {lr:g} · seed {seed}"
        for row, lr in enumerate(grid.lrs)
        for column, seed in enumerate(grid.seeds)
        if grid.keys[row][column]
    }
