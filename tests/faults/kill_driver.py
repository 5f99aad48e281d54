"""Kills a study at random moments until it was killed often enough, and lets every store that was begun finish.

    python kill_driver.py STUDY FOLDER KILLS SEED [grid]

The first store in FOLDER is not disturbed. Then, round after round, a new one is begun. Its workers, and then its
reports, are killed with SIGKILL after a random time and started again until the study is complete. With `grid`, the new
stores begin with the shards and checkpoints of the first, so that kills fall into fine-tunings. Prints as JSON how many
kills fell into what, and the stores.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.attempts import attempt, code_of, import_the_rest
from faults.kinds import plan_of

from biphase.leases import Leases
from biphase.store import Store
from biphase.study.ledger import finetunings
from biphase.study.plan import Plan

REPORTS = 4  # kills in reports, of each store


class Killer:
    def __init__(self, study: str, folder: Path, seed: int, *, grid: bool) -> None:
        self.study, self.folder, self.chance, self.grid = study, folder, random.Random(seed), grid
        self.fell: Counter[str] = Counter()
        self.codes: Counter[int] = Counter()  # of attempts that ended before they were killed

    def one_store(self, number: int, kills: int) -> str:
        """Begin a store, kill what works on it up to `kills` times, finish it."""
        store = Store(self.folder / f"killed-{number}")
        if self.grid and number:
            for kind in ("checkpoints", "shards"):
                shutil.copytree(self.folder / "killed-0" / kind, store.root / kind)
        run = ["run", self.study, "--store", str(store.root), "--checkpoint", "2", "--quiet"]
        report = ["report", self.study, "--store", str(store.root), "--no-print"]
        plan = plan_of(Path(self.study), store)
        done = 0
        while done < kills and not whole(plan, store):
            workers = self.chance.choice([1, 1, 2])
            loaders = [["--loaders", str(self.chance.randrange(3))] for _ in range(workers)]
            done += self.kill([run + each for each in loaders], plan, store)
        for _ in range(min(REPORTS, kills - done)):
            done += self.kill([report], plan, store, "report")
        for words in (run, report):
            self.codes[code_of(attempt(words, self.folder / "log"))] += 1
        return str(store.root)

    def kill(self, each: list[list[str]], plan: Plan, store: Store, phase: str = "") -> int:
        children = [attempt(words, self.folder / f"log-{place}") for place, words in enumerate(each)]
        time.sleep(self.chance.choice([0.3, 0.8, 1.6]) * self.chance.uniform(0.1, 1.5))
        killed = 0
        for child in children:
            os.kill(child, signal.SIGKILL)
            at = phase or phase_of(child, plan, store)
            code = code_of(child)
            if code == -signal.SIGKILL:
                killed += 1
                self.fell[at] += 1
            else:
                self.codes[code] += 1
        return killed


def phase_of(pid: int, plan: Plan, store: Store) -> str:
    """What a process was doing, by the leases it left."""
    held = [key for key, holder in Leases(store.leases).holders().items() if holder.pid == pid]
    if any(key.startswith("shards-") for key in held):
        return "tokenize"
    for key in held:
        if key in plan.jobs:
            run = plan.jobs[key].run.name
            shared = key in {job.key for job in plan.path(plan.results["clm"])}
            return "trunk" if shared else "branch" if run == "two" else "go on"
    return "fine-tune" if held else "between jobs"


def whole(plan: Plan, store: Store) -> bool:
    trials = [store.trials / trial.key for training in finetunings(plan) for trial in training.trials]
    return all(
        store.has(path) for path in [*trials, *(store.checkpoints / key for key in plan.results.values())]
    )


def main() -> None:
    study, folder, kills, seed, *grid = (
        sys.argv[1],
        Path(sys.argv[2]),
        *map(int, sys.argv[3:5]),
        *sys.argv[5:],
    )
    folder.mkdir(parents=True, exist_ok=True)
    import_the_rest(study, str(folder / "none"))
    killer = Killer(study, folder, seed, grid=bool(grid))
    stores = [killer.one_store(0, 0)]
    while killer.fell.total() < kills:
        stores.append(killer.one_store(len(stores), kills - killer.fell.total()))
    codes = {str(code): count for code, count in killer.codes.items()}
    print(json.dumps({"kills": killer.fell.total(), "fell": killer.fell, "codes": codes, "stores": stores}))


if __name__ == "__main__":
    main()
