"""A state that several processes wrote in parts is a state like any other: used, and gone on from."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from biphase import CLM, Stage
from biphase.data.shards import Shards
from biphase.errors import StoreError
from biphase.keys import checkpoint_key
from biphase.store import MANIFEST, Store, publish
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining, model_of_checkpoint
from biphase.training.tensors import RowRange, write_part


def train(run, step, store):
    Pretraining(
        run,
        step,
        store=store,
        shards=Shards.open(next(store.shards.iterdir())),
        identities=identities(store),
        ranks=Ranks(0, 1, torch.device("cpu")),
        needed=set,
        flops_per_token=1.0,
        options=RuntimeOptions(quiet=True, loaders=0),
    ).train()
    return store.checkpoints / checkpoint_key(run, step, identities(store))


def in_parts(place, of):
    """Write a state again as `of` processes would have."""
    built = place.parent.parent / "rewritten"
    shutil.copytree(place, built)
    (built / MANIFEST).unlink()
    for kind in ("model", "optimizer"):
        tensors = load_file(built / f"{kind}.safetensors")
        (built / f"{kind}.safetensors").unlink()
        for number in range(of):
            rows = {}
            for name, one in tensors.items():
                most = -(-len(one) // of) if one.ndim else 1
                first = number * most
                if one.ndim and first < len(one):
                    rows[name] = RowRange(one[first : first + most], tuple(one.shape), first)
                elif not one.ndim and number == 0:
                    rows[name] = RowRange.all_of(one)
            write_part(built, kind, number, of, rows)
    shutil.rmtree(place)
    publish(built, place)


@pytest.fixture
def other(tmp_path, shards):
    made = Store(tmp_path / "other")
    made.shards.mkdir(parents=True)
    (made.shards / shards.name).symlink_to(shards)
    return made


def test_a_state_in_parts_is_used_and_gone_on_from_like_a_whole_one(tiny_run, store, other, shards):
    run = tiny_run("run", Stage(CLM(), 12))
    whole = load_file(train(run, 12, other) / "model.safetensors")
    place = train(run, 5, store)
    before = load_file(place / "model.safetensors")
    in_parts(place, 3)
    assert not (place / "model.safetensors").exists()
    used = model_of_checkpoint(run, place.name, store, Shards.open(shards)).model.state_dict()
    assert all(torch.equal(used[name], before[name]) for name in before)
    end = load_file(train(run, 12, store) / "model.safetensors")
    assert all(torch.equal(end[name], whole[name]) for name in whole)


def test_a_damaged_part_is_refused(tiny_run, store, shards):
    run = tiny_run("run", Stage(CLM(), 12))
    place = train(run, 5, store)
    in_parts(place, 2)
    part = place / "model-1-of-2.safetensors"
    content = bytearray(part.read_bytes())
    content[-3] ^= 1
    part.write_bytes(content)
    with pytest.raises(StoreError, match="has changed since it was written"):
        model_of_checkpoint(run, place.name, store, Shards.open(shards))
