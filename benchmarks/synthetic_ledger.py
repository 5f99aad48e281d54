"""A store that looks as if a whole study had been computed, made of known truth and noise: to try the report on.

    python benchmarks/synthetic_ledger.py STORE                    the paper's study: 50 models, 18,000 leaves
    python benchmarks/synthetic_ledger.py STORE --effects none     the same with nothing to find
    python benchmarks/synthetic_ledger.py STORE --measure          then the report on it: seconds and memory

The means are the paper's where it tells them and plausible where not (`paper_means.csv` marks these with ~). Around
them: learning rates that matter more after MLM than after CLM, noise of fine-tuning seeds, validation scores that
lean on the test scores, test examples that are hard or easy for everybody. Every trial is a folder as the tuner writes
it, except that only the values of the selecting metric on the test part are kept: a gigabyte would else be three.
States have no weights. The device of it all is called "synthetic", and a folder that holds anything is refused:
invented scores must never stand among measured ones.
"""

import argparse
import csv
import resource
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from synthetic_leaves import Ledger, Truth, write_leaves
from synthetic_states import write_states

from biphase.report.recipes import models, recipe_of
from biphase.store import Store
from biphase.study.load import load
from biphase.study.plan import Plan, identities, make_plan, save_plan

HERE = Path(__file__).parent
STUDY = HERE.parent / "studies" / "paper.py"
FAMILIES = ("SC", "TC", "QA", "IR")
FLAT = {"SC": 87.0, "TC": 92.5, "QA": 60.0, "IR": 79.0}  # where there is nothing to find
# Raw runs of the paper lose 14.1 of 90.25 points (MLM) and 8.0 of 90.94 (CLM) at their worst rate.
LOST = {"clm": 0.088, "clm-mlm": 0.130}
LOST_ELSE = 0.156


def paper_truth(plan: Plan) -> Truth:
    """The paper's means, for the results of its study."""
    with (HERE / "paper_means.csv").open(encoding="utf-8") as file:
        means = {
            (row["model"], family): float(row[family].lstrip("~"))
            for row in csv.DictReader(file)
            for family in FAMILIES
        }
    unknown = [name for name in plan.results if (name, "SC") not in means]
    if unknown:
        sys.exit(f"the paper has no model {unknown[0]!r}; type --effects none for a study of your own")
    kinds = {name: recipe_of(plan, name).kind for name in plan.results}
    lost = {name: LOST.get(kind, LOST_ELSE) for name, kind in kinds.items()}
    return Truth(means, lost, frozenset(name for name, kind in kinds.items() if kind == "clm"))


def flat_truth(plan: Plan) -> Truth:
    """Every result is worth the same."""
    means = {(name, family): mean for name in plan.results for family, mean in FLAT.items()}
    return Truth(means, dict.fromkeys(plan.results, LOST_ELSE))


def write(
    ledger: Ledger, *, results: tuple[str, ...] = (), processes: int = 1, lines: int = 200, rows: int = 0
) -> int:
    """Write the states of a plan and the leaves of `results`, or of all. Gives the number of leaves."""
    save_plan(ledger.plan, ledger.store)
    write_states(ledger.plan, ledger.store, lines=lines, rows=rows)
    every = [one for model in models(ledger.plan).values() for one in model.results]
    wanted = [one for one in every if not results or one in results]
    if processes == 1:
        return sum(write_leaves(ledger, one) for one in wanted)
    with ProcessPoolExecutor(processes) as pool:
        return sum(pool.map(write_leaves, [ledger] * len(wanted), wanted))


def measure(study: Path, store: Path) -> None:
    """The report in a process of its own: seconds, and the most memory it held."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "biphase", "report", str(study), "--store", str(store)], check=True)
    seconds = time.perf_counter() - began
    most = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"report: {seconds:.1f} s, {most:.0f} MB")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "store", type=Path, help="a folder that does not exist yet, or one made by this script to --measure"
    )
    parser.add_argument("--study", type=Path, default=STUDY)
    parser.add_argument("--effects", choices=("paper", "none"), default="paper")
    parser.add_argument(
        "--models", nargs="+", default=(), help="leaves of these results only: a study on its way"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the noise")
    parser.add_argument("--shrink", type=float, default=1.0, help="the test sets to this share of their size")
    parser.add_argument(
        "--lines", type=int, default=200, help="of a run's loss curve; a real run logs every step"
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="run the report on it")
    options = parser.parse_args()
    there = options.store.exists() and any(options.store.iterdir())
    if there and not options.measure:
        sys.exit(f"{options.store} is not empty; name a new folder")
    if not there:
        store = Store(options.store)
        loaded = load(options.study)
        plan = make_plan(loaded.study, identities(store), loaded.question)
        unknown = [name for name in options.models if name not in plan.results]
        if unknown:
            sys.exit(f"the study has no result {unknown[0]!r}")
        truth = paper_truth(plan) if options.effects == "paper" else flat_truth(plan)
        ledger = Ledger(plan, store, truth, options.seed, options.shrink)
        began = time.perf_counter()
        count = write(ledger, results=tuple(options.models), processes=options.processes, lines=options.lines)
        print(f"{count:,} leaves in {time.perf_counter() - began:.0f} s: {options.store}")
    if options.measure:
        measure(options.study, options.store)


if __name__ == "__main__":
    main()
