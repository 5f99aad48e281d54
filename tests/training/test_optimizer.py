"""Layer-wise rates: each layer learns at its share, the embedding at the least, the head at the full rate."""

import pytest
import torch
from families.tiny import with_head
from torch import nn

from biphase.models.backbone import LanguageModel
from biphase.specs import AdamW, Muon
from biphase.training.optimizer import (
    build,
    forget,
    optimizer_state,
    update,
)


def llama(**more):
    return LanguageModel(with_head("llama", num_hidden_layers=3, **more))


def shares(model, optimizer):
    """The share of each parameter, by its name; each is in one group only."""
    found = {}
    names = {id(one): name for name, one in model.named_parameters()}
    for group in optimizer.param_groups:
        for one in group["params"]:
            assert names[id(one)] not in found
            found[names[id(one)]] = group["share"]
    return found


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_each_layer_learns_at_a_share_of_the_one_above(tied):
    model = llama(tie_word_embeddings=tied)
    found = shares(model, build(model, AdamW(layer_decay=0.5)))
    assert found.keys() == dict(model.named_parameters()).keys()
    for name, share in found.items():
        layer = next((number for number in range(3) if f"layers.{number}." in name), None)
        if layer is not None:
            assert share == 0.5 ** (3 - layer), name
        else:
            assert share == (0.5**4 if "embed_tokens" in name else 1.0), name
    assert ("model.lm_head.weight" in found) == (not tied)


BELOW = {
    "bert": ("word_embeddings", "position_embeddings", "token_type_embeddings", "embeddings.LayerNorm"),
    "gpt2": ("wte", "wpe"),
    "opt": ("embed_tokens", "embed_positions"),  # its last norm is written down before its layers
}


@pytest.mark.parametrize("family", BELOW)
def test_embeddings_have_the_lowest_share_and_the_head_the_full_rate(family):
    model = LanguageModel(with_head(family, **{"n_layer" if family == "gpt2" else "num_hidden_layers": 3}))
    found = shares(model, build(model, AdamW(layer_decay=0.5)))
    below = {name for name, share in found.items() if share == 0.5**4}
    behind = {name for name, share in found.items() if share == 1.0}
    for part in BELOW[family]:
        assert any(part in name for name in below), part
    assert all(any(part in name for part in BELOW[family]) for name in below)
    assert behind
    assert not [name for name in behind if "embed" in name or ".0." in name]
    assert len(set(found.values())) == 5


def test_muon_trains_the_matrices_of_the_layers_and_adamw_the_rest():
    model = llama(attention_bias=True)
    optimizer = build(model, Muon(adamw=AdamW(layer_decay=0.5)))
    found = {**shares(model, optimizer.muon), **shares(model, optimizer.adamw)}
    assert found.keys() == dict(model.named_parameters()).keys()
    by_muon = shares(model, optimizer.muon)
    assert by_muon.keys() == {
        name for name in found if "layers" in name and "norm" not in name and "bias" not in name
    }
    assert by_muon["model.model.layers.0.mlp.up_proj.weight"] == 0.125


def test_a_step_of_muon_is_torchs_with_the_gradients_divided():
    torch.manual_seed(0)
    model = llama()
    name = "model.model.layers.1.mlp.up_proj.weight"
    weight = dict(model.named_parameters())[name]
    theirs = nn.Parameter(weight.detach().clone())
    reference = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.3, momentum=0.9, adjust_lr_fn="match_rms_adamw"
    )
    optimizer = build(model, Muon(momentum=0.9, weight_decay=0.3))
    for step in range(3):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        theirs.grad = weight.grad / 2.0
        update(optimizer, rate=1e-2, nonfinite=torch.tensor(float(step == 1)), shrink=torch.tensor(2.0))
        if step != 1:  # this one is skipped
            reference.step()
        assert torch.equal(weight, theirs)
        assert weight.grad is None


def matrix(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Linear(5, 3)


def gradients(model, seed):
    chance = torch.Generator().manual_seed(seed)
    return [torch.randn(one.shape, generator=chance) for one in model.parameters()]


def take(model, optimizer, grads, *, rate=1e-2, shrink=1.0, nonfinite=0.0):
    for one, grad in zip(model.parameters(), grads, strict=True):
        one.grad = grad.clone()
    return update(optimizer, rate=rate, nonfinite=torch.tensor(nonfinite), shrink=torch.tensor(shrink))


def test_a_reset_optimizer_steps_like_a_new_one_in_the_same_memory():
    model, other = matrix(), matrix(seed=1)
    optimizer = build(model, AdamW())
    for seed in range(3):
        take(model, optimizer, gradients(model, seed))
    weights = dict(model.named_parameters())
    places = {name: one.data_ptr() for name, one in optimizer_state(weights, optimizer).items()}
    forget(optimizer)
    assert not any(one.any() for one in optimizer_state(weights, optimizer).values())
    model.load_state_dict(other.state_dict())
    fresh = build(other, AdamW())
    for seed in (7, 8):
        take(model, optimizer, gradients(model, seed))
        take(other, fresh, gradients(other, seed))
    assert {name: one.data_ptr() for name, one in optimizer_state(weights, optimizer).items()} == places
    assert all(torch.equal(one, two) for one, two in zip(model.parameters(), other.parameters(), strict=True))
