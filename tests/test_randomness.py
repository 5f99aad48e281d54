"""Counters instead of generators: uniform, independent of how they are asked for, a true permutation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.randomness import below, hash32, hash_samples, mix, mix_int, permute, salt, threshold


def test_the_tensor_and_the_integer_scramble_agree():
    values = [0, 1, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 123_456_789]
    assert mix(torch.tensor(values)).tolist() == [mix_int(value) for value in values]


def test_known_values_never_change():
    """Masks of every run ever published depend on these numbers."""
    assert mix_int(1) == 0x514E28B7
    assert hash32(42, "mask", torch.tensor([0, 2**33 + 5]), 3).tolist() == KNOWN


KNOWN = [[1007712353, 502371271, 1769485419], [51670736, 1653402928, 3326111808]]


def test_a_hash_is_uniform_over_its_bits():
    bits = hash32(1, "mask", torch.arange(500), 400).flatten()
    for bit in range(32):
        share = ((bits >> bit) & 1).double().mean().item()
        assert abs(share - 0.5) < 5 * 0.5 / len(bits) ** 0.5, bit


def test_neighbouring_positions_samples_and_purposes_are_uncorrelated():
    def centred(seed, purpose, first):
        return hash32(seed, purpose, torch.arange(first, first + 300), 300).double() - 2**31

    base = centred(1, "mask", 0)
    others = [
        base.roll(1, 1),
        base.roll(1, 0),
        centred(1, "token", 0),
        centred(2, "mask", 0),
        centred(1, "mask", 10**6),
    ]
    for other in others:
        correlation = (base * other).mean() / (base.std() * other.std())
        assert abs(correlation) < 5 / 300


def test_a_row_has_the_same_hash_alone_and_in_company():
    together = hash32(3, "mask", torch.tensor([5, 9, 2**40]), 64)
    assert torch.equal(together[2], hash32(3, "mask", torch.tensor([2**40]), 64)[0])


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_lower_ratio_chooses_a_subset(one, two):
    low, high = sorted((one, two))
    bits = hash_samples(0, "mask", torch.arange(200))
    assert ((bits < threshold(low)) <= (bits < threshold(high))).all()


def test_integers_below_n_are_uniform():
    counts = torch.bincount(below(hash_samples(0, "cut", torch.arange(70_000)), 7), minlength=7)
    assert (counts - 10_000).abs().max() < 500


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 2**32 - 1))
def test_permute_is_a_permutation(n, key):
    assert sorted(permute(torch.arange(n), n, key).tolist()) == list(range(n))


@pytest.mark.parametrize("n", [48_828_125, 2**31 + 11])
def test_permute_serves_large_corpora_by_random_access(n):
    index = torch.tensor([0, 1, n // 2, n - 1])
    moved = permute(index, n, salt(1, "order", 0))
    assert (moved < n).all()
    assert len(set(moved.tolist())) == 4
    assert int(permute(index[2:3], n, salt(1, "order", 0))) == int(moved[2])


def test_epochs_and_seeds_are_ordered_differently():
    n = 1000
    orders = [
        permute(torch.arange(n), n, salt(seed, "order", epoch)) for seed, epoch in ((1, 0), (1, 1), (2, 0))
    ]
    for one in range(3):
        for two in range(one):
            assert (orders[one] == orders[two]).sum() < 12  # one in a thousand by chance
