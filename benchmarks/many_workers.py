"""Many workers on one store of 20,000 trials: how evenly they divide them, and how long they take to find their work.

    python benchmarks/many_workers.py STORE --workers 32 200

Plan, store, leases and the choice of the next fine-tuning are the real ones, of as many `Worker`s in this process. Only
time is invented: a fine-tuning takes `--tune` seconds, and a worker that turns to another model or dataset reads it
first. Efficiency is the share of the workers' time that is fine-tuning. Then `plan`, `status` and the start of a worker
are measured in processes of their own. Seconds are of CPU, so another load on the machine changes them little.
"""

import argparse
import heapq
import resource
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from synthetic_leaves import Invented, Ledger
from synthetic_ledger import STUDY, flat_truth
from synthetic_states import as_json, put, write_states

from biphase.metadata import TRIAL
from biphase.store import Store
from biphase.study.ledger import keys_with_weights
from biphase.study.load import load
from biphase.study.plan import PLAN, Plan, identities, make_plan, save_plan
from biphase.study.worker import Worker
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions

START = """
import sys
from pathlib import Path
from biphase.cli.app import planned
from biphase.study.worker import Worker
from biphase.training.distributed import ALONE
from biphase.training.options import RuntimeOptions
plan, store, found = planned(Path(sys.argv[1]), Path(sys.argv[2]))
worker = Worker(plan, store, found, ALONE, RuntimeOptions(quiet=True), wanted=set())
_, order = worker._choose(False)
assert order["do"] == "tune", order
"""


def worker_of(plan: Plan, store: Store) -> Worker:
    ranks = Ranks(0, 1, torch.device("cpu"))
    return Worker(
        plan, store, identities(store), ranks, RuntimeOptions(quiet=True), wanted=set(), say=lambda text: None
    )


def simulate(plan: Plan, ledger: Ledger, count: int, costs: argparse.Namespace) -> None:
    """Let `count` workers do all fine-tunings in invented time, and print how they divided them."""
    store = ledger.store
    shutil.rmtree(store.trials, ignore_errors=True)
    workers = [worker_of(plan, store) for _ in range(count)]
    done, invented = keys_with_weights(plan, store), {}
    held, tasks = [None] * count, [set() for _ in range(count)]
    models, own, waits = [""] * count, Counter(), []
    spent, end, cpu = 0.0, 0.0, time.process_time()
    results = {key: name for name, key in plan.results.items()}
    events = [(0.0, number) for number in range(count)]
    while events:
        now, number = heapq.heappop(events)
        worker = workers[number]
        if lease := held[number]:
            training = worker.open[lease.key]
            for trial in training.trials:
                place = training.model, trial.task.name
                if place not in invented:
                    invented = {place: Invented(ledger, results[training.model], trial.task)} | invented
                about, _ = invented[place].trial(training, trial.key)
                put(store.trials / trial.key, {TRIAL: as_json(about)})  # fails if it is there already
            worker._forget(training)
            lease.release()
            end = now
        began = time.process_time()
        held[number] = worker._take_finetuning(done)
        waits.append(time.process_time() - began)
        if held[number] is None:
            continue
        training = worker.open[held[number].key]
        took = costs.tune
        took += costs.model if training.model != models[number] else 0
        took += costs.dataset if training.task not in tasks[number] else 0
        models[number] = training.model
        tasks[number].add(training.task)
        own[number] += 1
        spent += costs.tune
        heapq.heappush(events, (now + took, number))
    trials = sum(own.values())
    waits.sort()
    print(
        f"{count} workers: {trials:,} fine-tunings, each once; efficiency {spent / (count * end):.0%}; "
        f"{min(own.values())} to {max(own.values())} a worker; datasets read {sum(map(len, tasks)) / count:.1f} "
        f"a worker; next one found in {waits[len(waits) // 2] * 1e3:.1f} ms (median), {waits[-1] * 1e3:.0f} ms (most)"
        f"; {time.process_time() - cpu:.0f} s of CPU in all",
        flush=True,
    )


def measured(what: str, *command: object) -> None:
    """Run a command in a process; print its CPU and its elapsed seconds."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{what}: {cpu:.1f} s of CPU, {time.perf_counter() - began:.1f} s elapsed", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("store", type=Path, help="a folder that does not exist yet")
    parser.add_argument("--workers", type=int, nargs="+", default=[32, 200])
    parser.add_argument("--seeds", type=int, default=6, help="of 50 models, 12 tasks and 6 rates: 3,600 each")
    parser.add_argument("--tune", type=float, default=30.0, help="seconds of a fine-tuning")
    parser.add_argument("--model", type=float, default=10.0, help="seconds to read a model")
    parser.add_argument("--dataset", type=float, default=30.0, help="seconds to read a dataset")
    options = parser.parse_args()
    if options.store.exists():
        sys.exit(f"{options.store} exists; name a new folder")
    store = Store(options.store)
    study = load(STUDY).study
    study = replace(study, finetune=replace(study.finetune, seeds=tuple(range(options.seeds))))
    plan = make_plan(study, identities(store), "How do many workers divide it?")
    save_plan(plan, store)
    write_states(plan, store, lines=2)
    ledger = Ledger(plan, store, flat_truth(plan), shrink=0.001)
    for count in options.workers:
        simulate(plan, ledger, count, options)
    trials = sorted(store.trials.iterdir())
    for folder in trials[::2]:
        shutil.rmtree(folder)
    print(f"{len(trials) // 2:,} of {len(trials):,} trials done:", flush=True)
    path = store.studies / plan.study.name / PLAN
    measured(
        "a worker, from its start to its first fine-tuning", sys.executable, "-c", START, path, store.root
    )
    for verb in ("plan", "status"):
        measured(verb, sys.executable, "-m", "biphase", verb, path, "--store", store.root)


if __name__ == "__main__":
    main()
