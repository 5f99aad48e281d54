"""The documented results: tables and verdicts of studies equal their ledgers, and the quickstart learns."""

import csv
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
REPLICA, CROSSING = (ROOT / "docs" / "results" / name for name in ("replica", "crossing"))
# What a claim says in words may be said better; the replica's page has the verdicts of the rule of its time.
OF_CLAIMS = ("claim", "part", "verdict", "estimate", "low", "high", "n", "part_p", "p_holm", "detectable")


def rows_of(path, columns=None):
    with path.open(newline="") as file:
        table = csv.DictReader(file)
        return [[row[name] for name in columns or table.fieldnames] for row in table]


def compare(made, documented, columns=None):
    """Cell by cell; the last digit of a mean over thousands of examples depends on the machine's order of sums."""
    made, documented = rows_of(made, columns), rows_of(documented, columns)
    assert len(made) == len(documented)
    for row, wanted in zip(made, documented, strict=True):
        for cell, expected in zip(row, wanted, strict=True):
            assert cell == expected or abs(float(cell) - float(expected)) < 1.01e-4, (wanted, cell)


def printed_tables(report):
    """The rows of all tables of a report's scores."""
    text = (report / "report.md").read_text()
    lines = text[text.index("## Families") : text.index("## Provenance")].splitlines()
    return {line for line in lines if line.startswith("|")}


@pytest.mark.parametrize(
    "documented",
    [REPLICA, pytest.param(CROSSING, marks=pytest.mark.campaign)],
    ids=lambda folder: folder.name,
)
def test_the_documented_tables_equal_the_ledger(documented, verb, tmp_path):
    """The report as anyone makes it from the ledger in the docs."""
    for words in (
        ["ledger", "merge", *sorted(documented.rglob("*.tar.zst"))],
        [
            "report",
            tmp_path / "studies" / documented.name / "plan.json",
            "--out",
            tmp_path / "made",
            "--no-print",
        ],
    ):
        code, _, err = verb(*words, "--store", tmp_path)
        assert code == 0, err
    tables = [path for path in documented.glob("*.csv") if path.stem != "claims"]
    assert len(tables) >= 4
    for path in tables:
        compare(tmp_path / "made" / path.name, path)
    if documented == REPLICA:
        made = printed_tables(tmp_path / "made")
        assert len(made) > 20
        assert made <= printed_tables(REPLICA), "the documented report may have more tables than today's"
    else:
        compare(tmp_path / "made" / "claims.csv", documented / "claims.csv", OF_CLAIMS)


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
    report = [*command, "report", *study, "--no-print", "--json"]
    told = subprocess.run(report, capture_output=True, text=True, cwd=ROOT, check=True)
    assert json.loads(told.stdout)["claims"] == {"pays": "reproduced", "causal": "reproduced"}
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
