"""Verdicts under repetition: which claims carry the mark, what it says, and where it is read."""

import pytest

from biphase import CLM, MLM, WSD, Claim, Stage, Study
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.report.content import collect
from biphase.report.page.render import render
from biphase.report.text import latex, markdown

STEPS = (50, 100, 300)
MEANS = {
    "clm-50": 70.0, "clm-100": 72.0, "clm-300": 73.0, "clm": 75.0,
    "mlm-50": 60.0, "mlm-100": 71.0, "mlm-300": 76.0, "mlm": 80.0,
    "two": 81.0, "m20": 78.0,
}  # fmt: skip


@pytest.fixture
def content(run, grid, invent, tmp_path):
    """CLM and MLM with checkpoints, a quarter CLM, another ratio; claims of its own about both kinds of pairs."""
    how = {"schedule": WSD(1e-3, warmup=2, decay=20)}
    made = Study(
        "s",
        (
            run("clm", Stage(CLM(), 400), keep=STEPS, **how),
            run("mlm", Stage(MLM(0.4), 400), keep=STEPS, **how),
            run("two", Stage(CLM(), 100), Stage(MLM(0.4), 300), **how),
            run("m20", Stage(MLM(0.2), 400), **how),
        ),
        grid("sst2"),
        (Claim("causal", "it helps", "two", "mlm"), Claim("ratio", "more is better", "mlm", "m20")),
    )
    return lambda rows: collect(*invent(made, tmp_path / f"store-{rows}", means=MEANS, rows=rows))


def test_claims_about_equal_data_are_marked_where_the_corpus_was_read_again(content):
    found = {one.id: one for one in content(200).findings}
    tested = {name for name, one in found.items() if one.parts}
    marked = {name for name, one in found.items() if one.condition}
    assert {"C1", "C11", "C13", "causal"} <= marked
    # Half an epoch; other questions than what the same data is worth; two that are masked alike.
    assert {"C10", "C12", "B2", "ratio"} <= tested - marked
    first = found["C1"]
    assert first.condition == "under repetition"
    assert first.scale.endswith(" seeds · under repetition")
    assert first.caveats[0].startswith(
        "Under repetition: by the steps compared the corpus had been read 4.0 times."
    )
    assert first.caveats[0].endswith("which favours MLM.")
    assert (
        found["C11"]
        .caveats[0]
        .startswith("Under repetition: by the steps compared the corpus had been read 3.0")
    )
    for name in tested - marked:
        assert "repetition" not in found[name].scale
        assert not any("repetition" in one for one in found[name].caveats)


def test_several_budgets_are_told_as_a_range(run, grid, invent, tmp_path):
    def pair(steps):
        how = {"schedule": WSD(1e-3, warmup=2, decay=20)}
        return (
            run(f"mlm-{steps}", Stage(MLM(0.4), steps), **how),
            run(f"two-{steps}", Stage(CLM(), steps // 4), Stage(MLM(0.4), 3 * steps // 4), **how),
        )

    made = Study("s", (*pair(80), *pair(200), *pair(400)), grid("sst2"))
    found = {one.id: one for one in collect(*invent(made, tmp_path / "store", rows=200)).findings}
    assert "had been read 0.8 to 2.0 times" in found["C15"].caveats[0]
    assert "had been read 4.0 times" in found["C13"].caveats[0]


def test_nothing_is_said_where_nothing_was_repeated_or_nobody_knows(content):
    for rows in (0, 800, 10_000):
        found = content(rows).findings
        assert not any(one.condition or "repetition" in one.scale + "".join(one.caveats) for one in found)


def test_the_crossing_is_told_in_epochs_and_beside_what_one_epoch_shows(content):
    (part,) = next(one for one in content(200).findings if one.id == "C11").parts
    assert " epochs; at equal FLOPs" in part.note
    assert "; within one epoch (step 100, 1.00 epochs) it is " in part.note
    assert part.note.endswith(" points behind")
    (unknown,) = next(one for one in content(0).findings if one.id == "C11").parts
    assert "MLM 40% overtakes CLM near step" in unknown.note
    assert "epoch" not in unknown.note
    (once,) = next(one for one in content(800).findings if one.id == "C11").parts
    assert "within one epoch" not in once.note  # all of them are


def test_the_mark_stands_beside_the_verdict_wherever_it_is_read(content):
    made = content(200)
    row = next(line for line in markdown(made).splitlines() if line.startswith("| C1 |"))
    assert f"{made.findings[0].verdict}, under repetition |" in row
    badge = render(made).html.split('id="claim-C1"')[1].split("</summary>")[0]
    assert "<small>under repetition</small>" in badge
    assert "under repetition" in latex(made)["claims.tex"]
    (table,) = (one for one in made.tables if one.name == "claims")
    assert "· under repetition" in table.csv()


def test_only_claims_that_compare_objectives_ask_for_equal_data():
    assert [one.id for one in STATEMENTS if not one.equal_data] == [
        "C7", "C8", "C9", "C12", "C16", "B2", "B3",
    ]  # fmt: skip
