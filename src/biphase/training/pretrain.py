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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from biphase.attention import pattern_of, varlen_works
from biphase.data.shards import Shards
from biphase.data.stream import Stream, load_ahead, passes_of, share, streams_of
from biphase.data.tokenizer import Special, load
from biphase.errors import StoreError, TrainingError
from biphase.keys import Identities, checkpoint_key
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
from biphase.objectives import Batch, assign
from biphase.presets import sources_of
from biphase.protocol import heldout_objectives, micro_rows
from biphase.randomness import salt
from biphase.records import encode
from biphase.specs import (
    Config,
    Contrastive,
    Corpus,
    Hub,
    Merge,
    Muon,
    Phase,
    Pretrain,
    Pretrained,
    RowObjective,
    Size,
)
from biphase.store import Store
from biphase.tasks.files import refuse_changed
from biphase.training import checkpoint, distributed
from biphase.training.checkpoint import CheckpointRecord, Progress, Saver
from biphase.training.contrastive import PairBatch, PairStream
from biphase.training.distributed import Placed, Ranks, Replicated, layer_decays, place
from biphase.training.loop import (
    MOST_CAPTURED,
    Graphs,
    Hooks,
    LoopStep,
    PlainStep,
    train,
    worth_capturing,
)
from biphase.training.meter import BEHIND, READ_EVERY, Meter
from biphase.training.optimizer import begin_phase
from biphase.training.options import RuntimeOptions

PROBED_VOCAB = 512  # of a new model that is built only to test its attention


def starting_model(run: Pretrain, shards: Shards, *, probed: bool = False) -> LanguageModel:
    """Build a run's model with the weights of its root's start; `probed` also tests its attention, unless it is a `Size`."""
    root, card = run.root, shards.card
    if isinstance(root.start, Size | Config):
        ids = {"vocab": shards.vocab, "mask_id": shards.mask_id, "pad_id": card["pad_id"]}
        return _from_scratch(run, root, ids, probed=probed)
    special = Special(
        **{name: card[f"{name}_id"] for name in ("eos", "mask", "pad", "bos")},
        ids=shards.special_ids,
        mask_rule=card["mask_rule"],
    )
    return _from_hub(run, root, _tokenizer_info(run, shards.vocab, special), probed=probed)


def refuse_unfit(run: Pretrain) -> None:
    """Raise ModelError if the run's model is not supported, before its text is read."""
    root = run.root
    if isinstance(root.start, Hub):
        corpus = sources_of(run)[0]
        info = None  # unknown if the corpus trains its own tokenizer
        if isinstance(corpus.tokenizer, Pretrained):
            tokenizer = load(corpus)
            info = _tokenizer_info(run, tokenizer.vocab, tokenizer.special)
        _from_hub(run, root, info, probed=True)
    elif isinstance(root.start, Config):
        _from_scratch(run, root, {"vocab": PROBED_VOCAB, "mask_id": 0}, probed=True)


def _tokenizer_info(run: Pretrain, vocab: int, special: Special) -> TokenizerInfo:
    used = {special.eos, special.bos if sources_of(run)[0].bos else None}
    return TokenizerInfo(vocab, special.mask, special.mask_rule != "own", frozenset(special.ids) - used)


def _from_hub(
    run: Pretrain, root: Pretrain, tokenizer: TokenizerInfo | None, *, probed: bool
) -> LanguageModel:
    assert isinstance(root.start, Hub)
    model = from_hub(root.start, tokenizer, length=run.packing.length, stretched=_stretched(run))
    if probed:
        probe(model, vocab=len(model.head) if tokenizer is None else tokenizer.vocab)
    if run.adapter:
        add_adapter(model, run.adapter, seed=root.seed)
    return model


