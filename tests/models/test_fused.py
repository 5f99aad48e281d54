"""The trunk with its own backward pass: hidden states, gradients and law 1 as transformers' own, on any device."""

import copy

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from biphase.attention import NAME, AttentionPattern, segment_mask
from biphase.data.stream import positions_of
from biphase.fast import trunk
from biphase.fast.trunk import FusedTrunk, Joined
from biphase.models.adapters import freeze_embeddings
from biphase.models.backbone import LanguageModel, from_scratch
from biphase.objectives import Batch, Vocabulary, apply
from biphase.specs import CLM, MLM, Size

VOCAB, ROWS, T = 64, 3, 20
SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
SEGMENTS = torch.stack(
    [
        sum((torch.arange(T) >= cut).long() for cut in cuts)
        for cuts in ([7, 12], [1, 19], [T])  # one token alone at an end; a row in one training job
    ]
)


def eurobert(kv_heads=4, **more):
    size = Size("t", 2, 64, 4, kv_heads, 96, "fp32", **more)
    return from_scratch(size, vocab=VOCAB, mask_id=3, length=32, seed=0)


def grouped():
    return eurobert(kv_heads=2)


def tied():
    return eurobert(kv_heads=1, tied=True)


def llama(**more):
    """Heads that together are wider than the model."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = LlamaForCausalLM(LlamaConfig(**SHAPE, **({"head_dim": 16, "num_key_value_heads": 2} | more)))
    made.set_attn_implementation(NAME)
    return LanguageModel(made)


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
    fused = model.reader[0].fused = FusedTrunk(model.model.base_model, dtype)
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


@pytest.mark.parametrize("cut", [False, True], ids=["rows", "segments"])
@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
@pytest.mark.parametrize("make", MODELS)
def test_hidden_states_and_gradients_are_transformers_own(make, causal, cut):
    check_whole(make, causal, cut)


@pytest.mark.parametrize("make", MODELS)
def test_so_they_are_where_the_batch_is_large_and_more_is_kept(make, monkeypatch):
    monkeypatch.setattr(trunk, "RECOMPUTE_TOKENS", 0)
    check_whole(make, causal=False, cut=True)


def check_whole(make, causal, cut):
    model = made_by(make)
    twin, fused = twin_of(model), fuse(model)
    positions, pattern = seen(causal, cut)
    ours, theirs = fused(ids_of(), positions, pattern), read(twin, ids_of(), positions, pattern)
    close(ours, theirs)
    pull(ours).backward()
    pull(theirs).backward()
    same_gradients(model.model.base_model, twin)


def test_each_token_is_turned_by_its_own_position():
    """Attention knows distances only: positions that restart or not would be all the same to it, these are not."""
    model = made_by(grouped)
    twin, fused = twin_of(model), fuse(model)
    positions = torch.randint(0, 32, (ROWS, T), generator=torch.Generator().manual_seed(2))
    pattern = AttentionPattern(False)
    ours, theirs = fused(ids_of(), positions, pattern), read(twin, ids_of(), positions, pattern)
    close(ours, theirs)
    pull(ours).backward()
    pull(theirs).backward()
    same_gradients(model.model.base_model, twin)


@pytest.mark.parametrize("replaced", ["", "q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"])
def test_gradients_of_two_passes_add_up_wherever_the_first_ones_lie(replaced):
    model = made_by(grouped)
    twin, fused = twin_of(model), fuse(model)
    for seed in (0, 1):
        positions, pattern = seen(bool(seed), cut=True)
        pull(fused(ids_of(seed), positions, pattern)).backward()
        pull(read(twin, ids_of(seed), positions, pattern)).backward()
        for name, one in model.model.base_model.named_parameters():
            if replaced and replaced in name:
                one.grad = one.grad.clone()
    same_gradients(model.model.base_model, twin)


@pytest.mark.parametrize("dropped", ["q_proj", "v_proj", "up_proj"])
def test_a_gradient_that_was_dropped_starts_anew_beside_those_that_were_not(dropped):
    model = made_by(grouped)
    twin, fused = twin_of(model), fuse(model)
    positions, pattern = seen(False, cut=False)
    for seed in (0, 1):
        for either in (twin, model.model.base_model):
            for name, one in either.named_parameters():
                one.grad = None if dropped in name else one.grad
        pull(fused(ids_of(seed), positions, pattern)).backward()
        pull(read(twin, ids_of(seed), positions, pattern)).backward()
    same_gradients(model.model.base_model, twin)


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
    model = made_by(grouped)
    for name, one in model.model.base_model.named_parameters():
        one.requires_grad_(not any(part in name for part in parts))
    twin, fused = twin_of(model), fuse(model)
    positions, pattern = seen(False, cut=True)
    for seed in (0, 1):
        pull(fused(ids_of(seed), positions, pattern)).backward()
        pull(read(twin, ids_of(seed), positions, pattern)).backward()
    same_gradients(model.model.base_model, twin)


def test_without_gradients_nothing_is_kept_for_them():
    model = made_by(grouped)
    fused = fuse(model)
    with torch.no_grad():
        hidden = fused(ids_of(), *seen(True, cut=False))
    assert not hidden.requires_grad
    assert torch.equal(hidden, fused(ids_of(), *seen(True, cut=False)))


@pytest.mark.parametrize("cut", [False, True], ids=["rows", "segments"])
@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
@pytest.mark.parametrize("lean", [False, True], ids=["kept", "lean"])
def test_hidden_states_of_some_tokens_are_those_of_the_whole_and_so_are_their_gradients(
    lean, causal, cut, monkeypatch
):
    monkeypatch.setattr(trunk, "RECOMPUTE_TOKENS", 2**15 if lean else 0)
    model = made_by(grouped)
    twin, fused = twin_of(model), fuse(model)
    at = torch.tensor([59, 0, 7, 21, 33])  # in any order, some segments with none
    positions, pattern = seen(causal, cut)
    ours = fused(ids_of(), positions, pattern, only=at)
    theirs = read(twin, ids_of(), positions, pattern).flatten(0, 1)[at]
    close(ours, theirs)
    pull(ours).backward()
    pull(theirs).backward()
    same_gradients(model.model.base_model, twin)


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


def test_a_batch_without_labels_has_no_loss_and_gradients_of_zero():
    model = made_by(grouped)
    fuse(model)
    none = torch.empty(0, dtype=torch.long)
    loss = model(ids_of(), *seen(False, cut=False), none, none)
    loss.backward()
    assert loss.item() == 0
    assert all(one.grad is None or (one.grad == 0).all() for one in model.parameters())


@pytest.mark.parametrize("cut", [False, True], ids=["rows", "segments"])
@pytest.mark.parametrize("causal", [False, True], ids=["both_ways", "causal"])
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


def test_copies_in_16_bits_give_nearly_the_same_and_gradients_in_32():
    model = made_by(grouped)
    twin, fused = twin_of(model), fuse(model, torch.bfloat16)
    positions, pattern = seen(False, cut=True)
    for seed in (0, 1):
        ours, theirs = fused(ids_of(seed), positions, pattern), read(twin, ids_of(seed), positions, pattern)
        assert ours.dtype == torch.bfloat16
        close(ours, theirs, relative=0.03)
        pull(ours).backward()
        pull(theirs).backward()
    same_gradients(model.model.base_model, twin, relative=0.05)
