"""Objectives: labels stay inside their segment, masks follow from counters and have their share."""

import pytest
import torch

from biphase.data.stream import boundaries_of, positions_of
from biphase.objectives import IGNORE, Batch, Vocabulary, apply, label_bound
from biphase.specs import CLM, MLM, MNTP, Linear

VOCABULARY = Vocabulary.of(100, mask_id=3, special_ids=(0, 1, 2))
EVERY = [CLM(), MLM(0.2), MLM(0.5, replace=(0.8, 0.1, 0.1)), MLM(Linear(0.4, 0.2, steps=10)), MNTP(0.4)]


def rows(count=64, length=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 100, (count, length), generator=generator)
    ids[:, ::11] = 1  # end tokens
    return ids


def inputs_of(objective, ids=None, segments=None, seed=5, step=0, first=0):
    ids = rows() if ids is None else ids
    samples = torch.arange(first, first + len(ids))
    return apply(objective, ids, segments, samples, seed=seed, step=step, vocabulary=VOCABULARY)


@pytest.mark.parametrize("objective", EVERY, ids=str)
class TestEveryObjective:
    def test_labels_something(self, objective):
        assert (inputs_of(objective).labels != IGNORE).any()

    def test_the_same_counters_give_the_same_inputs(self, objective):
        one, two = inputs_of(objective), inputs_of(objective)
        assert torch.equal(one.ids, two.ids)
        assert torch.equal(one.labels, two.labels)

    def test_a_row_is_masked_the_same_alone(self, objective):
        ids = rows()
        whole = inputs_of(objective, ids)
        alone = apply(objective, ids[9:10], None, torch.tensor([9]), seed=5, step=0, vocabulary=VOCABULARY)
        assert torch.equal(whole.ids[9:10], alone.ids)
        assert torch.equal(whole.labels[9:10], alone.labels)

    def test_labels_stay_inside_their_segment(self, objective):
        ids = rows()
        segments = (torch.arange(48) >= 20).long().expand(64, 48)
        inputs = inputs_of(objective, ids, segments)
        if isinstance(objective, (CLM, MNTP)):  # these ask for the token after
            assert (inputs.labels[:, 19] == IGNORE).all()
            assert (inputs.labels[:, -1] == IGNORE).all()

    def test_the_tokens_are_not_changed_in_place(self, objective):
        ids = rows()
        before = ids.clone()
        inputs_of(objective, ids)
        assert torch.equal(ids, before)

    def test_labels_fit_the_bound(self, objective):
        ids = rows(256, 64)
        assert (inputs_of(objective, ids).labels != IGNORE).sum() <= label_bound(objective, ids.numel())


def test_clm_predicts_the_next_token():
    ids = torch.tensor([[5, 6, 7, 8]])
    inputs = inputs_of(CLM(), ids)
    assert inputs.causal
    assert inputs.labels.tolist() == [[6, 7, 8, IGNORE]]


def test_mlm_masks_its_share_of_ordinary_tokens_and_no_special_one():
    ids = rows(400, 64)
    inputs = inputs_of(MLM(0.4), ids)
    masked = inputs.labels != IGNORE
    special = VOCABULARY.special[ids]
    assert not (masked & special).any()
    share = masked.sum() / (~special).sum()
    assert abs(share - 0.4) < 0.01
    assert (inputs.ids[masked] == 3).all()
    assert torch.equal(inputs.ids[~masked], ids[~masked])
    assert torch.equal(inputs.labels[masked], ids[masked])
    assert not inputs.causal


def test_the_bert_rule_splits_80_10_10_and_takes_only_ordinary_tokens():
    ids = rows(600, 64)
    inputs = inputs_of(MLM(0.5, replace=(0.8, 0.1, 0.1)), ids)
    masked = inputs.labels != IGNORE
    shown, true = inputs.ids[masked], ids[masked]
    assert abs((shown == 3).float().mean() - 0.8) < 0.01
    kept = (shown == true).float().mean()
    assert abs(kept - 0.1 - 0.1 / 96) < 0.01
    drawn = shown[(shown != 3) & (shown != true)]
    assert not VOCABULARY.special[drawn].any()
    assert len(drawn.unique()) > 80


def test_masks_of_a_lower_ratio_are_subsets():
    low, high = (inputs_of(MLM(ratio)).labels != IGNORE for ratio in (0.2, 0.5))
    assert (low <= high).all()
    assert low.sum() < high.sum()


def test_epochs_and_seeds_mask_differently():
    ids = rows()
    base = inputs_of(MLM(0.4), ids).labels
    assert not torch.equal(base, inputs_of(MLM(0.4), ids, first=1000).labels)
    assert not torch.equal(base, inputs_of(MLM(0.4), ids, seed=6).labels)


def test_mntp_predicts_one_position_earlier_and_never_masks_the_first():
    ids = rows()
    segments = (torch.arange(48) >= 20).long().expand(64, 48)
    inputs = inputs_of(MNTP(0.4), ids, segments)
    changed = inputs.ids != ids
    assert not changed[:, 0].any()
    assert not changed[:, 20].any()
    where = (inputs.labels != IGNORE).nonzero()
    for row, at in where.tolist():
        assert inputs.ids[row, at + 1] == 3
        assert inputs.labels[row, at] == ids[row, at + 1]
    assert changed.sum() == len(where)


# ---------------------------------------------------------------- batches

CPU = torch.device("cpu")
SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


def batch_of(segments):
    boundaries = None if segments is None else boundaries_of(segments, fixed=False)
    ids, positions = torch.arange(8).view(2, 4), positions_of(segments, 2, 4)
    labels = torch.tensor([4, IGNORE])
    return Batch(ids, positions, segments, boundaries, torch.tensor([1, 0]), labels, 1, True, torch.arange(2))


def test_on_a_cpu_a_batch_is_not_copied():
    for batch in (batch_of(SEGMENTS), batch_of(None)):
        before = {
            name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
        }
        there = batch.ready_for(CPU).to(CPU)
        assert (there.count, there.causal, there.steady) == (1, True, False)
        assert (there.segments is None) == (batch.segments is None)
        for name, value in before.items():
            assert torch.equal(getattr(there, name), value)
            assert getattr(there, name).data_ptr() == getattr(batch, name).data_ptr()
