"""Why a verdict is what it is: one or two sentences with the numbers that decide, to be read without any table."""

from __future__ import annotations

import math
from collections.abc import Sequence

from biphase.report.claims.findings import Part
from biphase.report.claims.verdicts import Verdict, sought
from biphase.report.numerals import SCALE, fixed, p_equals, p_value, signed

LISTED = 4  # parts; of more, the weakest is told


def why(gist: str, verdict: Verdict, parts: Sequence[Part], p_holm: float, needs: str) -> str:
    known = [one for one in parts if one.supports != "missing"]
    if not parts:
        return f"{_capital(needs)}."
    if not known:
        return f"{_capital(_of_missing(parts))}."
    told = {
        "reproduced": _reproduced,
        "direction only": _direction,
        "not reproduced": _against,
        "underpowered": _underpowered,
    }[verdict](gist, known, p_holm)
    missing = [one for one in parts if one.supports == "missing"]
    return f"{told} Missing: {_of_missing(missing)}." if missing else told


def _reproduced(gist: str, known: Sequence[Part], p_holm: float) -> str:
    if len(known) == 1:
        return f"{_capital(_full(known[0]))}."
    return f"{_capital(_numbers(gist, known))}."


def _direction(gist: str, known: Sequence[Part], p_holm: float) -> str:
    open_parts = [one for one in known if one.supports == "direction"] or list(known)
    said = _full(open_parts[0]) if len(open_parts) == 1 else _numbers(gist, open_parts)
    smaller = all(one.paper is not None and one.estimate.high < one.paper for one in open_parts)
    than = ", and an effect as large as the paper's is" if smaller else ""
    return (
        f"{_capital(said)}: the claimed sign, but chance is not ruled out (p = {p_value(p_holm)} corrected){than}"
        f"{_clear(known)}."
    )


def _against(gist: str, known: Sequence[Part], p_holm: float) -> str:
    contrary = [one for one in known if one.supports == "against"]
    worst = min(contrary, key=_strength)
    speak = "speaks" if len(contrary) == 1 else "speak"
    more = f"; {len(contrary)} of {len(known)} parts {speak} against the claim" if len(known) > 1 else ""
    return f"{_capital(_full(worst))}{_short_of_margin(worst)}{more}."


def _underpowered(gist: str, known: Sequence[Part], p_holm: float) -> str:
    contrary = [one for one in known if one.contrary]
    if contrary:
        worst = min(contrary, key=_strength)
        more = (
            f"; {len(contrary)} of {len(known)} parts {'does' if len(contrary) == 1 else 'do'}"
            if len(known) > 1
            else ""
        )
        return (
            f"{_capital(_full(worst))}{_short_of_margin(worst)}: it points the other way "
            f"({p_equals(worst.estimate.p)}), and is not clear after correction for the number of claims{more}."
        )
    weak = [one for one in known if one.supports == "underpowered"]
    worst = max(weak, key=lambda one: one.detectable / (sought(one.paper, one.margin) or 1e-9))
    effect = sought(worst.paper, worst.margin)
    wanted = (
        f"the paper's is {fixed(effect)}" if worst.paper is not None else f"{fixed(effect)} should be found"
    )
    beyond = f" beyond {signed(worst.margin)}" if worst.margin else ""
    possible = f"only an effect of {fixed(worst.detectable)} points{beyond} would be found, and {wanted}"
    if math.isinf(worst.detectable):  # what its note says
        return f"{_capital(worst.says)}, but {worst.note}{_clear(known)}."
    if worst.detectable > SCALE:
        possible = "no effect that scores can have would be found"
    return f"{_capital(worst.says)}, but with the noise of these seeds {possible}{_clear(known)}."


def _numbers(gist: str, parts: Sequence[Part]) -> str:
    """The gist and the numbers; of many parts the weakest."""
    if len(parts) <= LISTED:
        return f"{gist}, in points: {', '.join(_short(one) for one in parts)}"
    weakest = max(parts, key=lambda one: one.estimate.p)
    return f"{gist}: {len(parts)} parts, the least clear {_short(weakest)}"


def _short(part: Part) -> str:
    paper = f"; paper {signed(part.paper)}" if part.paper is not None else ""
    return f"{signed(part.estimate.mean)} ± {_half(part)} ({part.title}{paper})"


def _full(part: Part) -> str:
    return part.says + (f" (paper: {signed(part.paper)})" if part.paper is not None else "")


def _short_of_margin(part: Part) -> str:
    """What the sentence does not show: that the claim asks for more, or less, than a sign."""
    return f", below the margin of {signed(part.margin)}" if part.margin else ""


def _clear(known: Sequence[Part]) -> str:
    """How much of the claim is beyond doubt, where some of it is not."""
    clear = sum(one.supports == "yes" for one in known)
    if len(known) == 1:
        return ""
    return f"; of {len(known)} parts {clear or 'none'} {'is' if clear < 2 else 'are'} clear"


def _of_missing(parts: Sequence[Part]) -> str:
    notes = list(dict.fromkeys(one.note for one in parts))
    if len(parts) == 1:
        return f"{parts[0].title} ({notes[0]})"
    if len(notes) == 1:
        return f"{len(parts)} parts ({notes[0]})"
    return ", ".join(f"{one.title} ({one.note})" for one in parts)


def _half(part: Part) -> str:
    return fixed((part.estimate.high - part.estimate.low) / 2)


def _strength(part: Part) -> float:
    """How far from the margin, in standard errors."""
    excess = part.estimate.mean - part.margin
    return excess / part.estimate.se if part.estimate.se > 0 else math.copysign(math.inf, excess)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
