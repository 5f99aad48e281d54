"""From measured contrasts to verdicts: what a study shows about each claim, and why.

`judge` measures all claims of a report, corrects their p-values for the number of claims, and returns one `Finding`
for each claim with a `ClaimPart` for each of its tests. The file has, in order, the records, the decision rules (pure
functions; docs/statistics.md gives the reasons), the sentences that explain a verdict, the claims that a study file
makes itself, the mark for repeated data, and `judge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import wrap
from typing import Any, Literal, get_args

import numpy as np

from biphase.report.contrasts import (
    ClaimPart,
    Contrast,
    Measure,
    Paper,
    Source,
    Statement,
    Supports,
    above,
)
from biphase.report.evidence import Evidence, Floats, Resamples
from biphase.report.pretraining import Epochs
from biphase.report.recipes import Model, Published
from biphase.report.selectors import Case, ComparableModels, comparable_models
from biphase.report.statistics.intervals import detectable_by
from biphase.report.statistics.moderated import ClaimTest, Looks, every, holm_distinct
from biphase.specs import Claim, Family, Hub
from biphase.specs.tasks import FAMILIES, family_name
from biphase.study.costs import REPEATED, shape_of
from biphase.study.plan import Plan
from biphase.text import (
    SCALE,
    counted,
    effect,
    finite,
    fixed,
    interval,
    listed,
    p_equals,
    p_value,
    percent,
    short,
    signed,
)

Verdict = Literal[
    "reproduced", "holds in part", "not reproduced", "no effect found", "underpowered", "not applicable", "not tested"
]  # fmt: skip
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@dataclass(frozen=True)
class Finding:
    """A claim and the study's verdict on it."""

    id: str
    says: str
    source: Source
    verdict: Verdict
    why: str
    parts: tuple[ClaimPart, ...]
    p: float  # for "every part holds"; NaN if not tested
    p_holm: float  # corrected for the number of claims
    p_refuted: float  # for "some part is reversed", corrected alike
    scale: str
    figure: str  # id of the figure that shows it
    caveats: tuple[str, ...]
    contrast: str  # how it is tested, in one line
    paper: str  # published numbers, as text
    condition: str = ""  # a condition that limits the verdict, in two words


# ---------------------------------------------------------------- decision rules
# Every part of a claim must hold, so a claim is reproduced by the largest of its parts' p-values; it is refuted by any
# part that is reversed, so by the smallest times their number. Holm's procedure corrects each side for the number of
# distinct claims: the probability of any false "reproduced" is at most 5%, and so is that of any false "not reproduced".


ALPHA = 0.05  # family-wise error rate of each side over all claims of a study
LENT_DF = 6.0  # degrees of freedom that many other cells (model × rate) lend to a variance, as `biphase plan` assumes


def sought(paper: float | None, margin: float, otherwise: float) -> float:
    """The effect a test should be able to find: the published distance from the margin, or the one stated."""
    return otherwise if paper is None else abs(paper - margin)


def supports(part: ClaimPart, *, level: float, parts: int, detectable: float, effect: float) -> Supports:
    """Classify one of the `parts` of a claim at the level at which claims are tested."""
    if part.missing:
        return "missing"
    if part.above <= level:
        return "yes"
    if part.below * parts <= level:
        return "against"
    return "underpowered" if detectable > effect else "unclear"


def verdict(
    parts: Sequence[Supports], holds: float, refuted: float, *, complete: bool, alpha: float = ALPHA
) -> Verdict:
    """The verdict on a claim from the classes of its parts and its corrected p-values.

    `complete`: no part is missing, and the study has tasks of all families that the claim is about. `alpha`: the
    family-wise error rate of this look.
    """
    if all(one == "missing" for one in parts):
        return "not tested"
    if holds <= alpha:
        return "reproduced" if complete else "holds in part"
    if refuted <= alpha:
        return "not reproduced"
    return "underpowered" if "underpowered" in parts else "no effect found"


# ---------------------------------------------------------------- explanations
# Each verdict is explained in one or two sentences that contain the deciding numbers and need no table.


LISTED = 4  # parts; of more, only the weakest is quoted
DECIDING: dict[Verdict, Supports] = {
    "not reproduced": "against",
    "no effect found": "unclear",
    "underpowered": "underpowered",
}


