"""Tables for a paper: valid LaTeX whatever things are called, the best in bold."""

import re
import shutil

import pytest

from biphase.report.content import collect
from biphase.report.text import escape, latex
from biphase.study.ledger import finetunings


@pytest.fixture
def content(ledger):
    return collect(*ledger)


def body(text):
    """The rows between the rules, split into cells."""
    inner = text.split("\\midrule\n", 1)[1].split("\\bottomrule")[0]
    lines = [line.removeprefix("\\midrule\n") for line in inner.split(" \\\\\n") if line.strip()]
    return [re.split(r"(?<!\\)&", line) for line in lines]


def test_every_row_has_as_many_cells_as_the_head(content):
    made = latex(content)
    assert sorted(made) == ["claims.tex", "families.tex", "tasks.tex"]
    for text in made.values():
        width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1])
        assert {len(row) for row in body(text)} == {width}
        assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
        assert re.sub(r"\\[{}]", "", text).count("{") == re.sub(r"\\[{}]", "", text).count("}")


def test_the_best_of_each_column_is_bold(content):
    families = content.boards[0]
    *rows, baseline = body(latex(content)["families.tex"])
    assert [cell.strip() for cell in baseline] == ["trivial baseline", *["25.00"] * 4]
    for line, row in zip(families.lines, rows, strict=True):
        assert row[0].strip() == line.model.name
        for cell, shown in zip(line.cells, row[1:], strict=True):
            mean = f"{100 * cell.score.seeds.mean:.2f}"
            assert (f"\\textbf{{{mean}}}" in shown) == cell.best
            assert mean in shown


def test_intervals_stand_beside_the_means(content):
    cell = content.boards[0].lines[0].cells[2]
    assert (
        f"$\\pm$ {100 * (cell.score.seeds.high - cell.score.seeds.mean):.2f}"
        in body(latex(content)["families.tex"])[0][3]
    )


def test_what_is_missing_is_a_dash(ledger):
    plan, store = ledger
    for training in finetunings(plan):
        if training.model == plan.results["mlm"] and training.lr == 2e-5 and training.task.name == "sst2":
            shutil.rmtree(store.trials / training.trials[0].key)
    rows = body(latex(collect(plan, store))["families.tex"])
    assert next(row for row in rows if row[0].strip() == "mlm")[1].strip() == "---"


def test_signs_that_latex_acts_upon_are_made_plain():
    assert escape("50%_a & {b} #1 ~ ^ $ \\") == (
        r"50\%\_a \& \{b\} \#1 \textasciitilde{} \textasciicircum{} \$ \textbackslash{}"
    )
    assert escape("mlm − clm → 1\n2") == r"mlm $-$ clm $\rightarrow$ 1 2"
    assert escape("[a]") == "{[}a{]}"  # after a rule or a line break a bracket opens an option


def test_no_sign_outside_ascii_is_left(content):
    for text in latex(content).values():
        assert text.isascii(), sorted({sign for sign in text if not sign.isascii()})


def test_claims_show_ours_and_the_paper_s(content):
    finding = next(one for one in content.findings if one.id == "C1")
    row = next(row for row in body(latex(content)["claims.tex"]) if row[0].strip() == "C1")
    assert row[1].strip() == finding.verdict
    assert row[3].strip() == f"${finding.parts[0].estimate.mean:+.2f}$"
