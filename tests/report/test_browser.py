"""The page in a real browser: it opens without an error or a request, sorts, filters, draws, switches, and fits a phone.

Chromium is Debian's (tests/system-packages installs it), driven by playwright. `BIPHASE_BROWSER` names another one.
Without a browser these tests fail where a machine is to prove something (CI) and are left out elsewhere, with a line.
"""

import os
import shutil
import threading
from dataclasses import replace
from functools import partial
from http.server import ThreadingHTTPServer

import pytest
from common import BROWSER_ARGUMENTS, browser_executable
from playwright.sync_api import expect, sync_playwright

from biphase import CLM, MLM, WSD, Stage, Study
from biphase.report.build import HOST, PAGE, PageHandler, build, render
from biphase.store import Store
from biphase.study.ledger import finetunings

BROWSER = browser_executable()


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as tool:
        opened = tool.chromium.launch(executable_path=BROWSER, args=BROWSER_ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def built(three, planned, _three_store, tmp_path_factory):
    return build(planned(three), Store(_three_store), tmp_path_factory.mktemp("page"), static=False)


@pytest.fixture
def visit(browser, built):
    """Open the page as `visit(width=…, scheme=…)`; at the end there was no error, no warning and no request."""
    troubles, contexts = [], []

    def go(width=1280, height=900, scheme="light", address="", context=None):
        context = context or browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=scheme
        )
        contexts.append(context)
        page = context.new_page()
        page.on(
            "console",
            lambda message: troubles.append(message.text) if message.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda wrong: troubles.append(str(wrong)))
        page.on(
            "request", lambda asked: troubles.append(asked.url) if not allowed(asked.url, address) else None
        )
        page.goto(address or built.page.as_uri())
        return page

    yield go
    for context in contexts:
        context.close()
    assert troubles == []


def allowed(url, address):
    return url.startswith("blob:") or (url.startswith(address) if address else url.startswith("file:"))


def drawn(page, figure):
    place = page.locator(f'[data-figure="{figure}"]')
    place.scroll_into_view_if_needed()
    page.wait_for_selector(f'[data-figure="{figure}"] .drawn svg.marks')
    return place


def names(page, table):
    """The names in the first column of what a table shows."""
    rows = page.locator(f"#{table} tbody tr:not(.hidden):not(.detail):visible th")
    return [text.split("\n")[0].strip() for text in rows.all_inner_texts()]


