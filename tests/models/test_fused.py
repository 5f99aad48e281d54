"""The fused trunk: outputs, gradients and law 1 as transformers', and copies of weights that stay current."""

import copy

import pytest
import torch
from families import tiny

from biphase.attention import AttentionPattern, segment_mask
from biphase.data.stream import positions_of
from biphase.fast import trunk
from biphase.fast.trunk import FusedTrunk, Joined, refusal
from biphase.models.backbone import add_adapter, freeze_embeddings, from_scratch, set_rope_base
from biphase.objectives import Batch, Vocabulary, apply
from biphase.specs import CLM, MLM, AdamW, LoRA, Size
from biphase.training.distributed import Ranks, Replicated
from biphase.training.loop import PlainStep
from biphase.training.optimizer import build

CPU = torch.device("cpu")
VOCAB, ROWS, T = 64, 3, 20
SHAPE = {"hidden_size": 48, "intermediate_size": 80, "max_position_embeddings": 32}
SEGMENTS = torch.stack(
    [
        sum((torch.arange(T) >= cut).long() for cut in cuts)
        for cuts in ([7, 12], [1, 19], [T])  # one token alone at an end; a row in one segment
    ]
)


def eurobert(kv_heads=4, **more):
    size = Size("t", 2, 64, 4, kv_heads, 96, "fp32", **more)
    return from_scratch(size, vocab=VOCAB, mask_id=3, length=32, seed=0)


def grouped():
    return eurobert(kv_heads=2)


def tied():
    return eurobert(kv_heads=1, tied=True)


def llama(**fields):
    """Heads that together are wider than the model."""
    return tiny.language_model("llama", **{**SHAPE, "head_dim": 16, **fields}).train()


MODELS = [eurobert, grouped, tied, llama]


def made_by(make):
    """A model whose norms are not 1 and whose matrices are not so small that attention is even."""
    model, chance = make(), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(one * 5 if one.ndim == 2 else 1 + 0.3 * torch.randn(one.shape, generator=chance))
    return model


def fuse(model, dtype=torch.float32):
    """What `prepare` does on a GPU."""
    fused = model.encoder.fused = FusedTrunk(model.model.base_model, dtype)
    model.head_copy = Joined(model.model.get_output_embeddings().weight, dtype=dtype)
    fused.watch(model.head_copy)
    return fused


def ids_of(seed=0):
    return torch.randint(4, VOCAB, (ROWS, T), generator=torch.Generator().manual_seed(seed))


def seen(causal, cut):
    """Positions, and who sees whom."""
    segments = SEGMENTS if cut else None
    mask = segment_mask(segments, causal=causal) if cut else None
    return positions_of(segments, ROWS, T), AttentionPattern(causal, mask=mask)


def pull(hidden):
    """A loss to which every number of the hidden states matters differently."""
    return (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(9)).to(hidden)).sum()


def twin_of(model):
    """Transformers' own trunk, layers and attention, in fp64."""
    twin = copy.deepcopy(model.model.base_model).double()
    twin.set_attn_implementation("eager")
    return twin


def read(twin, ids, positions, pattern):
    mask = (
        pattern.mask
        if pattern.mask is not None
        else segment_mask(torch.zeros_like(ids), causal=pattern.causal)
    )
    hidden_from = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -1e9)
    return twin(
        input_ids=ids, position_ids=positions, attention_mask=hidden_from, use_cache=False
    ).last_hidden_state


def close(ours, wanted, relative=1e-5):
    assert ours.shape == wanted.shape
    assert (ours.double() - wanted.double()).norm() <= relative * wanted.double().norm()


def same_gradients(ours, theirs, relative=1e-5):
    """None where the other has none."""
    wanted = dict(theirs.named_parameters())
    for name, one in ours.named_parameters():
        assert (one.grad is None) == (wanted[name].grad is None), name
        if one.grad is not None:
            assert one.grad.dtype == one.dtype
            assert wanted[name].grad.norm() > 0, name
            close(one.grad, wanted[name].grad, relative)


