"""Thirty steps of masked training through the real machinery, once in one go and once killed on the way."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from biphase import MLM, WSD, Chunks, Corpus, Hub, Pretrain, Stage
from biphase.data.shards import Shards
from biphase.keys import checkpoint_key
from biphase.store import Store
from biphase.study.plan import identities
from biphase.training import checkpoint
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

STEPS, SAVED, KILLED = 30, 10, 14


class Killed(Exception):
    """The process ended, and nobody was asked."""


def run_of(folder: Path, corpus: Corpus) -> Pretrain:
    """Masked training of the model in `folder`."""
    return Pretrain(
        "adapted",
        start=Hub(str(folder)),
        corpus=corpus,
        stages=(Stage(MLM(0.4), STEPS),),
        packing=Chunks(32, shortest=8),
        batch_tokens=16 * 32,
        schedule=WSD(peak=1e-2, warmup=3, decay=5),
        precision="fp32",
        heldout_every=STEPS,
        heldout_tokens=512,
        seed=7,
    )


def train(run: Pretrain, store: Store, *, killed: bool = False) -> None:
    """To the end; or to step `KILLED`, the last checkpoint some steps behind."""
    asked = iter(range(STEPS + 1))

    def stop() -> bool:
        if killed and next(asked) == KILLED:
            raise Killed
        return False

    job = Pretraining(
        run,
        run.steps,
        store=store,
        shards=shards_in(store),
        identities=identities(store),
        ranks=Ranks(0, 1, torch.device("cpu")),
        needed=set,
        flops_per_token=None,
        options=RuntimeOptions(loaders=0, checkpoint_steps=SAVED, quiet=True, stop=stop),
    )
    job.train()


def check_training(run: Pretrain, store: Store) -> None:
    """The loss falls, on what is trained on and on held-out text."""
    train(run, store)
    lines = checkpoint.metrics_of(store, last_state(run, store))
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == STEPS
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < first - 0.1, f"the loss goes from {first:.3f} to {last:.3f}"
    heldout = [line["heldout"] for line in lines if "heldout" in line]
    assert heldout[-1]["mlm40"] < heldout[0]["mlm40"], "the held-out loss does not fall"


def check_kill_and_resume(run: Pretrain, store: Store, *, as_in: Store) -> None:
    """Killed between two checkpoints and begun again, a run ends in the same bits as in the store `as_in`."""
    try:
        train(run, store, killed=True)
    except Killed:
        pass
    else:
        raise AssertionError("it was not killed")
    on_the_way = checkpoint.nearest(run, STEPS, store, identities(store))
    assert on_the_way is not None
    assert on_the_way[0] == SAVED
    train(run, store)
    for name in ("model.safetensors", "optimizer.safetensors"):
        ours, theirs = (load_file(one.checkpoints / last_state(run, one) / name) for one in (store, as_in))
        assert ours.keys() == theirs.keys()
        assert not [weight for weight in ours if not torch.equal(ours[weight], theirs[weight])], name


def shards_in(store: Store) -> Shards:
    return Shards.open(next(store.shards.iterdir()))


def last_state(run: Pretrain, store: Store) -> str:
    return checkpoint_key(run, run.steps, identities(store))
