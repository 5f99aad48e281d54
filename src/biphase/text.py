"""Numbers, and text of others, as a person reads them."""

from __future__ import annotations

import math
import re

# Control characters but newline and tab, marks that reorder text, and halves of characters.
_ACTING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Text for a terminal: whatever a terminal would act upon is shown as an escape such as \\x1b."""
    return _ACTING.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def si(value: float) -> str:
    """12,345 as 12.3k: three digits and a unit."""
    if not math.isfinite(value):
        return "? "
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.9995 * size:  # 999.7 is 1 k
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "


def short(count: float) -> str:
    """12,345 as 12.3k, and billions as a person counts them."""
    return si(count).replace(" ", "").replace("G", "B")


def beside(mean: float, low: float, high: float) -> str:
    """What stands after a score in percent: ± 0.18, or [0.00, 63.21] where its interval ends at 0 or 100."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return ""
    if low < 0 or high > 100 or not math.isclose(high - mean, mean - low, abs_tol=1e-9):
        return f"[{max(low, 0.0):.2f}, {min(high, 100.0):.2f}]"
    return f"± {(high - low) / 2:.2f}"


def counted(number: int, word: str, plural: str = "") -> str:
    """1 training job, 2 training jobs; 2 of what has another plural."""
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"


def collapse(number: int) -> str:
    """A warning where so many models predict the same for every test example."""
    return f"constant predictions in {counted(number, 'fine-tuning')}" if number else ""


def no_interval(seeds: int) -> str:
    """Why a mean over so many seeds has no interval."""
    return "one seed: no interval" if seeds < 2 else "all seeds alike: no interval"


def objective_in_words(objective: str) -> str:
    """What a held-out loss is of: mlm40 as masked 40%."""
    names = {"clm": "causal", "mlm": "masked", "mntp": "masked, one before"}
    kind = objective.rstrip("0123456789.")
    share = objective[len(kind) :]
    return f"{names.get(kind, kind)}{f' {share}%' if share else ''}"


def duration(seconds: float) -> str:
    """A length of time as a person says it."""
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


# ---------------------------------------------------------------- numerals
# Scores, differences and p-values as a person reads them. What is not known is a dash, never a nought.


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
