"""The files of a report, HTML, Markdown and LaTeX: whole, the same for the same ledger, honest about what is missing."""

import csv
import html
import io
import json
import math
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from biphase import CLM, MLM, Fewer, Hub, Pretrain, Stage, Study
from biphase.errors import SpecError
from biphase.papers.gisserot2025 import PAPER
from biphase.report.build import (
    KNOWN,
    VERDICTS,
    AxisScale,
    Mark,
    build,
    collect,
    drawing,
    escape,
    inside_script,
    latex,
    markdown,
)
from biphase.report.statistics.intervals import Estimate
from biphase.store import Store
from biphase.study import ledger as state_ledger
from biphase.study.ledger import finetunings

CSVS = ["claims.csv", "families.csv", "trials.csv", "noise.csv", "runs.csv", "scores.csv"]


def texts(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def words(page: str) -> str:
    """What a reader sees, about."""
    page = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.S)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", page)).split())


@pytest.fixture(scope="module")
def built(three, planned, _three_store, tmp_path_factory):
    """The report of the whole ledger, without figures for print."""
    return build(planned(three), Store(_three_store), tmp_path_factory.mktemp("report"), static=False)


@pytest.fixture(scope="module")
def page(built):
    return built.page.read_text()


def rows_of(built, name):
    return list(csv.DictReader(io.StringIO(built.page.with_name(f"{name}.csv").read_text())))


def summary(page, claim):
    """The closed row of a claim."""
    return html.unescape(page.split(f'id="claim-{claim}"')[1].split("</summary>")[0])


def test_everything_is_written_and_what_can_no_longer_be_drawn_is_taken_away(ledger, tmp_path):
    folder = tmp_path / "report"
    (folder / "figures").mkdir(parents=True)
    for name in ("robustness.svg", "efficiency-flops.pdf", "mine.svg", "ratio.txt"):
        (folder / "figures" / name).write_text("old")
    built = build(*ledger, folder)
    made = texts(folder)
    left = {name for name, content in made.items() if content == b"old"}
    assert left == {"figures/mine.svg", "figures/ratio.txt"}, "files of others stay"
    ids = {figure.id for figure in built.content.figures}
    assert {"objectives", "losses"} <= ids <= {*KNOWN}
    for name in ids:
        assert made[f"figures/{name}.svg"].startswith(b"<svg")
        assert made[f"figures/{name}.pdf"].startswith(b"%PDF")
    tables = {f"tables/{name}.tex" for name in ("families", "tasks", "claims")}
    assert {*CSVS, "report.html", "report.md", *tables} <= {*made}
    assert {*made} - left == {path.relative_to(folder).as_posix() for path in built.files}
    assert str(built.page) in built.words()
    assert built.content.headline.answer in built.words()
    told = json.loads(json.dumps(built.to_json()))
    assert told["scores"] == {"done": 180, "of": 180}
    assert told["claims"]["C1"] == next(one.verdict for one in built.content.findings if one.id == "C1")


def test_the_same_ledger_gives_the_same_bytes_wherever_it_lies(ledger, tmp_path):
    plan, store = ledger
    elsewhere = Store(tmp_path / "another" / "place")
    shutil.copytree(store.root, elsewhere.root)
    for path in elsewhere.root.rglob("*"):
        os.utime(path, (1e9, 1e9))
    build(plan, store, tmp_path / "one")
    build(plan, elsewhere, tmp_path / "two")
    one, two = texts(tmp_path / "one"), texts(tmp_path / "two")
    assert list(one) == list(two)
    assert [name for name in one if one[name] != two[name]] == []
    for name, content in one.items():
        assert str(tmp_path).encode() not in content, name


def test_a_study_that_has_just_begun_has_a_report(three, planned, tmp_path):
    built = build(planned(three), Store(tmp_path / "store"), tmp_path / "report")
    page = words(built.page.read_text())
    assert "0 of 180" in page
    assert "4 results not pretrained" in page
    assert all(one.verdict == "not tested" for one in built.content.findings)


