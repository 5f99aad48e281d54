"""The true quickstart, as the README runs it: in minutes, on CPU, it learns."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.campaign
@pytest.mark.alone
def test_the_quickstart_learns_in_minutes(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "biphase"]
    study = ["studies/quickstart.py", "--store", str(tmp_path)]
    began = time.monotonic()
    ran = subprocess.run([*command, "run", *study], capture_output=True, text=True, cwd=ROOT, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert time.monotonic() - began < 300
    status = subprocess.run(
        [*command, "status", *study, "--json"], capture_output=True, text=True, cwd=ROOT, check=True
    )
    told = json.loads(status.stdout)
    assert (told["finetunings"]["done"], told["finetunings"]["of"]) == (48, 48)
    scores = {(one["result"], one["task"]): one for one in told["scores"]}
    for model in ("clm", "clm-mlm40", "mlm40"):
        test = scores[model, "sources-mini"]["test"]
        assert sum(test) / len(test) >= 1 / 3 + 0.1, f"{model} should beat the majority class by 10 points"
    losses = {
        name: {int(step): one for step, one in curve.items()} for name, curve in told["heldout"].items()
    }
    card = json.loads(next((tmp_path / "shards").glob("*/card.json")).read_text())
    clm, two, mlm = losses["clm"], losses["clm-mlm40"], losses["mlm40"]
    end = max(clm)
    assert clm[end]["clm"] <= card["unigram_entropy"] - 0.8
    assert two[end]["mlm40"] < mlm[end]["mlm40"], "causal first helps the masked loss at this budget"
    switch = max(step for step in clm if clm[step] == two.get(step))
    assert switch == end // 2, "the two share their trunk up to the switch, number for number"
    after = min(step for step in two if step > switch)
    assert two[after]["mlm40"] < two[switch]["mlm40"], (
        "nothing is lost at the switch: the masked loss falls at once"
    )
