"""Studies made from command-line options: `biphase evaluate MODEL`, `compare MODEL …`, `adapt MODEL` and `new QUESTION`.

`evaluation` makes a study that fine-tunes existing models, to score or to compare them; `finetuning` parses its grid of
tasks, learning rates and seeds. `adaptation` makes a study that continues an existing model with a masked objective until
it attends in both directions; `before_after` reports what came of it. Study names end with a hash of the options, so that
different options do not share a study. `written` makes the study file of `biphase new`, within a budget.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from itertools import chain, count
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import wrap
from typing import Any

from biphase import specs
from biphase.catalog import CATALOG
from biphase.data.corpus import corpus_fingerprint
from biphase.errors import SpecError, nearest
from biphase.presets import CORPORA, STARTS, TOKENS, corpus_of, sources_of
from biphase.records import content_key, encode
from biphase.specs import (
    BPE,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Blend,
    Chunks,
    Config,
    Contrastive,
    Corpus,
    Discard,
    Finetune,
    Hub,
    LoRA,
    Merge,
    Pairs,
    Pretrain,
    Pretrained,
    Stage,
    Study,
    Task,
)
from biphase.specs.training import INHERIT
from biphase.store import Store, write_json
from biphase.study import ledger
from biphase.study.costs import reading_notes
from biphase.study.devices import at_hand
from biphase.study.load import corpus_named, load, metadata_only_refusal, run_named
from biphase.study.plan import Plan, identities, make_plan
from biphase.study.prices import Bill, bill
from biphase.text import duration, objective_title, short

WEIGHT = re.compile(r"\d+\.?\d*")  # in --corpus ./web=3,./code=1


def evaluation(models: Sequence[str], finetune: Finetune, store: Store, effect: float | None = None) -> Study:
    """Return the study that fine-tunes models: local folders, owner/name@revision, or keys of checkpoints in this store.

    With `effect`, a difference in points that is worth finding, two models or more are compared. Models of one name
    get a number.
    """
    repeated = [model for at, model in enumerate(models) if model in models[:at]]
    if effect is not None and (len(models) < 2 or repeated):
        what = f"{repeated[0]} is named twice" if repeated else f"{models[0]} alone cannot be compared"
        raise SpecError(f"{what}; name two models or more: biphase compare MODEL OTHER --tasks sst2")
    runs: list[Pretrain] = []
    for model in models:
        run, taken = run_named(model, store), {other.name for other in runs}
        numbered = (f"{run.name}-{number}" for number in count(2))
        name = next(name for name in chain([run.name], numbered) if name not in taken)
        runs.append(replace(run, name=name) if name != run.name else run)
    verb, named = "evaluate", {"model": models[0]}
    if effect is not None:
        verb, named = "compare", {"models": list(models), "effect": effect}
    digest = content_key({**named, "finetune": encode(finetune)})[:8]
    study = Study(f"{verb}-{runs[0].name}-{digest}", runs=tuple(runs), finetune=finetune)
    return study if effect is None else replace(study, effect=effect)


def finetuning(
    tasks: tuple[Task, ...],
    lrs: str,
    seeds: str,
    protocol: str,
    precision: str,
    documents: str,
    length: int,
    discard: int = 0,
    preset: Finetune | None = None,
) -> Finetune:
    """Parse the fine-tuning grid from command-line options; `discard`: learning rates to keep, 0: all.

    A `preset` gives the optimizer, the warmup and the choice of the epoch, and rates if `lrs` is empty.
    """
    fields: dict[str, Any] = {"protocol": protocol, "length": length}
    if precision or not has_gpu():  # bf16 is about 50 times slower on a CPU without bf16 instructions
        fields["precision"] = precision or "fp32"
    if documents:
        fields["documents"] = documents
    if discard:
        fields["discard"] = Discard(discard)
    tasks = tuple(replace(task, source=absolute(task.source)) for task in tasks)
    fields |= {"tasks": tasks, "seeds": tuple(_seeds(seeds))}
    if lrs or preset is None:
        rates = (_number(rate, float, "--lrs", "1e-5,3e-5") for rate in lrs.split(","))
        fields["lrs"] = tuple(rates)
    if preset is None:
        return Finetune(**fields)
    # A preset's own are those of its protocol; what is not typed follows from the protocol that is.
    return replace(preset, **({"precision": INHERIT, "documents": INHERIT} | fields))


def lengths_of(tasks: tuple[Task, ...], preset: Finetune | None, steps: int, epochs: int) -> tuple[Task, ...]:
    """Return the tasks with the epochs and the batch of a preset, and with the steps or epochs that were typed."""
    if steps and epochs:
        raise SpecError(f"--steps {steps} and --epochs {epochs} do not go together; leave out one of them")
    own = preset.tasks if preset else ()
    known = {task.name: {"epochs": task.epochs, "batch": task.batch} for task in own}
    typed = {"steps": steps, "epochs": 0} if steps else {"epochs": epochs} if epochs else {}
    for task in tasks:
        if preset and task.name not in known:
            raise SpecError(f"--preset says nothing of the task {task.name!r}; {nearest(task.name, known)}")
        if epochs and task.zero_shot:
            raise SpecError(f"--epochs {epochs}: {task.name} is scored without training; leave out --epochs")
    return tuple(replace(task, **(known.get(task.name, {}) | typed)) for task in tasks)


def absolute(source: str) -> str:
    """Make a local path absolute, since the saved plan may be read from another working directory."""
    return source if source.startswith(("hf://", "builtin:")) else str(Path(source).expanduser().resolve())


def _seeds(text: str) -> list[int]:
    """Parse seeds: "0,1,2", "0-4", or both, "0-2,7"."""
    seeds: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        ends = [_number(end, int, "--seeds", "0-4 or 0,1,2") for end in ((first, last) if dash else (first,))]
        seeds += range(ends[0], ends[-1] + 1)
    return seeds


def _number(text: str, kind: type, option: str, example: str) -> Any:
    try:
        return kind(text.strip())
    except ValueError:
        raise SpecError(f"{option}: {text!r} is no number; type for example {option} {example}") from None


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


# ---------------------------------------------------------------- adapt


OBJECTIVES = {"mlm": MLM, "mntp": MNTP}
LONGEST = 1_024  # default row length limit in tokens
ROWS = 32  # rows per step
FULL_PEAK, LORA_PEAK = 2e-4, 1e-3
PAIR_PEAK, LORA_PAIR_PEAK = 5e-5, 5e-4
CONVERTED = "tokenizers"  # folder of a store for tokenizers that were converted to tokenizer.json
HELDOUT_SHARE = 0.2  # cost of held-out evaluation, as a share of the cost of training
FEWEST_HELDOUT = 256
TITLE = "held-out loss, nats"
CONTEXT_FIELDS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length")


@dataclass(frozen=True)
class AdaptOptions:
    """The options of `biphase adapt`; 0 and "" stand for the default."""

    steps: int
    corpus: str = ""
    text: str = ""
    heldout: str = ""
    tokens: int = 0
    gguf: str = ""
    windows: str = "symmetric"
    objective: str = "mlm"
    ratio: float = 0.4
    lr: float = 0.0
    length: int = 0
    batch_rows: int = 0
    warmup: float = 0.05
    decay: float = 0.2
    lora: int = 0
    freeze_embeddings: bool = False
    layer_decay: float = 1.0
    rope_base: float = 0.0
    precision: str = ""
    seed: int = 42
    heldout_tokens: int = 0
    pairs: str = ""
    pair_steps: int = 500
    pair_batch: int = 256
    pair_lr: float = 0.0
    temperature: float = 0.05


def adaptation(model: str, options: AdaptOptions, store: Store, finetune: Finetune | None = None) -> Study:
    """Return the study of one adaptation; with `finetune`, the unadapted model is fine-tuned too.

    With pairs, a second run trains the adapted model on them; with 0 steps it trains the model as it is.
    """
    stage = _pair_stage(options)
    before = run_named(model, store, gguf=options.gguf, windows=options.windows)
    fields = _recipe(options)
    if isinstance(before.start, Hub) and not before.stages:
        start: Hub | Pretrain | Merge = before.start
        fields["corpus"] = _corpus(options, start, store)
        fields["packing"] = Chunks(options.length or _usual_length(start))
    else:
        if before.adapter and not options.lora:
            raise SpecError(
                f"{model} was trained with LoRA of rank {before.adapter.rank}: type --lora {before.adapter.rank} to go on "
                "with it; or, for all weights, export it and adapt the folder"
            )
        start = before if before.stages else before.start  # a merge is a start itself
        fields["data"], fields["optimizer_state"] = "restart", "reset"
        fields["corpus"] = _corpus_after(before, options, store)
        fields["packing"] = Chunks(options.length) if options.length else before.packing
    length = fields["packing"].length
    fields["batch_tokens"] = (options.batch_rows or ROWS) * length
    fields |= _heldout(options, length, fields["batch_tokens"])
    encoded = {name: encode(value) for name, value in fields.items()}
    runs = [replace(before, keep=())] if finetune else []
    if options.steps:
        runs.append(Pretrain(f"{before.name}-{options.objective}", start=start, **fields))
    if stage:
        own = _on_pairs(stage, options, length)
        encoded["pairs"] = {name: encode(value) for name, value in own.items()}
        after: dict[str, Any] = {**fields, "start": start}
        if options.steps:
            after = {"start": runs[-1], "optimizer_state": "reset"}
        runs.append(Pretrain(f"{before.name}-pairs", **(after | own)))
    digest = content_key({"start": encode(start), "finetune": encode(finetune), **encoded})
    return Study(f"adapt-{before.name}-{digest[:8]}", runs=tuple(runs), finetune=finetune)


def _recipe(options: AdaptOptions) -> dict[str, Any]:
    """Return the fields of the run that do not depend on the model it starts from."""
    if options.objective not in OBJECTIVES:
        raise SpecError(f"--objective {options.objective}: {nearest(options.objective, OBJECTIVES)}")
    objective = OBJECTIVES[options.objective](options.ratio)
    peak = options.lr or (LORA_PEAK if options.lora else FULL_PEAK)
    fields: dict[str, Any] = {
        "stages": (Stage(objective, options.steps or 1, rope_base=options.rope_base),),
        "schedule": WSD(peak, warmup=options.warmup, decay=options.decay),
        "optimizer": AdamW(layer_decay=options.layer_decay),
        "precision": options.precision or ("bf16" if has_gpu() else "fp32"),
        "seed": options.seed,
        "freeze": "embeddings" if options.freeze_embeddings else "nothing",
    }
    if options.lora:
        fields["adapter"] = LoRA(rank=options.lora, alpha=2 * options.lora)
    return fields


def _pair_stage(options: AdaptOptions) -> Contrastive | None:
    """Return the objective of the pairs that were typed, for texts of any length; None if none were."""
    if not options.pairs and not options.steps:
        raise SpecError(
            "--steps 0 trains nothing; type more, or the pairs to train embeddings on: --pairs FILE"
        )
    if not options.pairs:
        return None
    source = CATALOG.get(options.pairs) or Pairs(absolute(options.pairs))
    return Contrastive((source,), options.temperature, options.pair_batch)


def _on_pairs(stage: Contrastive, options: AdaptOptions, length: int) -> dict[str, Any]:
    """Return the fields of the run on pairs that differ from those of the masked one."""
    steps = options.pair_steps
    peak = options.pair_lr or (LORA_PAIR_PEAK if options.lora else PAIR_PEAK)
    objective = replace(stage, length=min(length, stage.length))
    return {
        "stages": (Stage(objective, steps, rope_base=options.rope_base),),
        "schedule": WSD(peak, warmup=options.warmup, decay=options.decay),
        **_heldout(replace(options, steps=steps), length, objective.most_tokens),
    }


def _heldout(options: AdaptOptions, length: int, batch_tokens: int) -> dict[str, int]:
    """Choose the interval and size of held-out evaluations that costs about `HELDOUT_SHARE` of training at most.

    By default there are six: before the first step, after the last and four in between, each for two objectives.
    Evaluating a token costs a third of training on it. A short run is evaluated on fewer tokens, a very short one
    only at its ends.
    """
    every, usual = max(1, options.steps // 5), max(length, 131_072 if has_gpu() else 8_192)
    if options.heldout_tokens:
        return {"heldout_every": every, "heldout_tokens": options.heldout_tokens}
    affordable = int(HELDOUT_SHARE * options.steps * batch_tokens * 3 / 2)
    fewest = max(length, FEWEST_HELDOUT)
    if affordable < 6 * fewest:
        return {"heldout_every": options.steps, "heldout_tokens": min(usual, max(fewest, affordable // 2))}
    return {"heldout_every": every, "heldout_tokens": min(usual, affordable // 6)}


# ---------------------------------------------------------------- corpus and tokenizer


def _corpus(options: AdaptOptions, hub: Hub, store: Store) -> Corpus | Blend:
    """Return the corpus with the hub model's own tokenizer, and a BOS token per document if it adds one."""
    from biphase.data.tokenizer import load

    if not options.corpus:
        raise SpecError(
            "say which text to learn from: --corpus builtin, fineweb-edu-10b, or a file or folder of yours"
        )
    tokenizer = _tokenizer(hub, store)
    loaded = load(Corpus(options.corpus, options.corpus, tokenizer))
    bos = loaded.special.bos
    begins = bos is not None and loaded.model.encode("a b").ids[:1] == [bos]
    return _corpus_of(options, tokenizer, bos=begins)


