"""Where masking overtakes prediction: the gap MLM − CLM at the decayed ends of runs, over their budgets.

For each size, a straight line through the gap over the logarithm of tokens is fitted to each seed by itself. The
budgets of one seed share most of their training, so the seeds, not the budgets, are the units of all intervals. A
crossing is the set of budgets at which t over the seeds' lines does not reject a gap of 0 (Fieller's limits), within the
budgets that were trained.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from biphase.report.estimates import Estimates, Score
from biphase.report.evidence import Evidence, Floats
from biphase.report.figures.description import (
    PAPER,
    Axis,
    Figure,
    Meaning,
    Panel,
    Series,
    Style,
    View,
    by_setting,
    by_size,
    ends,
    grouped,
    looks,
    on_log,
    usual,
)
from biphase.report.figures.scores import paper_series
from biphase.report.recipes import Model, run_of
from biphase.report.statistics.curves import Located, crossing, fit_each
from biphase.report.statistics.intervals import Estimate, over_seeds
from biphase.specs.tasks import FAMILIES
from biphase.study.costs import shape_of
from biphase.text import counted, interval, short, signed

BUDGETS = 3  # that both objectives need; fewer do not show whether a line fits
VIEWS = ("tokens per parameter", "tokens", "steps")


@dataclass(frozen=True)
class Gap:
    """MLM − CLM of one size on one family, in points, at each budget that both objectives have."""

    size: str
    suffix: str  # of the setting, where the study has several
    family: str
    pairs: tuple[tuple[Model, Model], ...]  # (MLM, CLM), the smallest budget first
    blocks: int | None  # parameters of the blocks; None: not known
    table: Floats  # (seeds, budgets)
    covers: str  # what the seeds are

    @property
    def tokens(self) -> Floats:
        return np.array([float(masked.recipe.tokens) for masked, _ in self.pairs])

    @property
    def points(self) -> list[Estimate]:
        """The gap at each budget, with its interval over seeds."""
        return [over_seeds(values, covers=self.covers) for values in self.table.T]

    @property
    def located(self) -> Located | None:
        """The crossing, over the logarithm of tokens; None with a single seed."""
        if len(self.table) < 2:
            return None
        x = np.log(self.tokens)
        return crossing(fit_each(x, self.table, 1, self.covers), (x[0], x[-1]))

    def __str__(self) -> str:
        """The crossing as text, in tokens."""
        located, (first, last) = self.located, (short(self.tokens[end]) for end in (0, -1))
        if located is None:
            return "one seed does not locate it"
        if not located.pieces:
            ahead = "ahead" if self.table.mean() > 0 else "behind"
            return f"MLM is {ahead} from {first} to {last} tokens"
        low, high = (short(math.exp(end)) for end in (located.pieces[0][0], located.pieces[-1][1]))
        if len(located.pieces) > 1 or (located.open_below and located.open_above):
            return f"not located between {first} and {last} tokens"
        if located.open_above:
            return f"not below {low} tokens"
        return f"below {high} tokens" if located.open_below else f"at {low} to {high} tokens"


def gaps(evidence: Evidence, estimates: Estimates) -> list[Gap]:
    """The gaps of every size that has CLM alone and MLM alone at enough budgets, by setting and size."""
    found = []
    for suffix, group in by_setting(ends(evidence.models.values())).items():
        for size, models in by_size(group).items():
            every = _pairs(models)
            shape = shape_of(run_of(evidence.plan, models[0].name)[0]) if every else None
            for family in evidence.families:
                scored = {pair: [estimates.families[model.name, family] for model in pair] for pair in every}
                scored = {pair: both for pair, both in scored.items() if all(one.known for one in both)}
                if len(scored) < BUDGETS:
                    continue
                table, covers = _by_seed(scored)
                if len(table):
                    blocks = shape.blocks if shape else None
                    found.append(Gap(size, suffix, family, tuple(scored), blocks, table, covers))
    return found


def _pairs(models: list[Model]) -> tuple[tuple[Model, Model], ...]:
    """MLM at the usual ratio and CLM, each alone, at each budget that has both and a decay."""
    budgets = grouped((model for model in models if model.recipe.decayed), lambda model: model.recipe.tokens)
    pairs = [(usual("mlm", budgets[tokens]), usual("clm", budgets[tokens])) for tokens in sorted(budgets)]
    return tuple((masked, causal) for masked, causal in pairs if masked and causal)


def _by_seed(scored: dict[tuple[Model, Model], list[Score]]) -> tuple[Floats, str]:
    """The gaps of the seeds that are complete at every budget, in points, and what these seeds are.

    With several pretraining seeds a value is the mean of a seed's fine-tunings; with one, its fine-tunings are the seeds.
    """
    several = all(len(model.seeds) > 1 for pair in scored for model in pair)
    columns = []
    for pair, both in scored.items():
        masked, causal = (
            dict(zip(model.seeds, score.by_seed.mean(axis=1), strict=True))
            if several
            else dict(enumerate(score.by_seed[0]))
            for model, score in zip(pair, both, strict=True)
        )
        columns.append({seed: 100 * (masked[seed] - causal[seed]) for seed in masked if seed in causal})
    rows = [[column.get(seed, math.nan) for column in columns] for seed in columns[0]]
    table = np.array([row for row in rows if np.isfinite(row).all()]).reshape(-1, len(columns))
    return table, "pretraining seeds" if several else "fine-tuning seeds"


# ---------------------------------------------------------------- figure


def crossings_figure(evidence: Evidence, every: list[Gap]) -> Figure | None:
    """The gap over tokens per parameter, tokens and steps: a line for each size, beside the paper's."""
    if not every:
        return None
    published = evidence.published.gaps()
    lines = list(dict.fromkeys(_line(gap) for gap in every))
    styles = dict(zip(lines, looks([Meaning("mlm", suffix, of) for _, suffix, of in lines]), strict=True))
    series_of = {
        family: [
            *(series for gap in of_family for series in _series(gap, styles[_line(gap)])),
            *paper_series(((x, y, f"{signed(y)} points") for x, y in published.get(family, [])), "both"),
        ]
        for family, of_family in grouped(every, lambda gap: gap.family).items()
    }
    drawn = [known for some in series_of.values() for known in some]
    places = [sorted({x for known in drawn for x in known.views[n]}) for n in range(len(VIEWS))]
    axes = []
    for name, xs in zip(VIEWS, places, strict=True):
        ticks = on_log(xs)
        axes.append(Axis(name, "log", ticks, tuple(map(short, ticks))))
    zero = tuple((xs[0], xs[-1]) for xs in places)
    line = Series("no gap", Style("paper", width=0.6), zero[0], (0.0, 0.0), "line", views=zero, legend=False)
    panels = [
        Panel(
            FAMILIES[family].name.capitalize(),
            axes[0],
            Axis("" if place else "MLM − CLM, points"),
            (line, *some),
        )
        for place, (family, some) in enumerate(series_of.items())
    ]
    caption = (
        "MLM − CLM, each alone, at the decayed ends of runs of equal length, over the parameters of the blocks. "
        f"Areas are 95% intervals over {every[0].covers}; small circles are these. Each panel has its own scale. Where a straight line over log tokens crosses 0: "
        + "; ".join(
            f"{size}{suffix}: " + ", ".join(f"{gap.family} {gap}" for gap in some)
            for (size, suffix), some in grouped(every, lambda gap: (gap.size, gap.suffix)).items()
        )
        + "."
    )
    if any(known.name == PAPER for known in drawn):
        caption += " Diamonds are the paper's 610M model: two checkpoints before the decay, and the end."
    views = tuple(View(name, axis) for name, axis in zip(VIEWS, axes, strict=True))
    return Figure("crossings", "Where does masking overtake prediction?", caption, tuple(panels), views)


