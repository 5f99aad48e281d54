"""B1 to B6: what the paper's numbers raise and do not answer. Tested in the same way as its claims."""

from __future__ import annotations

import math
from dataclasses import replace

from biphase.keys import decay_start, origin_step
from biphase.report.claims.contrasts import Contrast, Remark, Statement, Test, ahead, measured
from biphase.report.claims.efficiency import checkpoints, late
from biphase.report.claims.lines import Bench, Line, common
from biphase.report.claims.objectives import CLM, MLM, PAIR, pair, tagging
from biphase.report.claims.quantities import Best, Reading, Score, Sum, gap, paper_score, score
from biphase.report.claims.ratios import percent
from biphase.report.claims.stages import EVERY, compared, pairs, shares, smallest
from biphase.report.claims.stages import PAIR as TWO_STAGES
from biphase.report.recipes import Model
from biphase.report.statistics.intervals import complete, mean_squares
from biphase.specs import Classify
from biphase.specs.tasks import columns_of


def _b1(bench: Bench) -> list[Test]:
    found: list[Test] = []
    for group in bench.groups:
        line = smallest(group)
        if line is None:
            continue
        steps = max(pairs(line))
        first, ratios = pairs(line)[steps][0], line.ratios(steps)
        if len(ratios) > 1:
            found += _against_the_best(bench, line, first, tuple(ratios.values()))
    return found


def _against_the_best(bench: Bench, line: Line, first: Model, masked: tuple[Model, ...]) -> list[Contrast]:
    found = []
    for family, tasks in bench.families.items():
        best = Best(masked, tasks, family)

        def which(reading: Reading, best: Best = best) -> str:
            chosen = best.chosen(reading)
            return f"best ratio on validation: {percent(chosen.recipe.ratio or 0)}" if chosen else ""

        where = f"the best MLM ratio on {family} at {line.title}"
        found.append(
            measured(
                f"{line.title} · {family}",
                score(bench, first, family) - best,
                f"{shares(first)} scores {{}} points above {where}",
                f"{shares(first)} scores {{}} points below {where}",
                remark=which,
            )
        )
    return found


def _b2(bench: Bench) -> list[Test]:
    found: list[Test] = []
    for line in bench.lines:
        step = late(line)
        ends = [steps for steps in common(line.mlm(), line.clm()) if step is not None and steps > step]
        if step is None or not ends:
            continue
        masked, causal = line.mlm()[ends[0]], line.clm()[ends[0]]
        before, remark = checkpoints(line)[step], _ahead_of_decay(bench, masked, step)
        for family in (one for one in ("QA", "SC") if one in bench.families):
            how = f"than CLM on {family} at {line.title} from the decay (step {step:,} to {ends[0]:,})"
            found.append(
                measured(
                    f"{line.title} · {family} · gain of the decay",
                    gap(bench, masked, before[0], family) - gap(bench, causal, before[1], family),
                    f"MLM 40% gains {{}} points more {how}",
                    f"MLM 40% gains {{}} points less {how}",
                    remark=remark,
                )
            )
    return found


def _ahead_of_decay(bench: Bench, model: Model, step: int) -> Remark | None:
    """That some of the gain is training at the full rate, where the checkpoint is not where the decay begins."""
    run = bench.plan.states[bench.plan.results[model.results[0]]].run
    early = origin_step(run) + decay_start(run) - step
    if early <= 0:
        return None
    return lambda reading: (
        f"the checkpoint is {early:,} steps before the decay: what they bring is in this gain"
    )


def _b3(bench: Bench) -> list[Test]:
    """The gap on tasks whose text names two columns or more, minus the gap on the others."""
    texts = {name: task.form.text for name, task in bench.tasks.items() if isinstance(task.form, Classify)}
    two = tuple(name for name, text in texts.items() if len(columns_of(name, text)) > 1)
    one = tuple(name for name in texts if name not in two)
    if not one or not two:
        return []
    found: list[Test] = []
    for line in bench.lines:
        both = pair(line)
        if both:
            wider = _gap(both, two) - _gap(both, one)
            than = f"than on {', '.join(one)} at {line.title}"
            found.append(
                measured(
                    f"{line.title} · pairs against single texts",
                    wider,
                    f"MLM 40% leads CLM by {{}} points more on {', '.join(two)} {than}",
                    f"MLM 40% leads CLM by {{}} points less on {', '.join(two)} {than}",
                    paper=6.02 if line.size == "610m" and paper_score(both[0].recipe, "SC") else None,
                )
            )
    return found


def _gap(both: tuple[Model, Model], tasks: tuple[str, ...]) -> Sum:
    return Score(both[0], tasks) - Score(both[1], tasks)


