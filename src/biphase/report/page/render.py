"""Assemble the page: templates, style, scripts and data become one HTML text. Text of users is always escaped."""

from __future__ import annotations

import json
from functools import cache
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from biphase.papers.gisserot2025 import published
from biphase.report.content import Content, reading
from biphase.report.figures import PALETTES, screen_height, script, specification
from biphase.report.figures.description import PAPER
from biphase.report.page import view
from biphase.report.tables import Table

MOST = 200  # failed or unreadable entries listed one by one
FEW = 4096  # a column with at most this many distinct values is stored as indices into a list of them


def page(content: Content, *, live: bool = False) -> str:
    """The whole HTML file."""
    scripts = [f"const PALETTES = {_json(PALETTES)};", _asset("page.js"), _asset("figures.js")]
    if live:
        scripts.append(_asset("live.js"))
    return _template("template.html.j2").render(
        **_told(content),
        live=live,
        main=Markup(main(content, live=live)),
        style=Markup(_asset("style.css")),
        theme_script=Markup(_asset("theme.js")),
        vega=Markup(inside_script(script())),
        scripts=[Markup(inside_script(one)) for one in scripts],
    )


def main(content: Content, *, live: bool = False, with_figures: bool = True) -> str:
    """The part between the bar and the footer, which a watched page replaces on updates."""
    training = live and any(cost.standing != "done" for cost in content.evidence.job_costs)
    figures = [_figure(one) for one in content.figures]
    return _template("main.html.j2").render(
        **_told(content),
        live=live,
        losses=[one for one in figures if training and one["id"] == "losses"],
        top=content.headline,
        answer=view.answer(content),
        missing=content.missing,
        most=MOST,
        tally=view.tally(content),
        tally_words=", ".join(
            f"{count} {word}" for word, count in content.headline.verdicts.items() if count
        ),
        findings=content.findings,
        claims=view.claims(content),
        paper=published,
        figures=[one for one in figures if not (training and one["id"] == "losses")],
        marked=any(one.name == PAPER for figure in content.figures for one in figure.entries),
        boards=view.boards(content),
        edges=content.edges,
        noise=view.noise(content),
        sources_of_noise=view.SOURCES_OF_NOISE,
        runs=view.runs(content),
        trial_count=len(next(one for one in content.tables if one.name == "trials").rows),
        reading=reading(claims=bool(content.findings)),
        tables_json=Markup(_json({table.name: packed(table) for table in content.tables})),
        figures_json=Markup(_json(figures_data(content) if with_figures else {})),
    )


def figures_data(content: Content) -> dict[str, Any]:
    """Figure id → its Vega specification."""
    return {one.id: specification(one) for one in content.figures}


def packed(table: Table) -> dict[str, Any]:
    """A table for the page, by columns; repeated texts are stored once to keep the file small."""
    columns = []
    for place in range(len(table.columns)):
        cells = [row[place] for row in table.rows]
        distinct = list(dict.fromkeys(cells))
        if len(distinct) <= min(FEW, len(cells) // 2):
            at = {text: number for number, text in enumerate(distinct)}
            columns.append({"of": distinct, "at": [at[text] for text in cells]})
        else:
            columns.append({"all": cells})
    return {"columns": list(table.columns), "cells": columns, "rows": len(table.rows)}


# ---------------------------------------------------------------- parts


def _told(content: Content) -> dict[str, Any]:
    return {"name": content.name, "question": content.question, "about": content.provenance}


def _figure(figure: Any) -> dict[str, Any]:
    return {
        "id": figure.id,
        "title": figure.title,
        "caption": figure.caption,
        "views": [one.name for one in figure.views],
        "height": screen_height(figure),
    }


@cache
def _environment() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=PackageLoader("biphase.report.page", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _template(name: str) -> Any:
    return _environment().get_template(name)


@cache
def _asset(name: str) -> str:
    return files("biphase.report.page").joinpath(name).read_text(encoding="utf-8")


def inside_script(code: str) -> str:
    """Escape code so that it cannot end its script element or open an HTML comment."""
    return code.replace("</script", r"<\/script").replace("<!--", r"<\!--")


def _json(value: Any) -> str:
    """JSON for a script element; no character in it can end the element."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", r"\u003c").replace("\u2028", r"\u2028").replace("\u2029", r"\u2029")
