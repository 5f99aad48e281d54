"""How much the learning rate of fine-tuning matters: the mean over seeds at each rate, with nothing chosen."""

from __future__ import annotations

import math

import numpy as np

from biphase.report.estimates import Estimates
from biphase.report.evidence import Evidence
from biphase.report.figures.chosen import by_setting, by_size, ends, objective_name, standing_for
from biphase.report.figures.description import PAPER, Axis, Figure, Look, Panel, Series
from biphase.report.figures.palette import PAPER_LOOK, Meaning, looks, role_of
from biphase.report.figures.scored import SCORE, with_half
from biphase.report.figures.ticks import spaced
from biphase.report.numerals import fixed, listed, rate
from biphase.report.paper import at_rates
from biphase.report.recipes import Model
from biphase.report.statistics.intervals import Estimate, across, of_scores
from biphase.specs.tasks import FAMILIES
from biphase.wording import counted


def figure(evidence: Evidence, estimates: Estimates) -> Figure | None:
    finetune = evidence.plan.study.finetune
    if finetune is None or len(finetune.lrs) < 2:
        return None
    models, size = _models(evidence)
    panels: list[Panel] = []
    missing = points = 0
    covers: dict[str, None] = {}
    for family, tasks in evidence.families.items():
        made: list[Series] = []
        for one, (name, look) in models.items():
            at = _by_rate(evidence, evidence.models[one], tasks)
            points, missing = points + len(at), missing + sum(not math.isfinite(e.mean) for e in at.values())
            covers |= {e.covers: None for e in at.values() if math.isfinite(e.low)}
            made += _series(name, look, evidence.models[one], at)
        if made:
            marks = _paper_marks([evidence.models[one] for one in models], tasks)
            y = Axis("" if panels else SCORE)
            panels.append(Panel(FAMILIES[family].capitalize(), _axis(finetune.lrs), y, (*marks, *made)))
    if not panels:
        return None
    said = [f"Fine-tuning at each learning rate, {size}; no rate is chosen here."]
    said.append(
        f"Areas are 95% intervals over {listed(list(covers))}." if covers else "One seed: no intervals."
    )
    said += ["Each panel has its own scale."] * (len(panels) > 1)
    paper = any(one.name == PAPER for panel in panels for one in panel.series)
    said += ["Hollow diamonds are single runs of the paper."] * paper
    said += [f"{missing} of {counted(points, 'point')} missing."] * bool(missing)
    return Figure("rates", "How delicate is the learning rate?", " ".join(said), tuple(panels))


def _models(evidence: Evidence) -> tuple[dict[str, tuple[str, Look]], str]:
    """One model for each objective at the middle size with any score, by name; else the models as they are."""
    scored = [one for one in evidence.models.values() if _any(evidence, one)]
    sizes = by_size(ends(scored))
    if not sizes:
        starts = [one for one in scored if not one.recipe.spans]
        some = looks([Meaning("other", one.name) for one in starts])
        return {
            one.name: (one.name, look) for one, look in zip(starts, some, strict=True)
        }, "models as they are"
    size = list(sizes)[len(sizes) // 2]
    found: dict[str, tuple[str, Meaning]] = {}
    for words, some in by_setting(sizes[size]).items():
        for one in standing_for(some):
            name = f"{objective_name(one.recipe)}{words}"
            found[one.name] = name, Meaning(role_of(one.recipe), (words, name))
    styles = looks([one for _, one in found.values()])
    return {one: (name, look) for (one, (name, _)), look in zip(found.items(), styles, strict=True)}, size


def _any(evidence: Evidence, model: Model) -> bool:
    return any(evidence.grids[result, task].done for result in model.results for task in evidence.tasks)


def _by_rate(evidence: Evidence, model: Model, tasks: tuple[str, ...]) -> dict[float, Estimate]:
    """Rate → the mean over tasks, seed by seed."""
    scores = np.mean([evidence.by_rate(model, task) for task in tasks], axis=0)  # (P, rates, F)
    lrs = evidence.grids[model.results[0], tasks[0]].lrs
    return {lr: of_scores(across(scores[:, place])) for place, lr in enumerate(lrs)}


def _series(name: str, look: Look, model: Model, at: dict[float, Estimate]) -> list[Series]:
    known = {lr: one for lr, one in at.items() if math.isfinite(one.mean)}
    if not known:
        return []
    hover = tuple(
        f"{model.name}\nlearning rate {rate(lr)}\n{with_half(e.mean, e.low, e.high)}\n{counted(e.n, 'seed')}"
        for lr, e in known.items()
    )
    low, high = (tuple(100 * getattr(e, end) for e in known.values()) for end in ("low", "high"))
    mean = tuple(100 * e.mean for e in known.values())
    return [Series(name, look, tuple(known), mean, low=low, high=high, band=True, hover=hover)]


def _paper_marks(models: list[Model], tasks: tuple[str, ...]) -> list[Series]:
    """The paper's single runs, where a family here is the one dataset they are of."""
    if len(tasks) > 1:
        return []
    known = [(lr, y, one) for one in models for lr, y in at_rates(one.recipe, tasks[0]).items()]
    if not known:
        return []
    hover = tuple(
        f"the paper: {fixed(y)}%, one run\n{one.recipe.words()}\nlearning rate {rate(lr)}"
        for lr, y, one in known
    )
    x, y = tuple(one[0] for one in known), tuple(one[1] for one in known)
    return [Series(PAPER, PAPER_LOOK, x, y, draws="points", hover=hover)]


def _axis(lrs: tuple[float, ...]) -> Axis:
    ticks = tuple(sorted(lrs))
    return Axis("learning rate", "log", ticks, spaced(ticks, [rate(one) for one in ticks], 0.22, log=True))
