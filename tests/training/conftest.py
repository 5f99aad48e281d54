"""Shared by the tests of training: a second store, and training jobs in this process."""

import pytest
import torch
from common import store_with
from safetensors.torch import load_file

from biphase.data.shards import Shards
from biphase.keys import checkpoint_key
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

ALONE = Ranks(0, 1, torch.device("cpu"))


@pytest.fixture
def other(tmp_path, shards):
    """A second store, to train the same run without interruption."""
    return store_with(shards, tmp_path / "other")


@pytest.fixture
def job_of():
    """Makes the training job that brings a run to a step; `needed`: keys of checkpoints to keep, or a function."""

    def make(run, step, store, *, needed=(), ranks=ALONE, flops=1.0, live=None, **options):
        return Pretraining(
            run,
            step,
            store=store,
            shards=Shards.open(next(store.shards.iterdir())),
            identities=identities(store),
            ranks=ranks,
            needed=needed if callable(needed) else lambda: set(needed),
            flops_per_token=flops,
            options=RuntimeOptions(quiet=True, **({"loaders": 0} | options)),
            live=live,
        )

    return make


@pytest.fixture
def train(job_of):
    """Brings a run to a step; returns the finished training job."""

    def make(run, step, store, **more):
        job = job_of(run, step, store, **more)
        job.train()
        return job

    return make


@pytest.fixture
def tensors():
    """Reads the weights and the optimizer state of a run's checkpoint."""

    def read(store, run, step):
        folder = store.checkpoints / checkpoint_key(run, step, identities(store))
        return load_file(folder / "model.safetensors"), load_file(folder / "optimizer.safetensors")

    return read


@pytest.fixture
def same_checkpoint(tensors):
    """Compares a run's checkpoint in two stores, bit for bit."""

    def compare(run, step, store, other):
        pairs = zip(tensors(store, run, step), tensors(other, run, step), strict=True)
        return all(a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a) for a, b in pairs)

    return compare