def why(
    gist: str, verdict: Verdict, parts: Sequence[ClaimPart], p_holm: float, needs: str, effect: float
) -> str:
    """The sentences that explain a verdict. `needs`: what the study lacks, used where there is no part."""
    known = [part for part in parts if part.supports != "missing"]
    missing = _of_missing([part for part in parts if part.supports == "missing"])
    if not known:
        return f"{_capital(missing or needs)}."
    deciding = [part for part in known if part.supports == DECIDING.get(verdict)]
    if verdict == "not reproduced" and not deciding:
        # Holm's last steps are less strict than the level at which a part counts as against.
        deciding = [min(known, key=lambda part: part.below)]
    text = _numbers(gist, deciding or known)
    if verdict == "no effect found":
        excluded = all(
            part.paper is not None and part.estimate.high < part.paper for part in deciding or known
        )
        text += f"; no significant difference (corrected p = {p_value(p_holm)})"
        text += ", and an effect as large as the paper's is excluded" if excluded else ""
    elif verdict == "underpowered":
        text += f"; {_too_weak(deciding, effect)}"
    if verdict in DECIDING and len(known) > 1:
        clear = sum(part.supports == "yes" for part in known)
        against = sum(part.supports == "against" for part in known)
        against = len(deciding) if verdict == "not reproduced" else against
        text += f"; of {len(known)} parts {clear or 'none'} clear"
        text += f", {against} against" if against else ""
    return f"{text}." + (f" Missing: {missing}." if missing else "")  # it may begin with a run's own name


def _too_weak(weak: Sequence[ClaimPart], effect: float) -> str:
    """What the part that lacks most power would detect, and what it should."""
    worst = max(weak, key=lambda part: part.detectable / (sought(part.paper, part.margin, effect) or 1e-9))
    if worst.detectable > SCALE:
        return "with the noise of these seeds no possible effect would be detected"
    size = fixed(sought(worst.paper, worst.margin, effect))
    wanted = f"{size} should be found" if worst.paper is None else f"the paper's is {size}"
    beyond = f" beyond {signed(worst.margin)}" if worst.margin else ""
    return f"with the noise of these seeds only {fixed(worst.detectable)}{beyond} would be detected, and {wanted}"


def _numbers(gist: str, parts: Sequence[ClaimPart]) -> str:
    """The gist followed by the numbers of the parts; if there are many, only the least clear one."""
    if len(parts) <= LISTED:
        return f"{gist}, in points: {', '.join(map(_short, parts))}"
    weakest = max(parts, key=lambda part: part.below if part.supports == "against" else part.above)
    return f"{gist}: {len(parts)} parts, the least clear {_short(weakest)}"


def _short(part: ClaimPart) -> str:
    beside = [part.title, *([f"margin {signed(part.margin)}"] if part.margin else [])]
    beside += [f"paper {signed(part.paper)}"] if part.paper is not None else []
    return f"{signed(part.estimate.mean)} ± {fixed(part.half)} ({'; '.join(beside)})"


def _of_missing(parts: Sequence[ClaimPart]) -> str:
    if len(parts) > 1 and len({part.note for part in parts}) == 1:
        return f"{len(parts)} parts ({parts[0].note})"
    return ", ".join(f"{part.title} ({part.note})" for part in parts)


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
        return [] if models[0] is models[1] else [Case(study, models=models)]


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
        contrasts=(above(title="{on}", on=on, margin=claim.margin, metric=claim.metric),),
        figure="",
        paper="",
        source="study",
        effect=claim.effect,
    )


@dataclass(frozen=True)
class Examined:
    """A claim, its tests in a study, those of its premise, and the `Paper` whose numbers stand beside them."""

    statement: Statement
    tests: list[Contrast]
    premises: list[Contrast]
    lacks: list[str]  # contrasts that are not tested for want of models
    paper: Paper | None