def _corpus_after(before: Pretrain, options: AdaptOptions, store: Store) -> Corpus | Blend:
    """Return the corpus that continues an existing run: the same text, or another one with the same tokenizer."""
    earlier = sources_of(before)[0]
    if not options.corpus:
        if options.text or options.heldout or options.tokens:
            raise SpecError("--text, --heldout and --tokens are of a --corpus; say which one too")
        return corpus_of(before)
    corpus = _corpus_of(options, earlier.reader, bos=earlier.bos)
    fingerprint = corpus_fingerprint(earlier, store)
    if isinstance(corpus, Corpus) and corpus_fingerprint(corpus, store) == fingerprint:
        return replace(corpus, name=earlier.name, source=earlier.source, tokenizer=earlier.tokenizer)
    return corpus


def _corpus_of(options: AdaptOptions, tokenizer: BPE | Pretrained, *, bos: bool) -> Corpus | Blend:
    """Return the corpus that `--corpus` names, or the blend of several with their weights: ./web=3,./code=1."""

    def named(name: str) -> Corpus:
        corpus = corpus_named(name, tokenizer=tokenizer, text=options.text, heldout=options.heldout)
        tokens = options.tokens or corpus.tokens
        return replace(corpus, source=absolute(corpus.source), tokens=tokens, bos=bos)

    parts = [part.rpartition("=") for part in options.corpus.split(",")]
    if len(parts) < 2 or not all(name and WEIGHT.fullmatch(weight) for name, _, weight in parts):
        return named(options.corpus)
    return Blend(tuple((named(name), float(weight)) for name, _, weight in parts))


