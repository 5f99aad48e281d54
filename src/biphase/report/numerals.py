"""Scores, differences and p-values as a person reads them. What is not known is a dash, never a nought."""

from __future__ import annotations

import math

MISSING = "—"
SCALE = 100.0  # points between the worst and the best score
MINUS = "−"  # the sign a reader knows from print; files for programs keep the hyphen


def fixed(value: float, digits: int = 2) -> str:
    """A number with so many decimals; what rounds to nought has no sign."""
    if not math.isfinite(value):
        return MISSING
    text = f"{value:.{digits}f}"
    if text.startswith("-"):
        text = text[1:] if float(text) == 0 else MINUS + text[1:]
    return text


def percent(score: float, digits: int = 2) -> str:
    """A score between 0 and 1, in percent."""
    return fixed(score * 100, digits)


def signed(points: float, digits: int = 2) -> str:
    """A difference in points, always with its sign."""
    text = fixed(points, digits)
    return text if text == MISSING or text.startswith(MINUS) or float(text) == 0 else f"+{text}"


def interval(low: float, high: float, digits: int = 2, *, sign: bool = False) -> str:
    """[0.71, 1.09]; empty where there is none."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    say = signed if sign else fixed
    return f"[{say(low, digits)}, {say(high, digits)}]"


def p_value(p: float) -> str:
    """Two digits, and no more noughts than a reader counts."""
    if not math.isfinite(p):
        return MISSING
    if p < 0.0001:
        return "< 0.0001"
    return f"{p:.4f}" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def p_equals(p: float) -> str:
    """p = 0.011, or p < 0.0001."""
    told = p_value(p)
    return f"p {told}" if told.startswith("<") else f"p = {told}"


def effect(points: float) -> str:
    """The size of a detectable effect: none can be larger than the scale of scores."""
    return f">{SCALE:g}" if points > SCALE else fixed(points)


def rate(lr: float) -> str:
    """A learning rate as it is written in a study: 5e-5."""
    mantissa, exponent = f"{lr:e}".split("e")
    return f"{float(mantissa):g}e{int(exponent)}"


def plain(value: float | None, digits: int) -> str:
    """For a program: fixed decimals with a hyphen, empty where it is not known."""
    if value is None or not math.isfinite(value):
        return ""
    text = f"{value:.{digits}f}"
    return text[1:] if text.startswith("-") and float(text) == 0 else text


def exponent(value: float | None, digits: int = 6) -> str:
    """For a program: significant digits, empty where it is not known."""
    return "" if value is None or not math.isfinite(value) else f"{value:.{digits}g}"


def listed(words: list[str]) -> str:
    """a, b and c."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