def test_a_reader_sorts_filters_unfolds_and_opens_what_there_is(ledger, visit, tmp_path):
    """On the page of a study that lacks three scores of one model."""
    plan, store = ledger
    for training in finetunings(plan):
        if training.model == plan.results["mlm"] and training.lr == 2e-5 and training.task.name == "squad":
            shutil.rmtree(store.trials / training.trials[0].key)
    half = build(plan, store, tmp_path / "report", static=False)
    page, findings = visit(address=half.page.as_uri()), half.content.findings
    assert "177 of 180 scores; 3 missing" in page.locator(".notice").inner_text()
    page.get_by_role("link", name="What is missing").click()
    assert page.locator("#missing").is_visible()

    # Finished models come first; checkpoints are folded until they are asked for, or a filter asks for them.
    ends = ["clm", "mlm", "both"]
    assert names(page, "t-families") == ends
    page.locator("#filter-t-families").fill("clm-10")
    assert names(page, "t-families") == ["clm-10"]
    page.locator("#filter-t-families").fill("clm mlm")
    assert names(page, "t-families") == ["both"]
    assert page.locator('[data-count="t-families"]').inner_text() == "1 of 4 models"
    page.locator("#filter-t-families").fill("")
    assert names(page, "t-families") == ends
    page.locator('[data-unfold="t-families"]').click()

    # Scores sort by value; what is missing is at the end either way.
    head = page.locator("#t-families thead th").nth(3)
    scores = {line.model.name: line.cells[2].score for line in half.content.boards[0].lines}
    known = sorted(
        (name for name, one in scores.items() if one.known), key=lambda name: -scores[name].seeds.mean
    )
    head.get_by_role("button").click()
    assert (head.get_attribute("aria-sort"), names(page, "t-families")) == ("descending", [*known, "mlm"])
    head.get_by_role("button").press("Enter")
    assert (head.get_attribute("aria-sort"), names(page, "t-families")) == (
        "ascending",
        [*known[::-1], "mlm"],
    )

    # Claims open with their evidence, by a key or a link, and filter by verdict.
    finding = next(one for one in findings if one.parts)
    claim = page.locator(f"#claim-{finding.id}")
    assert not claim.locator(".evidence").is_visible()
    claim.locator("summary").focus()
    page.keyboard.press("Enter")
    assert claim.locator(".why").inner_text() == finding.why
    assert (
        claim.locator("tbody tr").count() == claim.locator("svg.forest .mean").count() == len(finding.parts)
    )
    page.locator('.chip[data-verdict="untested"]').click()
    untested = [f"claim-{one.id}" for one in findings if one.verdict == "not tested"]
    assert [one.get_attribute("id") for one in page.locator(".claim").all() if one.is_visible()] == untested
    page.locator('.chip[data-verdict=""]').click()
    assert page.locator(".claim:not(.hidden)").count() == len(findings)
    page.goto(half.page.as_uri() + "#claim-C7")
    assert page.locator("#claim-C7 .evidence").is_visible(), "not tested, so it was folded"

    # A run opens with its jobs, and moves with what was opened of it.
    run, key = page.locator("#run-both"), plan.results["both"]
    run.get_by_role("button", name="both").click()
    text = run.locator(".detail").inner_text()
    assert key in text
    assert "clm 0 → 10" in text
    assert run.locator(".detail tbody tr").count() == len(plan.path(key))
    page.locator("#t-runs thead th").nth(0).get_by_role("button").click()
    rows = [one.get_attribute("data-id") for one in page.locator("#t-runs tbody.run").all()]
    assert rows == ["both", "clm", "clm-10", "mlm"]
    assert run.locator(".detail").is_visible()


def texts(page, figure):
    return page.locator(f'[data-figure="{figure}"] svg.marks text').all_text_contents()


def test_figures_answer_to_hover_and_legend(visit, built):
    page = visit()
    drawn(page, "losses")
    figure = next(one for one in built.content.figures if one.id == "losses")
    entries = [series.name for series in figure.entries]
    assert texts(page, "losses")[-len(entries) :] == entries
    lines = "document.querySelectorAll('[data-figure=losses] .mark-line path').length"
    count = page.evaluate(lines)
    page.locator('[data-figure=losses] [class~="entry-0"] path').click()
    page.wait_for_function(f"() => {lines} < {count}")
    page.locator('[data-figure=losses] [class~="entry-0"] path').click()
    page.wait_for_function(f"() => {lines} === {count}")
    page.locator('[data-figure=losses] [class~="cells-1"] path').first.hover()
    hovers = {text for series in figure.panels[1].series for text in series.hover}
    assert page.locator("#tip").inner_text() in hovers


@pytest.mark.parametrize("width", [380, 900])
def test_every_figure_is_drawn_and_the_page_never_scrolls_sideways(visit, built, width):
    page = visit(width=width)
    for figure in built.content.figures:
        svg = drawn(page, figure.id).locator("svg.marks").bounding_box()
        assert svg["height"] > 100
        boxes = page.evaluate(
            "id => [...document.querySelectorAll(`[data-figure=${id}] svg.marks text`)].map(text => text.getBoundingClientRect())",
            figure.id,
        )
        assert all(
            svg["x"] - 1 <= box["left"] and box["right"] <= svg["x"] + svg["width"] + 1 for box in boxes
        )
    page.evaluate("document.querySelectorAll('.claim').forEach(claim => claim.open = true)")
    page.evaluate("document.querySelectorAll('.run .open').forEach(button => button.click())")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def colours(page):
    return page.evaluate(
        """() => [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,
                  document.querySelector('[data-figure=objectives] svg.marks text')?.getAttribute('fill')]"""
    )


