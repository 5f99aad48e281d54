"""What a study says to every claim: measured, corrected for their number, judged, and put into words."""

from __future__ import annotations

import math
from collections.abc import Iterable

from biphase.catalog import TASKS
from biphase.report.claims.catalog import STATEMENTS
from biphase.report.claims.contrasts import Statement, Test
from biphase.report.claims.findings import Finding, Part
from biphase.report.claims.lines import Bench, bench
from biphase.report.claims.measuring import Measured, detectable, measure
from biphase.report.claims.own import own_statements
from biphase.report.claims.repeated import marked
from biphase.report.claims.telling import why
from biphase.report.claims.verdicts import (
    ALPHA,
    claim_p,
    level_of_parts,
    sought,
    supports,
    verdict,
)
from biphase.report.draws import Draws, shared_draws
from biphase.report.evidence import Evidence
from biphase.report.numerals import interval, listed
from biphase.report.repetition import Epochs
from biphase.report.statistics.multiplicity import holm
from biphase.specs.tasks import family_name
from biphase.wording import counted, short


def statements(over: Bench) -> list[Statement]:
    """Every claim a report tests: the catalog's, if the study pretrains models to compare, then the study's own."""
    pretrained = {one.name for line in over.lines for one in line.models if one.recipe.spans}
    return [*(STATEMENTS if len(pretrained) > 1 else ()), *own_statements(over)]


def judge(evidence: Evidence, draws: Draws | None = None) -> list[Finding]:
    """Every claim of `statements`, in order. `draws`: those of the evidence, if they are at hand."""
    over = bench(evidence.plan, evidence.models)
    draws = shared_draws(evidence) if draws is None else draws
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


def _part(measured: Measured, level: float, first: float) -> Part:
    estimate = measured.estimate
    smallest = detectable(measured, first)
    says = supports(
        measured.excess,
        measured.p,
        level=level,
        detectable=smallest,
        effect=sought(measured.paper, measured.margin),
    )
    return Part(
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


def _sentence(measured: Measured) -> str:
    estimate = measured.estimate
    half = (estimate.high - estimate.low) / 2
    words = measured.said.above if estimate.mean >= 0 else measured.said.below
    around = "" if math.isnan(half) else f" ± {half:.2f}"
    return words.replace("{}", f"{abs(estimate.mean):.2f}{around}", 1)  # a name may hold braces of its own


def _finding(
    over: Bench,
    statement: Statement,
    tests: list[Test],
    measured: list[Measured],
    parts: tuple[Part, ...],
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


def missing_families(over: Bench, statement: Statement) -> list[str]:
    return [one for one in statement.on if one not in over.families]


def needs(over: Bench, statement: Statement) -> str:
    """Why no test was found: what the study lacks."""
    absent = missing_families(over, statement)
    if statement.on and len(absent) == len(statement.on):
        return (
            f"needs a task of {listed([family_name(one) for one in absent])}"
            if over.tasks
            else "needs tasks to fine-tune on"
        )
    return statement.needs


def _scale(over: Bench, tests: list[Test], measured: list[Measured]) -> str:
    """610m · 99B tokens · 1 pretraining seed, 5 fine-tuning seeds."""
    recipes = [model.recipe for test in tests for model in test.models]
    if not recipes:
        return ""
    known = [one.shape for one in measured if not one.missing] or [
        (1, over.seeds(model for test in tests for model in test.models))
    ]
    pretraining, tuning = ({shape[which] for shape in known} for which in (0, 1))
    tokens = sorted({one.tokens for one in recipes} - {0})  # none: published models as they are
    parts = [", ".join(dict.fromkeys(one.size for one in recipes))]
    if tokens:
        parts.append(f"{'–'.join(dict.fromkeys((short(tokens[0]), short(tokens[-1]))))} tokens")
    parts.append(f"{_seeds(pretraining, 'pretraining seed')}, {_seeds(tuning, 'fine-tuning seed')}")
    return " · ".join(parts)


def _seeds(counts: set[int], word: str) -> str:
    return counted(max(counts), word) if len(counts) == 1 else f"{min(counts)}–{counted(max(counts), word)}"


def _left_out(over: Bench, tests: list[Test], measured: list[Measured]) -> Iterable[str]:
    """Seeds that are not there because something failed: what is left of them is no chance selection."""
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


def _caveats(over: Bench, parts: tuple[Part, ...], tests: list[Test], absent: list[str]) -> Iterable[str]:
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
