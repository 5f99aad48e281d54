"""A sharded model in a group of one process: nothing is summed, so it is the plain one but for the rounding of a norm.

What several processes do together is in test_distributed.py.
"""

import socket

import pytest
import torch
import torch.distributed as dist

from biphase import CLM, WSD, AdamW, Muon, Pretrain, Size, Stage
from biphase.attention import pattern_of
from biphase.errors import TrainingError
from biphase.models.backbone import from_scratch
from biphase.objectives import Batch
from biphase.training import distributed
from biphase.training.distributed import Ranks, Replicated, place, shard
from biphase.training.loop import PlainStep
from biphase.training.optimizer import begin_phase, build
from biphase.training.options import RuntimeOptions, Sharding

TINY = Size("tiny", layers=2, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32")
CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


@pytest.fixture(scope="module", autouse=True)
def group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def model():
    return from_scratch(TINY, vocab=50, mask_id=3, length=16, seed=1)


def batches(count, seed):
    drawn = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(count):
        ids = torch.randint(4, 50, (2, 16), generator=drawn)
        at = torch.randperm(32, generator=drawn)[:10]
        positions = torch.arange(16).expand(2, 16)
        made.append(Batch(ids, positions, None, None, at, ids.flatten()[at], 10, True, torch.arange(2)))
    return made


def step_of(model, gradients, adam, precision="fp32", clip=0.5):
    def loss_sum(one):
        with distributed.autocast(CPU, precision):
            return model.loss_sum(one, pattern_of(one, varlen=False))

    return PlainStep(adam, loss_sum, clip, gradients)


def both(model, precision="fp32"):
    """Steps of the plain model and of one that is cut, with their weights by name."""
    other = from_scratch(TINY, vocab=50, mask_id=3, length=16, seed=1)
    plain = step_of(model, Replicated(list(model.parameters()), ALONE), build(model, AdamW()), precision)
    sharded = shard(other, Sharding("full"), ALONE, precision)
    cut = step_of(other, sharded, build(other, AdamW(), sharded.learned()), precision)
    return (
        (plain, dict(model.named_parameters())),
        (cut, {one.name: one.rows for one in sharded.parts}),
        sharded,
    )


def same(one, two):
    assert one.keys() == two.keys()
    return all(torch.equal(one[name], two[name]) for name in one)


def test_steps_of_several_micro_batches_are_the_plain_ones(model):
    (plain, weights), (cut, rows), _ = both(model)
    assert same(weights, rows)
    for number in range(4):
        micro = batches(3, number)
        one, two = (take(micro, [30] * 3, 1e-2) for take in (plain, cut))
        torch.testing.assert_close(one.loss, two.loss, rtol=1e-6, atol=0)
        assert one.norm > 0.5, "clipping is at work"
        torch.testing.assert_close(one.norm, two.norm, rtol=1e-6, atol=0)
    assert all(torch.allclose(weights[name], rows[name], rtol=0, atol=1e-7) for name in weights)


def test_frozen_rows_keep_their_bits_and_the_others_learn_as_in_a_whole_model(model):
    (plain, weights), (cut, rows), sharded = both(model)
    for step, learned in ((plain, weights), (cut, sharded.learned())):
        freeze = ("embeddings", "layers[0]")
        new = begin_phase(sharded.model, learned, step.optimizer, freeze=freeze, layer_decay=1.0)
        assert new == (True, False)
    before = {name: one.detach().clone() for name, one in rows.items()}
    one, two = plain(batches(2, 0), [20] * 2, 1e-2), cut(batches(2, 0), [20] * 2, 1e-2)
    torch.testing.assert_close(one.norm, two.norm, rtol=1e-6, atol=0)
    for name, row in rows.items():
        still = "layers.0." in name or "embed_tokens" in name
        assert torch.equal(before[name], row) == still, name
        assert torch.allclose(weights[name], row, rtol=0, atol=1e-7)
    new = begin_phase(sharded.model, sharded.learned(), cut.optimizer, freeze=freeze, layer_decay=1.0)
    assert new == (False, False)


def test_a_step_that_is_not_finite_changes_nothing(model):
    _, (cut, rows), _ = both(model)
    assert cut(batches(1, 0), [10], 1e-2).nonfinite == 0
    with torch.no_grad():
        rows["model.model.norm.weight"][0] = torch.inf
    frozen = {name: one.detach().clone() for name, one in rows.items()}
    optimizer_state = [value.clone() for state in cut.optimizer.state.values() for value in state.values()]
    assert cut(batches(1, 2), [10], 1e-2).nonfinite == 1
    after = [value for state in cut.optimizer.state.values() for value in state.values()]
    assert all(torch.equal(one, two) for one, two in zip(optimizer_state, after, strict=True))
    assert same(frozen, {name: one.detach() for name, one in rows.items()})


def test_in_bf16_weights_are_kept_in_fp32(model):
    _, (cut, rows), sharded = both(model, "bf16")
    dtypes = []
    head = sharded.model.model.get_output_embeddings()
    sharded.model.register_forward_hook(lambda *_: dtypes.append(head.weight.dtype))
    for number in range(3):
        cut(batches(2, number), [20] * 2, 1e-2)
    assert set(dtypes) == {torch.bfloat16}
    assert all(one.dtype == torch.float32 for one in rows.values())
    assert all(state["exp_avg"].dtype == torch.float32 for state in cut.optimizer.state.values())


def test_muon_is_refused_where_weights_are_cut(model):
    run = Pretrain("run", TINY, "builtin", Stage(CLM(), 5), WSD(1e-3, 1, 0), Muon())
    with pytest.raises(TrainingError, match=r"run.*Muon.*--shard none"):
        place(model, run, Ranks(0, 2, CPU), RuntimeOptions(sharding=Sharding("full")))