def check(
    make=grouped, passes=((False, True),), *, positions=None, only=None, dtype=torch.float32,
    prepare=lambda trunk: None, before=lambda trunk: None, after=lambda trunk: None, relative=(1e-5, 1e-5),
):  # fmt: skip
    """Hidden states and the gradients of some passes (causal, cut) are those of transformers."""
    model = made_by(make)
    base = model.model.base_model
    prepare(base)
    twin, fused = twin_of(model), fuse(model, dtype)
    for seed, (causal, cut) in enumerate(passes):
        usual, pattern = seen(causal, cut)
        places = usual if positions is None else positions
        before(base)
        before(twin)
        ours = fused(ids_of(seed), places, pattern, only=only)
        theirs = read(twin, ids_of(seed), places, pattern)
        theirs = theirs if only is None else theirs.flatten(0, 1)[only]
        assert ours.dtype == dtype
        close(ours, theirs, relative[0])
        pull(ours).backward()
        pull(theirs).backward()
        after(base)
    same_gradients(base, twin, relative[1])


CUT = pytest.mark.parametrize("cut", [False, True], ids=["rows", "segments"])
CAUSAL = pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
# Below this many tokens, what can be recomputed is not kept.
LEAN = pytest.mark.parametrize("lean", [2**15, 0], ids=["lean", "kept"])


@LEAN
@CUT
@CAUSAL
@pytest.mark.parametrize("make", MODELS)
def test_hidden_states_and_gradients_are_transformers_own(make, causal, cut, lean, monkeypatch):
    monkeypatch.setattr(trunk, "RECOMPUTE_TOKENS", lean)
    check(make, [(causal, cut)])


TWICE = [(False, True), (True, True)]


@pytest.mark.parametrize("replaced", ["none", "q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"])
def test_gradients_of_two_passes_add_up_wherever_the_first_ones_lie(replaced):
    def replace(trunk):
        for name, weight in trunk.named_parameters():
            if replaced in name:
                weight.grad = weight.grad.clone()

    check(passes=TWICE, after=replace)


FROZEN = {
    "embedding": ["embed_tokens"],
    "norms": ["norm"],
    "whole matrices": ["o_proj", "down_proj", "gate_proj", "up_proj"],
    "queries beside keys that learn": ["q_proj"],
    "the lower layer and what is below": ["embed_tokens", "layers.0"],
    "all but matrices": ["embed_tokens", "norm"],
    "all but the last norm": ["embed_tokens", "layers"],
}


@pytest.mark.parametrize("parts", FROZEN.values(), ids=FROZEN)
def test_what_is_frozen_gets_no_gradient_and_the_rest_gets_the_same(parts):
    def freeze(trunk):
        for name, weight in trunk.named_parameters():
            weight.requires_grad_(not any(part in name for part in parts))

    check(passes=[(False, True)] * 2, prepare=freeze)


def test_copies_in_16_bits_give_nearly_the_same_and_gradients_in_32():
    check(passes=[(False, True)] * 2, dtype=torch.bfloat16, relative=(0.03, 0.05))


def batch_of(objective, cut=False):
    segments = SEGMENTS if cut else None
    words = Vocabulary.of(VOCAB, mask_id=3, special_ids=(0, 1))
    asked = apply(objective, ids_of(), segments, torch.arange(ROWS), seed=0, step=0, vocabulary=words)
    flat = asked.labels.flatten()
    at = (flat >= 0).nonzero().flatten()
    positions = positions_of(segments, ROWS, T)
    return Batch(
        asked.ids, positions, segments, None, at, flat[at], len(at), asked.causal, torch.arange(ROWS)
    )


