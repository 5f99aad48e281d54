"""Packing of texts: every token once, in its place, and almost no place without one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.models.encoder import ROW, pack

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=60)
SHORT = st.lists(st.integers(1, ROW), min_size=1, max_size=200)


def texts(lengths):
    """Each token another number: what is lost, doubled or moved shows."""
    return np.split(np.arange(1, sum(lengths) + 1, dtype=np.int32), np.cumsum(lengths)[:-1])


def check_places(packed, lengths):
    """What holds in both layouts."""
    count = sum(lengths)
    flat = {name: getattr(packed, name).flatten() for name in ("ids", "positions", "segments")}
    assert len(packed) == len(lengths)
    assert packed.longest == max(lengths)
    assert packed.lengths.tolist() == list(lengths)
    assert flat["ids"][packed.at].tolist() == list(range(1, count + 1)), "text after text, each token once"
    assert len(set(packed.at.tolist())) == count
    assert packed.owner.tolist() == [number for number, length in enumerate(lengths) for _ in range(length)]
    assert flat["positions"][packed.at].tolist() == [at for length in lengths for at in range(length)]
    left_over = torch.ones(packed.ids.numel(), dtype=torch.bool)
    left_over[packed.at] = False
    assert (flat["ids"][left_over] == 0).all()
    assert (flat["segments"][left_over] == -1).all()
    assert (flat["segments"][packed.at] >= 0).all()


def seen_together(packed):
    """Pairs of texts that stand in one row and have the same segment there."""
    row = packed.at // packed.ids.shape[1]
    key = row * 10_000 + packed.segments.flatten()[packed.at]
    owners = {}
    for one, owner in zip(key.tolist(), packed.owner.tolist(), strict=True):
        owners.setdefault(one, set()).add(owner)
    return [some for some in owners.values() if len(some) > 1]


@settings(deadline=None, max_examples=100)
@given(LENGTHS)
def test_in_rows_every_token_stands_once_in_its_place(lengths):
    packed = pack(texts(lengths), varlen=False)
    check_places(packed, lengths)
    assert packed.boundaries is None
    assert packed.ids.shape[1] <= max(max(lengths), ROW)
    assert not seen_together(packed)


@settings(deadline=None, max_examples=100)
@given(LENGTHS)
def test_in_rows_a_text_stays_in_one_piece(lengths):
    packed = pack(texts(lengths), varlen=False)
    for number, length in enumerate(lengths):
        places = packed.at[packed.owner == number]
        assert (places.diff() == 1).all()
        assert places[0] // packed.ids.shape[1] == places[-1] // packed.ids.shape[1], "and in one row"
        assert len(places) == length


def places_of_first_fit(lengths):
    """Longest first, each into the first row with room: the plain way, and the most that may be used."""
    rows = []
    for length in sorted(lengths, reverse=True):
        row = next((one for one in rows if sum(one) + length <= max(*lengths, ROW)), None)
        rows.append([length]) if row is None else row.append(length)
    return len(rows) * max(map(sum, rows))


@settings(deadline=None, max_examples=200)
@given(st.one_of(SHORT, LENGTHS))
def test_no_more_places_are_used_than_by_plain_first_fit(lengths):
    assert sum(lengths) <= pack(texts(lengths), varlen=False).ids.numel() <= places_of_first_fit(lengths)


def test_little_is_padded_where_texts_are_as_long_as_sentences_are():
    draw = np.random.default_rng(0)
    used = padded = 0
    for _ in range(50):
        lengths = draw.gamma(1.7, 7.6, 32).astype(int).clip(2, 66)  # 13 tokens on average
        packed = pack(texts(lengths), varlen=False)
        used, padded = used + packed.ids.numel() - lengths.sum(), padded + 32 * lengths.max() - lengths.sum()
        assert lengths.sum() / packed.ids.numel() > 0.9
    assert used < 0.03 * 50 * 32 * 13
    assert padded > used * 30


def test_long_texts_have_rows_of_their_own_length_and_short_ones_share():
    packed = pack(texts([ROW + 60, 5, 50, 10]), varlen=False)
    assert packed.ids.shape == (2, ROW + 60)
    assert (packed.at // packed.ids.shape[1]).unique_consecutive().tolist() == [0, 1]
    assert packed.segments[1, :66].tolist() == [0] * 50 + [1] * 10 + [2] * 5 + [-1]


def test_texts_that_fill_a_row_exactly_share_it():
    packed = pack(texts([ROW // 2, ROW // 4, ROW // 2, ROW // 4, ROW // 2]), varlen=False)
    assert packed.ids.shape == (2, ROW)
    assert (packed.segments >= 0).all()


@settings(deadline=None, max_examples=100)
@given(LENGTHS)
def test_for_the_kernel_texts_stand_end_to_end_without_padding(lengths):
    packed = pack(texts(lengths), varlen=True)
    check_places(packed, lengths)
    assert packed.ids.shape == (1, sum(lengths))
    assert packed.at.tolist() == list(range(sum(lengths)))
    assert packed.boundaries.dtype == torch.int32
    assert packed.boundaries.tolist() == [0, *np.cumsum(lengths).tolist()]
    assert packed.pattern.boundaries is packed.boundaries
    assert packed.pattern.longest == max(lengths)
    assert packed.pattern.mask is None
    for number, (start, stop) in enumerate(
        zip(packed.boundaries[:-1].tolist(), packed.boundaries[1:].tolist(), strict=True)
    ):
        assert (packed.owner[start:stop] == number).all()
    assert not seen_together(packed)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_in_rows_every_text_sees_all_of_itself_and_nothing_else(lengths):
    packed = pack(texts(lengths), varlen=False)
    assert not packed.pattern.causal
    rows, width = packed.ids.shape
    owner = torch.full((rows * width,), -1)
    owner[packed.at] = packed.owner
    owner = owner.view(rows, 1, width)
    assert torch.equal(packed.pattern.mask[:, 0], owner.transpose(1, 2) == owner)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=12))
def test_in_rows_a_text_that_is_read_one_way_sees_what_came_before_and_nothing_else(lengths):
    packed = pack(texts(lengths), varlen=False, causal=True)
    assert packed.pattern.causal
    rows, width = packed.ids.shape
    owner = torch.full((rows * width,), -1)
    owner[packed.at] = packed.owner
    owner = owner.view(rows, 1, width)
    before = torch.ones(width, width).tril().bool()
    assert torch.equal(packed.pattern.mask[:, 0], (owner.transpose(1, 2) == owner) & before)


@pytest.mark.parametrize("varlen", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_a_pack_on_another_device_is_read_the_same_way(varlen, causal):
    packed = pack(texts([3, 5]), varlen=varlen, causal=causal)
    assert packed.pattern.causal == packed.to(torch.device("cpu")).pattern.causal == causal
    if varlen:
        assert packed.pattern.mask is None
        assert packed.pattern.boundaries.tolist() == [0, 3, 8]


@pytest.mark.parametrize("varlen", [True, False])
def test_places_left_over_hold_the_padding_id(varlen):
    packed = pack(texts([3, ROW]), varlen=varlen, pad=1_000)
    assert (packed.ids == 1_000).sum() == (0 if varlen else ROW - 3)


@settings(deadline=None, max_examples=100)
@given(LENGTHS)
def test_the_same_texts_are_packed_alike(lengths):
    one, other = (pack(texts(lengths), varlen=False) for _ in range(2))
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.at, other.at)
