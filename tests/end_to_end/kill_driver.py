"""Runs a study again and again and kills it with SIGKILL at random moments, then lets it finish.

    python kill_driver.py STUDY STORE KILLS SEED

Everything is imported once and each attempt is a fork, so that the moments fall into the work and not into
imports. Attempts differ in loaders and in the number of workers. Prints what happened as JSON.
"""

import contextlib
import json
import os
import random
import signal
import sys
import time

import pyarrow.parquet  # noqa: F401

import biphase.data.tokenize
import biphase.study.describe
import biphase.study.worker  # noqa: F401
from biphase.cli import app


def attempt(study, store, loaders):
    """Fork a worker; gives its process id."""
    child = os.fork()
    if child:
        return child
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    if "SHOW" not in os.environ:
        os.dup2(quiet, 2)
    code = 1
    try:
        app(
            ["run", study, "--store", store, "--checkpoint", "2", "--loaders", str(loaders)],
            standalone_mode=False,
        )
        code = 0
    except SystemExit as end:
        code = end.code or 0
    finally:
        os._exit(code)


def import_the_rest(study, store):
    """What a verb imports when it is called: half a second that would otherwise be what is killed."""
    quiet, shown = os.open(os.devnull, os.O_WRONLY), os.dup(1)
    os.dup2(quiet, 1)
    with contextlib.suppress(SystemExit):
        app(["plan", study, "--store", store], standalone_mode=False)
    sys.stdout.flush()
    os.dup2(shown, 1)


def main():
    study, store, kills, seed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    import_the_rest(study, store)
    chance = random.Random(seed)
    killed = 0
    codes = []
    while killed < kills:
        workers = [attempt(study, store, chance.randrange(3)) for _ in range(chance.choice([1, 1, 2]))]
        time.sleep(chance.uniform(0.05, 0.7))
        for worker in workers:
            os.kill(worker, signal.SIGKILL)
            _, status = os.waitpid(worker, 0)
            if os.WIFSIGNALED(status):
                killed += 1
            else:
                codes.append(os.WEXITSTATUS(status))
        if len(codes) > 3:
            break  # the study finished before enough kills fell into it
    last = attempt(study, store, 1)
    _, status = os.waitpid(last, 0)
    print(json.dumps({"killed": killed, "early": len(codes), "code": os.waitstatus_to_exitcode(status)}))


if __name__ == "__main__":
    main()
