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

from biphase.report.contrasts import (
    MeasuredContrast,
    Paper,
    Source,
    Statement,
    Test,
    above,
    measure,
)
from biphase.report.evidence import Evidence, Resamples
from biphase.report.pretraining import Epochs
from biphase.report.recipes import Model, Published
from biphase.report.selectors import Case, ComparableModels, comparable_models
from biphase.report.statistics.intervals import holm
from biphase.report.statistics.power import detectable_in
from biphase.specs import CLM, Claim
from biphase.specs.tasks import family_name
from biphase.study.names import REPEATED
from biphase.text import SCALE, counted, fixed, interval, listed, p_equals, p_value, short, signed

CONTRARY = "points the other way"
READS = ("reproduced", "direction only", "not reproduced", CONTRARY, "underpowered", "not tested")


@dataclass(frozen=True)
class ClaimPart(MeasuredContrast):
    """One measured test of a claim, and what it says about the claim."""

    detectable: float  # smallest effect beyond the margin found with 80% power at the corrected level
    supports: Supports

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
    return f"{signed(part.estimate.mean)} ± {fixed(part.half)} ({part.title}{paper})"


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


def _strength(part: ClaimPart) -> float:
    """The distance from the margin in standard errors."""
    excess = part.estimate.mean - part.margin
    return excess / part.estimate.se if part.estimate.se > 0 else math.copysign(math.inf, excess)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


# ---------------------------------------------------------------- which claims are tested


@dataclass(frozen=True)
class NamedResults:
    """The two results that a claim of a study file names; no case if they are one recipe."""

    more: str
    less: str

    def cases(self, study: ComparableModels) -> list[Case]:
        models = study.of_result(self.more), study.of_result(self.less)
        return [] if models[0] is models[1] else [Case(study, models=models, names=(self.more, self.less))]


def own_statement(study: ComparableModels, claim: Claim) -> Statement:
    """A claim of the study file as a `Statement`, as those of papers are."""
    on = claim.on or tuple(study.families)
    beyond = f", which must exceed {claim.margin:g}" if claim.margin else ""
    return Statement(
        id=claim.name,
        says=claim.says,
        gist=f"{claim.more} minus {claim.less}{beyond}",
        contrast=f"{claim.more} − {claim.less} > {claim.margin:g} on each of {', '.join(on)}",
        needs=f"cannot be tested: {claim.more} and {claim.less} are one recipe, so there is nothing to compare",
        on=tuple(family for family in study.families if family in on),
        models=NamedResults(claim.more, claim.less),
        contrasts=(above(place="", title="{on}", on=on, margin=claim.margin, metric=claim.metric),),
        figure="",
        paper="",
        source="study",
        equal_data=True,
    )


@dataclass(frozen=True)
class Examined:
    """A claim, its tests in a study, and the paper whose numbers stand beside them."""

    statement: Statement
    tests: list[Test]
    paper: Paper | None


def examined(study: ComparableModels, papers: Sequence[Paper]) -> list[Examined]:
    """Every claim that a report tests: those of papers, if the study pretrains two models or more, then its own."""
    pairs: list[tuple[Statement, Paper | None]] = [
        (one, paper) for paper in papers for one in paper.statements if len(study.pretrained) > 1
    ]
    beside = papers[0] if papers else None
    pairs += [(own_statement(study, claim), beside) for claim in study.plan.study.claims]
    return [
        Examined(one, one.tests(study, paper.published if paper else Published()), paper)
        for one, paper in pairs
    ]


# ---------------------------------------------------------------- repeated data
# Claims that compare objectives on equal data are marked where the corpus was read more than once. In a repeated epoch
# the number of steps is still equal, but MLM gets new masks while CLM gets the same targets again.


MARK = "under repetition"


def marked(finding: Finding, claim: Examined, epochs: Epochs) -> Finding:
    """Mark a finding "under repetition" where that applies; it stays unmarked where epochs are not known."""
    if not claim.statement.equal_data or finding.verdict == "not tested":
        return finding
    compared = [test for test in claim.tests if len({_causal(model) for model in test.models}) > 1]
    models = dict.fromkeys(model for test in compared for model in test.models)
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
    causal = sum(one.steps for one in spans if isinstance(one.objective, CLM))
    return round(causal / model.recipe.steps, 6) if spans else 0.0


# ---------------------------------------------------------------- judging