def test_a_study_that_only_pretrains_has_a_report(planned, run, tmp_path):
    plan = planned(run("clm", Stage(CLM(), 20)))
    built = build(plan, Store(tmp_path / "store"), tmp_path / "report", static=False)
    page = words(built.page.read_text())
    assert "fine-tunes nothing" in page
    assert built.content.findings == (), "one model compares with nothing"
    assert "Runs" in page
    assert not (tmp_path / "report" / "tables" / "families.tex").exists()


def test_the_report_of_an_evaluated_model_says_nothing_of_the_paper(invent, grid, tmp_path):
    model = Pretrain("bert", start=Hub("some/bert", revision="1" * 40))
    study = Study("evaluate-bert", (model,), grid("sst2"))
    built = build(*invent(study, tmp_path / "store"), tmp_path / "report", static=False)
    assert built.content.findings == ()
    for text in (words(built.page.read_text()), (tmp_path / "report" / "report.md").read_text()):
        assert "bert" in text
        assert "the paper" not in text.lower()
    assert "claims:" not in built.words()


def test_code_cannot_end_its_own_element():
    assert inside_script('a = "</script>" + "<!--"') == r'a = "<\/script>" + "<\!--"'


def test_a_file_that_cannot_be_put_in_place_leaves_the_old_one_and_no_draft(ledger, tmp_path):
    folder = tmp_path / "report"
    build(*ledger, folder, static=False)
    before = (folder / "report.html").read_bytes()
    (folder / "report.md").unlink()
    (folder / "report.md").mkdir()
    with pytest.raises(SpecError, match=r"report\.md.*--out"):
        build(*ledger, folder, static=False)
    assert (folder / "report.html").read_bytes() == before
    assert not list(folder.rglob("*.part"))


def test_what_was_not_asked_for_is_not_shown_as_missing(invent, run, grid, tmp_path):
    on_the_way = Fewer(("sst2",), lrs=(5e-5,), seeds=(0,))
    study = Study(
        "s", (run("mlm", Stage(MLM(0.4), 20), keep=(10,)),), grid("sst2", "squad", on_the_way=on_the_way)
    )
    plan, store = invent(study, tmp_path / "store")
    page = build(plan, store, tmp_path / "report", static=False).page
    lines = page.with_name("report.md").read_text().splitlines()
    assert next(line for line in lines if line.startswith("| mlm-10 |")).endswith("| — |")
    assert "not asked for" in page.read_text()
    assert "<small>0/0</small>" not in page.read_text()


def test_the_page_asks_nothing_of_any_network(page):
    own = page.split('<script type="text/plain" id="vega">')[0]
    assert re.findall(r'(?:src|href|action)="(?!#)([^"]+)', own) == [PAPER.address], "a link, to be clicked"
    assert "@import" not in own
    assert "url(" not in own
    assert "connect-src 'none'" in own
    assert "unsafe-eval" not in own
    assert page.count('id="vega"') == 1
    assert len(page) < 2e6
    assert page.index("<h1") < page.index("data-figures") < page.index('id="vega"'), "the text comes first"


def test_every_claim_has_its_verdict_reason_and_interval_and_untested_ones_are_folded(built, page):
    shown = dict(re.findall(r'<details class="claim" id="claim-(\w+)" data-verdict="(\w+)">', page))
    assert shown == {one.id: VERDICTS[one.verdict][0] for one in built.content.findings}
    folded = page.split('id="untested-paper">')[1].split("</details>\n    </div>")[0]
    untested = {name for name, verdict in shown.items() if verdict == "untested" and name[0] == "C"}
    assert untested == set(re.findall(r'id="claim-(C\w+)"', folded))
    seen, text, rows = html.unescape(page), markdown(built.content), rows_of(built, "claims")
    for one in built.content.findings:
        assert one.why in seen
        assert f"| {one.id} |" in text
        assert {row["verdict"] for row in rows if row["claim"] == one.id} == {one.verdict}
        interval = re.search(r"\[[+−0-9.]+, [+−0-9.]+\]", summary(page, one.id))
        assert bool(interval) == (one.verdict != "not tested"), one.id
    refuted = next(one for one in built.content.findings if one.verdict == "not reproduced")
    assert float(next(row["p_refuted"] for row in rows if row["claim"] == refuted.id)) <= 0.05
    assert f"{built.content.headline.verdicts['not reproduced']} not reproduced" in built.words()
    assert all(float(row["detectable"]) <= 100 for row in rows if row["detectable"])


