"""Kills a study at random moments until it was killed often enough, and lets every store that was begun finish.

    python kill_driver.py STUDY FOLDER KILLS SEED

The first store in FOLDER is not disturbed. Then, round after round, a new one is begun. Its workers, and then its
reports, are killed with SIGKILL after a random time and started again until the study is complete. Prints as JSON the
number of kills, the exit codes of what ended before it was killed, and the stores.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.attempts import attempt, code_of, import_the_rest

REPORTS = 4  # kills in reports, of each store


class Killer:
    def __init__(self, study: str, folder: Path, seed: int) -> None:
        self.study, self.folder, self.chance = study, folder, random.Random(seed)
        self.kills = 0
        self.codes: set[int] = set()  # of attempts that ended before they were killed

    def one_store(self, number: int, kills: int) -> str:
        """Begin a store, kill what works on it up to `kills` times, finish it."""
        store = str(self.folder / f"killed-{number}")
        run = ["run", self.study, "--store", store, "--checkpoint", "2", "--quiet"]
        report = ["report", self.study, "--store", store, "--no-print"]
        enough = self.kills + kills
        complete = False
        while self.kills < enough and not complete:
            workers = self.chance.choice([1, 1, 2])
            loaders = [["--loaders", str(self.chance.randrange(3))] for _ in range(workers)]
            complete = self.kill([run + each for each in loaders])
        for _ in range(min(REPORTS, enough - self.kills)):
            self.kill([report])
        for words in (run, report):
            self.codes.add(code_of(attempt(words, self.folder / "log")))
        return store

    def kill(self, each: list[list[str]]) -> bool:
        """Start attempts and kill them after a while; was one of them done before?"""
        children = [attempt(words, self.folder / f"log-{place}") for place, words in enumerate(each)]
        time.sleep(self.chance.choice([0.3, 0.8, 1.6]) * self.chance.uniform(0.1, 1.5))
        for child in children:
            os.kill(child, signal.SIGKILL)
        codes = [code_of(child) for child in children]
        self.kills += codes.count(-signal.SIGKILL)
        ended = {*codes} - {-signal.SIGKILL}
        self.codes |= ended
        return bool(ended)


def main() -> None:
    study, folder, kills, seed = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    folder.mkdir(parents=True, exist_ok=True)
    import_the_rest(study, str(folder / "none"))
    killer = Killer(study, folder, seed)
    stores = [killer.one_store(0, 0)]
    while killer.kills < kills:
        stores.append(killer.one_store(len(stores), kills - killer.kills))
    print(json.dumps({"kills": killer.kills, "codes": sorted(killer.codes), "stores": stores}))


if __name__ == "__main__":
    main()
