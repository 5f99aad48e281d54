"""From measured contrasts to verdicts: what a study shows about each claim, and why.

`judge` measures all claims of a report, corrects their p-values for the number of claims, and returns one `Finding`
for each claim with a `ClaimPart` for each of its tests. The file has, in order, the records, the decision rules (pure
functions; docs/statistics.md gives the reasons), the sentences that explain a verdict, the claims that a study file
makes itself, the mark for repeated data, and `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from biphase.catalog import TASKS
from biphase.papers.gisserot2025.claims import STATEMENTS
from biphase.report.contrasts import (
    ComparableModels,
    Contrast,
    MeasuredContrast,
    Source,
    Statement,
    Test,
    comparable_models,
    detectable,
    gap,
    measure,
    measured_contrasts,
)
from biphase.report.evidence import Evidence, Resamples, shared_resamples
from biphase.report.pretraining import Epochs
from biphase.report.recipes import Model
from biphase.report.statistics.intervals import Estimate, holm
from biphase.specs import Claim
from biphase.specs.tasks import family_name
from biphase.study.names import REPEATED
from biphase.text import SCALE, counted, fixed, interval, listed, p_equals, p_value, short, signed

CONTRARY = "points the other way"
READS = ("reproduced", "direction only", "not reproduced", CONTRARY, "underpowered", "not tested")


@dataclass(frozen=True)
class ClaimPart:
    """One test of a claim; numbers in percentage points."""

    title: str  # "610m · SC"
    models: tuple[str, ...]
    estimate: Estimate  # of the contrast; positive: as claimed; its p-value is for exceeding the margin
    margin: float  # the value that the contrast must exceed
    paper: float | None  # the contrast of the paper's scores, where they are published for these recipes
    detectable: float  # smallest effect beyond the margin found with 80% power at the corrected level
    examples: tuple[float, float] | None  # the contrast's 95% interval over test examples
    supports: Supports
    note: str
    says: str  # the result as a sentence without a full stop; empty if missing

    @property
    def contrary(self) -> bool:
        """Whether the 95% interval lies below both 0 and the margin, although the corrected test is not significant."""
        return self.supports == "underpowered" and self.estimate.high < min(self.margin, 0.0)


@dataclass(frozen=True)
class Finding:
    """A claim and the study's verdict on it."""

    id: str
    says: str
    source: Source
    verdict: Verdict
    why: str
    parts: tuple[ClaimPart, ...]
    p: float  # NaN if not tested
    p_holm: float
    scale: str
    figure: str  # id of the figure that shows it
    caveats: tuple[str, ...]
    contrast: str  # how it is tested, in one line
    paper: str  # the paper's numbers, as text
    condition: str = ""  # a condition that limits the verdict, in two words

    @property
    def reads(self) -> str:
        """The verdict as a report shows it: an underpowered claim with a contrary part "points the other way"."""
        contrary = self.verdict == "underpowered" and any(one.contrary for one in self.parts)
        return CONTRARY if contrary else self.verdict


# ---------------------------------------------------------------- decision rules
# Every part of a claim must hold, so the p-value of a claim is the largest of its parts' (a part with the wrong sign
# counts as 1). Holm's procedure then corrects for the number of claims that were tested.


Verdict = Literal["reproduced", "direction only", "not reproduced", "underpowered", "not tested"]
Supports = Literal["yes", "direction", "against", "underpowered", "missing"]

ALPHA = 0.05  # family-wise error rate over all claims of a study
WORTH_FINDING = 0.5  # points: the effect a test should be able to find where the paper gives none


def claim_p(parts: Sequence[tuple[float, float]]) -> float:
    """The p-value of a claim from its parts as (excess over the margin, p).

    Missing parts (NaN) are ignored; NaN if all are missing.
    """
    known = [p if excess > 0 else 1.0 for excess, p in parts if not math.isnan(p)]
    return max(known, default=math.nan)


def level_of_parts(adjusted: Sequence[float]) -> float:
    """The significance level of single parts in claims that Holm's procedure does not reject.

    It is the level of the step at which the procedure stopped, so a claim that is not reproduced always has at least
    one part that is not significant at this level.
    """
    left = sum(p > ALPHA for p in adjusted)
    return ALPHA / max(1, left)


