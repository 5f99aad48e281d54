"""Invented ledgers: written as real ones are, the same for the same seed, and never among measured scores."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from biphase import CATALOG, CLM, Finetune, Stage, Study
from biphase.metadata import PREDICTIONS, TRIAL
from biphase.report.evidence import gather
from biphase.store import MANIFEST, verify

ROOT = Path(__file__).parents[2]


def test_an_invented_ledger_is_written_as_a_real_one(tiny_run, store, invent, tmp_path):
    import torch

    from biphase.study.plan import identities, make_plan, save_plan
    from biphase.study.worker import Worker
    from biphase.training.distributed import Ranks
    from biphase.training.options import RuntimeOptions

    task = replace(CATALOG["wikiann-mini"], steps=2, batch=4)
    task = replace(task, splits=replace(task.splits, rows=(8, 4, 4)))
    spec = Finetune((task,), lrs=(1e-3,), seeds=(0,), protocol="standard", precision="fp32")
    study = Study("real", (tiny_run("clm", Stage(CLM(), 8)),), spec)
    plan = make_plan(study, identities(store))
    save_plan(plan, store)
    alone = Ranks(0, 1, torch.device("cpu"))
    options = RuntimeOptions(quiet=True, loaders=0)
    Worker(
        plan, store, identities(store), alone, options, wanted=set(plan.jobs), say=lambda text: None
    ).work()

    _, made = invent(study, tmp_path / "made")
    real = json.loads(next(store.trials.glob(f"*/{TRIAL}")).read_text())
    mine = json.loads(next(made.trials.glob(f"*/{TRIAL}")).read_text())
    assert shape_of(mine, but=("losses",)) == shape_of(real, but=("losses",))
    checkpoints = [
        json.loads(next(one.checkpoints.glob("*/checkpoint.json")).read_text()) for one in (made, store)
    ]
    assert shape_of(checkpoints[0]) == shape_of(checkpoints[1])
    files = [json.loads(next(one.trials.glob(f"*/{MANIFEST}")).read_text()) for one in (made, store)]
    assert shape_of(files[0]) == shape_of(files[1], but=(PREDICTIONS,)), "what was predicted is not invented"
    for folder in (*made.trials.iterdir(), *made.checkpoints.iterdir()):
        verify(folder)
    real_lines, my_lines = (
        [json.loads(line) for line in next(one.checkpoints.glob("*/metrics.jsonl")).read_text().splitlines()]
        for one in (store, made)
    )
    assert {tuple(line) for line in my_lines} == {tuple(line) for line in real_lines}
    assert gather(plan, store).count == (1, 1)


def shape_of(value, but=()):
    """The names in a JSON value, in order, without what stands under them."""
    if isinstance(value, dict):
        return {name: shape_of(one, but) for name, one in value.items() if name not in but}
    return None


def test_invented_scores_never_join_a_store_that_holds_anything(tmp_path):
    (tmp_path / "trials").mkdir()
    asked = [sys.executable, str(ROOT / "benchmarks" / "synthetic_ledger.py"), str(tmp_path)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"{tmp_path} is not empty; name a new folder\n"
    assert list(tmp_path.iterdir()) == [tmp_path / "trials"]