def _tokenizer(hub: Hub, store: Store) -> Pretrained:
    """Return a hub model's tokenizer; one that is not a tokenizer.json is converted and saved in the store."""
    from biphase.models.hub import has_tokenizer_json, load_tokenizer

    if not hub.gguf and has_tokenizer_json(hub):
        source = str(Path(hub.source).expanduser()) if hub.local else hub.source
        return Pretrained(source, revision=hub.revision)
    tokenizer = load_tokenizer(hub)
    model = tokenizer.backend_tokenizer.to_str()
    names = ("eos_token", "bos_token", "mask_token", "pad_token", "unk_token")
    config = {name: str(token) for name in names if (token := getattr(tokenizer, name)) is not None}
    folder = store.root / CONVERTED / content_key({"tokenizer": model, "named": config})
    if not (folder / "tokenizer_config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "tokenizer.json", json.loads(model))
        # Written last: its presence means that the folder is complete.
        write_json(folder / "tokenizer_config.json", config)
    return Pretrained(str(folder.resolve()))


def _usual_length(hub: Hub) -> int:
    """Return the model's context length, at most `LONGEST`, rounded down to a power of two."""
    from transformers import AutoConfig

    from biphase.models.hub import address

    try:
        config = AutoConfig.from_pretrained(**address(hub), trust_remote_code=False)
    except Exception:  # loading the model reports the error
        return LONGEST
    lengths = (getattr(config, name, None) for name in CONTEXT_FIELDS)
    context = next((int(length) for length in lengths if length), LONGEST)
    return min(LONGEST, 1 << (context.bit_length() - 1))


# ---------------------------------------------------------------- report


def before_after(plan: Plan, store: Store, at: str) -> list[str]:
    """Return lines with the held-out losses before and after the adaptation, and the next commands to type.

    `at` is appended to these commands, such as the option that names the store; empty if it is the default.
    """
    run = plan.study.runs[-1]
    end = plan.results[run.name]
    if not store.knows(store.checkpoints / end):
        return []
    measured = ledger.measured(plan, store, run.name)
    # With fine-tunings the first run is the model as it came; a run on pairs follows that on text.
    first = plan.study.runs[bool(plan.study.finetune)].origin_step
    lines = []
    if first in measured and len(measured) > 1:
        since = [measured[step] for step in sorted(measured) if step >= first]
        rows = {
            objective_title(loss): (next(one[loss] for one in since if loss in one), now)
            for loss, now in since[-1].items()
        }
        title = f"{TITLE} (up to {run.heldout_tokens:,} tokens)"
        wide = max(map(len, (title, *rows)))
        lines += ["", f"  {title:<{wide}}  {'before':>8}  {'after':>8}"]
        lines += [f"  {loss:<{wide}}  {was:>8.3f}  {now:>8.3f}" for loss, (was, now) in rows.items()]
    if not store.has(store.checkpoints / end):
        return [*lines, "", metadata_only_refusal(end, store)]
    embeds = isinstance(run.stages[-1].objective, Contrastive)
    lines += [
        "",
        f"The {'embedding model' if embeds else 'encoder'}: biphase export {end[:8]} FOLDER{at}",
        f"What it is good for: biphase evaluate {end[:8]} --tasks {'scifact --zero-shot' if embeds else 'sst2'}{at}",
    ]
    return lines


# ---------------------------------------------------------------- study files for common questions
# `written` fills the template new.j2. With a budget it chooses first the seeds, then steps and batch, by pricing the
# plan of the very file that it writes, so that `biphase plan` shows the hours that were chosen here.


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
        "corpus": wishes.question != "evaluate" and _corpus_code(wishes, corpus, [hub for _, hub in models]),
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


def _corpus_code(wishes: Wishes, name: str, models: Sequence[Hub]) -> str:
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

    template = Path(__file__).with_name("new.j2").read_text(encoding="utf-8")
    body = Template(template, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined).render(values)
    named = {*specs.__all__, "CATALOG", "CONFIGS", "CORPORA", "SIZES"} & {*re.findall(r"\b[A-Z]\w+", body)}
    names = sorted(named, key=lambda name: (not name.isupper(), name))
    imports = "\n    ".join(wrap(f"from biphase import {', '.join(names)}", WIDE))
    if "\n" in imports:
        imports = imports.replace("import ", "import (  # fmt: skip\n    ") + ",\n)"
    first = "from dataclasses import replace\n\n" if "replace(" in body else ""
    return f'"""{values["ask"]}"""\n\n{first}{imports}\n\n{body}\n'


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
    if (plan.jobs and two.hours(plan.jobs) is None) or (evaluates and unpriced):
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