def test_a_failed_job_and_damaged_files_are_named_and_the_rest_is_reported(ledger, tmp_path):
    plan, store = ledger
    mlm, clm, both = (plan.results[name] for name in ("mlm", "clm", "both"))
    shutil.rmtree(store.checkpoints / mlm)
    state_ledger.note_failure(plan, store, mlm, ValueError("the loss was not finite"))
    (store.checkpoints / clm / "checkpoint.json").write_text("{")
    (store.checkpoints / both / "metrics.jsonl").write_text("{")
    built = build(plan, store, tmp_path / "report", static=False)
    assert ("mlm", mlm, "ValueError: the loss was not finite") in [
        (one.title, one.key, one.why) for one in built.content.missing.failed
    ]
    for text in (words(built.page.read_text()), (tmp_path / "report" / "report.md").read_text()):
        assert "the loss was not finite" in text
        assert re.search(r"Not pretrained yet:? mlm\b", text[text.index("What is missing") :])
        assert clm[:8] in text
    changed = next(one for one in built.content.runs if one.name == "both")
    assert changed.heldout == {}, "not replaced by earlier losses"
    assert changed.wrong.startswith(f"checkpoints/{both}/metrics.jsonl ")
    assert str(store.root) not in built.page.read_text()
    assert built.content.headline.subject == "CLM for 10 steps, then MLM 40% for 10"


def test_half_a_study_says_at_the_top_what_is_missing(ledger, tmp_path):
    plan, store = ledger

    def tuned(result, task):
        model = plan.results[result]
        return [one for one in finetunings(plan) if (one.model, one.task.name) == (model, task)]

    gone = [one.trials[0].key for one in tuned("mlm", "sst2")]
    failed, spoiled = tuned("both", "squad")[0], tuned("clm", "squad")[0]
    for key in (*gone, failed.trials[0].key):
        shutil.rmtree(store.trials / key)
    why = "the loss was not finite"
    state_ledger.note_failure(plan, store, failed.key, ValueError(why))
    (store.trials / spoiled.trials[0].key / "trial.json").write_text("{}")
    built = build(plan, store, tmp_path / "report", static=False)
    top, _, below = words(built.page.read_text()).partition("Claims Each claim")
    for fact in ("169 of 180", "11 missing", "1 job failed", "1 file cannot be read"):
        assert fact in top
    for fact in (why, "trial.json is missing", "— 0/9"):
        assert fact in below
    assert "11 missing" in built.words()
    text, tex = markdown(built.content), latex(built.content)["families.tex"]
    assert "| mlm | sst2 | 9 | 9 |" in text
    assert next(row for row in text.splitlines() if row.startswith("| mlm |") and "0/9" in row)
    assert next(row for row in body(tex) if row[0].strip() == "mlm")[1].strip() == "---"


# ---------------------------------------------------------------- Markdown and LaTeX


def body(text):
    """The rows of a LaTeX table between the rules, split into cells."""
    inner = text.split("\\midrule\n", 1)[1].split("\\bottomrule")[0]
    lines = [line.removeprefix("\\midrule\n") for line in inner.split(" \\\\\n") if line.strip()]
    return [re.split(r"(?<!\\)&", line) for line in lines]


def test_markdown_has_the_answer_every_test_figures_and_provenance(built):
    content = built.content
    text, bare = markdown(content), markdown(content, drawn=False)
    lines = text.splitlines()
    assert lines[0] == "# Is it so?"
    assert content.headline.answer in lines[2].replace("\\", "")
    parts = text.split("The tests behind the verdicts")[1].split("</details>")[0]
    assert parts.count("\n| ") == 1 + sum(len(one.parts) for one in content.findings)
    for figure in content.figures:
        assert f"](figures/{figure.id}.svg)" in text
        assert f"### {figure.title}" in bare
    assert "svg" not in bare
    assert all(key in text for key in content.evidence.plan.tasks.values())


