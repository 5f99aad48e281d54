"""Both sides get the same tokens, as many as are promised, in the lengths that are promised."""

import numpy as np
import pytest
import torch

from biphase.bench import measure, peers
from biphase.bench.cases import LIKE, FinetuneCase, Lengths, PretrainCase
from biphase.bench.measure import END, MASK, Dataset, drawn_lengths, objective_of, reading_of, stream_of
from biphase.finetune.families import QuestionAnswering, TextClassification, family_of
from biphase.finetune.trial import batches_of, rows_of

CPU = torch.device("cpu")
SHORT = (Lengths("classes", 9, 20, 3.0, 3), Lengths("answers", 24, 40, 5.0, 0))


def tuning(lengths, batch=4):
    return FinetuneCase("1m", 200, lengths, batch, steps=1, warm=1, precision="fp32")


def pretraining(objective, packing="chunks"):
    return PretrainCase("1m", 200, objective, 0.4, packing, 64, 3, 2, 3, "fp32")


@pytest.mark.parametrize("lengths", LIKE, ids=lambda one: one.name)
def test_lengths_have_their_mean_and_their_bound_and_are_the_same_each_time(lengths):
    drawn = drawn_lengths(lengths, 4_096)
    assert drawn.mean() == pytest.approx(lengths.mean, rel=0.03)
    assert drawn.max() <= lengths.most
    assert drawn.std() > 0.2 * lengths.mean
    assert np.array_equal(drawn, drawn_lengths(lengths, 4_096))


@pytest.mark.parametrize("lengths", SHORT, ids=lambda one: one.name)
def test_our_family_reads_the_ids_that_the_peer_is_given(lengths):
    data = Dataset(tuning(lengths))
    family = family_of(data.task(), data.examples(), reading_of(200, 64), protocol="standard")
    if isinstance(family, TextClassification):
        ids, labels = family.ids["train"], family.labels["train"]
    else:
        assert isinstance(family, QuestionAnswering)
        ids, labels = family.encoded["train"].ids, family.encoded["train"].bounds
    assert len(ids) == len(data.ids)
    assert all(np.array_equal(one, other) for one, other in zip(ids, data.ids, strict=True))
    assert np.array_equal(labels, data.labels)
    assert data.tokens == pytest.approx(4 * lengths.mean, rel=0.1)


@pytest.mark.parametrize("lengths", SHORT, ids=lambda one: one.name)
def test_with_the_same_weights_the_padded_batch_has_our_loss(lengths):
    case = tuning(lengths)
    data = Dataset(case)
    family = family_of(data.task(), data.examples(), reading_of(200, measure.CONTEXT), protocol="standard")
    bench = measure.bench_of(case, CPU)
    model = bench.fresh(family, 0)
    peer = peers.Padded(case, measure.CONTEXT)
    peer.trunk.load_state_dict(model.encoder.trunk.state_dict())
    peer.head.load_state_dict(model.head.state_dict())
    (batch,) = batches_of(family, 0, 0, bench.options)

    texts = peers.TextDataset(data)
    theirs = peer(**peers.padded([texts[row] for row in rows_of(family, 0, 0)]))["loss"]
    ours = family.loss_sum(model, batch) / batch.count
    assert theirs.item() == pytest.approx(ours.item(), abs=1e-5)


def test_the_trainers_rows_are_masked_as_ours_are():
    case = pretraining("mlm", packing="rows")
    rows = peers.RowDataset(case)
    batch = stream_of(case).batch(objective_of(case), torch.arange(3), step=0)
    assert torch.equal(torch.stack([rows[row]["input_ids"] for row in range(3)]), batch.ids)
    asked = torch.cat([rows[row]["labels"] for row in range(3)])
    assert torch.equal((asked != -100).nonzero().flatten(), batch.label_at)
    assert torch.equal(asked[batch.label_at], batch.labels)
    assert (batch.ids == MASK).sum() == batch.count


@pytest.mark.parametrize("objective", ["mlm", "clm"])
def test_with_the_same_weights_the_trainers_model_has_our_loss(objective):
    case = pretraining(objective, packing="rows")
    ours = measure.Side(case, CPU, measure.model_of(case, CPU))
    (batch,) = ours.batches(0)
    peer = peers.peer_model(case)
    peer.load_state_dict(ours.model.model.state_dict())
    rows = peers.RowDataset(case)
    at = [next(n for n in range(len(rows)) if torch.equal(rows[n]["input_ids"], ids)) for ids in batch.ids]
    their = [torch.stack([rows[n][name] for n in at]) for name in ("input_ids", "labels")]
    loss = peer(input_ids=their[0], labels=their[1]).loss
    torch.testing.assert_close(ours.loss_sum(batch) / batch.count, loss)


def test_causal_rows_are_their_own_labels_since_llama_shifts_them():
    one = peers.RowDataset(pretraining("clm"))[0]
    assert torch.equal(one["input_ids"], one["labels"])


def test_packings_cut_rows_as_they_are_named():
    cuts = {
        packing: stream_of(pretraining("mlm", packing)).batch(
            objective_of(pretraining("mlm")), torch.arange(64), step=0
        )
        for packing in ("chunks", "rows", "documents")
    }
    assert cuts["rows"].segments is None
    assert cuts["chunks"].segments.max() == 1
    ends = (stream_of(pretraining("mlm", "documents")).ids(torch.arange(64)) == END).sum()
    assert 0 < ends == cuts["documents"].segments[:, -1].sum() + (cuts["documents"].ids[:, -1] == END).sum()
