"""Studies built from command-line options: `biphase evaluate MODEL`, `compare MODEL …` and `adapt MODEL`.

`evaluation` makes a study that fine-tunes existing models; `finetuning` parses its grid of tasks, learning rates
and seeds. `adaptation` makes a study that continues an existing model with a masked objective until it attends in
both directions; `before_after` reports what came of it. Study names end with a hash of the options, so that
different options do not share a study.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any

from biphase.catalog import CATALOG
from biphase.data.corpus import corpus_fingerprint
from biphase.errors import SpecError, nearest
from biphase.presets import corpus_of, sources_of
from biphase.records import content_key, encode
from biphase.specs import (
    BPE,
    MLM,
    MNTP,
    WSD,
    AdamW,
    Blend,
    Chunks,
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
from biphase.study.load import corpus_named, metadata_only_refusal, run_named
from biphase.study.plan import Plan
from biphase.text import objective_title

WEIGHT = re.compile(r"\d+\.?\d*")  # in --corpus ./web=3,./code=1


def evaluation(model: str, finetune: Finetune, store: Store) -> Study:
    """Return the study of one model: a local folder, owner/name@revision, or the key of a checkpoint in this store."""
    run = run_named(model, store)
    digest = content_key({"model": model, "finetune": encode(finetune)})[:8]
    return Study(f"evaluate-{run.name}-{digest}", runs=(run,), finetune=finetune)


def comparison(models: Sequence[str], finetune: Finetune, store: Store, effect: float) -> Study:
    """Return the study of several models; models of one name get a number. `effect`: points worth finding."""
    repeated = [model for at, model in enumerate(models) if model in models[:at]]
    if len(models) < 2 or repeated:
        what = f"{repeated[0]} is named twice" if repeated else f"{models[0]} alone cannot be compared"
        raise SpecError(f"{what}; name two models or more: biphase compare MODEL OTHER --tasks sst2")
    runs: list[Pretrain] = []
    for model in models:
        run, taken = run_named(model, store), {other.name for other in runs}
        numbered = (f"{run.name}-{number}" for number in count(2))
        name = next(name for name in chain([run.name], numbered) if name not in taken)
        runs.append(replace(run, name=name) if name != run.name else run)
    digest = content_key({"models": list(models), "finetune": encode(finetune), "effect": effect})[:8]
    return Study(f"compare-{runs[0].name}-{digest}", runs=tuple(runs), finetune=finetune, effect=effect)


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

    A `preset` gives the optimizer, the warmup and the choice of the epoch.
    """
    fields: dict[str, Any] = {"protocol": protocol, "length": length}
    if precision or not has_gpu():  # bf16 is about 50 times slower on a CPU without bf16 instructions
        fields["precision"] = precision or "fp32"
    if documents:
        fields["documents"] = documents
    if discard:
        fields["discard"] = Discard(discard)
    tasks = tuple(replace(task, source=absolute(task.source)) for task in tasks)
    rates = [_number(rate, float, "--lrs", "1e-5,3e-5") for rate in lrs.split(",")]
    fields |= {"tasks": tasks, "lrs": tuple(rates), "seeds": tuple(_seeds(seeds))}
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