def examined(study: ComparableModels, papers: Sequence[Paper]) -> list[Examined]:
    """Every claim that a report tests: those of papers, if the study pretrains two models or more, then its own."""
    trained = sum(bool(model.recipe.spans) for model in study.models.values())
    pairs: list[tuple[Statement, Paper | None]] = [
        (one, paper) for paper in papers for one in paper.statements if trained > 1
    ]
    beside = papers[0] if papers else None
    pairs += [(own_statement(study, claim), beside) for claim in study.plan.study.claims]
    found = []
    for one, paper in pairs:
        numbers = paper.published if paper else Published()
        compared = study if one.source == "study" or not paper else _of_paper(study, paper)
        tests, premises = one.tests(compared, numbers), one.premises(compared, numbers)
        found.append(Examined(one, tests, premises, one.lacks(compared, numbers) if tests else [], paper))
    return found


def _of_paper(study: ComparableModels, paper: Paper) -> ComparableModels:
    """The study without tasks of families that the paper has none of: its claims do not speak of them."""
    return replace(study, tasks={name: t for name, t in study.tasks.items() if t.family in paper.tasks})


# ---------------------------------------------------------------- repeated data
# Claims that compare objectives on equal data are marked where the corpus was read more than once. In a repeated epoch
# the number of steps is still equal, but MLM gets new masks while CLM gets the same targets again.


MARK = "under repetition"


def marked(finding: Finding, claim: Examined, epochs: Epochs) -> Finding:
    """Mark a finding "under repetition" where that applies; it stays unmarked where epochs are not known."""
    if not claim.statement.equal_data or finding.verdict in ("not tested", "not applicable"):
        return finding
    compared = [test for test in claim.tests if len({_causal(model) for model in test.models}) > 1]
    models = dict.fromkeys(model for test in compared for model in test.models)
    times = [at for model in models for name in model.results if (at := epochs.at(name)) is not None]
    if max(times, default=0.0) <= REPEATED:
        return finding
    often = " to ".join(dict.fromkeys(f"{epochs:.1f}" for epochs in (min(times), max(times))))
    caveat = (
        f"Under repetition: by the steps compared the corpus had been read {often} times. Masks were new each time, "
        "causal targets were not, which favours MLM."
    )
    condition = ", ".join(filter(None, (finding.condition, MARK)))
    return replace(
        finding, scale=f"{finding.scale} · {MARK}", condition=condition, caveats=(caveat, *finding.caveats)
    )


def _causal(model: Model) -> float:
    """The share of all its rows trained with CLM: models that differ in it gain differently from a second epoch."""
    spans = model.recipe.spans
    causal = sum(one.steps * one.objective.causal_share(0, one.steps) for one in spans)
    return round(causal / model.recipe.steps, 6) if spans else 0.0


# ---------------------------------------------------------------- judging


def judge(evidence: Evidence, papers: Sequence[Paper] = (), draws: Resamples | None = None) -> list[Finding]:
    """Judge every claim of these papers and of the study, in order. `draws`: resamples shared with other callers."""
    study = comparable_models(evidence.plan, evidence.models)
    measure = Measure(evidence, draws or Resamples(evidence))
    claims = examined(study, papers)
    results = [[measure(test) for test in claim.tests] for claim in claims]
    premises = [[measure(test) for test in claim.premises] for claim in claims]
    tests = [_tested(parts, before) for parts, before in zip(results, premises, strict=True)]
    keys = [frozenset(part.key for part in parts if not part.missing) for parts in results]
    adjusted = holm_distinct(tests, keys)
    left = sum(p > ALPHA for p, _ in adjusted)
    counts = sum(test.known > 0 for test in tests), left
    findings, epochs = [], Epochs(evidence.plan, evidence.store)
    for claim, measured, before, test, (holds, refuted) in zip(
        claims, results, premises, tests, adjusted, strict=True
    ):
        alpha, unplanned = _look(study, measured)
        first, stopped = (alpha / max(1, count) for count in counts)
        level, effect = alpha if holds <= alpha else stopped, _effect(study, claim.statement)
        known = sum(not part.missing for part in measured)
        parts = tuple(_classified(part, level, first, known, effect) for part in measured)
        finding = _finding(study, claim, parts, before, test, (holds, refuted), effect, evidence, alpha)
        if unplanned:
            finding = _unjudged(finding, unplanned)
        findings.append(marked(finding, claim, epochs))
    return findings


