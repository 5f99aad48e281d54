"""Runs a study with workers that share a folder and nothing else, on machines that treat them badly.

    python fleet_driver.py STUDY STORE WORKERS STALLS SEED

Each worker is a fork that believes to be on a machine of its own: another host name, a wall clock that is hours off,
another monotonic clock, and a file system where renames, links and listings take up to a tenth of a second, and where
a listing is as old as that. STALLS times one that holds a job is stopped (SIGSTOP) until another has taken the job
over, and goes on in the middle of the other's work or after it. Leases live for seconds instead of a minute.
Prints what happened as JSON; every rename that published something stands in STORE/published.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import biphase.data.tokenize
import biphase.leases
import biphase.study.describe
import biphase.study.worker
from biphase.cli import app
from biphase.leases import Leases

HOURS_OFF = 30
SLOWEST = 0.1
Leases.__init__.__kwdefaults__.update(beat_seconds=0.5, stale_seconds=3.0)


def believe_in_another_machine(number, dice):
    _, boot, namespace = biphase.leases.machine()
    biphase.leases.machine = lambda: (f"machine{number}", boot, namespace)
    wall, gmtime, steady = time.time, time.gmtime, time.monotonic
    skew, offset = dice.uniform(-HOURS_OFF, HOURS_OFF) * 3600, dice.uniform(0, 1e6)
    time.time = lambda: wall() + skew
    time.gmtime = lambda seconds=None: gmtime(time.time() if seconds is None else seconds)
    time.monotonic = lambda: steady() + offset


def slow_down(dice, store):
    """Delays before and after, so that others see what happened late and we hear of it late."""

    def late(function, record=None):
        def slowly(*arguments, **options):
            time.sleep(dice.uniform(0, SLOWEST / 2))
            result = function(*arguments, **options)
            if record:
                record(*arguments)
            time.sleep(dice.uniform(0, SLOWEST / 2))
            return result

        return slowly

    def published(source, target, **_):
        if Path(target).parent.name in ("checkpoints", "trials"):
            with (store / "published").open("ab", buffering=0) as file:
                file.write(f"{Path(target).name}\n".encode())

    class Listing(list):
        """What was there a moment ago."""

        def __enter__(self):
            return iter(self)

        def __exit__(self, *_):
            pass

        def close(self):
            pass

    listed, names = os.scandir, os.listdir
    os.scandir = late(lambda *where: Listing(listed(*where)))
    os.listdir = late(names)
    os.rename = late(os.rename, published)
    os.link, os.unlink, os.replace = late(os.link), late(os.unlink), late(os.replace)


def worker(number, study, store, dice):
    """Fork one; gives its process id."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        with Path(f"{store}/worker{number}.log").open("ab", buffering=0) as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        believe_in_another_machine(number, dice)
        slow_down(dice, Path(store))
        app(["run", study, "--store", store, "--checkpoint", "100", "--loaders", "0"], standalone_mode=False)
        code = 0
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def stall(leases, workers, dice):
    """Stop a worker in the middle of a job until the job is another's, and a little longer. True if it was."""
    held = [(key, one) for key, one in leases.holders().items() if one.pid in workers]
    if not held:
        return False
    key, victim = dice.choice(held)
    before = len(leases.takeovers())
    os.kill(victim.pid, signal.SIGSTOP)
    try:
        until = time.monotonic() + 15
        while time.monotonic() < until and len(leases.takeovers()) == before:
            time.sleep(0.05)
        time.sleep(dice.choice([0.0, 0.5, 3.0]))  # in the middle of the thief's work, or after it
    finally:
        os.kill(victim.pid, signal.SIGCONT)
    return any(event["key"] == key for event in leases.takeovers()[before:])


def main():
    study, store, count, stalls, seed = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:6])
    dice = random.Random(seed)
    Path(store).mkdir(parents=True, exist_ok=True)
    workers = [worker(number, study, store, random.Random(seed * 100 + number)) for number in range(count)]
    codes, taken, until = {}, 0, time.monotonic() + 400
    while len(codes) < count and time.monotonic() < until:
        for pid in set(workers) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        if taken < stalls and len(codes) == 0:
            taken += stall(Leases(Path(store) / "leases"), workers, dice)
        time.sleep(dice.uniform(0.05, 0.5))
    for pid in set(workers) - set(codes):
        os.kill(pid, signal.SIGKILL)
    print(json.dumps({"codes": [codes.get(pid, "hangs") for pid in workers], "taken": taken}))


if __name__ == "__main__":
    main()