def _from_scratch(run: Pretrain, root: Pretrain, ids: dict[str, int], *, probed: bool) -> LanguageModel:
    assert isinstance(root.start, Size | Config)
    model = from_scratch(
        root.start, **ids, length=run.packing.length, seed=root.seed, stretched=_stretched(run)
    )
    if probed and isinstance(root.start, Config):
        probe(model, vocab=ids["vocab"])
    return model


def _stretched(run: Pretrain) -> bool:
    """Return whether the rope base changes from the first step on, so that rows may exceed the model's context."""
    return run.initial_rope_base > 0 or (bool(run.stages) and run.phases[0].rope_base > 0)


# ---------------------------------------------------------------- models of saved checkpoints


def model_of_checkpoint(run: Pretrain, key: str | None, store: Store, shards: Shards) -> LanguageModel:
    """Load the model of the run's checkpoint `key`, or its start if None, for evaluation or export.

    Adapters are merged, and the rope base is the one at that step.
    """
    model = starting_model(run, shards)
    step = 0
    if key is not None:
        taken = checkpoint.load_weights(store, key, model).step
        # A run's checkpoint at step 0 is the last one of the run it continues, whose steps count from its own start.
        origin = read_checkpoint_file(store.checkpoints / key)["origin_step"]
        step = origin + taken - run.origin_step
    base = run.rope_base_after(step)
    if base:
        set_rope_base(model.model, base)
    if run.adapter:
        merge_adapter(model)
    return model


# ---------------------------------------------------------------- held-out losses


def mask_words(objectives: Iterable[RowObjective]) -> bool:
    """Return whether any of the objectives masks whole words, so that its stream needs the table of words."""
    return any(getattr(objective, "unit", "") == "word" for objective in objectives)


@torch.no_grad()
def heldout_losses(
    loss_sum: Callable[[Batch], Tensor],
    stream: Stream,
    objectives: tuple[RowObjective, ...],
    *,
    rows: int,
    micro_rows: int,
    ranks: Ranks,
    fixed: bool,
    together: bool = False,  # sharded: every process must run the same number of forward passes
) -> dict[str, float]:
    """Return the mean loss per label on the first `rows` held-out rows, by objective."""
    rows = min(rows, stream.rows)
    losses = {}
    for objective in objectives:
        every = assign(objective, 0, rows, seed=stream.seed, step=0)
        mine = share(every, ranks.rank, ranks.world, micro_rows)
        total = torch.zeros((), dtype=torch.float64, device=ranks.device)
        mass = 0
        for part in mine:
            batch = stream.batch(objective, part.samples, step=0, fixed=fixed)
            total += loss_sum(batch.to(ranks.device))
            mass += batch.term.mass
        if together:
            samples = mine[0].samples[:1] if mine else torch.tensor([0])
            spare = stream.batch(objective, samples, step=0, fixed=fixed)
            for _ in range(passes_of(every, ranks.world, micro_rows) - len(mine)):
                loss_sum(spare.without_labels().to(ranks.device))
        masses = ranks.sum(mass)[0]
        if masses:
            losses[objective.column] = ranks.sum_float(float(total)) / masses
    return losses


# ---------------------------------------------------------------- training jobs


@dataclass
class LiveModel:
    """A trained model on its device with its optimizer, which the next training job of a worker takes over.

    A job that begins at the checkpoint `key` goes on with it as it is. One that begins at another checkpoint of the
    same model reads that into it. Neither builds, moves or compiles a model.
    """

    facts: tuple[object, ...]  # everything that the model and its optimizer are built from
    model: LanguageModel
    placed: Placed
    rope_base: float  # 0: the model's own
    key: str  # "": equal to no checkpoint in the store
    graphs: Graphs[AnyBatch] | None  # captured steps; they read weights and optimizer state where these are
    lines: list[dict[str, Any]]  # the metrics up to `key`

    @property
    def bytes(self) -> int:
        """Memory of the weights and of the optimizer state, which is twice as large."""
        return 3 * sum(weight.numel() * weight.element_size() for weight in self.model.parameters())


