"""Formatting of numbers, scores, durations and untrusted text for terminals, reports and files."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

# Control characters except newline and tab, bidirectional marks, and surrogates.
_CONTROL = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Replace control characters and bidirectional marks by escapes such as \\x1b, so that text is safe to print."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def si(value: float) -> str:
    """Format a number with three digits and an SI prefix: 12345 → "12.3 k"."""
    if not math.isfinite(value):
        return "? "
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.7 would round to 1000
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def short(count: float) -> str:
    """Format a count as 12.3k, 1.5M or 2B."""
    return si(count).replace(" ", "").replace("G", "B")


def beside(mean: float, low: float, high: float, least: float = 0.0) -> str:
    """Format the interval of a score in percent: "± 0.18", or "[0.00, 63.21]" if it is asymmetric or leaves `least`–100."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    if low < least or high > 100 or not math.isclose(high - mean, mean - low, abs_tol=1e-9):
        return f"[{max(low, least):.2f}, {min(high, 100.0):.2f}]"
    return f"± {(high - low) / 2:.2f}"


def counted(number: int, word: str, plural: str = "") -> str:
    """Format a count with its noun: 1 training job, 2 training jobs. `plural` is for irregular nouns."""
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"


def collapse(number: int) -> str:
    """Return a warning that `number` fine-tuned models predict the same for every test example; "" for 0."""
    return f"constant predictions in {counted(number, 'fine-tuning')}" if number else ""


def no_interval(seeds: int) -> str:
    """Return why a mean over `seeds` seeds has no confidence interval."""
    return "one seed: no interval" if seeds < 2 else "all seeds alike: no interval"


# Objectives whose number is a masking ratio in percent, by name.
MASKED = {"mlm": "masked", "mntp": "masked, one before"}


def objective_title(objective: str) -> str:
    """Return the readable name of a held-out loss's objective: mlm40 → "masked 40%"."""
    kind = objective.rstrip("0123456789.")
    share = objective[len(kind) :]
    if kind in MASKED and share:
        return f"{MASKED[kind]} {share}%"
    return "causal" if objective == "clm" else objective


def duration(seconds: float) -> str:
    """Format a duration with a unit from seconds to years."""
    if not math.isfinite(seconds):
        return "?"
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    days = seconds / 86_400
    if days >= 730:
        return f"{days / 365.25:,.0f} years"
    return f"{seconds / 3600:.1f} h" if days < 2 else f"{days:.1f} days"


# ---------------------------------------------------------------- lines of a terminal


BLOCKS = "█▇▆▅▄▃▂▁"
SHORTEST = 8  # characters to which a part of a line is shortened at most


def middle(text: str, width: int) -> str:
    """Shorten a text to `width` characters by an ellipsis in its middle: names differ at either end.

    Of "name · more", the name is shortened first.
    """
    name, dot, more = text.partition(" · ")
    room = width - len(dot + more)
    if room < min(SHORTEST, len(name)):
        name, dot, more, room = text, "", "", width
    if len(name) > room:
        end = max(0, room - 1) // 2
        name = f"{name[: room - 1 - end]}…{name[len(name) - end :]}"
    return name + dot + more


def apart(names: Sequence[str], width: int) -> dict[str, str]:
    """Shorten each of several names to `width` characters so that they stay different, if that is possible.

    Where they differ in their middles, what they begin and end with alike is shortened instead.
    """
    short = {name: middle(name, width) for name in names}
    if len(set(short.values())) < len(short):
        begin = _alike(list(short))
        end = _alike([name[begin:][::-1] for name in short])
        for name in short:
            core = name[begin : len(name) - end]
            room = max(2, width - len(core))
            head, tail = middle(name[:begin], room - room // 2), middle(name[len(name) - end :], room // 2)
            short[name] = middle(head + core + tail, width)
    return short


def _alike(texts: Sequence[str]) -> int:
    """Return with how many equal characters all texts begin."""
    return sum(1 for _ in takewhile(lambda letters: len(set(letters)) == 1, zip(*texts, strict=False)))


def fit(parts: Sequence[str], width: int, spare: Sequence[int] = (), name: int = 0, gap: str = "  ") -> str:
    """Join parts by `gap`; if that exceeds `width` characters, leave out and shorten. A width below 1 means any.

    The parts at `spare` are left out one after the other, then the part `name` is shortened in its middle.
    """
    kept, left = dict(enumerate(parts)), list(spare)
    while len(line := gap.join(filter(None, kept.values()))) > width > 0 and left:
        del kept[left.pop(0)]
    if len(line) > width > 0:
        kept[name] = middle(kept[name], max(SHORTEST, len(kept[name]) - len(line) + width))
        line = gap.join(filter(None, kept.values()))
    return line


def sparkline(values: Sequence[float], width: int) -> str:
    """Draw a curve in one line of at most `width` block characters, from its highest value to its lowest."""
    if not values:
        return ""
    if len(values) > width:
        values = [values[round(i * (len(values) - 1) / (width - 1))] for i in range(width)]
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    return "".join(BLOCKS[min(7, int((high - value) / span * 8))] for value in values)


# ---------------------------------------------------------------- numerals
# Scores, differences and p-values. An unknown value is shown as a dash, never as 0.


MISSING = "—"
SCALE = 100.0  # points between the worst and the best score
MINUS = "−"  # typographic minus for people; files for programs keep the hyphen


def fixed(value: float, digits: int = 2) -> str:
    """Format a number with `digits` decimals; a value that rounds to 0 has no sign."""
    if not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    if text.startswith("-"):
        text = text[1:] if float(text) == 0 else MINUS + text[1:]
    return text


def percent(score: float, digits: int = 2) -> str:
    """Format a score between 0 and 1 in percent."""
    return fixed(score * 100, digits)


def signed(points: float, digits: int = 2) -> str:
    """Format a difference in points with its sign, also if it is positive."""
    text = fixed(points, digits)
    return text if text == MISSING or text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def interval(low: float, high: float, digits: int = 2, *, sign: bool = False) -> str:
    """Format an interval as [0.71, 1.09]; "" if a bound is not finite."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    number = signed if sign else fixed
    return f"[{number(low, digits)}, {number(high, digits)}]"


def p_value(p: float) -> str:
    """Format a p-value with two to four decimals, or as "< 0.0001"."""
    if not math.isfinite(p):
        return MISSING
    if p < 0.0001:
        return "< 0.0001"
    return f"{p:.4f}" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_equals(p: float) -> str:
    """Format a p-value as "p = 0.011" or "p < 0.0001"."""
    value = p_value(p)
    return f"p {value}" if value.startswith("<") else f"p = {value}"


def effect(points: float) -> str:
    """Format a detectable effect in points; one above the scale of scores is shown as ">100"."""
    return f">{SCALE:g}" if points > SCALE else fixed(points)


def rate(lr: float) -> str:
    """Format a learning rate as a study file writes it: 5e-5."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def plain(value: float | None, digits: int) -> str:
    """Format for a program: fixed decimals with an ASCII hyphen, "" if unknown."""
    if value is None or not math.isfinite(value):
        return ""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


def exponent(value: float | None, digits: int = 6) -> str:
    """Format for a program: `digits` significant digits, "" if unknown."""
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def finite(value: Any) -> Any:
    """Return records as JSON can hold them: numbers that are not finite become None."""
    if isinstance(value, dict):
        return {name: finite(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def listed(words: list[str]) -> str:
    """Join words as "a, b and c"."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""


def aligned(rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """Return rows of cells as lines with aligned columns: the first `left` columns to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines
