"""The tables of a report: `Table`s of text for CSV files, and `Board`s of models against tasks for people.

CSV files have percent with four decimals and an empty cell for a missing value. The format does not depend on the
locale: comma-separated, one line a row, with a header, UTF-8.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

from biphase.report.estimates import Estimates, Score
from biphase.report.evidence import Baseline, Evidence, ScoreGrid
from biphase.report.figures.crossings import Gap
from biphase.report.pretraining import RunSummary
from biphase.report.recipes import Model
from biphase.report.verdicts import Finding
from biphase.text import SCALE, beside, exponent, interval, plain, rate, signed

DIGITS = 4
# What a spreadsheet would take for a formula and is not a number.
FORMULA = re.compile(r"[=+\-@\t\r](?![\d.]+(e[+-]?\d+)?$)")


@dataclass(frozen=True)
class Table:
    """A CSV file. The first column identifies the row."""

    name: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def csv(self) -> str:
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_as_text(cell) for cell in row] for row in self.rows)
        return out.getvalue()


def _as_text(cell: str) -> str:
    """Prefix a cell that a spreadsheet would run as a formula with a quote. Numbers stay numbers."""
    return f"'{cell}" if FORMULA.match(cell) else cell


@dataclass(frozen=True)
class Cell:
    """One score of a board."""

    score: Score
    best: bool  # the highest mean of its column

    @property
    def around(self) -> str:
        """The interval over seeds in percent, to print beside the mean; empty if there is none."""
        seeds = self.score.seeds
        return beside(100 * seeds.mean, 100 * seeds.low, 100 * seeds.high, -100.0)  # cut already


@dataclass(frozen=True)
class BoardRow:
    """One model of a board."""

    model: Model
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Board:
    """Models against tasks or families, followed by the baselines of the tasks."""

    name: str
    columns: tuple[str, ...]
    lines: tuple[BoardRow, ...]
    baselines: tuple[tuple[str, tuple[Baseline | None, ...]], ...] = ()  # by name, a cell for each column


def boards(evidence: Evidence, estimates: Estimates) -> tuple[Board, Board]:
    """The boards of families and of tasks.

    Rows are ordered: ends of runs with a score, ends of runs without one, intermediate checkpoints.
    """

    def order(model: Model) -> tuple[bool, bool]:
        scored = any(estimates.tasks[model.name, task].known for task in evidence.tasks)
        return not model.recipe.final, not scored

    models = sorted(evidence.models.values(), key=order)
    return (
        _board("families", models, tuple(evidence.families), estimates.families),
        _board("tasks", models, tuple(evidence.tasks), estimates.tasks),
    )


def _board(
    name: str, models: list[Model], columns: tuple[str, ...], scores: dict[tuple[str, str], Score]
) -> Board:
    """Build one board. All models that tie for the best are marked; constant predictions never are."""
    best = dict.fromkeys(columns, math.nan)
    baselines: dict[str, dict[str, Baseline]] = {}  # name → column → its baseline
    for on in columns:
        known = [score for score in scores.values() if score.on == on]
        means = [score.seeds.mean for score in known if score.known and not score.constant]
        best[on] = max(means, default=math.nan)
        for baseline, of in next((score.baselines for score in known if score.baselines), {}).items():
            baselines.setdefault(baseline, {})[on] = of
    lines = []
    for model in models:
        row = [scores[model.name, on] for on in columns]
        cells = [Cell(score, score.seeds.mean == best[score.on] and not score.constant) for score in row]
        lines.append(BoardRow(model, tuple(cells)))
    below = tuple((name, tuple(of.get(on) for on in columns)) for name, of in baselines.items())
    return Board(name, columns, tuple(lines), below)


# ---------------------------------------------------------------- files


SCORE = (
    "mean", "low", "high", "sd", "n", "covers", "examples_low", "examples_high", "done", "of", "no_interval",
    "constant", "baselines",
)  # fmt: skip


def scores(evidence: Evidence, estimates: Estimates) -> Table:
    """Every model on every task."""
    rows = []
    for name, model in evidence.models.items():
        for task, spec in evidence.tasks.items():
            score = estimates.tasks[name, task]
            identity = (name, model.recipe.words(), task, spec.family, score.metric)
            others = "; ".join(f"{metric} {_percent(mean)}" for metric, mean in score.others.items())
            rows.append((*identity, *_score(score), _rates(evidence, model, task), others))
    columns = ("model", "recipe", "task", "family", "metric", *SCORE, "rate_of_each_seed", "other_metrics")
    return Table("scores", columns, tuple(rows))


def families(evidence: Evidence, estimates: Estimates) -> Table:
    """Every model on every family."""
    rows = [
        (name, model.recipe.words(), family, *_score(estimates.families[name, family]))
        for name, model in evidence.models.items()
        for family in evidence.families
    ]
    return Table("families", ("model", "recipe", "family", *SCORE), tuple(rows))


NOISE = (
    "model", "family", "pretraining_seeds", "finetuning_seeds", "test_examples", "sd_pretraining_seed",
    "sd_finetuning_seed", "sd_both_seeds", "sd_test_example", "sd_seeds_and_example",
)  # fmt: skip


def noise(evidence: Evidence, estimates: Estimates) -> Table:
    """The standard deviation from each source of noise in one family score."""
    rows = []
    for name in evidence.models:
        for family in evidence.families:
            parts = estimates.families[name, family].noise
            if parts is None:
                continue
            counts = (parts.pretraining_seeds, parts.finetuning_seeds, parts.examples)
            deviations = (_percent(math.sqrt(component.single)) for component in parts.components)
            rows.append((name, family, *map(str, counts), *deviations))
    return Table("noise", NOISE, tuple(rows))


def _score(score: Score) -> tuple[str, ...]:
    seeds = score.seeds
    low, high = score.examples or (math.nan, math.nan)
    lacking = [score.no_interval, f"test examples: {score.no_examples}" if score.no_examples else ""]
    baselines = (f"{name} {_percent(base.test)} ({base.what})" for name, base in score.baselines.items())
    return (
        *map(_percent, (seeds.mean, seeds.low, seeds.high, seeds.sd)),
        str(seeds.n),
        seeds.covers if score.known else "",
        _percent(low),
        _percent(high),
        str(score.done),
        str(score.of),
        "; ".join(filter(None, lacking)),
        str(score.constant or ""),
        "; ".join(baselines),
    )


def _percent(score: float) -> str:
    return plain(score * 100, DIGITS)


def _rates(evidence: Evidence, model: Model, task: str) -> str:
    """The learning rate chosen for each seed, in order; "none" for an incomplete seed."""
    grids = [evidence.grids[result, task] for result in model.results]
    chosen = [(grid, grid.chosen.get(seed)) for grid in grids for seed in grid.seeds]
    return " ".join("none" if row is None else rate(grid.lrs[row]) for grid, row in chosen)


CROSSING = (
    "size", "family", "above", "below", "seeds", "covers", "gaps",
    "tokens", "tokens_low", "tokens_high", "tokens_per_parameter", "steps", "says",
)  # fmt: skip


def crossings(every: list[Gap]) -> Table:
    """A row for each size and family: the gap at each budget, and where it crosses 0."""
    rows = []
    for gap in every:
        located, points, last = gap.located, gap.points, gap.pairs[-1][0].recipe
        at, low, high = math.nan, math.nan, math.nan
        if located:
            at = math.exp(located.estimate)
            if len(located.pieces) == 1:
                low = math.nan if located.open_below else math.exp(located.pieces[0][0])
                high = math.nan if located.open_above else math.exp(located.pieces[0][1])
        text = [plain(one, 0) for one in (at, low, high)]
        text += [plain(at / gap.blocks, 1) if gap.blocks else "", plain(at / last.tokens * last.steps, 0)]
        shown = (
            f"{masked.recipe.tokens}: {signed(one.mean)} {interval(one.low, one.high, sign=True)}"
            for (masked, _), one in zip(gap.pairs, points, strict=True)
        )
        names = (gap.pairs[-1][0].name, gap.pairs[-1][1].name)
        rows.append(
            (f"{gap.size}{gap.suffix}", gap.family, *names, f"{len(gap.table)}", gap.covers, "; ".join(shown), *text, f"{gap}")
        )  # fmt: skip
    return Table("crossings", CROSSING, tuple(rows))


CLAIM = ("claim", "says", "source", "verdict", "why", "p", "p_holm", "p_refuted", "scale")
PART = (
    "part", "models", "estimate", "low", "high", "n", "covers", "part_p", "margin", "paper", "detectable",
    "examples_low", "examples_high", "supports", "note",
)  # fmt: skip


def claims(findings: Iterable[Finding]) -> Table:
    """One row for each part of each claim; a claim without parts has one row."""
    rows = []
    for finding in findings:
        claim = (
            finding.id, finding.says, finding.source, finding.verdict, finding.why, exponent(finding.p),
            exponent(finding.p_holm), exponent(finding.p_refuted), finding.scale,
        )  # fmt: skip
        for part in finding.parts:
            low, high = part.examples or (math.nan, math.nan)
            seeds = part.estimate
            row = (
                part.title, " ".join(part.models), *(plain(v, DIGITS) for v in (seeds.mean, seeds.low, seeds.high)),
                str(seeds.n), seeds.covers, exponent(part.above), plain(part.margin, 2), plain(part.paper, 2),
                plain(min(part.detectable, SCALE), DIGITS), plain(low, DIGITS), plain(high, DIGITS), part.supports, part.note,
            )  # fmt: skip
            rows.append((*claim, *row))
        if not finding.parts:
            rows.append((*claim, *("" for _ in PART)))
    return Table("claims", (*CLAIM, *PART), tuple(rows))


TRIAL_COLUMNS = (
    "model", "pretraining_seed", "task", "metric", "rate", "seed", "validation", "test", "chosen", "seconds",
    "key", "missing",
)  # fmt: skip


def trial_table(evidence: Evidence) -> Table:
    """Every planned trial, finished or not."""
    rows: list[tuple[str, ...]] = []
    for model in evidence.models.values():
        for result, pretraining_seed in zip(model.results, model.seeds, strict=True):
            for task in evidence.tasks:
                rows += _trial_rows(model.name, pretraining_seed, evidence.grids[result, task])
    return Table("trials", TRIAL_COLUMNS, tuple(rows))


def _trial_rows(model: str, pretraining_seed: int, grid: ScoreGrid) -> Iterable[tuple[str, ...]]:
    validation, test = grid.validation.get(grid.metric), grid.test.get(grid.metric)
    for row, lr in enumerate(grid.lrs):
        for column, seed in enumerate(grid.seeds):
            key = grid.keys[row][column]
            if not key:  # not planned
                continue
            scores = (math.nan if part is None else float(part[row, column]) for part in (validation, test))
            chosen = "yes" if grid.chosen.get(seed) == row else ""
            seconds = plain(float(grid.seconds[row, column]), 3)
            trial = model, str(pretraining_seed), grid.task.name, grid.metric, rate(lr), str(seed)
            why = "" if seconds else grid.missing.get(key, "not computed")
            yield (*trial, *map(_percent, scores), chosen, seconds, key, why)


RUN = (
    "run", "model", "recipe", "size", "parameters", "steps", "tokens", "flops", "seconds", "devices", "device",
    "joules", "epochs", "heldout_clm", "heldout_mlm40", "standing", "trials_done", "trials_of", "key",
)  # fmt: skip


def runs(summaries: Iterable[RunSummary]) -> Table:
    """Every result and its cost."""
    rows = []
    for run in summaries:
        recipe = run.recipe
        losses = (plain(run.heldout.get(name), DIGITS) for name in ("clm", "mlm40"))
        row = (
            run.name, run.model, recipe.words(), recipe.size,
            "" if recipe.parameters is None else str(recipe.parameters), str(recipe.steps), str(recipe.tokens),
            exponent(run.flops), plain(run.seconds, 1), str(run.devices), run.device, plain(run.joules, 0),
            plain(run.epochs, DIGITS), *losses, run.standing, *(str(n) for n in run.trials), run.key,
        )  # fmt: skip
        rows.append(row)
    return Table("runs", RUN, tuple(rows))