def sought(paper: float | None, margin: float) -> float:
    """The effect a test should be able to find: the paper's distance from the margin, or `WORTH_FINDING`."""
    return WORTH_FINDING if paper is None else abs(paper - margin)


def supports(excess: float, p: float, *, level: float, detectable: float, effect: float) -> Supports:
    """Classify one part.

    `excess`: the estimate minus the margin; `effect`: the size of effect that the test should be able to find.
    """
    if math.isnan(p):
        return "missing"
    if p <= level:
        return "yes" if excess > 0 else "against"
    if detectable > effect:
        return "underpowered"
    return "direction" if excess > 0 else "against"


def verdict(parts: Sequence[Supports], p_holm: float) -> Verdict:
    """The verdict on a claim, from the classes of its parts and its corrected p-value."""
    if all(one == "missing" for one in parts):
        return "not tested"
    if p_holm <= ALPHA:
        return "reproduced"
    if "against" in parts:
        return "not reproduced"
    return "underpowered" if "underpowered" in parts else "direction only"


# ---------------------------------------------------------------- explanations
# Each verdict is explained in one or two sentences that contain the deciding numbers and need no table.


LISTED = 4  # parts; of more, only the weakest is quoted


def why(gist: str, verdict: Verdict, parts: Sequence[ClaimPart], p_holm: float, needs: str) -> str:
    """The sentences that explain a verdict. `needs`: what the study lacks, used where there is no part."""
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


def _reproduced(gist: str, known: Sequence[ClaimPart], p_holm: float) -> str:
    if len(known) == 1:
        return f"{_capital(_full(known[0]))}."
    return f"{_capital(_numbers(gist, known))}."


def _direction(gist: str, known: Sequence[ClaimPart], p_holm: float) -> str:
    open_parts = [one for one in known if one.supports == "direction"] or list(known)
    said = _full(open_parts[0]) if len(open_parts) == 1 else _numbers(gist, open_parts)
    smaller = all(one.paper is not None and one.estimate.high < one.paper for one in open_parts)
    than = ", and an effect as large as the paper's is" if smaller else ""
    return (
        f"{_capital(said)}: the claimed sign, but chance is not ruled out (p = {p_value(p_holm)} corrected){than}"
        f"{_clear(known)}."
    )


def _against(gist: str, known: Sequence[ClaimPart], p_holm: float) -> str:
    contrary = [one for one in known if one.supports == "against"]
    worst = min(contrary, key=_strength)
    speak = "speaks" if len(contrary) == 1 else "speak"
    more = f"; {len(contrary)} of {len(known)} parts {speak} against the claim" if len(known) > 1 else ""
    return f"{_capital(_full(worst))}{_short_of_margin(worst)}{more}."


def _underpowered(gist: str, known: Sequence[ClaimPart], p_holm: float) -> str:
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
    if math.isinf(worst.detectable):  # the note gives the reason
        return f"{_capital(worst.says)}, but {worst.note}{_clear(known)}."
    if worst.detectable > SCALE:
        possible = "no effect that scores can have would be found"
    return f"{_capital(worst.says)}, but with the noise of these seeds {possible}{_clear(known)}."


def _numbers(gist: str, parts: Sequence[ClaimPart]) -> str:
    """The gist followed by the numbers of the parts; if there are many, only the least significant one."""
    if len(parts) <= LISTED:
        return f"{gist}, in points: {', '.join(_short(one) for one in parts)}"
    weakest = max(parts, key=lambda one: one.estimate.p)
    return f"{gist}: {len(parts)} parts, the least clear {_short(weakest)}"


def _short(part: ClaimPart) -> str:
    paper = f"; paper {signed(part.paper)}" if part.paper is not None else ""
    return f"{signed(part.estimate.mean)} ± {_half(part)} ({part.title}{paper})"


def _full(part: ClaimPart) -> str:
    return part.says + (f" (paper: {signed(part.paper)})" if part.paper is not None else "")


def _short_of_margin(part: ClaimPart) -> str:
    """A phrase for claims with a margin, since the sentence itself compares with 0 only."""
    return f", below the margin of {signed(part.margin)}" if part.margin else ""


def _clear(known: Sequence[ClaimPart]) -> str:
    """How many of several parts are significant."""
    clear = sum(one.supports == "yes" for one in known)
    if len(known) == 1:
        return ""
    return f"; of {len(known)} parts {clear or 'none'} {'is' if clear < 2 else 'are'} clear"


def _of_missing(parts: Sequence[ClaimPart]) -> str:
    notes = list(dict.fromkeys(one.note for one in parts))
    if len(parts) == 1:
        return f"{parts[0].title} ({notes[0]})"
    if len(notes) == 1:
        return f"{len(parts)} parts ({notes[0]})"
    return ", ".join(f"{one.title} ({one.note})" for one in parts)


def _half(part: ClaimPart) -> str:
    return fixed((part.estimate.high - part.estimate.low) / 2)


def _strength(part: ClaimPart) -> float:
    """The distance from the margin in standard errors."""
    excess = part.estimate.mean - part.margin
    return excess / part.estimate.se if part.estimate.se > 0 else math.copysign(math.inf, excess)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- the study's own claims
# Claims of the study file (`Study(claims=…)`) become `Statement`s, as those of the paper are.


def own_statements(bench: ComparableModels) -> list[Statement]:
    """The claims of the study file, in its order."""
    return [_statement(bench, claim) for claim in bench.plan.study.claims]


def _statement(bench: ComparableModels, claim: Claim) -> Statement:
    more, less = _model(bench, claim.more), _model(bench, claim.less)
    on = claim.on or tuple(bench.families)
    beyond = f", which must exceed {claim.margin:g}" if claim.margin else ""
    alike = more is less
    return Statement(
        id=claim.name,
        says=claim.says,
        gist=f"{claim.more} minus {claim.less}{beyond}",
        contrast=f"{claim.more} − {claim.less} > {claim.margin:g} on each of {', '.join(on)}",
        needs=f"cannot be tested: {claim.more} and {claim.less} are one recipe, so there is nothing to compare",
        find=lambda bench: [] if alike else _tests(bench, claim, more, less, on),
        on=tuple(one for one in bench.families if one in on),
        figure="",
        paper="",
        source="study",
        equal_data=True,
    )


def _tests(
    bench: ComparableModels, claim: Claim, more: Model, less: Model, on: tuple[str, ...]
) -> list[Test]:
    return [_test(bench, claim, more, less, where) for where in on]


def _test(bench: ComparableModels, claim: Claim, more: Model, less: Model, where: str) -> Contrast:
    what = f"{where} ({claim.metric})" if claim.metric else where
    return measured_contrasts(
        what,
        gap(bench, more, less, where, claim.metric),
        f"{claim.more} scores {{}} points above {claim.less} on {what}",
        f"{claim.more} scores {{}} points below {claim.less} on {what}",
        margin=claim.margin,
    )


def _model(bench: ComparableModels, result: str) -> Model:
    """The model that a result belongs to. Two names of one checkpoint are one model."""
    at = bench.plan.results[result]
    return next(
        model for model in bench.models.values() if at in [bench.plan.results[name] for name in model.results]
    )


# ---------------------------------------------------------------- repeated data
# Claims that compare objectives on equal data are marked where the corpus was read more than once. In a repeated epoch
# the number of steps is still equal, but MLM gets new masks while CLM gets the same targets again.


MARK = "under repetition"


def marked(finding: Finding, statement: Statement, tests: Iterable[Test], epochs: Epochs) -> Finding:
    """Mark a finding "under repetition" where that applies; it stays unmarked where epochs are not known."""
    if not statement.equal_data or finding.verdict == "not tested":
        return finding
    compared = [one for one in tests if len({_causal(model) for model in one.models}) > 1]
    models = dict.fromkeys(model for one in compared for model in one.models)
    times = [at for model in models for name in model.results if (at := epochs.at(name)) is not None]
    if max(times, default=0.0) <= REPEATED:
        return finding
    often = " to ".join(dict.fromkeys(f"{one:.1f}" for one in (min(times), max(times))))
    caveat = (
        f"Under repetition: by the steps compared the corpus had been read {often} times. Masks were new each time, "
        "causal targets were not, which favours MLM."
    )
    return replace(
        finding, scale=f"{finding.scale} · {MARK}", condition=MARK, caveats=(caveat, *finding.caveats)
    )


def _causal(model: Model) -> float:
    """The share of all its steps trained with CLM: models that differ in it gain differently from a second epoch."""
    spans = model.recipe.spans
    causal = sum(one.steps for one in spans if one.objective.causal)
    return round(causal / model.recipe.steps, 6) if spans else 0.0


# ---------------------------------------------------------------- judging


def statements(over: ComparableModels) -> list[Statement]:
    """Every claim that a report tests: the paper's, if the study pretrains two models or more, then the study's own."""
    pretrained = {one.name for line in over.lines for one in line.models if one.recipe.spans}
    return [*(STATEMENTS if len(pretrained) > 1 else ()), *own_statements(over)]


def judge(evidence: Evidence, draws: Resamples | None = None) -> list[Finding]:
    """Judge every claim of `statements`, in order. `draws` defaults to the shared resamples of the evidence."""
    over = comparable_models(evidence.plan, evidence.models)
    draws = shared_resamples(evidence) if draws is None else draws
    asked = [(one, one.tests(over)) for one in statements(over)]
    results = [[measure(test, evidence, draws) for test in tests] for _, tests in asked]
    ps = [claim_p([(one.excess, one.p) for one in parts]) for parts in results]
    tested = [place for place, p in enumerate(ps) if not math.isnan(p)]
    adjusted = dict(zip(tested, holm([ps[place] for place in tested]), strict=True)) if tested else {}
    first, stopped = ALPHA / max(1, len(tested)), level_of_parts(list(adjusted.values()))
    found, epochs = [], Epochs(evidence.plan, evidence.store)
    for place, ((statement, tests), measured) in enumerate(zip(asked, results, strict=True)):
        p_holm = adjusted.get(place, math.nan)
        level = ALPHA if p_holm <= ALPHA else stopped
        parts = tuple(_part(one, level, first) for one in measured)
        finding = _finding(over, statement, tests, measured, parts, ps[place], p_holm)
        found.append(marked(finding, statement, tests, epochs))
    return found


def _part(measured: MeasuredContrast, level: float, first: float) -> ClaimPart:
    """Classify one measured contrast. `level`: of its claim; `first`: of Holm's first step, used for the power."""
    estimate = measured.estimate
    smallest = detectable(measured, first)
    says = supports(
        measured.excess,
        measured.p,
        level=level,
        detectable=smallest,
        effect=sought(measured.paper, measured.margin),
    )
    return ClaimPart(
        title=measured.title,
        models=measured.models,
        estimate=estimate,
        margin=measured.margin,
        paper=measured.paper,
        detectable=smallest,
        examples=measured.examples,
        supports=says,
        note=measured.note,
        says="" if measured.missing else _sentence(measured),
    )


def _sentence(measured: MeasuredContrast) -> str:
    estimate = measured.estimate
    half = (estimate.high - estimate.low) / 2
    words = measured.said.above if estimate.mean >= 0 else measured.said.below
    around = "" if math.isnan(half) else f" ± {half:.2f}"
    return words.replace(
        "{}", f"{abs(estimate.mean):.2f}{around}", 1
    )  # only the first {}: a run's name may contain braces


def _finding(
    over: ComparableModels,
    statement: Statement,
    tests: list[Test],
    measured: list[MeasuredContrast],
    parts: tuple[ClaimPart, ...],
    p: float,
    p_holm: float,
) -> Finding:
    judged = verdict([one.supports for one in parts], p_holm)
    absent = missing_families(over, statement)
    return Finding(
        id=statement.id,
        says=statement.says,
        source=statement.source,
        verdict=judged,
        why=why(statement.gist, judged, parts, p_holm, needs(over, statement)),
        parts=parts,
        p=p,
        p_holm=p_holm,
        scale=_scale(over, tests, measured),
        figure=statement.figure,
        caveats=(*statement.caveats, *_caveats(over, parts, tests, absent), *_left_out(over, tests, measured))
        if tests
        else (),
        contrast=statement.contrast,
        paper=statement.paper,
    )