AnyBatch = Batch | PairBatch


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
        live: LiveModel | None = None,  # left by the worker's last training job
        sources: Mapping[Corpus, Shards] | None = None,  # all that the run reads, if those are several
    ) -> None:
        self.run, self.target, self.store, self.shards = run, target, store, shards
        self.identities, self.ranks, self.needed, self.options = identities, ranks, needed, options
        self.flops_per_token = flops_per_token
        self.title, self.live = title or run.name, live
        self.key = checkpoint_key(run, target, identities)
        words = mask_words(part.objective for phase in run.phases for part in phase.objective.parts_at(0))
        self.stream, self.heldout = streams_of(run, sources or {sources_of(run)[0]: shards}, words=words)
        self.rope_base = 0.0  # 0: the model's own
        self.phase: Phase | None = None  # the one that the model was last prepared for
        self.pairs: dict[Contrastive, PairStream] = {}  # of the contrastive phases in this job
        self.graphs: Graphs[AnyBatch] | None = None  # None: every step is a plain one
        self.varlen = varlen_works(ranks.device, run.precision)
        self.loaded = False
        # When this job's first and last step ended and its last held-out losses were measured, in seconds of the wall
        # clock.
        self.times: dict[str, float] = {}

    # ------------------------------------------------------------ before

    def load(self) -> None:
        """Build the model, load the nearest saved checkpoint and set up saving and metrics."""
        run, ranks = self.run, self.ranks
        if run.rows_per_step < ranks.world:
            raise TrainingError(
                f"{run.name}: {ranks.world} processes cannot share a batch of {run.rows_per_step} rows; use fewer"
            )
        self.store.refuse_debris(self.store.checkpoints / self.key)  # before the work rather than after it
        lines = self._load_nearest()
        self._adopt_arithmetic()
        self._load_pairs()
        on_pairs = self._pairs_at(self.target - 1)
        if self.graphs is None and self._capturable():
            self.graphs = Graphs(self.placed.optimizer, ranks.device)
        self.saver = Saver(self.store, ranks, self.model, self.placed, job=self.key)
        self.saver.remove_leftovers()
        self.meter = Meter(
            title=self.title,
            origin=run.origin_step,
            first=self.progress.step,
            until=self.target,
            tokens_per_step=on_pairs.tokens_per_step if on_pairs else run.batch_tokens,
            every=1 if ranks.device.type == "cpu" else READ_EVERY,
            behind=0 if ranks.device.type == "cpu" else BEHIND,
            lines=lines,
            nonfinite_in_a_row=self.progress.nonfinite_in_a_row,
            options=self.options
            if ranks.first
            else replace(self.options, tracked=None, live=None, quiet=True),
        )
        self.loaded = True

    def _load_nearest(self) -> list[dict[str, Any]]:
        """Load the nearest checkpoint of the run, or its start; return the metrics up to there."""
        run, ranks, store = self.run, self.ranks, self.store
        self.graphs = None  # a second call, after a checkpoint was pruned, builds another model
        nearest = ranks.share(
            checkpoint.nearest(run, self.target, store, self.identities) if ranks.first else None
        )
        if nearest is None and run.sources:
            names = " and ".join(part.run.name for part in run.sources)
            start = (
                f"the merge of {names}, which"
                if isinstance(run.start, Merge)
                else f"{names}, whose checkpoint"
            )
            raise StoreError(
                f"{run.name} goes on from {start} is not in {store.checkpoints}; run the study again to compute it"
            )
        self.from_hub = nearest is None and isinstance(run.root.start, Hub)
        live = self._taken_over(nearest)
        self.model = live.model if live else starting_model(run, self.shards, probed=nearest is None)
        self.progress = Progress(step=0, next_sample=run.origin_sample, joules=0.0)
        if nearest is None:
            ranks.equalize(self.model)  # CPUs of other kinds round the initial weights otherwise
            self.placed = place(self.model, run, ranks, self.options)
            return []
        step, key = nearest
        keeps = step > 0 or (run.parent is not None and run.optimizer_state == "keep")
        try:
            if live and live.key == key and keeps:  # the model is this checkpoint
                loaded = checkpoint.progress_of(store, key)
                self.placed, self.graphs, lines = live.placed, live.graphs, live.lines
            else:
                loaded = checkpoint.load_weights(store, key, self.model, ranks)
                self.placed = live.placed if live else place(self.model, run, ranks, self.options)
                self.placed.optimizer.state.clear()
                if keeps:
                    checkpoint.load_optimizer_state(store, key, self.placed, ranks)
                lines = checkpoint.metrics_of(store, key) if ranks.first else []
        except (StoreError, OSError):
            if ranks.world == 1 and not (store.checkpoints / key).exists():
                return self._load_nearest()  # another worker has passed and pruned it: look again
            raise
        self.progress = loaded if step else replace(loaded, step=0, next_sample=run.origin_sample)
        return lines

    def _load_pairs(self) -> None:
        """Read the pairs of the contrastive phases in this job; refuse what cannot be trained on them."""
        run, ranks = self.run, self.ranks
        for phase in run.phases:
            objective = phase.objective
            missing = phase.first < self.target and phase.until > self.progress.step
            if not isinstance(objective, Contrastive) or not missing or objective in self.pairs:
                continue
            if self.placed.sharded:
                raise TrainingError(
                    f"{run.name}: processes embed different numbers of texts, for which weights cannot be gathered "
                    "together; type --shard none"
                )
            if objective.batch < ranks.world:
                raise TrainingError(
                    f"{run.name}: {ranks.world} processes cannot share {objective.batch} pairs; use fewer"
                )
            # As many tokens are embedded together as a micro-batch of rows has.
            budget = self.micro_rows * run.packing.length
            self.pairs[objective] = PairStream.of(
                objective, run, self.shards, budget=budget, varlen=self.varlen
            )
            for source in objective.pairs if ranks.first else ():
                refuse_changed(source, self.identities.task(source), self.store)

    def _pairs_at(self, step: int) -> PairStream | None:
        """Return the pairs that step `step` trains on; None if it trains on rows, or is done."""
        objective = self.run.phase_at(step).objective
        return self.pairs.get(objective) if isinstance(objective, Contrastive) else None

    def _facts(self) -> tuple[object, ...]:
        """Return everything that `starting_model` and `place` read of a run."""
        run = self.run
        return (
            run.root.start,
            run.root.seed,
            run.packing.length,
            isinstance(run.root.start, Hub | Config) and bool(run.stages) and run.phases[0].rope_base > 0,
            run.adapter,
            run.freeze,
            bool(layer_decays(run)),
            run.precision,
            run.optimizer,
            run.z_loss,  # captured steps contain it
            self.shards.folder.name,
        )

    def _taken_over(self, nearest: tuple[int, str] | None) -> LiveModel | None:
        """Return the worker's live model if this job can begin with it at `nearest`; else free its memory."""
        live, self.live = self.live, None
        self.rope_base = 0.0
        if live is None or nearest is None or live.facts != self._facts():
            return None
        run, step = self.run, nearest[0]
        bases = {run.phase_at(min(step, run.steps - 1)).rope_base, step > 0 or run.initial_rope_base}
        if live.rope_base and bases - {True, live.rope_base}:
            return None
        self.rope_base = live.rope_base
        return live

    def live_model(self) -> LiveModel | None:
        """Return the model of this finished job for the worker's next one; None if it must be loaded again.

        With several processes it is: sharded weights cannot be read into a model, and only the first process knows
        whether another worker has published the checkpoint before this one.
        """
        if self.ranks.world > 1 or not self.published:
            return None
        key = self.key if self.saver.published == self.key else ""
        return LiveModel(
            self._facts(),
            self.model,
            self.placed,
            self.rope_base,
            key,
            self.graphs,
            self.meter.lines,
        )

    def _capturable(self) -> bool:
        """Return whether to capture steps as CUDA graphs."""
        tokens = self.micro_rows * self.run.packing.length
        alone = self.ranks.world == 1 and self.options.graphs and not isinstance(self.run.optimizer, Muon)
        return alone and worth_capturing(self.model, self.ranks.device, tokens)

    def _set_rope_base(self, base: float) -> None:
        if base and base != self.rope_base:
            set_rope_base(self.model.model, base)
            self.rope_base = base
            if self.graphs:
                self.graphs.captured.clear()  # they read the rotations of the former base

    def _begin_step(self, step: int) -> None:
        """Set what step `step`'s phase trains and its rope base; called before each step, acts where a phase begins."""
        phase = self.run.phase_at(step) if step < self.run.steps else None
        if phase is None or phase == self.phase:
            return
        self.phase, placed = phase, self.placed
        self._set_rope_base(phase.rope_base)
        embeds = isinstance(phase.objective, Contrastive)
        self.model.use_compiled(not embeds)
        refrozen, rescaled = begin_phase(
            self.model,
            placed.learned,
            placed.optimizer,
            freeze=phase.freeze,
            head=not embeds,
            layer_decay=phase.layer_decay or self.run.optimizer.layer_decay,
        )
        if refrozen and placed.path == "compiled":
            torch.compiler.reset()  # every freezing compiles anew, and torch limits how often one function may
        if (refrozen or rescaled) and self.graphs:
            self.graphs.captured.clear()  # they compute the gradients and rates of the former phase

    def _adopt_arithmetic(self) -> None:
        """Adopt the checkpoint's micro-batch size and thread count if possible, so that sums have the same order.

        The micro-batch of another kind of device may not fit here, or not keep this one busy, and bits differ there
        anyway: it is adopted only with `--deterministic`.
        """
        progress, ranks = self.progress, self.ranks
        rows = self.run.rows_per_step // ranks.world
        shard = str(self.options.sharding)
        same = (progress.world, progress.shard) == (ranks.world, shard) and progress.step > 0
        default = micro_rows(distributed.memory_of(ranks.device), rows, self.run.packing.length)
        machine = distributed.machine(ranks.device)
        here = progress.machine.get("device") == machine["device"]
        adopted = same and (here or self.options.deterministic)
        self.micro_rows = self.options.micro_rows or (progress.micro_rows if adopted else default)
        if ranks.device.type == "cpu" and 0 < progress.threads <= (os.cpu_count() or 1):
            torch.set_num_threads(progress.threads)
        progress.micro_rows, progress.world, progress.shard = self.micro_rows, ranks.world, shard
        progress.threads = torch.get_num_threads() if ranks.device.type == "cpu" else 0
        progress.machine = machine | {"path": self.placed.path}
        progress.begin_segment(self.run.origin_step + progress.step)

    # ------------------------------------------------------------ during

    def train(self) -> bool:
        """Take the missing steps; return True if the target was published, False if stopped before."""
        if not self.loaded:
            self.load()
        with distributed.repeatable(enabled=self.options.deterministic):
            return self._train()

    def _train(self) -> bool:
        self.clock = self.last_save = time.monotonic()
        self.energy = distributed.joules(self.ranks.device)
        self.published = self.progress.step == self.target
        # Measure before the first step: a hub model, or a continued model on its new text.
        if self.from_hub or (self.progress.step == 0 and self.run.changes_heldout):
            self._set_rope_base(self.run.initial_rope_base)
            self._measure(0, 0)
        self._begin_step(self.progress.step)
        batches = load_ahead(self._batches, self.progress.step, self.target, loaders=self.options.loaders)
        placed = self.placed
        step = PlainStep(
            placed.optimizer,
            self._loss_sum,
            self.run.optimizer.clip,
            placed.sharded or Replicated([*placed.learned.values()], self.ranks),
            self.model.encoder,
        )
        self.model.encoder.refresh()  # a captured step does not look whether weights were loaded
        hooks = Hooks(
            after=(
                self._count,
                self._log,
                self._evaluate,
                lambda done: None if done.lost else self.saver.settle(),
                self._save,
                lambda done: self._begin_step(done.step + 1),
            ),
            stop=self.options.stop,
            lost=self.options.lost,
            save=self._due,
        )
        try:
            train(
                self.graphs.over(step) if self.graphs else step,
                batches,
                first=self.progress.step,
                rate=self.run.learning_rate,
                ranks=self.ranks,
                hooks=hooks,
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

    def _batches(self, step: int) -> list[AnyBatch]:
        """Return this process's micro-batches of one step; pairs are one, since their loss is one."""
        run = self.run
        phase = run.phase_at(step)
        if isinstance(phase.objective, Contrastive):
            pairs = self.pairs[phase.objective]
            return [pairs.batch(run.origin_step + step, self.ranks.rank, self.ranks.world)]
        first, inside = run.origin_sample + run.rows_until(step), step - phase.first
        every = assign(phase.objective, first, run.rows_per_step, seed=run.seed, step=inside)
        few = self.placed.path == "compiled" and len(every) > 1
        parts = share(every, self.ranks.rank, self.ranks.world, self.micro_rows, few_shapes=few)
        # A ratio that follows a schedule would fill up to its highest, and the number of documents varies.
        steady = not phase.objective.restarts and run.packing.fixed_segments
        captured = self.graphs is not None and steady and len(parts) <= MOST_CAPTURED
        fixed = self.placed.path == "compiled" or captured
        batches = [
            self.stream.batch(
                part.objective, part.samples, step=inside, fixed=fixed, term=part.term
            ).ready_for(self.ranks.device)
            for part in parts
        ]
        if self.placed.sharded:  # all processes must gather weights equally often
            passes = passes_of(every, self.ranks.world, self.micro_rows, few_shapes=few)
            batches += [batches[0].without_labels()] * (passes - len(batches))
        return [*batches]

    def _loss_sum(self, batch: AnyBatch) -> torch.Tensor:
        # Seed dropout by the sample index, so that a resumed run drops the same units. The fused path has no dropout.
        if self.placed.path != "fused":
            distributed.seed_device(salt(self.run.seed, "dropout", int(batch.samples[0])), self.ranks.device)
        with distributed.autocast(self.ranks.device, self.run.precision):
            if isinstance(batch, PairBatch):
                return batch.loss_sum(self.model, self.ranks)
            z_loss = self.run.z_loss if self.model.training else 0.0  # held-out losses are without it
            return self.model.loss_sum(batch, pattern_of(batch, varlen=self.varlen), z_loss=z_loss)

    def _due(self) -> bool:
        """Return whether a checkpoint is due; called before each step."""
        if self.options.checkpoint_steps:
            return (self.progress.step + 1) % self.options.checkpoint_steps == 0
        return time.monotonic() - self.last_save > self.options.checkpoint_seconds

    # ------------------------------------------------------------ after each step

    def _count(self, done: LoopStep) -> None:
        now = time.monotonic()
        self.times.setdefault("first_step", time.time())
        progress = self.progress
        on_pairs = self._pairs_at(done.step)
        progress.step, tokens = done.step + 1, self.run.batch_tokens
        if on_pairs:
            tokens = on_pairs.tokens(self.run.origin_step + done.step)
        else:
            progress.next_sample += self.run.rows_per_step
        progress.seconds, self.clock = progress.seconds + now - self.clock, now
        progress.tokens += tokens
        if progress.flops is not None:
            each = self.flops_per_token
            progress.flops = None if each is None else progress.flops + tokens * each

    def _log(self, done: LoopStep) -> None:
        phase = self.run.phase_at(done.step)
        facts: dict[str, Any] = {
            "rate": done.rate,
            "labels": done.labels,
            "objective": phase.objective.label,
        }
        ratio = phase.objective.ratio_at(done.step - phase.first)
        if ratio is not None:
            facts["ratio"] = ratio
        facts |= {"tokens": self.progress.tokens, "seconds": round(self.progress.seconds, 3)}
        rows, until = self.run.rows_per_step, self.progress.next_sample
        if isinstance(phase.objective, Contrastive):
            rows = phase.objective.batch
            until = (self.run.origin_step + done.step + 1) * rows
        facts["samples"] = [until - rows, until - 1]  # over all processes; kept only for skipped steps
        self.meter.step(done.step, facts, done.outcome)

    def _evaluate(self, done: LoopStep) -> None:
        step = done.step + 1
        if step == self.target:
            self._wait()
            self.times["last_step"] = time.time()
            if not done.lost:  # the tensors are written while held-out losses are measured
                self._begin_saving(CheckpointRecord(self.key), step)
            self.clock = time.monotonic()  # copying to the host is not training time
        if step % self.run.heldout_every == 0 or step == self.target:
            self._measure(step, done.step)
        self.times["measured"] = time.time()

    def _begin_saving(self, record: CheckpointRecord, step: int) -> None:
        prune = partial(checkpoint.prune, self.run, step, self.store, self.identities)
        self.saver.begin(record, last=step == self.target, then=lambda: prune(self.needed()))

    def _wait(self) -> None:
        """Wait for the steps that are still queued on the device, since their time is training time."""
        self.meter.flush()
        now = time.monotonic()
        self.progress.seconds, self.clock = self.progress.seconds + now - self.clock, now

    def _measure(self, step: int, trained: int) -> None:
        """Measure and record the held-out losses after `step` steps; those of the objectives of step `trained` too."""
        if self.heldout.rows == 0:
            return
        phase = self.run.phase_at(trained)
        inside = trained - phase.first
        own = [part.objective.at(inside) for part in phase.objective.parts_at(inside)]
        self._wait()
        self.model.eval()
        losses = heldout_losses(
            self._loss_sum,
            self.heldout,
            heldout_objectives(*own),
            rows=self.run.heldout_tokens // self.run.packing.length,
            micro_rows=self.micro_rows,
            ranks=self.ranks,
            fixed=self.placed.path == "compiled",
            together=self.placed.sharded is not None,
        )
        if self.placed.sharded:
            self.placed.sharded.rest()
        facts: dict[str, Any] = {}
        if on_pairs := self._pairs_at(trained):
            most = self.run.heldout_tokens // (2 * on_pairs.objective.length)
            with distributed.autocast(self.ranks.device, self.run.precision):
                facts = on_pairs.measure(self.model, self.ranks, most)
            losses |= {on_pairs.objective.column: facts.pop("loss")} if facts else {}
        self.model.train()
        losses = {name: loss for name, loss in losses.items() if math.isfinite(loss)}
        self.meter.leave_out(time.monotonic() - self.clock)
        if losses:
            self.meter.event(step, heldout=losses, **facts)
        self.clock = time.monotonic()  # measuring does not count as training time

    def _save(self, done: LoopStep) -> None:
        finished = done.step + 1 == self.target
        if done.lost:
            self.saver.abandon()
        if done.lost or not (finished or done.save or done.stop):
            return
        self._wait()
        self._count_energy()
        self.progress.skipped += self.meter.skipped
        self.meter.skipped = 0
        self.progress.nonfinite_in_a_row = self.meter.nonfinite_in_a_row
        step = done.step + 1
        about = {
            "run": encode(self.run),
            "origin_step": self.run.origin_step,
            **self.stream.reading(self.progress.next_sample),
            "times": dict(self.times),
            "progress": asdict(self.progress),
        }
        key = checkpoint_key(self.run, step, self.identities)
        record = CheckpointRecord(key, about, self.meter.text())
        if finished:
            self.saver.complete(record)
        else:
            self._begin_saving(record, step)
            if done.stop:
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