def test_themes_follow_the_system_and_the_switch_and_are_remembered(visit, built):
    dark, light = visit(scheme="dark"), visit(scheme="light")
    for page in (dark, light):
        drawn(page, "objectives")
    assert colours(dark)[0] == "rgb(20, 23, 28)"
    assert colours(light)[0] == "rgb(255, 255, 255)"
    assert all(one != other for one, other in zip(colours(dark), colours(light), strict=True)), "figures, too"
    light.get_by_role("button", name="Switch between light and dark").click()
    assert colours(light) == colours(dark)
    again = visit(context=light.context)
    assert again.evaluate("document.documentElement.dataset.theme") == "dark"


def test_paper_is_light_and_shows_everything(visit, built):
    page = visit(scheme="dark")
    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert page.locator(".claim:not([open])").count() == 0
    assert page.locator(".plot .drawn").count() == len(built.content.figures)
    assert not page.locator(".bar").is_visible()
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"
    assert page.locator(".claim[open]").count() == 0


def test_a_watched_page_reloads_when_it_was_written_again(visit, built, tmp_path):
    live = render(built.content, live=True)
    (tmp_path / PAGE).write_text(live)
    os.utime(tmp_path / PAGE, (1e9, 1e9))  # times in HTTP are whole seconds
    with ThreadingHTTPServer((HOST, 0), partial(PageHandler, directory=str(tmp_path))) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        page = visit(address=f"http://{HOST}:{server.server_port}/{PAGE}")
        page.wait_for_function("written !== null")
        (tmp_path / PAGE).write_text(live.replace("Is it so?", "Is it not?"))
        page.evaluate("reloadIfWritten()")
        expect(page.locator("h1")).to_have_text("Is it not?")
        page.goto("about:blank")
        server.shutdown()


def test_odd_names_do_no_harm(invent, run, grid, visit, tmp_path):
    name = "a\"b'c<i>&#35; {d}"
    link = "<a href='about:blank'>=1+1</a>"
    runs = (
        run(name, Stage(CLM(), 20)),
        run("__proto__", Stage(CLM(), 20), schedule=WSD(2e-3, warmup=2, decay=4)),
        run(link.replace("/", "\N{DIVISION SLASH}"), Stage(MLM(0.4), 20)),
        run("=1+1", Stage(MLM(0.4), 20), schedule=WSD(2e-3, warmup=2, decay=4)),
    )
    study = Study(name, runs, grid("squad"), papers="gisserot2025")
    plan, store = invent(study, tmp_path / "store")
    plan = replace(
        plan, question="</script><script>window.harm = 1</script><img src=x onerror='window.harm = 2'>?"
    )
    odd = build(plan, store, tmp_path / "report", static=False)
    page = visit(address=odd.page.as_uri())
    for figure in odd.content.figures:
        drawn(page, figure.id)
    assert page.evaluate("window.harm") is None
    assert page.locator("svg a").count() == 0, "no name in a figure is a link"
    assert {"__proto__", "=1+1"} <= set(texts(page, "losses"))
    assert page.locator("h1").inner_text() == plan.question
    assert name in names(page, "t-families")
    page.locator("#filter-t-families").fill("<i>")
    assert names(page, "t-families") == [name]


# ---------------------------------------------------------------- repetition


def test_one_epoch_is_marked_over_tokens_and_verdicts_carry_their_mark(visit, run, grid, invent, tmp_path):
    runs = (run("clm", Stage(CLM(), 40), keep=(10, 30)), run("mlm", Stage(MLM(0.4), 40), keep=(10, 30)))
    plan, store = invent(
        Study("twice", runs, grid("sst2"), papers="gisserot2025"), tmp_path / "store", rows=40
    )
    built = build(plan, store, tmp_path / "page", static=False)
    page = visit(address=built.page.as_uri())
    figure = page.locator("#figure-efficiency")
    figure.scroll_into_view_if_needed()
    mark = figure.locator("svg.marks text").filter(has_text="one epoch")
    for view, opacity in (
        ("tokens", "1"),
        ("FLOPs", "0"),
        ("tokens", "1"),
    ):  # where it lies depends on the objective
        figure.get_by_text(view, exact=True).click()
        expect(mark).to_have_attribute("opacity", opacity)
        assert f"training {view}" in texts(page, "efficiency")
    verdict = next(one.verdict for one in built.content.findings if one.id == "C1")
    badge = page.locator("#claim-C1 > summary .badge")
    assert badge.inner_text().split("\n") == [verdict, "under repetition"]
