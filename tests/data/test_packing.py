"""Cuts are where they should be, positions restart, boundaries list every segment."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.data.stream import boundaries_of, positions_of, segments_of
from biphase.specs import Chunks, Rows

EOS = 1


def test_chunk_cuts_are_uniform_and_leave_the_shortest():
    packing = Chunks(64, shortest=12)
    draws = torch.arange(40_000)
    ids = torch.zeros(1, 64).long().expand(40_000, 64)
    cuts = (segments_of(packing, ids, draws, seed=1, eos_id=EOS) == 0).sum(1)
    assert (cuts.min(), cuts.max()) == (12, 52)
    counts = torch.bincount(cuts)[12:]
    assert (counts - 40_000 / 41).abs().max() < 6 * (40_000 / 41) ** 0.5


def test_a_cut_is_a_function_of_seed_and_draw_alone():
    packing, ids = Chunks(64), torch.zeros(3, 64).long()
    together = segments_of(packing, ids, torch.tensor([4, 9, 4]), seed=1, eos_id=EOS)
    assert torch.equal(together[0], together[2])
    assert torch.equal(together[1:2], segments_of(packing, ids[:1], torch.tensor([9]), seed=1, eos_id=EOS))
    assert not torch.equal(together, segments_of(packing, ids, torch.tensor([4, 9, 4]), seed=2, eos_id=EOS))


def test_whole_rows_have_no_segments():
    assert segments_of(Rows(8), torch.zeros(2, 8).long(), torch.arange(2), seed=0, eos_id=EOS) is None
    assert positions_of(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2
    assert boundaries_of(None, fixed=True) is None


def test_an_end_token_closes_its_document():
    ids = torch.tensor([[5, 6, EOS, 7, EOS, EOS, 8, 9]])
    segments = segments_of(Rows(8, document_mask=True), ids, torch.arange(1), seed=0, eos_id=EOS)
    assert segments.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    assert positions_of(segments, 1, 8).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert boundaries_of(segments, fixed=False).tolist() == [0, 3, 5, 6, 8]


@settings(deadline=None)
@given(st.integers(0, 10**6), st.booleans())
def test_boundaries_cover_the_batch_in_order(seed, documents):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 6, (3, 20), generator=generator)
    packing = Rows(20, document_mask=True) if documents else Chunks(20, shortest=2)
    segments = segments_of(packing, ids, torch.arange(seed, seed + 3), seed=seed, eos_id=EOS)
    plain, fixed = boundaries_of(segments, fixed=False), boundaries_of(segments, fixed=True)
    assert plain[0] == 0
    assert plain[-1] == fixed[-1] == 60
    assert (plain.diff() > 0).all()
    assert torch.equal(fixed[: len(plain)], plain)
    flat = torch.repeat_interleave(torch.arange(len(plain) - 1), plain.diff())
    rows = torch.arange(3).repeat_interleave(20)
    pair = rows * 100 + segments.flatten()
    assert (pair.unique(return_inverse=True)[1] == flat).all()
    positions = positions_of(segments, 3, 20).flatten()
    assert torch.equal(positions, torch.arange(60) - plain[:-1].repeat_interleave(plain.diff()))


def test_fixed_boundaries_keep_their_length_from_batch_to_batch():
    lengths = set()
    for first in range(50):
        ids = torch.randint(2, 50, (8, 512), generator=torch.Generator().manual_seed(first))
        ids[torch.rand(8, 512, generator=torch.Generator().manual_seed(first)) < 0.01] = EOS
        segments = segments_of(Rows(512, document_mask=True), ids, torch.arange(8), seed=0, eos_id=EOS)
        lengths.add(len(boundaries_of(segments, fixed=True, documents=True)))
    assert len(lengths) == 1
