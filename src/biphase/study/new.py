"""Study files for common questions: `biphase new two-stage|ratio|adapt|evaluate|continue`.

`written` fills the template new.j2. With a budget it chooses first the seeds, then steps and batch, by pricing the
plan of the very file that it writes with `study.prices`, so that `biphase plan` shows the hours that were chosen here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from biphase import specs
from biphase.catalog import CATALOG
from biphase.errors import SpecError, nearest
from biphase.presets import CORPORA, STARTS, TOKENS
from biphase.specs import Config, Hub, Pretrained
from biphase.store import Store
from biphase.study.build import FULL_PEAK
from biphase.study.costs import reading_notes
from biphase.study.devices import at_hand
from biphase.study.load import corpus_named, load, run_named
from biphase.study.plan import Plan, identities, make_plan
from biphase.study.prices import Bill, bill
from biphase.text import duration, short

QUESTIONS = {
    "two-stage": "At equal steps, is CLM before MLM better than MLM alone?",
    "ratio": "Which share of the tokens should be masked?",
    "adapt": "What does masked pretraining make of a decoder?",
    "evaluate": "How good are these models as encoders?",
    "continue": "What does an encoder gain from more pretraining on text of its domain?",
}
FROM_SCRATCH = ("two-stage", "ratio")
FINETUNING = 0.3  # of a budget at most
SEEDS, MOST_SEEDS = 5, 20  # as in arXiv 2507.00994; where nothing is pretrained, a budget buys more
# Widest model → tokens per row, peak learning rate and where it is from, rates of fine-tuning.
BY_WIDTH: dict[float, tuple[int, float, str, tuple[float, ...]]] = {
    256: (256, 2e-3, "as in studies/crossing.py", (5e-4, 1e-3, 2e-3)),
    512: (512, 1e-3, "as in studies/replica.py", (1e-4, 2e-4, 5e-4)),
    math.inf: (2_048, 5e-4, "as in arXiv 2507.00994", (5e-5, 1e-4, 2e-4)),
}
OF_MODELS = 512, FULL_PEAK, "as `biphase adapt`", (2e-5, 5e-5, 1e-4)
MINI_LRS = 2e-3, 4e-3  # for the few steps on the tiny built-in tasks
# The batch is this one times a power of the tokens; both from the recipes of studies/replica.py and studies/paper.py.
TOKENS_OF, BATCH_OF, POWER, MOST_BATCH = 131e6, 32_768, 2 / 3, 2_359_296
BATCH_WHY = (
    "The batch grows as tokens^(2/3), a line through two recipes: 32,768 tokens a step for runs of 131M "
    "(studies/replica.py), 2.36M, the most, for runs of 99B (studies/paper.py)."
)
OF_ADAPT = "The batch is the one of `biphase adapt`; longer runs get larger ones."
WIDE = 108  # characters of a line, without the comment's mark
FEWEST_ROWS, FEWEST_STEPS = 8, 20
PER_PARAMETER = 20  # tokens of a run without a budget, for each parameter of the blocks
USUAL_TOKENS = 16e6  # the same where these are unknown: 1,000 steps of 32 rows of 512
CLOSE = 0.98  # of a budget; nearer is not searched


@dataclass(frozen=True)
class Wishes:
    """What was typed after `biphase new`; "" and 0 stand for the default."""

    question: str
    name: str  # of the study
    corpus: str = ""
    text: str = ""
    tokenizer: str = ""
    size: str = ""
    models: tuple[str, ...] = ()
    tasks: str = ""
    hours: float = 0.0
    device: str = ""


def written(wishes: Wishes, store: Store) -> tuple[str, Plan, Bill]:
    """Return the text of a study file, with its plan and what that costs."""
    _check(wishes)
    values, tokens = _values(wishes, store)

    def make(**chosen: Any) -> tuple[str, Plan, Bill]:
        text = _text(values | chosen)
        with TemporaryDirectory() as folder:
            path = Path(folder) / "study.py"
            path.write_text(text, encoding="utf-8")
            loaded = load(path)
        plan = make_plan(loaded.study, identities(store), loaded.question)
        return text, plan, bill(plan, store, wishes.device, None, tuned=0)

    length = values["length"]
    fewest = BATCH_OF // length if wishes.models else FEWEST_ROWS  # as `biphase adapt`
    steps = partial(_steps, length=length, fewest=fewest)
    chosen = _affordable(wishes, steps, make) if wishes.hours else {"seeds": SEEDS, **steps(tokens)}
    if values["corpus"]:
        batch = chosen["rows"] * length
        each = f"{short(chosen['steps'] * batch)} tokens a run, {short(batch)} in a step"
        why = chosen.pop("why", "No budget was given (--hours)")
        notes = (f"{note}." for note in reading_notes(make(**chosen)[2].texts))
        rule = OF_ADAPT if chosen["rows"] == fewest and wishes.models else BATCH_WHY
        chosen["why"] = [line for note in (f"{why}: {each}.", rule, *notes) for line in wrap(note, WIDE)]
    return make(**chosen)


def _check(wishes: Wishes) -> None:
    question = wishes.question
    if question not in QUESTIONS:
        raise SpecError(f"there is no question {question!r}; {nearest(question, QUESTIONS)}")
    scratch, several = question in FROM_SCRATCH, question == "evaluate"
    if scratch and wishes.models:
        raise SpecError(f"{question} trains new models: type --size 30m in place of --model")
    if not scratch and (not wishes.models or (len(wishes.models) > 1 and not several)):
        how = "--model, once for each model" if several else "one --model"
        raise SpecError(f"{question} needs {how}: --model FOLDER or --model owner/name@commit")
    idle = {"--size": wishes.size, "--tokenizer": wishes.tokenizer} if not scratch else {}
    idle |= {"--corpus": wishes.corpus, "--text": wishes.text} if several else {}
    for option, value in idle.items():
        if value:
            raise SpecError(f"{option} {value} means nothing to {question}; leave it out")


# ---------------------------------------------------------------- what the template shows


def _values(wishes: Wishes, store: Store) -> tuple[dict[str, Any], float]:
    """Return what the template needs besides the choices of a budget, and the tokens of a run without one."""
    from biphase.study.datasets import tasks_named  # imports numpy

    on_cpu = (wishes.device or at_hand()) == "cpu"
    models = [_model(model, store) for model in wishes.models]
    names = [name for name, _ in models]
    start = None if models else STARTS[wishes.size or ("1m" if on_cpu else "30m")]
    corpus = wishes.corpus or ("builtin" if on_cpu else "fineweb-edu-10b")
    (length, peak, peak_from, lrs), tokens = OF_MODELS, USUAL_TOKENS
    if start:
        of_config = isinstance(start, Config)
        hidden = start.fields["hidden_size"] if of_config else start.hidden
        length, peak, peak_from, lrs = next(row for width, row in BY_WIDTH.items() if hidden <= width)
        tokens = tokens if of_config else PER_PARAMETER * start.block_parameters
        tokens = min(tokens, TOKENS.get(corpus, math.inf))
    tasks = tasks_named(wishes.tasks or ("sources-mini" if on_cpu else "sst2,conll2003"))
    known = [task.name for task in tasks if CATALOG.get(task.name) == task]
    tiny = all(task.source.startswith("builtin:") for task in tasks)
    return {
        "question": wishes.question,
        "ask": QUESTIONS[wishes.question],
        "name": _code(wishes.name),
        "models": [
            (name if names.count(name) == 1 else f"{name}-{at}", _code(hub))
            for at, (name, hub) in enumerate(models, 1)
        ],
        "start": start and f'{"CONFIGS" if isinstance(start, Config) else "SIZES"}["{start.name}"]',
        "corpus": wishes.question != "evaluate" and _corpus(wishes, corpus, [hub for _, hub in models]),
        "length": length,
        "peak": peak,
        "peak_from": peak_from,
        "precision": "fp32" if on_cpu else "bf16",
        "heldout": "8_192" if on_cpu else "200_000",
        "tasks": json.dumps(known),
        "own": [_code(task) for task in tasks if task.name not in known],
        "tiny": tiny,
        "lrs": MINI_LRS if tiny else lrs,
    }, tokens


def _model(model: str, store: Store) -> tuple[str, Hub]:
    run = run_named(model, store, note=False)
    if not isinstance(run.start, Hub) or run.stages:
        raise SpecError(f"{model} is a checkpoint: type biphase export {model} FOLDER, then --model ./FOLDER")
    if not run.start.local:
        return run.name, run.start
    return run.name, Hub(model if model.startswith((".", "/", "~")) else f"./{model}")


def _corpus(wishes: Wishes, name: str, models: Sequence[Hub]) -> str:
    """Return the corpus as Python, with the tokenizer of the model that is continued."""
    own = [Pretrained(model.source, revision=model.revision) for model in models]
    default = "" if name in CORPORA else "bpe:32000"
    corpus = corpus_named(name, tokenizer=(own or [wishes.tokenizer])[0] or default, text=wishes.text)
    if name not in CORPORA:
        return _code(corpus)
    changed = {"tokenizer": corpus.tokenizer, "text": corpus.text}
    more = [f"{it}={_code(value)}" for it, value in changed.items() if value != getattr(CORPORA[name], it)]
    return f'replace(CORPORA["{name}"], {", ".join(more)})' if more else f'CORPORA["{name}"]'


def _code(value: Any) -> str:
    """Return a record as Python, without the fields that have their default."""
    if not is_dataclass(value):
        return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)
    given = {field.name: (getattr(value, field.name), field.default) for field in fields(value)}
    shown = [f"{name}={_code(it)}" for name, (it, default) in given.items() if it != default]
    return f"{type(value).__name__}({', '.join(shown)})"


def _text(values: dict[str, Any]) -> str:
    """Fill the template; what it names is imported."""
    from jinja2 import StrictUndefined, Template

    template = Path(__file__).with_suffix(".j2").read_text(encoding="utf-8")
    body = Template(template, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).render(values)
    named = {*specs.__all__, "CATALOG", "CONFIGS", "CORPORA", "SIZES"} & {*re.findall(r"\b[A-Z]\w+", body)}
    names = sorted(named, key=lambda name: (not name.isupper(), name))
    imports = "\n    ".join(wrap(f"from biphase import {', '.join(names)}", WIDE))
    if "\n" in imports:
        imports = imports.replace("import ", "import (  # fmt: skip\n    ") + ",\n)"
    first = "from dataclasses import replace\n\n" if "replace(" in body else ""
    return f'"""{values["ask"]}"""\n\n{first}{imports}\n\n{body}\n'


# ---------------------------------------------------------------- what a budget buys


def _steps(tokens: float, length: int, fewest: int) -> dict[str, Any]:
    """Return steps and rows of a run of so many tokens; of long runs, all but three digits of the steps are 0."""
    batch = min(BATCH_OF * (tokens / TOKENS_OF) ** POWER, MOST_BATCH)
    rows = max(fewest, 2 ** int(math.log2(batch / length)))
    steps = max(FEWEST_STEPS, int(tokens / (rows * length)))
    return {"steps": steps - steps % 10 ** max(0, len(str(steps)) - 3), "rows": rows}


def _affordable(
    wishes: Wishes, steps: Callable[[float], dict[str, Any]], make: Callable[..., tuple[str, Plan, Bill]]
) -> dict[str, Any]:
    """Return the most seeds that fit the share of fine-tuning, then the longest runs that fit what is left."""
    hours, evaluates = wishes.hours, wishes.question == "evaluate"
    share, most = (1.0, MOST_SEEDS) if evaluates else (FINETUNING, SEEDS)

    def cost(tokens: float) -> float:
        return make(seeds=2, **steps(tokens))[2].pretraining()

    _, plan, two = make(seeds=2, **steps(1.0))
    unpriced = two.machine is None or two.tunings.keys() != two.grids.keys()
    if (plan.jobs and two.hours() is None) or (evaluates and unpriced):
        notes = "; ".join(two.notes)
        raise SpecError(
            f"--hours {hours:g} buys what has no price here: {notes}; leave out --hours, or name a local copy of the model, or another --device"
        )
    tuning = two.finetuning(two.grids) / 2  # of one seed
    seeds = min(most, int(share * hours / tuning)) if tuning else 2
    if seeds < 2:
        raise SpecError(
            f"two seeds of fine-tuning take {2 * tuning:.2g} hours, and {share:.0%} of --hours {hours:g} is for it; type "
            f"--hours {2.1 * tuning / share:.2g}, or fewer --tasks"
        )
    if evaluates:
        return {"seeds": seeds, **steps(1.0)}
    left = hours * (1 - share) if unpriced else hours - seeds * tuning
    low, high = 1.0, 2.0
    if cost(low) > left:
        raise SpecError(
            f"--hours {hours:g} buys fewer than {FEWEST_STEPS} steps; type more, or a smaller --size"
        )
    while cost(high) <= left:
        low, high = high, 2 * high
    while cost(low) < CLOSE * left and high > 1.01 * low:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if cost(middle) <= left else (low, middle)
    spent = (
        f"{share:.0%} is left" if unpriced else f"{duration(3600 * seeds * tuning)}, at most {share:.0%}, are"
    )
    unknown = ", which has no price there" if unpriced else ""
    why = f"A budget of {hours:g} h on {two.device}, of which {spent} for fine-tuning{unknown}"
    return {"seeds": seeds, **steps(low), "why": why}
