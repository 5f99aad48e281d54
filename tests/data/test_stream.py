"""The stream is a pure function: same draws, same batch, for any loaders and processes; nothing lost."""

import pytest
import torch

from biphase.data.shards import Shards
from biphase.data.stream import Stream, heldout_stream, load_ahead, share
from biphase.errors import DataError
from biphase.objectives import IGNORE
from biphase.specs import CLM, MLM, Chunks, Rows


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


def test_a_batch_may_straddle_epochs(stream):
    draws = torch.arange(stream.rows - 3, stream.rows + 3)
    assert torch.equal(stream.ids(draws)[3:], stream.ids(draws[3:]))
    assert torch.equal(stream.ids(draws)[:3], stream.ids(draws[:3]))


@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("micro", [1, 3, 16])
def test_processes_and_micro_batches_together_see_the_global_batch(stream, world, micro):
    whole = stream.batch(MLM(0.4), torch.arange(40, 56), step=0)
    parts = [
        stream.batch(MLM(0.4), draws, step=0)
        for rank in range(world)
        for draws in share(40, 16, rank, world).split(micro)
    ]
    assert torch.equal(torch.cat([part.ids for part in parts]), whole.ids)
    assert torch.equal(torch.cat([part.segments for part in parts]), whole.segments)
    assert torch.equal(torch.cat([part.labels for part in parts]), whole.labels)
    assert sum(part.count for part in parts) == whole.count


@pytest.mark.parametrize("loaders", [1, 2, 5])
def test_any_number_of_loaders_gives_the_same_batches_in_order(stream, loaders):
    def make(step):
        return [stream.batch(MLM(0.3), share(step * 8, 8, 0, 1), step=step)]

    alone = list(load_ahead(make, 2, 12, loaders=0))
    ahead = list(load_ahead(make, 2, 12, loaders=loaders))
    assert len(alone) == len(ahead) == 10
    assert all(equal(a[0], b[0]) for a, b in zip(alone, ahead, strict=True))


def test_a_loader_that_fails_says_so(stream):
    def make(step):
        if step == 3:
            raise DataError("shard gone")
        return []

    steps = load_ahead(make, 0, 9, loaders=2)
    with pytest.raises(DataError, match="shard gone"):
        list(steps)


def test_labels_point_to_the_true_tokens(stream):
    draws = torch.arange(8)
    true = stream.ids(draws).flatten()
    masked = stream.batch(MLM(0.4), draws, step=0)
    assert torch.equal(true[masked.label_at], masked.labels)
    causal = stream.batch(CLM(), draws, step=0)
    assert torch.equal(true[causal.label_at + 1], causal.labels)
    assert causal.count == 8 * (32 - 2)  # two chunks a row, none asked beyond its end


def test_fixed_shapes_pad_and_never_drop_a_label(stream):
    draws = torch.arange(8)
    plain, fixed = (stream.batch(MLM(0.4), draws, step=0, fixed=fixed) for fixed in (False, True))
    assert len(fixed.labels) % 128 == 0
    assert fixed.count == plain.count
    assert torch.equal(fixed.labels[: fixed.count], plain.labels)
    assert (fixed.labels[fixed.count :] == IGNORE).all()


def test_a_draw_beyond_the_bound_doubles_it(stream, monkeypatch):
    monkeypatch.setattr("biphase.data.stream.label_bound", lambda objective, tokens: 16)
    batch = stream.batch(MLM(0.4), torch.arange(8), step=0, fixed=True)
    assert batch.count > 16
    assert (batch.labels != IGNORE).sum() == batch.count
    assert len(batch.labels) in (32, 64, 128, 256)


def test_heldout_rows_and_masks_do_not_depend_on_the_run(shards):
    opened = Shards.open(shards)
    one, two = (heldout_stream(opened, Rows(32)) for _ in range(2))
    assert equal(one.batch(MLM(0.4), torch.arange(4), step=0), two.batch(MLM(0.4), torch.arange(4), step=0))
    raw = torch.from_numpy(opened.heldout.span(0, 32).astype("int64"))
    assert torch.equal(one.ids(torch.tensor([0]))[0], raw)


def test_a_corpus_shorter_than_a_row_is_refused(shards):
    with pytest.raises(DataError, match="fewer than one row"):
        Stream.of(Shards.open(shards), Rows(10**9), seed=0)
