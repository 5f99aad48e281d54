"""Pretraining: the starting model of a run, held-out losses, and the training job that reaches a wanted step.

`Pretraining` brings a run from its nearest saved checkpoint to a target step. A fresh run, a resumed one, a branch from
a shared beginning and a continuation of another run are the same call: find the nearest checkpoint of the run, load it,
take the missing steps, publish.

`starting_model` builds the model from scratch or from the hub; `model_of_checkpoint` loads one for evaluation or
export. `heldout_losses` measures the same rows, cuts and masks for every run, so that curves are comparable: the
causal loss and the masked loss at 40%, and the run's own objective if it is another, each with its own attention
direction.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from biphase.attention import pattern_of, varlen_works
from biphase.data.shards import Shards
from biphase.data.stream import Stream, heldout_stream, load_ahead, passes_of, share
from biphase.data.tokenizer import Special, load
from biphase.errors import ModelError, StoreError, TrainingError
from biphase.fast.trunk import fp8_refusal, refusal
from biphase.keys import (
    Identities,
    checkpoint_key,
    label,
    last_rope_base,
    origin_sample,
    origin_step,
    phase_at,
    phases,
    root_of,
)
from biphase.metadata import read_checkpoint_file
from biphase.models.backbone import (
    LanguageModel,
    TokenizerInfo,
    add_adapter,
    from_hub,
    from_scratch,
    merge_adapter,
    probe,
    set_rope_base,
)
from biphase.models.native import is_masked, masked_forms
from biphase.objectives import Batch, ratio_at
from biphase.presets import corpus_of
from biphase.randomness import salt
from biphase.records import encode
from biphase.specs import CLM, MLM, MNTP, Hub, Objective, Pretrain, Pretrained, Size
from biphase.store import Store
from biphase.training import checkpoint, distributed
from biphase.training.checkpoint import CheckpointRecord, Progress, Saver
from biphase.training.distributed import Ranks, place
from biphase.training.loop import LoopStep, train
from biphase.training.meter import Meter
from biphase.training.optimizer import rate
from biphase.training.options import RuntimeOptions


def reads_otherwise(run: Pretrain) -> bool:
    """Return whether a run's held-out losses are on other text or packing than those of the run it continues."""
    if not isinstance(run.start, Pretrain):
        return False
    return any(
        getattr(run, name) != getattr(run.start, name) for name in ("corpus", "packing", "heldout_tokens")
    )


def starting_model(run: Pretrain, shards: Shards, *, probed: bool = False) -> LanguageModel:
    """Build a run's model with the weights of its root's start; `probed` also tests a hub model's attention."""
    root = root_of(run)
    if isinstance(root.start, Size):
        return from_scratch(
            root.start, vocab=shards.vocab, mask_id=shards.mask_id, length=run.packing.length, seed=root.seed
        )
    card = shards.card
    special = Special(
        **{name: card[f"{name}_id"] for name in ("eos", "mask", "pad", "bos")},
        ids=shards.special_ids,
        mask_rule=card["mask_rule"],
    )
    return _existing(run, root, _words(run, shards.vocab, special), probed=probed)


def refuse_unfit(run: Pretrain, device: torch.device) -> None:
    """Raise ModelError if the run's model or precision is not supported on this device, before its text is read."""
    in_fp8 = run.precision == "fp8"
    why = fp8_refusal(device) if in_fp8 else ""
    root = root_of(run)
    if isinstance(root.start, Hub):
        corpus = corpus_of(run)
        words = None  # unknown if the corpus trains its own tokenizer
        if isinstance(corpus.tokenizer, Pretrained):
            tokenizer = load(corpus)
            words = _words(run, tokenizer.vocab, tokenizer.special)
        model = _existing(run, root, words, probed=True)
    elif isinstance(root.start, Size) and in_fp8 and not why:
        with torch.device("meta"):  # shapes only
            model = from_scratch(root.start, vocab=16, mask_id=0, length=run.packing.length, seed=0)
    else:
        model = None
    if in_fp8 and model is not None:
        why = why or refusal(model.model.base_model, in_fp8=True)
    if why:
        raise ModelError(f"{run.name}: precision='fp8' cannot be had ({why}); say precision='bf16'")