def _line(gap: Gap) -> tuple[str, str, int]:
    return gap.size, gap.suffix, gap.blocks or 0


def _series(gap: Gap, look: Style) -> list[Series]:
    """The mean with its interval, and a small circle for each seed."""
    points, tokens = gap.points, tuple(gap.tokens.tolist())
    views = (
        tuple(count / gap.blocks if gap.blocks else math.nan for count in tokens),
        tokens,
        tuple(float(masked.recipe.steps) for masked, _ in gap.pairs),
    )
    hover = tuple(
        f"{masked.name}\nminus {causal.name}\n{signed(one.mean)} points {interval(one.low, one.high, sign=True)}\n"
        f"{counted(one.n, 'seed')}"
        for (masked, causal), one in zip(gap.pairs, points, strict=True)
    )
    mean, low, high = (tuple(getattr(one, name) for one in points) for name in ("mean", "low", "high"))
    name, x, small = (
        f"{gap.size}{gap.suffix}",
        views[0],
        replace(look, marker="circle", hollow=True, size=0.55),
    )
    line = Series(name, look, x, mean, low=low, high=high, band=True, hover=hover, views=views)
    return [
        line,
        *(
            Series(name, small, x, tuple(seed.tolist()), "points", views=views, legend=False)
            for seed in gap.table
            if len(gap.table) > 1
        ),
    ]
