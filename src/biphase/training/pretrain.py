"""Pretraining: bring a run from its nearest saved state to a wanted step.

A fresh run, a resumed one, a branch from a shared trunk and a continuation of another run are the same call:
find the nearest state on the run's path, load it, take the steps that are missing, publish.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from biphase.batch import Batch
from biphase.data.shards import Shards
from biphase.data.stream import Stream, heldout_stream, load_ahead, passes_of, share
from biphase.errors import StoreError, TrainingError
from biphase.files import Store
from biphase.keys import Identities, act_at, label, last_rope_base, origin_draw, origin_step, state_key
from biphase.models.attention import sight_of, varlen_works
from biphase.models.rope import set_rope_base
from biphase.objectives import ratio_at
from biphase.randomness import salt
from biphase.records import encode
from biphase.specs import CLM, Hub, Objective, Pretrain
from biphase.training import checkpoint, devices
from biphase.training.checkpoint import Progress
from biphase.training.devices import Ranks
from biphase.training.heldout import heldout_losses, yardsticks
from biphase.training.loop import Done, train
from biphase.training.manner import Manner
from biphase.training.meter import Meter
from biphase.training.placing import place
from biphase.training.saving import Saver, Told
from biphase.training.schedule import rate
from biphase.training.starting import reads_otherwise, root_of, starting_model

UNSOUND_LIMIT = 20  # steps in a row


class Pretraining:
    """One piece of work: `run` up to `target`, from wherever the store can begin."""

    def __init__(
        self,
        run: Pretrain,
        target: int,
        *,
        store: Store,
        shards: Shards,
        identities: Identities,
        ranks: Ranks,
        needed: Callable[[], set[str]],  # the states that plans of the store need, as they stand now
        flops_per_token: float | None,  # None: the model's shape is not known beforehand
        manner: Manner,
        title: str = "",
    ) -> None:
        self.run, self.target, self.store, self.shards = run, target, store, shards
        self.identities, self.ranks, self.needed, self.manner = identities, ranks, needed, manner
        self.flops_per_token = flops_per_token
        self.title = title or run.name
        if run.rows_per_step < ranks.world:
            raise TrainingError(
                f"{run.name}: {ranks.world} processes cannot share a batch of {run.rows_per_step} rows; use fewer"
            )
        self.key = state_key(run, target, identities)
        store.refuse_debris(store.states / self.key)  # now, and not after the work
        self.stream = Stream.of(shards, run.packing, run.seed)
        self.heldout = heldout_stream(shards, run.packing)
        self.rope_base = 0.0  # as the model came
        self.varlen = varlen_works(ranks.device, run.precision)
        self._begin()

    # ------------------------------------------------------------ before

    def _begin(self) -> None:
        """Build the model and put it where the nearest saved state left it."""
        run, ranks = self.run, self.ranks
        lines = self._load_nearest()
        self._adopt_arithmetic()
        self.saver = Saver(self.store, ranks, self.model, self.placed, piece=self.key)
        self.meter = Meter(
            title=self.title,
            origin=origin_step(run),
            first=self.progress.step,
            until=self.target,
            tokens_per_step=run.batch_tokens,
            flops_per_token=self.flops_per_token,
            every=1 if ranks.device.type == "cpu" else 10,
            lines=lines,
            unsound_in_a_row=self.progress.unsound_in_a_row,
            board=self.manner.board if ranks.first else None,
            live=self.manner.live if ranks.first else None,
            quiet=self.manner.quiet or not ranks.first,
        )

    def _load_nearest(self) -> list[dict[str, Any]]:
        """Load the nearest state of the run, or start it; gives the lines of metrics that led there."""
        run, ranks, store = self.run, self.ranks, self.store
        found = ranks.share(
            checkpoint.nearest(run, self.target, store, self.identities) if ranks.first else None
        )
        if found is None and isinstance(run.start, Pretrain):
            raise StoreError(
                f"{run.name} goes on from {run.start.name}, whose end is not in {store.states}; "
                "run the study again to compute it"
            )
        self.from_hub = found is None and isinstance(root_of(run).start, Hub)
        self.model = starting_model(run, self.shards, probed=self.from_hub)
        self.progress = Progress(step=0, draw=origin_draw(run), joules=0.0)
        if found is None:
            self.placed = place(self.model, run, ranks, self.manner)
            return []
        step, key = found
        try:
            loaded = checkpoint.load_weights(store, key, self.model)
            self.placed = place(self.model, run, ranks, self.manner)
            if step > 0 or run.moments == "keep":
                checkpoint.load_moments(store, key, self.placed.rows, self.placed.optimizer)
            lines = checkpoint.metrics_of(store, key)
        except (StoreError, OSError):
            if ranks.world == 1 and not (store.states / key).exists():
                return self._load_nearest()  # another worker went past it and removed it: look again
            raise
        self.progress = loaded if step else replace(loaded, step=0, draw=origin_draw(run))
        return lines

    def _turn(self, step: int) -> None:
        """Positions as the act of step `step` has them: asked before each step, done where an act begins."""
        self._turn_to(act_at(self.run, step).rope_base if step < self.run.steps else 0.0)

    def _turn_to(self, base: float) -> None:
        if base and base != self.rope_base:
            set_rope_base(self.model.model, base)
            self.rope_base = base

    def _adopt_arithmetic(self) -> None:
        """Sum as the state was summed so far, as far as this machine can: the same bits need the same order."""
        progress, ranks = self.progress, self.ranks
        rows = self.run.rows_per_step // ranks.world
        shard = str(self.manner.sharding)
        same = (progress.world, progress.shard) == (ranks.world, shard) and progress.step > 0
        suits = devices.micro_rows(ranks.device, rows, self.run.packing.length)
        self.micro_rows = self.manner.micro_rows or (progress.micro_rows if same else suits)
        if ranks.device.type == "cpu" and 0 < progress.threads <= (os.cpu_count() or 1):
            torch.set_num_threads(progress.threads)
        progress.micro_rows, progress.world, progress.shard = self.micro_rows, ranks.world, shard
        self.progress.threads = torch.get_num_threads() if ranks.device.type == "cpu" else 0
        self.progress.machine = devices.machine(ranks.device) | {"path": self.placed.path}

    # ------------------------------------------------------------ during

    def train(self) -> bool:
        """Take the missing steps. True when the target stands in the store, False when stopped before."""
        with devices.repeatable(enabled=self.manner.deterministic):
            return self._train()

    def _train(self) -> bool:
        self.clock = self.last_save = time.monotonic()
        self.energy = devices.joules(self.ranks.device)
        self.published = self.progress.step == self.target
        # What it could do before.
        if self.from_hub or (self.progress.step == 0 and reads_otherwise(self.run)):
            self._turn_to(last_rope_base(self.run.start) if isinstance(self.run.start, Pretrain) else 0.0)
            self._measure(0, self.run.stages[0].objective, 0)
        self._turn(self.progress.step)
        steps = load_ahead(self._batches, self.progress.step, self.target, loaders=self.manner.loaders)
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
                autocast=lambda: devices.autocast(self.ranks.device, self.run.precision),
                after=(
                    self._count,
                    self._log,
                    self._evaluate,
                    lambda done: None if done.lost else self.saver.settle(),
                    self._save,
                    lambda done: self._turn(done.step + 1),
                ),
                stop=self.manner.stop,
                lost=self.manner.lost,
                save=self._due,
                copies=self.model.copies,
                refresh=self.model.refresh,
                gradients=self.placed.sharded,
            )
        except Exception:
            self.saver.salvage(lost=self.manner.lost())
            raise
        except KeyboardInterrupt:
            self.saver.drop()
            raise
        finally:
            self.meter.close()
        return self.published

    def _batches(self, step: int) -> list[Batch]:
        """This process's micro-batches of one step."""
        run = self.run
        act = act_at(run, step)
        draws = share(
            origin_draw(run) + step * run.rows_per_step, run.rows_per_step, self.ranks.rank, self.ranks.world
        )
        made = [
            self.stream.batch(
                act.objective, part, step=step - act.first, fixed=self.placed.path == "compiled"
            ).ready_for(self.ranks.device)
            for part in draws.split(self.micro_rows)
        ]
        if self.placed.sharded:  # all processes fetch weights the same number of times
            passes = passes_of(run.rows_per_step, self.ranks.world, self.micro_rows)
            made += [made[0].silent()] * (passes - len(made))
        return made

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        # Dropout, where a model has it, is drawn from counters too: a resumed run drops the same units.
        devices.draw_from(salt(self.run.seed, "dropout", int(batch.draws[0])), self.ranks.device)
        return self.model.loss_sum(batch, sight_of(batch, varlen=self.varlen))

    def _due(self) -> bool:
        """Is a checkpoint due? Asked before each step."""
        if self.manner.checkpoint_steps:
            return (self.progress.step + 1) % self.manner.checkpoint_steps == 0
        return time.monotonic() - self.last_save > self.manner.checkpoint_seconds

    # ------------------------------------------------------------ after each step

    def _count(self, done: Done) -> None:
        now = time.monotonic()
        progress = self.progress
        progress.step, progress.draw = done.step + 1, progress.draw + self.run.rows_per_step
        progress.seconds, self.clock = progress.seconds + now - self.clock, now
        progress.tokens += self.run.batch_tokens
        if progress.flops is not None:
            each = self.flops_per_token
            progress.flops = None if each is None else progress.flops + self.run.batch_tokens * each

    def _log(self, done: Done) -> None:
        act = act_at(self.run, done.step)
        facts: dict[str, Any] = {"rate": done.rate, "labels": done.labels, "objective": label(act.objective)}
        if not isinstance(act.objective, CLM):
            facts["ratio"] = ratio_at(act.objective, done.step - act.first)
        facts |= {"tokens": self.progress.tokens, "seconds": round(self.progress.seconds, 3)}
        first = self.progress.draw - self.run.rows_per_step
        facts["draws"] = [first, self.progress.draw - 1]  # of all processes; kept only if the step is skipped
        self.meter.step(done.step, facts, done.loss, done.norm, done.unsound)
        if self.meter.longest_unsound >= UNSOUND_LIMIT:
            last = self.meter.last_skipped
            raise TrainingError(
                f"{self.run.name}: {UNSOUND_LIMIT} steps in a row had no finite loss or gradient, the last at step "
                f"{last['step']:,} with samples {last['draws'][0]} to {last['draws'][1]}; "
                "lower schedule=WSD(peak=…) or look at the corpus there"
            )

    def _evaluate(self, done: Done) -> None:
        step = done.step + 1
        if step % self.run.heldout_every == 0 or step == self.target:
            act = act_at(self.run, done.step)
            self._measure(step, act.objective, done.step - act.first)

    def _measure(self, step: int, objective: Objective, into: int) -> None:
        """Note the held-out losses after `step` steps, `into` steps into an act."""
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
            autocast=lambda: devices.autocast(self.ranks.device, self.run.precision),
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
        self.clock = time.monotonic()  # time spent measuring is not time spent training

    def _save(self, done: Done) -> None:
        finished = done.step + 1 == self.target
        if done.lost:
            self.saver.abandon()
        if done.lost or not (finished or done.save or done.stop):
            return
        self.meter.flush()
        self._count_energy()
        self.progress.skipped += self.meter.skipped
        self.meter.skipped = 0
        self.progress.unsound_in_a_row = self.meter.unsound_in_a_row
        step = done.step + 1
        state = {
            "run": encode(self.run),
            "origin_step": origin_step(self.run),
            "epochs": self.stream.epochs(self.progress.draw),
            "tokens_left_out": len(self.shards.train) % self.run.packing.length,
            "progress": asdict(self.progress),
        }
        told = Told(state_key(self.run, step, self.identities), state, list(self.meter.lines))
        behind = partial(checkpoint.prune, self.run, step, self.store, self.identities)
        self.saver.begin(told, last=finished, then=lambda: behind(self.needed()))
        if finished or done.stop:
            self.saver.finish()
        self.published = finished
        self.last_save = self.clock = time.monotonic()

    def _count_energy(self) -> None:
        """Add what all GPUs used since the last time. A part that nobody measured leaves the whole unknown."""
        now = devices.joules(self.ranks.device)
        used = math.nan if now is None or self.energy is None else now - self.energy
        before = math.nan if self.progress.joules is None else self.progress.joules
        total = before + self.ranks.sum_float(used)
        self.energy, self.progress.joules = now, total if math.isfinite(total) else None
