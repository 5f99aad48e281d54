"""Shared by the tests on a CUDA device: training jobs on it."""

import pytest
import torch

from biphase.data.shards import Shards
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining


@pytest.fixture
def job_of():
    """Makes the training job that brings a run to a step."""

    def make(run, step, store, live=None, **options):
        return Pretraining(
            run,
            step,
            store=store,
            shards=Shards.open(next(store.shards.iterdir())),
            identities=identities(store),
            ranks=Ranks(0, 1, torch.device("cuda")),
            needed=set,
            flops_per_token=1.0,
            options=RuntimeOptions(quiet=True, **options),
            live=live,
        )

    return make


@pytest.fixture
def train(job_of):
    """Brings a run to a step; returns the finished training job."""

    def make(run, step, store, live=None, **options):
        job = job_of(run, step, store, live, **options)
        job.train()
        return job

    return make