def _look(study: ComparableModels, parts: Sequence[ClaimPart]) -> tuple[float, str]:
    """The error rate at which a claim is judged, and, if no look is planned at its number of seeds, why it is not.

    Seeds are those of pretraining, if the study plans several of a model, and otherwise those of fine-tuning.
    """
    looks, known = study.plan.study.looks, [part for part in parts if not part.missing]
    if not looks or not known:
        return ALPHA, ""
    unit = 0 if any(len(model.seeds) > 1 for model in study.models.values()) else 1
    seeds = min(part.shape[unit] for part in known)
    if seeds in looks:
        return Looks(looks).level(seeds), ""
    after = next((one for one in looks if one > seeds), None)
    planned = f"the next look is at {after} seeds" if after else f"the last look was at {looks[-1]} seeds"
    return ALPHA, f"Not judged with {counted(seeds, 'seed')}: {planned}."


def _unjudged(finding: Finding, why: str) -> Finding:
    """A claim between two looks: its estimates without any judgment."""
    nothing = {"above": math.nan, "below": math.nan, "detectable": math.nan}
    parts = tuple(replace(part, supports="missing", **nothing) for part in finding.parts)
    blank = {"p": math.nan, "p_holm": math.nan, "p_refuted": math.nan}
    return replace(finding, verdict="not tested", why=why, condition="", parts=parts, **blank)


def _tested(parts: Sequence[ClaimPart], premises: Sequence[ClaimPart]) -> ClaimTest:
    """The p-values of a claim. A claim with a premise also needs that to hold; without it, nothing is tested."""
    test = every([part.above for part in parts], [part.below for part in parts])
    if not premises or not test.known:
        return test
    # It counts among the claims whether or not its premise is shown: a number of tests that depends on the results
    # would not hold the level.
    before = max(1.0 if part.missing else part.above for part in premises)
    refuted = test.refuted if _applies(premises) else 1.0
    return replace(test, reproduced=max(test.reproduced, before), refuted=refuted)


def _applies(premises: Sequence[ClaimPart]) -> bool:
    """Whether the premise of a claim is shown."""
    return all(part.above <= ALPHA for part in premises)


def _effect(study: ComparableModels, statement: Statement) -> float:
    """The effect worth finding where none is published: the claim's own, or the study's."""
    return statement.effect or study.plan.study.effect


def _finding(
    study: ComparableModels,
    claim: Examined,
    parts: tuple[ClaimPart, ...],
    premises: Sequence[ClaimPart],
    test: ClaimTest,
    adjusted: tuple[float, float],
    effect: float,
    evidence: Evidence,
    alpha: float,
) -> Finding:
    statement, absent = claim.statement, untested_families(study, claim, parts)
    complete = not absent and not test.missing and not claim.lacks
    judged = verdict([part.supports for part in parts], *adjusted, complete=complete, alpha=alpha)
    explained = why(statement.gist, judged, parts, adjusted[0], needs(study, statement), effect)
    if claim.lacks and test.known:
        explained += f" Not tested: {'; '.join(claim.lacks)}."
    if premises and not _applies(premises) and any(not part.missing for part in parts):
        pending = any(part.missing for part in premises)
        judged, explained = "not tested" if pending else "not applicable", _no_premise(premises)
    condition = ""
    if judged == "holds in part":
        there = [family for family in statement.on if family not in absent]
        every_part = test.known + test.missing + len(claim.lacks)
        known, of = (len(there), len(statement.on)) if absent else (test.known, every_part)
        condition = f"on {known} of {of} {'families' if absent else 'parts'}"
    elif judged in ("no effect found", "underpowered") and any(part.supports == "yes" for part in parts):
        unclear = sum(part.supports not in ("yes", "missing") for part in parts)
        condition = f"in {unclear} of {test.known} parts"
    return Finding(
        id=statement.id,
        says=statement.says,
        source=statement.source,
        verdict=judged,
        why=explained,
        parts=parts,
        p=test.reproduced,
        p_holm=adjusted[0],
        p_refuted=adjusted[1],
        scale=_scale(study, claim.tests, parts),
        figure=statement.figure,
        caveats=(*statement.caveats, *_caveats(study, claim, parts, evidence)) if claim.tests else (),
        contrast=statement.contrast,
        paper=statement.paper,
        condition=condition,
    )


def _no_premise(premises: Sequence[ClaimPart]) -> str:
    """Why a claim is not applicable, with the numbers of its premise."""
    failing = next((part for part in premises if not part.above <= ALPHA), premises[0])
    if failing.missing:
        return f"Its premise is not tested: {failing.note}."
    return f"Its premise is not shown: {_short(failing)}, in points (one-sided {p_equals(failing.above)})."