def test_markdown_and_latex_show_the_scores_and_mark_the_best(built):
    board, tex = built.content.boards[0], latex(built.content)["families.tex"]
    table = markdown(built.content).split("## Families\n")[1].split("\n\n")[1].splitlines()[2:]
    plain = [[cell.strip() for cell in line.strip("|").split("|")] for line in table]
    typeset = [[cell.strip() for cell in row] for row in body(tex)]
    for rows, bold, around in ((plain, "**{}**", "± {}"), (typeset, "\\textbf{{{}}}", "$\\pm$ {}")):
        for line, row in zip(board.lines, rows[:-2], strict=True):  # the last two are baselines
            assert row[0] == line.model.name
            for cell, shown in zip(line.cells, row[1:], strict=True):
                seeds = cell.score.seeds
                mean, half = f"{100 * seeds.mean:.2f}", f"{100 * (seeds.high - seeds.mean):.2f}"
                assert shown.startswith(bold.format(mean) if cell.best else mean)
                assert around.format(half) in shown or cell.score.no_interval in shown
    assert typeset[-2:] == [
        ["trivial baseline", *["25.00"] * 4], ["lexical baseline", "25.00", "25.00", "---", "25.00"],
    ]  # fmt: skip


def test_words_of_a_user_stay_words_in_markdown_and_latex(ledger):
    plan, store = ledger
    asked = "a | b <script>x</script> [link](y) `code` *star*\nnext"
    text = markdown(collect(replace(plan, question=asked), store))
    assert text.splitlines()[0] == (r"# a \| b \<script\>x\</script\> \[link\](y) \`code\` \*star\* next")
    assert escape("50%_a & {b} #1 ~ ^ $ \\") == (
        r"50\%\_a \& \{b\} \#1 \textasciitilde{} \textasciicircum{} \$ \textbackslash{}"
    )
    assert escape("mlm − clm → 1\n2") == r"mlm $-$ clm $\rightarrow$ 1 2"
    assert escape("[a]") == "{[}a{]}"  # after a rule or a line break a bracket opens an option


def test_latex_tables_compile(built):
    content, tables = built.content, latex(built.content)
    assert sorted(tables) == ["claims.tex", "families.tex", "tasks.tex"]
    for text in tables.values():
        width = len(re.search(r"\\begin\{tabular\}\{(\w+)\}", text)[1])
        assert {len(row) for row in body(text)} == {width}
        assert text.count("\\begin{tabular}") == text.count("\\end{tabular}") == 1
        assert re.sub(r"\\[{}]", "", text).count("{") == re.sub(r"\\[{}]", "", text).count("}")
        assert text.isascii(), sorted({sign for sign in text if not sign.isascii()})
    finding = next(one for one in content.findings if one.id == "C1")
    row = next(row for row in body(tables["claims.tex"]) if row[0].strip() == "C1")
    assert (row[1].strip(), row[3].strip()) == (finding.verdict, f"${finding.parts[0].estimate.mean:+.2f}$")


# ---------------------------------------------------------------- forest plots


def mark(mean, low=math.nan, high=math.nan, **fields):
    return Mark(Estimate(mean, 0.0, 3, low, high, 0.5, ""), **fields)


def test_forest_rows_share_a_scale_with_zero_and_a_long_interval_is_cut_and_marked():
    everything = mark(1.0, 0.5, 1.5, examples=(0.2, 1.8), paper=1.2, margin=-0.5)
    marks = [mark(1.0, -100.0, 102.0), mark(2.0, 1.5, 2.5), everything, mark(math.nan)]
    scale = AxisScale(marks, 210)
    assert scale.high - scale.low < 20
    assert scale.at(-1.0) < scale.at(0) < scale.at(2.0)
    assert 0 in scale.ticks()
    cut, whole, full, unknown = (drawing(one, scale) for one in marks)
    assert cut.count("l-4 4 4 4") == cut.count("l4 4-4 4") == 1
    assert "l4 4" not in whole
    for what, x in {"margin": -0.5, "examples": 0.2}.items():
        assert re.search(rf'class="{what}"[^>]* x1="{scale.at(x)}"', full)
    assert "+1.00 [+0.50, +1.50], paper +1.20" in full
    assert 'class="zero"' in unknown
    assert not any(f'class="{what}"' in unknown for what in ("mean", "seeds", "paper"))
