"""The report as Markdown and LaTeX: the same numbers, and no character of a user's text that acts as markup."""

import re
import shutil
from dataclasses import replace

import pytest

from biphase.report.build import escape, latex, markdown
from biphase.report.content import collect
from biphase.study.ledger import finetunings


@pytest.fixture
def content(ledger):
    return collect(*ledger)


def test_it_begins_with_the_question_and_the_answer(content):
    lines = markdown(content).splitlines()
    assert lines[0] == "# Is it so?"
    assert content.headline.answer.replace("|", r"\|") in lines[2].replace("\\", "")
    assert "## What is missing" not in markdown(content)


def test_every_claim_and_every_part_has_a_row(content):
    text = markdown(content)
    for one in content.findings:
        assert f"| {one.id} |" in text
    parts = text.split("The tests behind the verdicts")[1].split("</details>")[0]
    assert parts.count("\n| ") == 1 + sum(len(one.parts) for one in content.findings)


def rows(text, title):
    table = text.split(f"## {title}\n")[1].split("\n\n")[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_boards_show_means_intervals_and_the_best_in_bold(content):
    table = rows(markdown(content), "Families")
    assert table[0][:2] == ["model", "sequence classification (SC)"]
    families = content.boards[0]
    assert table[-1] == ["*trivial baseline*", *["25.00 (invented)"] * 4]
    for line, row in zip(families.lines, table[2:-1], strict=True):
        assert row[0] == line.model.name
        for cell, shown in zip(line.cells, row[1:], strict=True):
            mean = f"{100 * cell.score.seeds.mean:.2f}"
            value, _, around = shown.partition(" ")
            assert value == (f"**{mean}**" if cell.best else mean)
            assert around.startswith("± ") or around == f"({cell.score.no_interval})"
            assert around, "an interval, or why there is none"


def test_what_is_missing_is_said_and_shown(ledger):
    plan, store = ledger
    for training in finetunings(plan):
        if training.model == plan.results["mlm"] and training.lr == 2e-5 and training.task.name == "sst2":
            shutil.rmtree(store.trials / training.trials[0].key)
    text = markdown(collect(plan, store))
    assert "177 of 180 scores; 3 missing" in text
    assert "| mlm | sst2 | 3 | 9 |" in text
    assert next(row for row in rows(text, "Families") if row[0] == "mlm")[1] == "— (6/9)"


def test_words_of_a_user_stay_words(ledger):
    plan, store = ledger
    asked = "a | b <script>x</script> [link](y) `code` *star*\nnext"
    text = markdown(collect(replace(plan, question=asked), store))
    assert text.splitlines()[0] == (r"# a \| b \<script\>x\</script\> \[link\](y) \`code\` \*star\* next")


def test_figures_are_linked_where_they_were_drawn(content):
    drawn, bare = markdown(content), markdown(content, drawn=False)
    assert content.figures
    for figure in content.figures:
        assert f"](figures/{figure.id}.svg)" in drawn
        assert f"### {figure.title}" in bare
    assert "svg" in drawn.splitlines()[-1]
    assert "svg" not in bare


def test_provenance_names_data_and_protocol(content):
    text = markdown(content)
    for name, key in content.evidence.plan.tasks.items():
        assert name.replace("_", r"\_") in text
        assert key in text
    assert "Learning rates: 2e-5, 5e-5, 2e-4" in text
    assert content.provenance.study in text


# ---------------------------------------------------------------- LaTeX


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


def test_the_best_of_each_latex_column_is_bold(content):
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


def test_a_missing_score_is_a_dash_in_latex(ledger):
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
