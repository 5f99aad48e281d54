"""The results that the docs show are what their ledger says, today as on the day they were written."""

import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("table", ["claims", "scores", "families", "noise", "runs", "leaves"])
def test_a_table_in_the_docs_is_the_ledgers(written, table):
    assert (written / f"{table}.csv").read_text() == (REPLICA / f"{table}.csv").read_text()


def test_the_text_in_the_docs_is_the_ledgers(written):
    here, there = ((at / "report.md").read_text().splitlines() for at in (written, REPLICA))
    version = "- biphase 0.1.0+"  # of the code that wrote it, which is another each time
    assert [line for line in here if not line.startswith(version)] == [
        line for line in there if not line.startswith(version)
    ]


def test_what_the_docs_say_of_the_claims_is_in_the_report(written):
    said = (REPLICA / "README.md").read_text()
    rows = [
        line.split(" | ") for line in said.splitlines() if line.startswith(("| C", "| B")) and "[" in line
    ]
    report = (written / "report.md").read_text()
    assert len(rows) == 12
    for row in rows:
        verdict = "not reproduced" if "not reproduced" in row[-1] else "underpowered"
        line = next(line for line in report.splitlines() if line.startswith(f"| {row[0].strip('| ')} |"))
        assert verdict in line