def missing_families(over: ComparableModels, statement: Statement) -> list[str]:
    """The families that a claim is about and the study has no task of."""
    return [one for one in statement.on if one not in over.families]


def needs(over: ComparableModels, statement: Statement) -> str:
    """What the study lacks, where no test of a claim was found."""
    absent = missing_families(over, statement)
    if statement.on and len(absent) == len(statement.on):
        return (
            f"needs a task of {listed([family_name(one) for one in absent])}"
            if over.tasks
            else "needs tasks to fine-tune on"
        )
    return statement.needs


def _scale(over: ComparableModels, tests: list[Test], measured: list[MeasuredContrast]) -> str:
    """The scale of a claim's tests: "610m · 99B tokens · 1 pretraining seed, 5 fine-tuning seeds"."""
    recipes = [model.recipe for test in tests for model in test.models]
    if not recipes:
        return ""
    known = [one.shape for one in measured if not one.missing] or [
        (1, over.seeds(model for test in tests for model in test.models))
    ]
    pretraining, tuning = ({shape[which] for shape in known} for which in (0, 1))
    tokens = sorted({one.tokens for one in recipes} - {0})  # 0: published models without further training
    parts = [", ".join(dict.fromkeys(one.size for one in recipes))]
    if tokens:
        parts.append(f"{'–'.join(dict.fromkeys((short(tokens[0]), short(tokens[-1]))))} tokens")
    parts.append(f"{_seeds(pretraining, 'pretraining seed')}, {_seeds(tuning, 'fine-tuning seed')}")
    return " · ".join(parts)


def _seeds(counts: set[int], word: str) -> str:
    return counted(max(counts), word) if len(counts) == 1 else f"{min(counts)}–{counted(max(counts), word)}"


def _left_out(over: ComparableModels, tests: list[Test], measured: list[MeasuredContrast]) -> Iterable[str]:
    """A caveat where seeds are missing because trials failed: the remaining seeds are not a random selection."""
    fewer = [
        one
        for test, one in zip(tests, measured, strict=True)
        if one.lost and not one.missing and one.shape[1] < over.seeds(test.models)
    ]
    if fewer:
        which = fewer[0].title if len(fewer) == 1 else counted(len(fewer), "test")
        yield (
            f"Fine-tunings failed or cannot be read, and their seeds are left out ({which}): where a learning rate "
            "failed by diverging, the seeds that stay are those that went well."
        )


def _caveats(
    over: ComparableModels, parts: tuple[ClaimPart, ...], tests: list[Test], absent: list[str]
) -> Iterable[str]:
    """Caveats that apply to a claim's tests in this study."""
    if absent:
        yield f"The study has no task of {listed(absent)}: this much of the claim is open."
    if over.fewer and any(not model.recipe.final for test in tests for model in test.models):
        rates = counted(len(over.fewer.lrs), "learning rate")
        yield f"Steps on the way were fine-tuned on {listed(list(over.fewer.tasks))} alone, at {rates}."
    for one in parts:
        if one.supports == "yes" and one.examples and one.examples[0] <= one.margin:
            over_examples = interval(*one.examples, sign=True)
            yield f"{one.title}: clear over seeds, not over test examples ({over_examples}); another test set may differ."
    if not any(one.paper is not None for one in parts):
        return
    used = {task for test in tests for task in test.tasks}
    theirs = {task.name: task.family for task in TASKS}
    for family, names in over.families.items():
        paper = [name for name, of in theirs.items() if of == family]
        if used & set(names) and set(names) != set(paper):
            yield f"{family} here is {listed(list(names))}; the paper's is the mean of {listed(paper)}."
    if over.finetune and over.finetune.protocol != "paper" and any(theirs.get(one) != "SC" for one in used):
        yield "The paper's numbers are in its own metrics, these in the usual ones: compare signs, not sizes."