def _words(run: Pretrain, vocab: int, special: Special) -> TokenizerInfo:
    used = {special.eos, special.bos if corpus_of(run).bos else None}
    return TokenizerInfo(vocab, special.mask, special.mask_rule != "own", frozenset(special.ids) - used)


def _existing(run: Pretrain, root: Pretrain, words: TokenizerInfo | None, *, probed: bool) -> LanguageModel:
    assert isinstance(root.start, Hub)
    stretched = bool(run.stages) and phases(run)[0].rope_base > 0  # from the first step on
    model = from_hub(root.start, words, length=run.packing.length, stretched=stretched)
    if probed:
        probe(model, vocab=len(model.head) if words is None else words.vocab)
        if run.stages and isinstance(run.stages[-1].objective, MLM):
            model.note = _without_masked_class(model, run.packing.length)
    if run.adapter:
        add_adapter(model, run.adapter, seed=root.seed)
    return model


def _without_masked_class(model: LanguageModel, length: int) -> str:
    """Return a warning if transformers has no class that fills masks with the resulting model, else ""."""
    name = type(model.model).__name__
    if is_masked(name) or next(masked_forms(model, length), None) is not None:
        return ""
    return (
        f"transformers has no masked-language-model class for {name}: the exported encoder gives hidden states and "
        "embeddings there, but fills masks only by biphase.load(FOLDER).fill_mask(…)"
    )


# ---------------------------------------------------------------- models of saved checkpoints


def model_of_checkpoint(run: Pretrain, state: str | None, store: Store, shards: Shards) -> LanguageModel:
    """Load the model of the run's checkpoint `state`, or its start if None, for evaluation or export.

    Adapters are merged, and the rope base is the one at that step.
    """
    model = starting_model(run, shards)
    step = 0
    if state is not None:
        taken = checkpoint.load_weights(store, state, model).step
        # A run's checkpoint at step 0 is the last one of the run it continues, whose steps count from its own start.
        began = read_checkpoint_file(store.checkpoints / state)["origin_step"]
        step = began + taken - origin_step(run)
    base = _rope_base(run, step)
    if base:
        set_rope_base(model.model, base)
    if run.adapter:
        merge_adapter(model)
    return model


def _rope_base(run: Pretrain, step: int) -> float:
    felt = [phase.rope_base for phase in phases(run) if phase.first < step]
    if felt:
        return felt[-1]
    return last_rope_base(run.start) if isinstance(run.start, Pretrain) else 0.0


# ---------------------------------------------------------------- held-out losses


ALWAYS: tuple[Objective, ...] = (CLM(), MLM(0.4))


def yardsticks(objective: Objective, step: int) -> tuple[Objective, ...]:
    """Return the held-out objectives to measure while `objective` trains, `step` steps into its phase."""
    if isinstance(objective, MLM):
        now = type(objective)(ratio_at(objective, step), objective.replace)
        return ALWAYS if now in ALWAYS else (*ALWAYS, now)
    return ALWAYS


@torch.no_grad()
def heldout_losses(
    loss_sum: Callable[[Batch], Tensor],
    stream: Stream,
    objectives: tuple[Objective, ...],
    *,
    rows: int,
    micro_rows: int,
    ranks: Ranks,
    autocast: Callable[[], AbstractContextManager[object]],
    fixed: bool,
    together: bool = False,  # sharded: every process must run the same number of forward passes
) -> dict[str, float]:
    """Return the mean loss per label on the first `rows` held-out rows, by objective."""
    rows = min(rows, stream.rows)
    mine = share(0, rows, ranks.rank, ranks.world)
    losses = {}
    for objective in objectives:
        total = torch.zeros((), dtype=torch.float64)
        count = 0
        for draws in mine.split(micro_rows) if len(mine) else ():
            batch = stream.batch(objective, draws, step=0, fixed=fixed)
            with autocast():
                total += loss_sum(batch.to(ranks.device)).cpu()
            count += batch.count
        if together:
            passes = passes_of(rows, ranks.world, micro_rows)
            spare = stream.batch(objective, mine[:1] if len(mine) else torch.tensor([0]), step=0, fixed=fixed)
            for _ in range(passes - math.ceil(len(mine) / micro_rows)):
                with autocast():
                    loss_sum(spare.silent().to(ranks.device))
        labels = ranks.sum(count)[0]
        if labels:
            losses[_name(objective)] = ranks.sum_float(float(total)) / labels
    return losses