@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen_embedding"])
@pytest.mark.parametrize("objective", [CLM(), MLM(0.3)], ids=["clm", "mlm"])
@pytest.mark.parametrize("make", MODELS)
def test_the_loss_and_all_its_gradients_are_the_same_with_and_without(make, objective, frozen):
    plain = made_by(make)
    if frozen:
        freeze_embeddings(plain)
    model = copy.deepcopy(plain)
    fuse(model)
    batch = batch_of(objective, cut=True)
    pattern = AttentionPattern(batch.causal, mask=segment_mask(batch.segments, causal=batch.causal))
    for _ in range(2):
        ours, theirs = model.loss_sum(batch, pattern), plain.loss_sum(batch, pattern)
        close(ours, theirs)
        (ours / batch.count).backward()
        (theirs / batch.count).backward()
    same_gradients(model, plain)


@CUT
@CAUSAL
@torch.no_grad()
def test_a_token_changes_what_may_see_it_and_not_a_bit_of_anything_else(causal, cut):
    fused = fuse(made_by(grouped))
    positions, pattern = seen(causal, cut)
    mask = segment_mask(SEGMENTS if cut else torch.zeros(ROWS, T), causal=causal)[:, 0]
    before = fused(ids_of(), positions, pattern)
    for row, place in ((0, 0), (0, 9), (1, 0), (2, 19)):
        ids = ids_of()
        ids[row, place] = 5 if ids[row, place] != 5 else 6
        changed = (fused(ids, positions, pattern) != before).any(-1)
        wanted = torch.zeros(ROWS, T, dtype=torch.bool)
        wanted[row] = mask[row, :, place]
        assert torch.equal(changed, wanted)


# ---------------------------------------------------------------- copies


BATCH = batch_of(MLM(0.3))


@torch.no_grad()
def loss_of(model):
    return model.loss_sum(BATCH, AttentionPattern(False))


def change_by_a_step(model):
    """Torch's fused AdamW leaves no trace in the versions of what it changes: the step itself sees to the copies."""
    step = PlainStep(
        build(model, AdamW()),
        lambda batch: model.loss_sum(batch, AttentionPattern(False)),
        1.0,
        Replicated(list(model.parameters()), Ranks(0, 1, CPU)),
        encoder=model.encoder,
    )
    step([BATCH], [BATCH.count], 0.1)


def change_without_a_trace(model):
    """As a kernel or `data` writes to weights; `refresh` renews the copies."""
    for weight in model.parameters():
        weight.data.mul_(1.25)
    model.encoder.refresh()


CHANGES = {
    "a step": change_by_a_step,
    "no trace": change_without_a_trace,
    "in place": lambda model: model.model.base_model.layers[1].self_attn.k_proj.weight.mul_(-1),
    "the head": lambda model: model.head.copy_(model.head.flip(0)),
    "the rope base": lambda model: set_rope_base(model.model, 50.0),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_change_is_seen_by_the_next_forward(change):
    model = made_by(grouped)
    fuse(model, torch.bfloat16)
    before = loss_of(model)
    with torch.set_grad_enabled(change is change_by_a_step):
        change(model)
    after = loss_of(model)
    fuse(model, torch.bfloat16)
    assert torch.equal(after, loss_of(model))
    assert after != before


def adapted():
    model = llama()
    add_adapter(model, LoRA(rank=2), seed=1)
    return model


def with_rope(kind):
    return llama(rope_parameters={"rope_type": kind, "rope_theta": 100.0, "factor": 2.0})


REFUSED = [
    ("BertModel", lambda: tiny.language_model("bert")),
    ("biases", lambda: llama(attention_bias=True)),
    ("biases", lambda: llama(mlp_bias=True)),
    ("adapters", adapted),
    ("positions", lambda: with_rope("dynamic")),
    ("positions", lambda: with_rope("yarn")),
    ("activation", lambda: llama(hidden_act="gelu")),
    *((f"{width} wide", lambda width=width: llama(head_dim=width)) for width in (8, 12, 24, 256)),
    *(("", make) for make in (eurobert, llama, lambda: llama(head_dim=128), lambda: with_rope("linear"))),
]


@pytest.mark.parametrize(("why", "make"), REFUSED)
def test_an_unsupported_trunk_is_refused_with_the_reason(why, make):
    message = refusal(make().model.base_model)
    assert why in message
    assert bool(why) == bool(message)