def _classified(part: ClaimPart, level: float, first: float, parts: int, effect: float) -> ClaimPart:
    """A measured part with its class. `level`: of its claim; `first`: of Holm's first step, used for the power."""
    smallest = math.nan
    if not part.missing:  # the tests are one-sided
        smallest = detectable_by(part.estimate.se, part.estimate.df, 2 * first / part.tries)
    wanted = sought(part.paper, part.margin, effect)
    says = supports(part, level=level, parts=parts, detectable=smallest, effect=wanted)
    return replace(part, detectable=smallest, supports=says)


def untested_families(study: ComparableModels, claim: Examined, parts: Sequence[ClaimPart]) -> list[str]:
    """The families that a claim is about and none of its tests uses; a test may leave out tasks that are not learnt.

    A family of the study that only a contrast without its models would use is not missing: the models are.
    """
    planned = [test.tasks for test in claim.tests]
    measured = [{task for _, task, *_ in part.key if task} for part in parts]
    tasks = {task for some in zip(measured, planned, strict=True) for task in some[0] or some[1]}
    used = {study.tasks[task].family for task in tasks} | (set(study.families) if claim.lacks else set())
    return [family for family in claim.statement.on if family not in used]


def needs(study: ComparableModels, statement: Statement) -> str:
    """What the study lacks, where no test of a claim was found."""
    absent = [family for family in statement.on if family not in study.families]
    if statement.every_rate and study.finetune and study.finetune.discard:
        return "needs every learning rate, and this study discards some early; leave out Finetune(discard=…)"
    if not statement.on or len(absent) < len(statement.on):
        return statement.needs
    if not study.tasks:
        return "needs tasks to fine-tune on"
    return f"needs a task of {listed([family_name(family) for family in absent])}"


def _scale(study: ComparableModels, tests: list[Contrast], parts: Sequence[ClaimPart]) -> str:
    """The scale of a claim's tests: "610m · 99B tokens · 1 pretraining seed, 5 fine-tuning seeds"."""
    models = [model for test in tests for model in test.models]
    if not models:
        return ""
    shapes = [part.shape for part in parts if not part.missing] or [(1, study.seeds(models))]
    words = ("pretraining seed", "fine-tuning seed")
    seeds = [_span({shape[which] for shape in shapes}, word) for which, word in enumerate(words)]
    # 0 tokens: published models without further training
    tokens = [short(count) for count in sorted({model.recipe.tokens for model in models} - {0})]
    trained = [f"{'–'.join(dict.fromkeys((tokens[0], tokens[-1])))} tokens"] if tokens else []
    sizes = ", ".join(dict.fromkeys(model.recipe.size for model in models))
    return " · ".join([sizes, *trained, ", ".join(seeds)])


def _span(counts: set[int], word: str) -> str:
    return counted(max(counts), word) if len(counts) == 1 else f"{min(counts)}–{counted(max(counts), word)}"


def _caveats(
    study: ComparableModels, claim: Examined, parts: tuple[ClaimPart, ...], evidence: Evidence
) -> Iterable[str]:
    """Caveats that apply to a claim's tests in this study."""
    if weak := list(dict.fromkeys(_not_above(claim.tests, evidence))):
        more = f" and {len(weak) - LISTED} more" if len(weak) > LISTED else ""
        yield f"It rests on models that are not above a baseline: {', '.join(weak[:LISTED])}{more}."
    if absent := untested_families(study, claim, parts):
        yield f"No test of the claim is on {listed(absent)}: that part of it is not tested."
    if study.fewer and any(not model.recipe.final for test in claim.tests for model in test.models):
        rates = counted(len(study.fewer.lrs), "learning rate")
        yield f"Intermediate checkpoints were fine-tuned on {listed(list(study.fewer.tasks))} alone, at {rates}."
    for part in parts:
        if part.supports == "yes" and part.examples and part.examples[0] <= part.margin:
            over_examples = interval(*part.examples, sign=True)
            yield f"{part.title}: clear over seeds, not over test examples ({over_examples}); another test set may differ."
    if claim.paper and any(part.paper is not None for part in parts):
        yield from _beside(claim.paper, study, {task for test in claim.tests for task in test.tasks})
    lost = [
        part.title
        for test, part in zip(claim.tests, parts, strict=True)
        if part.lost and not part.missing and part.shape[1] < study.seeds(test.models)
    ]
    if lost:  # the remaining seeds are not a random selection
        which = lost[0] if len(lost) == 1 else counted(len(lost), "test")
        yield (
            f"Fine-tunings failed or cannot be read, and their seeds are left out ({which}): where a learning rate "
            "failed by diverging, the remaining seeds are biased towards better scores."
        )