def _name(objective: Objective) -> str:
    """Return an objective's short name for a column: clm, mlm40, mntp40."""
    if isinstance(objective, (MLM, MNTP)) and objective.replace == (1.0, 0.0, 0.0):
        return label(objective).replace(" ", "").replace("%", "")
    return label(objective)


# ---------------------------------------------------------------- training jobs


UNSOUND_LIMIT = 20  # consecutive skipped steps after which training fails


class Pretraining:
    """One training job: takes `run` to step `target` from the nearest checkpoint in the store."""

    def __init__(
        self,
        run: Pretrain,
        target: int,
        *,
        store: Store,
        shards: Shards,
        identities: Identities,
        ranks: Ranks,
        needed: Callable[[], set[str]],  # keys of the checkpoints that the store's plans need at this time
        flops_per_token: float | None,  # None: the model's shape is not known in advance
        options: RuntimeOptions,
        title: str = "",
    ) -> None:
        self.run, self.target, self.store, self.shards = run, target, store, shards
        self.identities, self.ranks, self.needed, self.options = identities, ranks, needed, options
        self.flops_per_token = flops_per_token
        self.title = title or run.name
        if run.rows_per_step < ranks.world:
            raise TrainingError(
                f"{run.name}: {ranks.world} processes cannot share a batch of {run.rows_per_step} rows; use fewer"
            )
        self.key = checkpoint_key(run, target, identities)
        store.refuse_debris(store.checkpoints / self.key)  # before the work rather than after it
        self.stream = Stream.of(shards, run.packing, run.seed)
        self.heldout = heldout_stream(shards, run.packing)
        self.rope_base = 0.0  # 0: the model's own
        self.varlen = varlen_works(ranks.device, run.precision)
        self._begin()

    # ------------------------------------------------------------ before

    def _begin(self) -> None:
        """Build the model, load the nearest saved checkpoint and set up saving and metrics."""
        run, ranks = self.run, self.ranks
        lines = self._load_nearest()
        self._adopt_arithmetic()
        self.saver = Saver(self.store, ranks, self.model, self.placed, job=self.key)
        self.meter = Meter(
            title=self.title,
            origin=origin_step(run),
            first=self.progress.step,
            until=self.target,
            tokens_per_step=run.batch_tokens,
            flops_per_token=self.flops_per_token,
            every=1 if ranks.device.type == "cpu" else 10,
            lines=lines,
            nonfinite_in_a_row=self.progress.nonfinite_in_a_row,
            board=self.options.board if ranks.first else None,
            live=self.options.live if ranks.first else None,
            quiet=self.options.quiet or not ranks.first,
        )

    def _load_nearest(self) -> list[dict[str, Any]]:
        """Load the nearest checkpoint of the run, or its start; return the metrics up to there."""
        run, ranks, store = self.run, self.ranks, self.store
        found = ranks.share(
            checkpoint.nearest(run, self.target, store, self.identities) if ranks.first else None
        )
        if found is None and isinstance(run.start, Pretrain):
            raise StoreError(
                f"{run.name} goes on from {run.start.name}, whose end is not in {store.checkpoints}; "
                "run the study again to compute it"
            )
        self.from_hub = found is None and isinstance(root_of(run).start, Hub)
        self.model = starting_model(run, self.shards, probed=self.from_hub)
        self.progress = Progress(step=0, draw=origin_sample(run), joules=0.0)
        if found is None:
            self.placed = place(self.model, run, ranks, self.options)
            return []
        step, key = found
        try:
            loaded = checkpoint.load_weights(store, key, self.model)
            self.placed = place(self.model, run, ranks, self.options)
            if step > 0 or run.optimizer_state == "keep":
                checkpoint.load_optimizer_state(store, key, self.placed.rows, self.placed.optimizer)
            lines = checkpoint.metrics_of(store, key)
        except (StoreError, OSError):
            if ranks.world == 1 and not (store.checkpoints / key).exists():
                return self._load_nearest()  # another worker has passed and pruned it: look again
            raise
        self.progress = loaded if step else replace(loaded, step=0, draw=origin_sample(run))
        return lines

    def _turn(self, step: int) -> None:
        """Set the rope base of step `step`'s phase; called before each step, changes it where a phase begins."""
        self._turn_to(phase_at(self.run, step).rope_base if step < self.run.steps else 0.0)

    def _turn_to(self, base: float) -> None:
        if base and base != self.rope_base:
            set_rope_base(self.model.model, base)
            self.rope_base = base

    def _adopt_arithmetic(self) -> None:
        """Adopt the checkpoint's micro-batch size and thread count if possible, so that sums have the same order."""
        progress, ranks = self.progress, self.ranks
        rows = self.run.rows_per_step // ranks.world
        shard = str(self.options.sharding)
        same = (progress.world, progress.shard) == (ranks.world, shard) and progress.step > 0
        suits = distributed.micro_rows(ranks.device, rows, self.run.packing.length)
        self.micro_rows = self.options.micro_rows or (progress.micro_rows if same else suits)
        if ranks.device.type == "cpu" and 0 < progress.threads <= (os.cpu_count() or 1):
            torch.set_num_threads(progress.threads)
        progress.micro_rows, progress.world, progress.shard = self.micro_rows, ranks.world, shard
        self.progress.threads = torch.get_num_threads() if ranks.device.type == "cpu" else 0
        self.progress.machine = distributed.machine(ranks.device) | {"path": self.placed.path}

    # ------------------------------------------------------------ during

    def train(self) -> bool:
        """Take the missing steps; return True if the target was published, False if stopped before."""
        with distributed.repeatable(enabled=self.options.deterministic):
            return self._train()

    def _train(self) -> bool:
        self.clock = self.last_save = time.monotonic()
        self.energy = distributed.joules(self.ranks.device)
        self.published = self.progress.step == self.target
        # Measure before the first step: a hub model, or a continued model on its new text.
        if self.from_hub or (self.progress.step == 0 and reads_otherwise(self.run)):
            self._turn_to(last_rope_base(self.run.start) if isinstance(self.run.start, Pretrain) else 0.0)
            self._measure(0, self.run.stages[0].objective, 0)
        self._turn(self.progress.step)
        steps = load_ahead(self._batches, self.progress.step, self.target, loaders=self.options.loaders)
        try:
            train(
                self.placed.parameters,
                self.placed.optimizer,
                self._loss_sum,
                steps,
                first=self.progress.step,
                rate=lambda step: rate(self.run, step),
                clip=self.run.optimizer.clip,
                ranks=self.ranks,
                autocast=lambda: distributed.autocast(self.ranks.device, self.run.precision),
                after=(
                    self._count,
                    self._log,
                    self._evaluate,
                    lambda done: None if done.lost else self.saver.settle(),
                    self._save,
                    lambda done: self._turn(done.step + 1),
                ),
                stop=self.options.stop,
                lost=self.options.lost,
                save=self._due,
                copies=self.model.copies,
                refresh=self.model.refresh,
                gradients=self.placed.sharded,
            )
        except Exception:
            self.saver.salvage(lost=self.options.lost())
            raise
        except KeyboardInterrupt:
            self.saver.drop()
            raise
        finally:
            self.meter.close()
        return self.published

    def _batches(self, step: int) -> list[Batch]:
        """Return this process's micro-batches of one step."""
        run = self.run
        phase = phase_at(run, step)
        draws = share(
            origin_sample(run) + step * run.rows_per_step,
            run.rows_per_step,
            self.ranks.rank,
            self.ranks.world,
        )
        made = [
            self.stream.batch(
                phase.objective, part, step=step - phase.first, fixed=self.placed.path == "compiled"
            ).ready_for(self.ranks.device)
            for part in draws.split(self.micro_rows)
        ]
        if self.placed.sharded:  # all processes must gather weights equally often
            passes = passes_of(run.rows_per_step, self.ranks.world, self.micro_rows)
            made += [made[0].silent()] * (passes - len(made))
        return made

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        # Seed dropout by the sample index, so that a resumed run drops the same units.
        distributed.seed_device(salt(self.run.seed, "dropout", int(batch.draws[0])), self.ranks.device)
        return self.model.loss_sum(batch, pattern_of(batch, varlen=self.varlen))

    def _due(self) -> bool:
        """Return whether a checkpoint is due; called before each step."""
        if self.options.checkpoint_steps:
            return (self.progress.step + 1) % self.options.checkpoint_steps == 0
        return time.monotonic() - self.last_save > self.options.checkpoint_seconds

    # ------------------------------------------------------------ after each step

    def _count(self, done: LoopStep) -> None:
        now = time.monotonic()
        progress = self.progress
        progress.step, progress.draw = done.step + 1, progress.draw + self.run.rows_per_step
        progress.seconds, self.clock = progress.seconds + now - self.clock, now
        progress.tokens += self.run.batch_tokens
        if progress.flops is not None:
            each = self.flops_per_token
            progress.flops = None if each is None else progress.flops + self.run.batch_tokens * each

    def _log(self, done: LoopStep) -> None:
        phase = phase_at(self.run, done.step)
        facts: dict[str, Any] = {
            "rate": done.rate,
            "labels": done.labels,
            "objective": label(phase.objective),
        }
        if not isinstance(phase.objective, CLM):
            facts["ratio"] = ratio_at(phase.objective, done.step - phase.first)
        facts |= {"tokens": self.progress.tokens, "seconds": round(self.progress.seconds, 3)}
        first = self.progress.draw - self.run.rows_per_step
        facts["draws"] = [first, self.progress.draw - 1]  # over all processes; kept only for skipped steps
        self.meter.step(done.step, facts, done.loss, done.norm, done.nonfinite)
        if self.meter.longest_nonfinite >= UNSOUND_LIMIT:
            last = self.meter.last_skipped
            raise TrainingError(
                f"{self.run.name}: {UNSOUND_LIMIT} steps in a row had no finite loss or gradient, the last at step "
                f"{last['step']:,} with samples {last['draws'][0]} to {last['draws'][1]}; "
                "lower schedule=WSD(peak=…) or look at the corpus there"
            )

    def _evaluate(self, done: LoopStep) -> None:
        step = done.step + 1
        if step % self.run.heldout_every == 0 or step == self.target:
            phase = phase_at(self.run, done.step)
            self._measure(step, phase.objective, done.step - phase.first)

    def _measure(self, step: int, objective: Objective, into: int) -> None:
        """Measure and record the held-out losses after `step` steps, `into` steps into a phase."""
        if self.heldout.rows == 0:
            return
        self.model.eval()
        losses = heldout_losses(
            self._loss_sum,
            self.heldout,
            yardsticks(objective, into),
            rows=self.run.heldout_tokens // self.run.packing.length,
            micro_rows=self.micro_rows,
            ranks=self.ranks,
            autocast=lambda: distributed.autocast(self.ranks.device, self.run.precision),
            fixed=self.placed.path == "compiled",
            together=self.placed.sharded is not None,
        )
        if self.placed.sharded:
            self.placed.sharded.rest()
        self.model.train()
        losses = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
        self.meter.leave_out(time.monotonic() - self.clock)
        if losses:
            self.meter.event(step, heldout=losses)
        self.clock = time.monotonic()  # measuring does not count as training time

    def _save(self, done: LoopStep) -> None:
        finished = done.step + 1 == self.target
        if done.lost:
            self.saver.abandon()
        if done.lost or not (finished or done.save or done.stop):
            return
        self.meter.flush()
        self._count_energy()
        self.progress.skipped += self.meter.skipped
        self.meter.skipped = 0
        self.progress.nonfinite_in_a_row = self.meter.nonfinite_in_a_row
        step = done.step + 1
        state = {
            "run": encode(self.run),
            "origin_step": origin_step(self.run),
            "epochs": self.stream.epochs(self.progress.draw),
            "tokens_left_out": len(self.shards.train) % self.run.packing.length,
            "progress": asdict(self.progress),
        }
        told = CheckpointRecord(
            checkpoint_key(self.run, step, self.identities), state, list(self.meter.lines)
        )
        behind = partial(checkpoint.prune, self.run, step, self.store, self.identities)
        self.saver.begin(told, last=finished, then=lambda: behind(self.needed()))
        if finished or done.stop:
            self.saver.finish()
        self.published = finished
        self.last_save = self.clock = time.monotonic()

    def _count_energy(self) -> None:
        """Add the energy of all GPUs since the last call; if any part is unmeasured, the total stays unknown."""
        now = distributed.joules(self.ranks.device)
        used = math.nan if now is None or self.energy is None else now - self.energy
        before = math.nan if self.progress.joules is None else self.progress.joules
        total = before + self.ranks.sum_float(used)
        self.energy, self.progress.joules = now, total if math.isfinite(total) else None
