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
    """1 piece, 2 pieces; 2 of what has another plural."""
    return f"{number:,} {word if number == 1 else plural or f'{word}s'}"


def collapse(number: int) -> str:
    """A warning where so many models predict the same for every test example."""
    return f"constant predictions in {counted(number, 'fine-tuning')}" if number else ""


def no_interval(seeds: int) -> str:
    """Why a mean over so many seeds has no interval."""
    return "one seed: no interval" if seeds < 2 else "all seeds alike: no interval"


def spoken(objective: str) -> str:
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