def _not_above(tests: Sequence[Contrast], evidence: Evidence) -> Iterable[str]:
    """The models of tests that score no higher than a baseline, each with its task and both numbers."""
    for model, task in ((model, task) for test in tests for model in test.models for task in test.tasks):
        scores = evidence.scores(model, task)
        grid = evidence.grids[model.results[0], task]
        known = [one[grid.metric] for one in grid.baselines.values() if grid.metric in one]
        if not known or not np.isfinite(scores).any():
            continue
        best, mean = max(known, key=lambda one: one.test), float(np.nanmean(scores))
        if mean <= best.test:
            yield f"{model.name} on {task} ({percent(mean)}; {best.what} {percent(best.test)})"


def _beside(paper: Paper, study: ComparableModels, used: set[str]) -> Iterable[str]:
    """Caveats where the numbers of a paper are of other tasks or metrics."""
    for family, names in study.families.items():
        theirs = paper.tasks.get(family, ())
        if used & set(names) and set(names) != set(theirs):
            mean = (
                f"the paper's is the mean of {listed(list(theirs))}"
                if theirs
                else "the paper has none of these"
            )
            yield f"{family} here is {listed(list(names))}; {mean}."
    # Families whose metric is the same under every protocol
    same = [short for short, family in FAMILIES.items() if len(set(family.selects.values())) == 1]
    same_metric = used <= {task for short in same for task in paper.tasks.get(short, ())}
    if study.finetune and study.finetune.protocol != paper.protocol and not same_metric:
        yield "The paper's numbers are in its own metrics, these in the usual ones: compare signs, not sizes."


# ---------------------------------------------------------------- prospects
# Power analysis before a study is run: which claims it will test, and the smallest effects its seeds can detect. Which
# tests exist follows from the plan's recipes alone. The noise of scores is estimated from the study's trials where
# enough are finished; otherwise it is assumed, and the assumed numbers are printed.


SMALL = 100_000_000  # parameters in the blocks
# Standard deviations of one score, in points: over fine-tuning seeds, and beside that over pretraining seeds.
Spread = tuple[float, float]
ENOUGH = 3  # degrees of freedom from which a measured standard deviation replaces the assumed one
WIDTH, SAYS = 110, 44  # columns of the text, and of the claim


@dataclass(frozen=True)
class Expected:
    """A planned test and its power."""

    title: str
    models: tuple[str, ...]
    seeds: tuple[int, int]  # pretraining seeds, fine-tuning seeds
    se: float  # of the contrast, in points
    detectable: (
        float  # smallest effect beyond the margin found with 80% power at the corrected level, in points
    )
    paper: float | None
    margin: float
    effect: float  # the effect it should find: the published one beyond the margin, or the one stated
    weak: bool  # whether it would miss the effect it should find


@dataclass(frozen=True)
class Prospect:
    """A claim, and the tests that a study plans for it."""

    id: str
    says: str
    source: Source
    tested: bool
    noise: str  # the source of the standard deviations
    needs: str  # why it will not be tested
    tests: tuple[Expected, ...]
    assumed: dict[Family, Spread]  # used where none was measured


