"""Every objective: asks for something, never for what it shows, and inside its segment."""

import pytest
import torch

from biphase.objectives import IGNORE, Vocabulary, apply, label_bound
from biphase.specs import CLM, MLM, MNTP, Linear

WORDS = Vocabulary.of(100, mask_id=3, special_ids=(0, 1, 2))
EVERY = [CLM(), MLM(0.2), MLM(0.5, replace=(0.8, 0.1, 0.1)), MLM(Linear(0.4, 0.2, steps=10)), MNTP(0.4)]


def rows(count=64, length=48, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 100, (count, length), generator=generator)
    ids[:, ::11] = 1  # end tokens
    return ids


def asked(objective, ids=None, segments=None, seed=5, step=0, first=0):
    ids = rows() if ids is None else ids
    draws = torch.arange(first, first + len(ids))
    return apply(objective, ids, segments, draws, seed=seed, step=step, vocabulary=WORDS)


@pytest.mark.parametrize("objective", EVERY, ids=str)
class TestEveryObjective:
    def test_asks_for_something(self, objective):
        assert (asked(objective).labels != IGNORE).any()

    def test_same_counters_same_question(self, objective):
        one, two = asked(objective), asked(objective)
        assert torch.equal(one.ids, two.ids)
        assert torch.equal(one.labels, two.labels)

    def test_a_row_is_asked_the_same_alone(self, objective):
        ids = rows()
        whole = asked(objective, ids)
        alone = apply(objective, ids[9:10], None, torch.tensor([9]), seed=5, step=0, vocabulary=WORDS)
        assert torch.equal(whole.ids[9:10], alone.ids)
        assert torch.equal(whole.labels[9:10], alone.labels)

    def test_labels_stay_inside_their_segment(self, objective):
        ids = rows()
        segments = (torch.arange(48) >= 20).long().expand(64, 48)
        question = asked(objective, ids, segments)
        if isinstance(objective, (CLM, MNTP)):  # these ask for the token after
            assert (question.labels[:, 19] == IGNORE).all()
            assert (question.labels[:, -1] == IGNORE).all()

    def test_the_true_tokens_are_left_alone(self, objective):
        ids = rows()
        before = ids.clone()
        asked(objective, ids)
        assert torch.equal(ids, before)

    def test_labels_fit_the_bound(self, objective):
        ids = rows(256, 64)
        assert (asked(objective, ids).labels != IGNORE).sum() <= label_bound(objective, ids.numel())


def test_clm_asks_each_position_for_the_next_token():
    ids = torch.tensor([[5, 6, 7, 8]])
    question = asked(CLM(), ids)
    assert question.causal
    assert question.labels.tolist() == [[6, 7, 8, IGNORE]]


def test_mlm_hides_its_share_of_ordinary_tokens_and_no_special_one():
    ids = rows(400, 64)
    question = asked(MLM(0.4), ids)
    hidden = question.labels != IGNORE
    special = WORDS.special[ids]
    assert not (hidden & special).any()
    share = hidden.sum() / (~special).sum()
    assert abs(share - 0.4) < 0.01
    assert (question.ids[hidden] == 3).all()
    assert torch.equal(question.ids[~hidden], ids[~hidden])
    assert torch.equal(question.labels[hidden], ids[hidden])
    assert not question.causal


def test_the_bert_rule_splits_80_10_10_and_draws_only_ordinary_tokens():
    ids = rows(600, 64)
    question = asked(MLM(0.5, replace=(0.8, 0.1, 0.1)), ids)
    hidden = question.labels != IGNORE
    shown, true = question.ids[hidden], ids[hidden]
    assert abs((shown == 3).float().mean() - 0.8) < 0.01
    kept = (shown == true).float().mean()
    assert abs(kept - 0.1 - 0.1 / 96) < 0.01
    drawn = shown[(shown != 3) & (shown != true)]
    assert not WORDS.special[drawn].any()
    assert len(drawn.unique()) > 80


def test_masks_of_a_lower_ratio_are_subsets():
    low, high = (asked(MLM(ratio)).labels != IGNORE for ratio in (0.2, 0.5))
    assert (low <= high).all()
    assert low.sum() < high.sum()


def test_epochs_and_seeds_mask_differently():
    ids = rows()
    base = asked(MLM(0.4), ids).labels
    assert not torch.equal(base, asked(MLM(0.4), ids, first=1000).labels)
    assert not torch.equal(base, asked(MLM(0.4), ids, seed=6).labels)


def test_mntp_asks_one_position_earlier_and_never_hides_the_first():
    ids = rows()
    segments = (torch.arange(48) >= 20).long().expand(64, 48)
    question = asked(MNTP(0.4), ids, segments)
    changed = question.ids != ids
    assert not changed[:, 0].any()
    assert not changed[:, 20].any()
    where = (question.labels != IGNORE).nonzero()
    for row, at in where.tolist():
        assert question.ids[row, at + 1] == 3
        assert question.labels[row, at] == ids[row, at + 1]
    assert changed.sum() == len(where)
