"""Heads: plain means, small matrices, and weights that are a function of the seed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from biphase.models.encoder import EmbeddingHead, TextHead, TokenHead, initialise, mean_pool, pack

WIDTH, LABELS = 6, 3
LENGTHS = [4, 1, 90, 60, 7]
LAYOUTS = pytest.mark.parametrize("varlen", [True, False], ids=["one row", "rows"])


def packed_of(lengths=LENGTHS, *, varlen=False):
    """A pack, and hidden states for each of its places; those of no token are huge, so that none may count."""
    draw = torch.Generator().manual_seed(sum(lengths))
    some = [torch.randint(1, 50, (length,), generator=draw).numpy() for length in lengths]
    packed = pack(some, varlen=varlen)
    hidden = torch.full((*packed.ids.shape, WIDTH), 1e30)
    hidden.flatten(0, 1)[packed.at] = torch.randn(sum(lengths), WIDTH, generator=draw)
    return hidden, packed


def of_each(hidden, packed):
    """The hidden states of each text."""
    return hidden.flatten(0, 1)[packed.at].split(packed.lengths.tolist())


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 200), min_size=1, max_size=20), st.booleans())
def test_pooling_is_the_plain_mean_of_a_texts_tokens(lengths, varlen):
    hidden, packed = packed_of(lengths, varlen=varlen)
    wanted = torch.stack([one.double().mean(0) for one in of_each(hidden, packed)])
    torch.testing.assert_close(mean_pool(hidden, packed).double(), wanted, rtol=1e-5, atol=1e-6)


def test_pooling_adds_in_fp32_whatever_the_model_computes_in():
    """A sum of 2,000 numbers in bf16 would have three right digits."""
    hidden, packed = packed_of([2_000])
    exact = hidden.flatten(0, 1)[packed.at].bfloat16().double().mean(0)
    pooled = mean_pool(hidden.bfloat16(), packed)
    assert pooled.dtype == torch.float32
    torch.testing.assert_close(pooled[0].double(), exact, rtol=1e-5, atol=1e-6)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(mean_pool(hidden.bfloat16(), packed), pooled)


@LAYOUTS
def test_pooling_spreads_a_texts_gradient_evenly_over_its_tokens(varlen):
    hidden, packed = packed_of(varlen=varlen)
    hidden.requires_grad_()
    weights = torch.randn(len(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(1))
    (mean_pool(hidden, packed) * weights).sum().backward()
    gradient = hidden.grad.flatten(0, 1)
    wanted = (weights / packed.lengths[:, None])[packed.owner]
    torch.testing.assert_close(gradient[packed.at], wanted)
    gradient[packed.at] = 0
    assert not gradient.any(), "places without a token have none"


@LAYOUTS
def test_a_text_is_classified_by_two_matrices_on_its_mean(varlen):
    hidden, packed = packed_of(varlen=varlen)
    head = TextHead(WIDTH, LABELS)
    initialise(head, std=0.5, seed=1)
    with torch.no_grad():
        head.dense.bias += 0.3
        head.out.bias -= 0.2
        wanted = [
            nn.functional.gelu(one.mean(0) @ head.dense.weight.T + 0.3) @ head.out.weight.T - 0.2
            for one in of_each(hidden, packed)
        ]
        torch.testing.assert_close(head(hidden, packed), torch.stack(wanted))


@LAYOUTS
def test_tokens_are_labelled_one_by_one_in_the_order_of_the_texts(varlen):
    hidden, packed = packed_of(varlen=varlen)
    head = TokenHead(WIDTH, LABELS)
    initialise(head, std=0.5, seed=1)
    with torch.no_grad():
        wanted = torch.cat(of_each(hidden, packed)) @ head.out.weight.T
        torch.testing.assert_close(head(hidden, packed), wanted)


@LAYOUTS
def test_an_embedding_is_the_direction_of_the_mean(varlen):
    hidden, packed = packed_of(varlen=varlen)
    head = EmbeddingHead()
    assert not list(head.parameters())
    means = torch.stack([one.mean(0) for one in of_each(hidden, packed)])
    vectors = head(hidden, packed)
    torch.testing.assert_close(vectors, means / means.norm(dim=1, keepdim=True))
    torch.testing.assert_close(vectors.norm(dim=1), torch.ones(len(LENGTHS)))


@pytest.mark.parametrize("kind", [TextHead, TokenHead])
def test_new_weights_are_a_function_of_the_seed_alone(kind):
    def drawn(seed):
        head = kind(64, LABELS)  # torch's own draw of it, from a generator that moves on
        initialise(head, std=0.02, seed=seed)
        return head.state_dict()

    one, same, other = drawn(1), drawn(1), drawn(2)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert all(torch.equal(one[name], other[name]) == name.endswith("bias") for name in one)
    assert all(not value.any() for name, value in one.items() if name.endswith("bias"))


def test_new_weights_have_the_asked_spread_and_leave_the_generator_alone():
    head = TextHead(256, 256)
    before = torch.get_rng_state()
    initialise(head, std=0.05, seed=3)
    assert torch.equal(before, torch.get_rng_state())
    for layer in (head.dense, head.out):
        assert layer.weight.std().item() == pytest.approx(0.05, rel=0.02)
        assert abs(layer.weight.mean().item()) < 3 * 0.05 / 256
    assert not torch.equal(head.dense.weight, head.out.weight)
