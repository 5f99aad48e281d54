"""The stream is a pure function from sample indices to a batch, for any number of loaders and processes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from biphase.data.shards import Shards
from biphase.data.stream import (
    Stream,
    boundaries_of,
    heldout_stream,
    load_ahead,
    passes_of,
    positions_of,
    segments_of,
    share,
)
from biphase.objectives import IGNORE, assign
from biphase.specs import CLM, MLM, MNTP, Chunks, Mix, Rows

EOS = 1


def test_chunk_cuts_are_uniform_and_leave_the_shortest():
    packing = Chunks(64, shortest=12)
    samples = torch.arange(40_000)
    ids = torch.zeros(1, 64).long().expand(40_000, 64)
    cuts = (segments_of(packing, ids, samples, seed=1, eos_id=EOS) == 0).sum(1)
    assert (cuts.min(), cuts.max()) == (12, 52)
    counts = torch.bincount(cuts)[12:]
    assert (counts - 40_000 / 41).abs().max() < 6 * (40_000 / 41) ** 0.5


def test_an_end_token_closes_its_document():
    ids = torch.tensor([[5, 6, EOS, 7, EOS, EOS, 8, 9]])
    segments = segments_of(Rows(8, document_mask=True), ids, torch.arange(1), seed=0, eos_id=EOS)
    assert segments.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3]]
    assert positions_of(segments, 1, 8).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    assert boundaries_of(segments, fixed=False).tolist() == [0, 3, 5, 6, 8]
    # Whole rows are one segment.
    assert segments_of(Rows(8), ids, torch.arange(1), seed=0, eos_id=EOS) is None
    assert positions_of(None, 2, 4).tolist() == [[0, 1, 2, 3]] * 2
    assert boundaries_of(None, fixed=True) is None


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


# ---------------------------------------------------------------- order and batches


@pytest.fixture(scope="module")
def stream(shards):
    return Stream.of(Shards.open(shards), Chunks(32, shortest=4), seed=3)


def equal(one, two):
    return all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(vars(one).values(), vars(two).values(), strict=True)
    )


def test_an_epoch_holds_every_row_once(stream):
    ids = stream.ids(torch.arange(stream.rows))
    raw = torch.from_numpy(stream.tokens.span(0, stream.rows * 32).astype("int64")).view(-1, 32)
    assert sorted(map(tuple, ids.tolist())) == sorted(map(tuple, raw.tolist()))
    assert len(stream.tokens) - stream.rows * 32 < 32


def test_the_next_epoch_holds_them_in_another_order_with_other_masks(stream):
    n = stream.rows
    first, second = stream.ids(torch.arange(n)), stream.ids(torch.arange(n, 2 * n))
    assert not torch.equal(first, second)
    assert sorted(map(tuple, first.tolist())) == sorted(map(tuple, second.tolist()))
    assert stream.epochs(2 * n) == 2
    straddling = torch.arange(n - 3, n + 3)
    assert torch.equal(stream.ids(straddling), torch.cat([first[-3:], second[:3]]))
    masked = [stream.batch(MLM(0.4), torch.arange(start, start + n), step=0) for start in (0, n)]
    assert not torch.equal(masked[0].label_at, masked[1].label_at)
    assert not torch.equal(masked[0].segments, masked[1].segments)


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 3, 16])
def test_processes_and_micro_batches_together_see_the_global_batch(stream, world, micro):
    whole = stream.batch(MLM(0.4), torch.arange(40, 56), step=0)
    parts = [
        stream.batch(part.objective, part.samples, step=0)
        for rank in range(world)
        for part in share(assign(MLM(0.4), 40, 16, seed=3, step=0), rank, world, micro)
    ]
    assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
    assert torch.equal(torch.cat([part.segments for part in parts]), whole.segments)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert sum(part.count for part in parts) == whole.count


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 9), st.integers(0, 99), st.booleans())
def test_processes_divide_the_rows_of_a_mixture_evenly_and_each_micro_batch_has_one_objective(
    rows, world, micro, first, few_shapes
):
    step = assign(Mix({CLM(): 2, MLM(0.4): 1, MNTP(0.3): 4}), first, rows, seed=1, step=0)
    parts = [share(step, rank, world, micro, few_shapes=few_shapes) for rank in range(world)]
    assert max(map(len, parts)) == passes_of(step, world, micro, few_shapes=few_shapes)
    counts = [sum(len(part.samples) for part in some) for some in parts]
    assert max(counts) - min(counts) <= 1
    for each in step:
        own = [part.samples for some in parts for part in some if part.objective == each.objective]
        assert torch.equal(torch.cat([*own, each.samples[:0]]), each.samples)
    sizes = {len(part.samples) for some in parts for part in some}
    assert all(size <= micro for size in sizes)
    if few_shapes:
        assert all(size == micro or size & (size - 1) == 0 for size in sizes)


def test_a_row_of_a_mixture_is_masked_as_with_its_objective_alone(stream):
    mix = Mix({CLM(): 1, MLM(0.4): 1})
    for part in assign(mix, 32, 16, seed=stream.seed, step=0):
        mixed = stream.batch(part.objective, part.samples, step=0)
        for place, sample in enumerate(part.samples.tolist()):
            alone = stream.batch(part.objective, torch.tensor([sample]), step=0)
            assert torch.equal(mixed.ids[place], alone.ids[0])
            assert mixed.causal == part.objective.causal


@pytest.mark.parametrize("loaders", [1, 2, 5])
def test_any_number_of_loaders_gives_the_same_batches_in_order(stream, loaders):
    def make(step):
        return [stream.batch(MLM(0.3), torch.arange(step * 8, step * 8 + 8), step=step)]

    alone = list(load_ahead(make, 2, 12, loaders=0))
    ahead = list(load_ahead(make, 2, 12, loaders=loaders))
    assert len(alone) == len(ahead) == 10
    assert all(equal(a[0], b[0]) for a, b in zip(alone, ahead, strict=True))
    with pytest.raises(ZeroDivisionError):  # a loader that fails says so
        list(load_ahead(lambda step: 1 / (step - 3), 0, 9, loaders=loaders))


def test_labels_point_to_the_true_tokens(stream):
    samples = torch.arange(8)
    true = stream.ids(samples).flatten()
    masked = stream.batch(MLM(0.4), samples, step=0)
    assert torch.equal(true[masked.label_at], masked.labels)
    causal = stream.batch(CLM(), samples, step=0)
    assert torch.equal(true[causal.label_at + 1], causal.labels)
    assert causal.count == 8 * (32 - 2)  # two chunks a row, none asked beyond its end


@pytest.mark.parametrize("bound", [None, 16])
def test_fixed_shapes_pad_and_never_drop_a_label(stream, monkeypatch, bound):
    if bound:  # more labels than the bound double it
        monkeypatch.setattr("biphase.data.stream.label_bound", lambda objective, rows, length: bound)
    plain, fixed = (stream.batch(MLM(0.4), torch.arange(64), step=0, fixed=fixed) for fixed in (False, True))
    assert len(fixed.labels) == 1024
    assert fixed.count == plain.count > 512
    assert torch.equal(fixed.labels[: fixed.count], plain.labels)
    assert torch.equal(fixed.label_at[: fixed.count], plain.label_at)
    assert (fixed.labels[fixed.count :] == IGNORE).all()
    assert len(fixed.label_at.unique()) == len(fixed.label_at), "gradients are copied back, not added"
    assert (fixed.graph_key is None) == bool(bound), "a rare shape is not captured"


def test_batches_of_one_shape_share_a_captured_step(stream):
    def key(objective, first, fixed=True):
        return stream.batch(objective, torch.arange(first, first + 8), step=0, fixed=fixed).graph_key

    assert key(MLM(0.4), 0) == key(MLM(0.4), 8)
    assert len({key(CLM(), 0), key(MLM(0.4), 0), key(MLM(0.2), 0)}) == 3
    assert key(MLM(0.4), 0, fixed=False) is None


def test_heldout_rows_and_masks_do_not_depend_on_the_run(shards):
    opened = Shards.open(shards)
    one, two = (heldout_stream(opened, Rows(32)) for _ in range(2))
    assert equal(one.batch(MLM(0.4), torch.arange(4), step=0), two.batch(MLM(0.4), torch.arange(4), step=0))
    raw = torch.from_numpy(opened.heldout.span(0, one.rows * 32).astype("int64")).view(-1, 32)
    assert torch.equal(one.ids(torch.arange(one.rows)), raw)
    assert one.rows == len(opened.heldout) // 32
