"""The results that the docs show are what their ledger says, today as on the day they were written."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

CLAIM = re.compile(r"\| [CB]\d+ \|")
ESTIMATE = re.compile(r"([+−][\d.]+) (\[[^\]]+\])")
REPLICA = Path(__file__).parents[2] / "docs" / "results" / "replica"


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


@pytest.mark.parametrize("table", ["claims", "scores", "families", "noise", "runs", "trials"])
def test_a_table_in_the_docs_is_the_ledgers(written, table):
    assert (written / f"{table}.csv").read_text() == (REPLICA / f"{table}.csv").read_text()


def test_the_text_in_the_docs_is_the_ledgers(written):
    here, there = ((at / "report.md").read_text().splitlines() for at in (written, REPLICA))
    version = "- biphase "  # of the code that wrote it, which is another each time
    assert [line for line in here if not line.startswith(version)] == [
        line for line in there if not line.startswith(version)
    ]


def test_what_the_docs_say_of_the_claims_is_in_the_report(written):
    lines = (written / "report.md").read_text().splitlines()
    rows = [
        line.strip("| ").split(" | ")
        for line in (REPLICA / "README.md").read_text().splitlines()
        if CLAIM.match(line)
    ]
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