def prospects(plan: Plan, evidence: Evidence | None = None, papers: Sequence[Paper] = ()) -> list[Prospect]:
    """The prospects of every claim, in the order of the report. `evidence`: the finished trials of this plan."""
    study = comparable_models(plan, evidence.models if evidence else None)
    claims = examined(study, papers)
    tested = [any(max(_seeds_of(test, study)) > 1 for test in claim.tests) for claim in claims]
    looks = plan.study.looks
    level = (Looks(looks).level(looks[-1]) if looks else ALPHA) / max(1, sum(tested))
    measured = measured_spread(evidence) if evidence else {}
    shown = set(study.families).union(*(claim.statement.on for claim in claims))
    assumed = {short: _assumed(short, small=_small(plan)) for short in FAMILIES if short in shown}

    def spread_of(task: str) -> Spread:
        tuning, pretraining = measured.get(task, (None, None))
        usual = assumed[study.tasks[task].family]
        return tuning or usual[0], usual[1] if pretraining is None else pretraining

    found = []
    for claim, will in zip(claims, tested, strict=True):
        statement, tests = claim.statement, claim.tests if will else []
        used = {task for test in tests for task in test.tasks}
        known = used & set(measured)
        noise = "from this ledger" if known == used else "partly from this ledger" if known else "assumed"
        lacks = "needs two fine-tuning seeds or more" if claim.tests else needs(study, statement)
        found.append(
            Prospect(
                id=statement.id,
                says=statement.says,
                source=statement.source,
                tested=will,
                noise=noise if will else "",
                needs="" if will else lacks,
                tests=tuple(
                    _expected(test, study, level, spread_of, _effect(study, statement)) for test in tests
                ),
                assumed=assumed,
            )
        )
    return found


def _assumed(family: Family, *, small: bool) -> Spread:
    """What is assumed of a family. Where pretraining was not measured, it changes a score as fine-tuning does."""
    tuning, pretraining = FAMILIES[family].assumed_sd[small], FAMILIES[family].pretraining_sd
    return tuning, pretraining if small and pretraining is not None else tuning


def _small(plan: Plan) -> bool:
    """Whether every model is known to have fewer than `SMALL` parameters in its blocks."""
    shapes = [shape_of(run) if run.corpus or isinstance(run.start, Hub) else None for run in plan.study.runs]
    return all(shape is not None and shape.blocks < SMALL for shape in shapes)


def _seeds_of(test: Contrast, study: ComparableModels) -> tuple[int, int]:
    """The pretraining seeds of the model that has the fewest, and the fine-tuning seeds."""
    return min(len(model.seeds) for model in test.models), study.seeds(test.models)


def _expected(
    test: Contrast, study: ComparableModels, level: float, spread_of: Callable[[str], Spread], effect: float
) -> Expected:
    seeds = _seeds_of(test, study)
    if test.options:
        options = [
            _expected(one, study, level / len(test.options), spread_of, effect) for one in test.options
        ]
        easiest = min(options, key=lambda one: one.detectable)
        se, least = easiest.se, easiest.detectable
    else:
        pretrained, tuned = seeds
        several = any(len(model.seeds) > 1 for model in study.models.values())

        def noise(task: str) -> float:
            """The sd of one value; with several pretraining seeds a value is the mean of a seed's fine-tunings."""
            tuning, pretraining = spread_of(task)
            return math.hypot(pretraining, tuning / math.sqrt(tuned)) if several else tuning

        n = pretrained if several else tuned
        se = math.sqrt(test.quantity.variance(noise, lambda model: len(model.seeds) if several else tuned))
        cells = len(study.models) * study.finetune.rates if study.finetune else 0
        df = n - 1 + min(LENT_DF, cells / 4) if n > 1 or several else 0.0
        least = detectable_by(se, df, 2 * level)
    wanted = sought(test.paper, test.margin, effect)
    return Expected(
        title=test.title,
        models=tuple(one.name for one in test.models),
        seeds=seeds,
        se=se,
        detectable=least,
        paper=test.paper,
        margin=test.margin,
        effect=wanted,
        weak=least > wanted,
    )


