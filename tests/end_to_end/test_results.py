"""The documented results: the replica's tables equal its ledger, and the quickstart learns."""

import csv
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

CLAIM = re.compile(r"\| [CB]\d+ \|")
ESTIMATE = re.compile(r"([+−][\d.]+) (\[[^\]]+\])")
ROOT = Path(__file__).parents[2]
REPLICA = ROOT / "docs" / "results" / "replica"
README = (REPLICA / "README.md").read_text()


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """The report as anyone makes it from the file in the docs."""
    folder = tmp_path_factory.mktemp("laptop")
    for command in (
        ["ledger", "merge", str(REPLICA / "replica.tar.zst")],
        ["report", "store/studies/replica/plan.json", "--out", "report"],
    ):
        subprocess.run([sys.executable, "-m", "biphase", *command], cwd=folder, check=True)
    return folder / "report"


@pytest.mark.parametrize("table", ["scores", "families", "noise", "runs", "trials"])
def test_the_documented_tables_equal_the_ledger(written, table):
    """Cell by cell; the last digit of a mean over thousands of examples depends on the machine's order of sums."""
    made, documented = (
        list(csv.reader((folder / f"{table}.csv").read_text().splitlines())) for folder in (written, REPLICA)
    )
    assert [len(row) for row in made] == [len(row) for row in documented]
    for row, wanted in zip(made, documented, strict=True):
        for cell, expected in zip(row, wanted, strict=True):
            assert cell == expected or abs(float(cell) - float(expected)) < 1.01e-4, (wanted, cell)


def test_the_documented_scores_and_figures_equal_the_ledger(written):
    """The claims of the documented report are judged by the rule that was fixed before its results."""

    def rows(folder):
        text = (folder / "report.md").read_text()
        lines = text[text.index("## Families") : text.index("## Provenance")].splitlines()
        return [line for line in lines if line.startswith("|")]

    made = rows(written)
    assert len(made) > 20
    assert set(made) <= set(rows(REPLICA)), "the documented report may have more tables than today's"


def test_the_verdicts_of_today_are_as_documented(written):
    with (written / "claims.csv").open(newline="") as file:
        verdicts = {row["claim"]: row["verdict"] for row in csv.DictReader(file)}
    told = next(line for line in README.splitlines() if line.startswith("**By today's rule.**"))
    for verdict, names in {
        "reproduced": r"says: (.*?) is reproduced",
        "not reproduced": r"reproduced; (.*?) are not;",
        "underpowered": r"are not; (.*?) are underpowered",
        "not applicable": r"underpowered; (.*?) is not applicable",
    }.items():
        documented = re.findall(r"[CB]\d+", re.search(names, told)[1])
        assert documented == [name for name, one in verdicts.items() if one == verdict]


def test_the_documented_claims_are_in_the_documented_report():
    lines = (REPLICA / "report.md").read_text().splitlines()
    rows = [line.strip("| ").split(" | ") for line in README.splitlines() if CLAIM.match(line)]
    tested = [line for line in lines if CLAIM.match(line) and "not tested" not in line]
    assert [row[0] for row in rows] == list(
        dict.fromkeys(line.split(" | ")[0].strip("| ") for line in tested)
    )
    for name, _, here, _, verdict in rows:
        of_claim = [line for line in lines if line.startswith(f"| {name} |")]
        assert verdict.replace("*", "").split(";")[0] in of_claim[0].split(" | ")[2]
        for points, interval in ESTIMATE.findall(here):
            assert any(f"| {points} | {interval} |" in line for line in of_claim[1:]), (name, points)
    assert sum(len(ESTIMATE.findall(row[2])) for row in rows) == 24


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
    facts = json.loads(status.stdout)
    assert (facts["finetunings"]["done"], facts["finetunings"]["of"]) == (48, 48)
    scores = {(score["result"], score["task"]): score for score in facts["scores"]}
    for model in ("clm", "clm-mlm40", "mlm40"):
        test = scores[model, "sources-mini"]["test"]
        assert sum(test) / len(test) >= 1 / 3 + 0.1, f"{model} should beat the majority class by 10 points"
    curves = facts["heldout"].items()
    losses = {name: {int(step): values for step, values in curve.items()} for name, curve in curves}
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
