"""The tables of docs/statistics.md: printed by simulations, and compared with the page."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "statistics.md"


def show(header, rows, error):
    """Print a table, and find it on the page: the same words, and numbers that differ by no more than `error`."""
    lines = [f"| {' | '.join(row)} |" for row in (header, *rows)]
    print("\n" + "\n".join(lines))
    page = PAGE.read_text(encoding="utf-8").splitlines()
    assert lines[0] in page, lines[0]
    first = page.index(lines[0]) + 2  # after the line of dashes
    assert not any(page[first + len(rows) : first + len(rows) + 1])  # the table ends there
    for ours, theirs in zip(lines[1:], page[first : first + len(rows)], strict=True):
        number = re.compile(r"\d+\.\d+")
        assert number.sub("#", theirs) == number.sub("#", ours)
        pairs = zip(number.findall(ours), number.findall(theirs), strict=True)
        assert all(abs(float(one) - float(other)) <= error for one, other in pairs), (ours, theirs)


def percent(share):
    return f"{100 * share:.1f}"