def _b4(bench: Bench) -> list[Test]:
    answers = [
        ahead(bench, line, "QA", (MLM, both[0]), (CLM, both[1]), metric="f1")
        for line in bench.lines
        if (both := pair(line)) and "QA" in bench.families
    ]
    return [*answers, *tagging(bench, "entity_f1")]


def _b5(bench: Bench) -> list[Test]:
    if not bench.finetune or bench.finetune.documents != "all" or "IR" not in bench.families:
        return []
    return [
        ahead(bench, line, "IR", (MLM, both[0]), (CLM, both[1]), metric="ndcg@10")
        for line in bench.lines
        if (both := pair(line))
    ]


def _b6(bench: Bench) -> list[Test]:
    found: list[Test] = []
    for line in bench.lines:
        several = [
            steps
            for steps, (first, masked) in pairs(line).items()
            if len(set(first.seeds) & set(masked.seeds)) > 1
        ]
        if several:
            found += [replace(one, remark=_noise(one)) for one in compared(bench, line, max(several))]
    return found


def _noise(contrast: Contrast) -> Remark:
    """How much of its noise is pretraining's."""

    def words(reading: Reading) -> str:
        table = complete(contrast.quantity.measure(reading))
        if min(table.shape) < 2:
            return ""
        rows, columns, rest = mean_squares(table)
        pretraining = math.sqrt(max(0.0, rows - rest) / table.shape[1])
        tuning = math.sqrt(max(0.0, columns - rest) / table.shape[0] + rest)
        return f"sd over pretraining seeds {pretraining:.2f} points, over fine-tuning seeds {tuning:.2f}"

    return words


STATEMENTS = (
    Statement(
        "B1",
        "A quarter CLM, then MLM 40%, also beats the best masking ratio",
        "CLM→MLM 25-75 minus the best MLM ratio",
        "25-75 − the MLM ratio that is best on validation (mean over seeds, family by family), same budget; each family",
        f"{TWO_STAGES}; and a second ratio",
        _b1,
        EVERY,
        "splits",
        "computed from its tables, 610m: +0.29, +0.28, +2.77, +0.26 (SC, TC, QA, IR)",
        "beyond",
        equal_data=True,
    ),
    Statement(
        "B2",
        "The decay of the learning rate is worth more to MLM than to CLM",
        "Gain of MLM 40% from the decay minus the gain of CLM",
        "(final − last undecayed checkpoint) of MLM 40% − the same of CLM; on QA and SC",
        "needs an MLM 40% and a CLM run of the same size and length, with a checkpoint of both late in the run (keep=…)",
        _b2,
        ("QA", "SC"),
        "efficiency",
        "computed from its tables, 610m: +4.77 (QA), +0.50 (SC)",
        "beyond",
    ),
    Statement(
        "B3",
        "The gap on sequence classification sits in tasks that compare two texts",
        "Gap between MLM 40% and CLM on pairs of texts minus the gap on single texts",
        "(MLM 40% − CLM on SC tasks whose text names two columns) − (the same on the others) > 0",
        f"{PAIR}, a task with two texts (mnli, qqp) and one with a single text (sst2)",
        _b3,
        ("SC",),
        "objectives",
        "610m: 6.02 between MNLI and SST-2",
        "beyond",
        ("The paper's number is two single runs at one learning rate: one seed, no interval.",),
    ),
    Statement(
        "B4",
        "C2 and C4 hold with the usual metrics: SQuAD's F1 and entity F1",
        "MLM 40% minus CLM on QA (f1); CLM minus MLM 40% on TC (entity F1), which must exceed −0.5",
        "MLM 40% − CLM on QA by f1 > 0; CLM − MLM 40% on TC by entity_f1 > −0.5 points; each size",
        PAIR,
        _b4,
        ("QA", "TC"),
        "objectives",
        "none: the paper has its own metrics only",
        "beyond",
        equal_data=True,
    ),
    Statement(
        "B5",
        "C3 holds where all documents are searched",
        "MLM 40% minus CLM on IR (ndcg@10, all documents)",
        "MLM 40% − CLM on IR by ndcg@10 over all documents; each size",
        f"{PAIR}, scored over all documents (Finetune(documents='all'))",
        _b5,
        ("IR",),
        "objectives",
        "none: the paper searches judged documents only",
        "beyond",
        equal_data=True,
    ),
    Statement(
        "B6",
        "C13 survives the noise of pretraining",
        "CLM→MLM 25-75 minus MLM 40%, over pretraining seeds",
        "C13's contrast where both were pretrained with two seeds or more; the interval covers these; each family",
        f"{TWO_STAGES}, each with two pretraining seeds or more",
        _b6,
        EVERY,
        "splits",
        "none: the paper has one pretraining seed",
        "beyond",
        equal_data=True,
    ),
)
