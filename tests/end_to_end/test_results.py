"""The documented results: tables and pages of studies equal their ledgers, and the quickstart learns."""

import csv
import itertools
import json
import os
import re
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from biphase.cli.study import planned
from biphase.report.evidence import gather
from biphase.report.verdicts import measured_spread

CLAIM = re.compile(r"\| [CB]\d+ \|")
ESTIMATE = re.compile(r"([+−][\d.]+) (\[[^\]]+\])")
ROOT = Path(__file__).parents[2]
REPLICA, CROSSING = (ROOT / "docs" / "results" / name for name in ("replica", "crossing"))
README = (REPLICA / "README.md").read_text()


def report_of(documented, folder):
    """The report as anyone makes it from the ledger in the docs."""
    for command in (
        ["ledger", "merge", *map(str, sorted(documented.rglob("*.tar.zst")))],
        ["report", f"store/studies/{documented.name}/plan.json", "--out", "report"],
    ):
        subprocess.run([sys.executable, "-m", "biphase", *command], cwd=folder, check=True)
    return folder / "report"


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    return report_of(REPLICA, tmp_path_factory.mktemp("replica"))


@pytest.fixture(scope="module")
def crossing(tmp_path_factory):
    return report_of(CROSSING, tmp_path_factory.mktemp("crossing"))


def tables(folder):
    return sorted(path.stem for path in folder.glob("*.csv") if path.stem != "claims")


@pytest.mark.parametrize(
    ("study", "table"), [(folder, table) for folder in (REPLICA, CROSSING) for table in tables(folder)]
)
def test_the_documented_tables_equal_the_ledger(study, table, request):
    """Cell by cell; the last digit of a mean over thousands of examples depends on the machine's order of sums."""
    made, documented = (
        list(csv.reader((folder / f"{table}.csv").read_text().splitlines()))
        for folder in (request.getfixturevalue("written" if study == REPLICA else "crossing"), study)
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


def test_the_page_of_the_crossing_study_tells_what_its_ledger_holds(crossing):
    """Gaps and crossings, scores by pretraining seed, noise, and verdicts."""
    page = (CROSSING / "README.md").read_text()
    with (crossing / "crossings.csv").open(newline="") as file:
        found = {row["family"]: row for row in csv.DictReader(file) if row["size"] == "2m"}
    budgets = zip(*(row["gaps"].split("; ") for row in found.values()), strict=True)
    for tokens, *gaps in ([gap.split(": ") for gap in each] for each in budgets):
        cells = [gap for _, gap in (tokens, *gaps)]
        steps = int(tokens[0]) // 32_768
        assert f"| {int(tokens[0]) / 1e6:.0f}M ({steps:,}) | {' | '.join(cells)} |" in page
    assert found["IR"]["says"].removesuffix(" tokens") in page
    assert {row["says"] for name, row in found.items() if name != "IR"} == {
        "not located between 50M and 524M tokens"
    }
    with (crossing / "trials.csv").open(newline="") as file:
        chosen = [row for row in csv.DictReader(file) if row["chosen"] == "yes" and row["test"]]
    for steps in (1525, 2440, 3900, 6250, 10000, 16000):
        cells = []
        for task, seed in itertools.product(("mnli", "squad"), "123"):
            of = (f"2m-mlm-{steps}-s1", task, seed)
            tests = [row for row in chosen if (row["model"], row["task"], row["pretraining_seed"]) == of]
            cells.append(f"{sum(float(row['test']) for row in tests) / len(tests):.1f}")
        assert f"| {steps:,} | {' | '.join(cells)} |" in page
    plan, store, _ = planned(
        crossing.parent / "store/studies/crossing/plan.json", crossing.parent / "store", verify=False
    )
    names = {
        "mnli": "MNLI",
        "qqp": "QQP",
        "conll2003": "CoNLL-2003",
        "squad": "SQuAD",
        "reqa_squad": "ReQA-SQuAD",
    }
    for task, (tuning, pretraining) in measured_spread(gather(plan, store)).items():
        assert f"| {names[task]} | {tuning:.2f} | {pretraining:.2f} |" in page
    with (crossing / "claims.csv").open(newline="") as file:
        verdicts = Counter({row["claim"]: row["verdict"] for row in csv.DictReader(file)}.values())
    assert verdicts == {"holds in part": 1, "underpowered": 16, "not tested": 10}
    assert "**C8 holds in part; 16 claims" in page
    assert "10 (C5" in page


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