def measured_spread(evidence: Evidence) -> dict[str, tuple[float, float | None]]:
    """Task → its spread in this ledger, pooled over all models, or over its family too; None: it does not tell.

    Each of the two needs `ENOUGH` degrees of freedom. The variance over pretraining seeds is that of the means of a
    seed's fine-tunings, less what fine-tuning contributes to them.
    """
    # Of each task: squares and degrees of freedom of fine-tunings; the same of the means of pretraining seeds, and the
    # sum of 1 / fine-tunings, with which fine-tuning stands in the latter.
    pooled: dict[str, Floats] = {}
    # Random weights are noisier than what was trained on them, and no claim is about them.
    models = [model for model in evidence.models.values() if model.recipe.spans] or evidence.models.values()
    for task in evidence.tasks:
        sums = np.zeros(5)
        for model in models:
            seeds = [100 * row[np.isfinite(row)] for row in evidence.scores(model, task)]
            seeds = [row for row in seeds if row.size > 1]
            for row in seeds:
                sums[:2] += np.square(row - row.mean()).sum(), row.size - 1
            if len(seeds) > 1:
                means, df = np.array([row.mean() for row in seeds]), len(seeds) - 1
                sums[2:] += (
                    np.square(means - means.mean()).sum(),
                    df,
                    df * np.mean([1 / row.size for row in seeds]),
                )
        pooled[task] = sums
    found = {}
    for family in evidence.families.values():
        together = np.sum([pooled[task] for task in family], axis=0)
        for task in family:
            tuning, pretraining = (
                next(
                    (sums for sums in (pooled[task], together) if sums[df] >= ENOUGH and sums[df - 1] > 0),
                    None,
                )
                for df in (1, 3)
            )
            if tuning is None:
                continue
            variance = tuning[0] / tuning[1]
            between = (
                None if pretraining is None else (pretraining[2] - pretraining[4] * variance) / pretraining[3]
            )
            found[task] = math.sqrt(variance), None if between is None else math.sqrt(max(0.0, between))
    return found


def as_json(found: list[Prospect]) -> list[dict[str, Any]]:
    """The prospects for JSON; unknown numbers are null."""
    return [
        {name: value for name, value in finite(asdict(one)).items() if name != "assumed"} for one in found
    ]


def render(found: list[Prospect]) -> list[str]:
    """The prospects for a terminal: one line for each claim that will be tested, and one that names the others."""
    lines = []
    if tested := [one for one in found if one.tested]:
        lines = [
            f"{len(tested)} of {counted(len(found), 'claim')} will be tested; effects in points beyond any margin, "
            "found with 80% power",
            *_wrapped(f"noise of scores: {_noise(tested)}"),
            *map(_line, tested),
        ]
        if any(test.weak for one in tested for test in one.tests):
            lines.append(
                "  weak: tests that would miss the published effect, or the one that the study states"
            )
    if untested := ", ".join(_abbreviated([one for one in found if not one.tested])):
        text = f"not tested: {untested}; the report says what each would need"
        lines += _wrapped(text)
    return lines


def _wrapped(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _line(one: Prospect) -> str:
    weak = sum(test.weak for test in one.tests)
    finds = _range([test.detectable for test in one.tests])
    published = [test.effect for test in one.tests if test.paper is not None]
    paper = f"paper {_range(published)}" if published else ""
    says = one.says
    if len(says) > SAYS:
        says = f"{says[:SAYS].rsplit(' ', 1)[0].rstrip(',')}…"
    tests = counted(len(one.tests), "test")
    weakness = f"{weak} weak" if weak else ""
    return f"  {one.id:<4} {says:<{SAYS}}  {tests:>8}  finds {finds:<11}  {paper:<17}  {weakness}".rstrip()


def _noise(tested: list[Prospect]) -> str:
    sources = {one.noise for one in tested}
    if sources == {"from this ledger"}:
        return "from this ledger"
    several = any(test.seeds[0] > 1 for one in tested for test in one.tests)
    assumed = ", ".join(
        f"{family} {tuning:g}" + f" ({pretraining:g})" * several
        for family, (tuning, pretraining) in tested[0].assumed.items()
    )
    where = "where this ledger does not tell, " if sources != {"assumed"} else ""
    over = " (over pretraining seeds)" if several else ""
    return f"{where}assumed, an sd over seeds{over} for each task of {assumed}"


def _abbreviated(claims: list[Prospect]) -> list[str]:
    """Their ids; consecutive ones of papers are abbreviated: C5, C6, C7 becomes C5–C7."""
    runs: list[list[str]] = []
    for claim in claims:
        last = runs[-1][-1] if runs else ""
        follows = claim.source != "study" and last[:1] == claim.id[:1] and last[1:].isdecimal()
        if follows and claim.id[1:] == str(int(last[1:]) + 1):
            runs[-1].append(claim.id)
        else:
            runs.append([claim.id])
    return [run[0] if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs]


def _range(values: list[float]) -> str:
    return "–".join(dict.fromkeys(effect(value) for value in (min(values), max(values))))