def judge(evidence: Evidence, papers: Sequence[Paper] = (), draws: Resamples | None = None) -> list[Finding]:
    """Judge every claim of these papers and of the study, in order. `draws`: resamples shared with other callers."""
    study = comparable_models(evidence.plan, evidence.models)
    draws = draws or Resamples(evidence)
    claims = examined(study, papers)
    results = [[measure(test, evidence, draws) for test in claim.tests] for claim in claims]
    ps = [claim_p([(result.excess, result.p) for result in parts]) for parts in results]
    adjusted = holm(ps)
    tested = [p for p in adjusted if not math.isnan(p)]
    first, stopped = ALPHA / max(1, len(tested)), level_of_parts(tested)
    findings, epochs = [], Epochs(evidence.plan, evidence.store)
    for claim, measured, p, p_holm in zip(claims, results, ps, adjusted, strict=True):
        level = ALPHA if p_holm <= ALPHA else stopped
        parts = tuple(_part(result, level, first) for result in measured)
        finding = _finding(study, claim, measured, parts, p, p_holm)
        findings.append(marked(finding, claim, epochs))
    return findings


def _part(measured: MeasuredContrast, level: float, first: float) -> ClaimPart:
    """Classify one measured contrast. `level`: of its claim; `first`: of Holm's first step, used for the power."""
    smallest = math.inf  # where all seeds are alike
    if not measured.alike:
        smallest = math.nan if measured.missing else detectable_in(measured.estimate, first / measured.tries)
    effect = sought(measured.paper, measured.margin)
    says = supports(measured.excess, measured.p, level=level, detectable=smallest, effect=effect)
    return ClaimPart(**vars(measured), detectable=smallest, supports=says)


def _finding(
    study: ComparableModels,
    claim: Examined,
    measured: list[MeasuredContrast],
    parts: tuple[ClaimPart, ...],
    p: float,
    p_holm: float,
) -> Finding:
    statement = claim.statement
    judged = verdict([part.supports for part in parts], p_holm)
    caveats = (
        *statement.caveats,
        *_caveats(study, claim, parts),
        *_left_out(study, claim.tests, measured),
    )
    return Finding(
        id=statement.id,
        says=statement.says,
        source=statement.source,
        verdict=judged,
        why=why(statement.gist, judged, parts, p_holm, needs(study, statement)),
        parts=parts,
        p=p,
        p_holm=p_holm,
        scale=_scale(study, claim.tests, measured),
        figure=statement.figure,
        caveats=caveats if claim.tests else (),
        contrast=statement.contrast,
        paper=statement.paper,
    )


def missing_families(study: ComparableModels, statement: Statement) -> list[str]:
    """The families that a claim is about and the study has no task of."""
    return [family for family in statement.on if family not in study.families]


def needs(study: ComparableModels, statement: Statement) -> str:
    """What the study lacks, where no test of a claim was found."""
    absent = missing_families(study, statement)
    if not statement.on or len(absent) < len(statement.on):
        return statement.needs
    if not study.tasks:
        return "needs tasks to fine-tune on"
    return f"needs a task of {listed([family_name(family) for family in absent])}"


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


def _caveats(study: ComparableModels, claim: Examined, parts: tuple[ClaimPart, ...]) -> Iterable[str]:
    """Caveats that apply to a claim's tests in this study."""
    if absent := missing_families(study, claim.statement):
        yield f"The study has no task of {listed(absent)}: this much of the claim is open."
    if study.fewer and any(not model.recipe.final for test in claim.tests for model in test.models):
        rates = counted(len(study.fewer.lrs), "learning rate")
        yield f"Steps on the way were fine-tuned on {listed(list(study.fewer.tasks))} alone, at {rates}."
    for part in parts:
        if part.supports == "yes" and part.examples and part.examples[0] <= part.margin:
            over_examples = interval(*part.examples, sign=True)
            yield f"{part.title}: clear over seeds, not over test examples ({over_examples}); another test set may differ."
    if claim.paper is None or all(part.paper is None for part in parts):
        return
    used = {task for test in claim.tests for task in test.tasks}
    for family, names in study.families.items():
        theirs = claim.paper.tasks.get(family, ())
        if used & set(names) and set(names) != set(theirs):
            yield f"{family} here is {listed(list(names))}; the paper's is the mean of {listed(list(theirs))}."
    same_metric = used <= set(claim.paper.tasks.get("SC", ()))  # accuracy under every protocol
    if study.finetune and study.finetune.protocol != claim.paper.protocol and not same_metric:
        yield "The paper's numbers are in its own metrics, these in the usual ones: compare signs, not sizes."
