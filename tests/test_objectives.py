"""Objectives: labels stay inside their segment, masks follow from counters and have their share."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from biphase.errors import SpecError
from biphase.objectives import IGNORE, Vocabulary, apply, assign, label_bound
from biphase.randomness import hash32, hash_samples, permute, salt
from biphase.records import decode, encode
from biphase.specs import CLM, MLM, MNTP, Cosine, Linear, Mix, Uniform

VOCABULARY = Vocabulary.of(100, mask_id=3, special_ids=(0, 1, 2))
EVERY = [
    CLM(),
    MLM(0.2),
    MLM(0.5, replace=(0.8, 0.1, 0.1)),
    MLM(Linear(0.4, 0.2, steps=10)),
    MNTP(0.4),
    MLM(Uniform(0, 1), replace=(0.8, 0.1, 0.1), weight="1/ratio"),
    MNTP(Uniform(0.2, 0.6)),
    MLM(0.3, masks="static"),
]


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
    def test_a_row_is_masked_the_same_alone(self, objective):
        ids = rows()
        whole = inputs_of(objective, ids)
        assert torch.equal(ids, rows()), "the tokens are not changed in place"
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

    def test_labels_fit_the_bound(self, objective):
        ids = rows(256, 64)
        assert 0 < (inputs_of(objective, ids).labels != IGNORE).sum() <= label_bound(objective, *ids.shape)


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


# ---------------------------------------------------------------- drawn ratios


def test_a_drawn_ratio_is_uniform_over_rows_and_the_share_that_is_masked():
    ids = rows(1_000, 400) + 0
    ids[ids == 1] = 5  # no special token
    masked = inputs_of(MLM(Uniform(0.2, 0.8)), ids).labels != IGNORE
    shares = masked.float().mean(1).sort().values
    wanted = 0.2 + 0.6 * (torch.arange(1_000) + 0.5) / 1_000
    assert (shares - wanted).abs().max() < 0.06
    drawn = 0.2 + 0.6 * hash_samples(5, "ratio", torch.arange(1_000)).double() / 2**32
    apart = (masked.float().mean(1) - drawn).abs()
    assert (apart < 5 * (drawn * (1 - drawn) / 400).sqrt()).all()


@pytest.mark.parametrize("kind", [MLM, MNTP])
def test_rows_weighted_by_one_over_their_ratio_weigh_alike_in_expectation(kind):
    ids = rows(4_000, 64)
    segments = (torch.arange(64) >= 20).long().expand(4_000, 64)
    inputs = inputs_of(kind(Uniform(0.1, 1), weight="1/ratio"), ids, segments)
    open_to_masks = ~VOCABULARY.special[ids]
    if kind is MNTP:
        open_to_masks[:, [0, 20]] = False
    assert inputs.mass == open_to_masks.sum()
    drawn = 0.1 + 0.9 * hash_samples(5, "ratio", torch.arange(4_000)).double() / 2**32
    torch.testing.assert_close(inputs.weights, (1 / drawn).float())
    summed = ((inputs.labels != IGNORE) * inputs.weights[:, None]).sum()
    assert summed == pytest.approx(inputs.mass, rel=0.02)
    assert inputs_of(kind(Uniform(0.1, 1)), ids).weights is None


def test_labels_of_drawn_ratios_fit_the_bound_and_fill_most_of_it():
    objective = MLM(Uniform(0, 1))
    ids = rows(16, 128)
    ids[ids == 1] = 5
    counts = [int((inputs_of(objective, ids, first=16 * n).labels != IGNORE).sum()) for n in range(200)]
    bound = label_bound(objective, 16, 128)
    spread = math.sqrt(16 * (128**2 / 12 + 128 / 6))
    assert max(counts) <= bound <= 1024 + 5 * spread + 128
    assert max(counts) > 1024 + spread, "the ratios of a batch differ from those of the next"


# ---------------------------------------------------------------- words and spans


CONTINUES = [number % 3 == 0 and number > 3 for number in range(100)]
WORDS = Vocabulary.of(100, mask_id=3, special_ids=(0, 1, 2), continues=CONTINUES)


def masked_plainly(objective, ids, segments, samples, seed):
    """The masked tokens, token by token."""
    length, masked = ids.shape[1], torch.zeros_like(ids, dtype=torch.bool)
    bits, spans = (hash32(seed, purpose, samples, length).tolist() for purpose in ("mask", "span"))
    for row, tokens in enumerate(ids.tolist()):
        start = 0
        for at, token in enumerate(tokens):
            new = at == 0 or (segments is not None and segments[row, at] != segments[row, at - 1])
            first = new
            if objective.unit == "word":
                new = new or not CONTINUES[token] or tokens[at - 1] < 4
            elif objective.unit == "span":
                new = new or spans[row][at] < int(2**32 / objective.mean_span)
            start = at if new or objective.unit == "token" else start
            hit = bits[row][start] < int(objective.ratio * 2**32)
            masked[row, at] = hit and token > 3 and not (objective.shifted and first)
    return masked


@settings(deadline=None, max_examples=30)
@example(MLM, "word", 0.5, 3, 7, True)
@example(MNTP, "span", 0.5, 5, 7, True)
@given(
    st.sampled_from([MLM, MNTP]),
    st.sampled_from(["token", "word", "span"]),
    st.floats(0.05, 0.9),
    st.floats(1, 6),
    st.integers(0, 10**6),
    st.booleans(),
)
def test_units_are_masked_as_a_plain_reference_masks_them(kind, unit, ratio, mean_span, first, chunks):
    objective = kind(ratio, unit=unit, **({"mean_span": mean_span} if unit == "span" else {}))
    ids, samples = rows(4, 48, seed=first), torch.arange(first, first + 4)
    segments = (torch.arange(48) >= 20).long().expand(4, 48) if chunks else None
    inputs = apply(objective, ids, segments, samples, seed=5, step=0, vocabulary=WORDS)
    wanted = masked_plainly(objective, ids, segments, samples, 5)
    assert torch.equal(inputs.ids, ids.masked_fill(wanted, 3))


@pytest.mark.parametrize("objective", [MLM(0.3, unit="word"), MLM(0.3, unit="span", mean_span=4)], ids=str)
def test_the_ratio_of_units_holds_in_expectation_and_labels_fit_the_bound(objective):
    ids = rows(2_000, 64)
    samples = torch.arange(2_000)
    masked = apply(objective, ids, None, samples, seed=5, step=0, vocabulary=WORDS).labels != IGNORE
    ordinary = ~VOCABULARY.special[ids]
    assert (masked.sum() / ordinary.sum()).item() == pytest.approx(0.3, abs=0.012)
    assert max(masked.view(125, -1).sum(1)) <= label_bound(objective, 16, 64)
    lower = apply(replace(objective, ratio=0.1), ids, None, samples, seed=5, step=0, vocabulary=WORDS)
    assert ((lower.labels != IGNORE) <= masked).all(), "masks of a lower ratio are subsets"


# ---------------------------------------------------------------- mixtures

OBJECTIVES = st.sampled_from(EVERY)
SHARES = st.one_of(
    st.integers(1, 20).map(float), st.builds(Linear, st.floats(0.1, 1), st.floats(0, 1), st.integers(1, 30))
)
MIXTURES = st.dictionaries(OBJECTIVES, SHARES, min_size=2, max_size=4).filter(
    lambda shares: sum(getattr(share, "last", share) for share in shares.values()) > 0.01
)


@given(MIXTURES)
def test_a_mixture_read_back_is_the_same_mixture_in_any_order(shares):
    mix = Mix(shares)
    assert decode(encode(mix)) == decode(encode(decode(encode(mix)))) == mix
    assert Mix(dict(reversed(shares.items()))) == mix


def test_objectives_of_one_label_are_mixed_in_one_order():
    falling = MLM(Linear(0.4, 0.1, steps=10)), MLM(Cosine(0.4, 0.1, steps=10))
    assert falling[0].label == falling[1].label
    assert Mix({falling[0]: 1, falling[1]: 2}) == Mix({falling[1]: 2, falling[0]: 1})
    with pytest.raises(SpecError, match="shares"):
        Mix(None)


def plainly(mix, first, count, *, seed, step):
    """The objective of each row of a step, row by row."""
    offset = (int(hash_samples(seed, "mix/offset", torch.tensor([first]))) + 0.5) / 2**32
    found = {}
    for place, row in enumerate(permute(torch.arange(count), count, salt(seed, "mix", first)).tolist()):
        point, at = (place + offset) / count, 0
        ends = [sum(part.share for part in mix.parts_at(step)[: n + 1]) for n in range(len(mix.shares))]
        while at < len(ends) - 1 and point >= ends[at]:
            at += 1
        found[first + row] = mix.objectives[at]
    return found


@settings(deadline=None)
@given(MIXTURES, st.integers(0, 10**9), st.integers(1, 40), st.integers(0, 99), st.integers(0, 40))
def test_rows_are_assigned_as_a_plain_reference_assigns_them(shares, first, count, seed, step):
    mix = Mix(shares)
    assigned = assign(mix, first, count, seed=seed, step=step)
    found = {sample: each.objective for each in assigned for sample in each.samples.tolist()}
    assert sorted(found) == list(range(first, first + count))
    assert found == plainly(mix, first, count, seed=seed, step=step)
    for each, part in zip(assigned, mix.parts_at(step), strict=True):
        assert abs(len(each.samples) - part.share * count) < 1 + 1e-6


def test_shares_that_divide_the_rows_are_exact_in_every_step_and_others_on_average():
    def counts(shares, rows):
        steps = (assign(Mix(shares), first * rows, rows, seed=3, step=0) for first in range(2_000))
        return torch.tensor([[len(each.samples) for each in step] for step in steps])

    exact = counts({CLM(): 3, MNTP(0.3): 1}, 8)
    assert (exact == torch.tensor([6, 2])).all()
    between = counts({CLM(): 63, MLM(0.4): 1}, 16)
    assert set(between[:, 1].tolist()) == {0, 1}
    assert between.float().mean(0)[1] == pytest.approx(0.25, abs=0.04)


def test_a_terms_weight_is_its_share_of_the_rows_times_its_own():
    mix = Mix({CLM(): 3, MLM(0.4): 1}, weights={CLM(): 2})
    causal, masked = (each.term for each in assign(mix, 0, 8, seed=0, step=0))
    assert (causal.number, causal.terms, causal.weight) == (0, 2, 1.5)
    assert (masked.number, masked.terms, masked.weight) == (1, 2, 0.25)
    by_label = Mix({CLM(): 3, MLM(0.4): 1}, weights={CLM(): 2}, mean_over="labels")
    terms = [each.term for each in assign(by_label, 0, 8, seed=0, step=0)]
    assert [(term.number, term.terms, term.weight) for term in terms] == [(0, 1, 2.0), (0, 1, 1.0)]
