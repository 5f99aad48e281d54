"""Regression, several labels a text, and choices: losses of transformers, metrics, learning and resuming."""

import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import f1_score
from transformers import EuroBertForSequenceClassification

from biphase import CATALOG, Finetune
from biphase.fast.trunk import FusedTrunk
from biphase.finetune.encoder import per_text
from biphase.finetune.families import family_of
from biphase.finetune.trial import Checkpoints, FineTuner, batches_of, rows_of, score
from biphase.store import Store
from biphase.tasks.load import Examples
from biphase.tasks.metrics import entity_f1

SPEC = Finetune((CATALOG["sources-mini"],))
KEY = "e" * 32


EVERY = pytest.mark.parametrize("family", ["SR", "ML", "MC"])


def transformers_loss(some, model, problem, labels):
    """The loss of transformers' class with our weights, on the first step's texts in one padded batch."""
    config = model.encoder.trunk.config
    config.problem_type, config.num_labels, config.classifier_pooling = problem, labels, "mean"
    config.pad_token_id = 0
    theirs = EuroBertForSequenceClassification._from_config(config, attn_implementation="eager").eval()
    theirs.model.load_state_dict(model.encoder.trunk.state_dict())
    theirs.dense.load_state_dict(model.head.dense.state_dict())
    theirs.classifier.load_state_dict(model.head.out.state_dict())
    rows = rows_of(some, 0, 0)
    texts = [torch.from_numpy(some.ids["train"][row].astype(np.int64)) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(texts, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(one) for one in texts], batch_first=True)
    gold = torch.from_numpy(some.targets[rows]).float()
    return theirs(input_ids=ids, attention_mask=mask, labels=gold).loss.item()


@pytest.mark.parametrize("tokens", [10_000, 60], ids=["one micro-batch", "several"])
@torch.no_grad()
def test_the_loss_is_that_of_transformers_for_the_problem_type(tokens, made, encoder, options):
    for family, problem, labels in (("SR", "regression", 1), ("ML", "multi_label_classification", 3)):
        some = made(family, batch=9)
        tuner = FineTuner(encoder(), options(train_tokens=tokens))
        model = tuner.fresh(some, 0)
        batches = batches_of(some, 0, 0, tuner.options)
        assert (len(batches) > 1) == (tokens == 60)
        loss = sum(some.loss_sum(model, batch).item() for batch in batches)
        loss /= sum(batch.count for batch in batches)
        assert loss == pytest.approx(transformers_loss(some, model, problem, labels), rel=1e-4)


@pytest.mark.parametrize(
    ("family", "best", "chance", "most"),
    [("SC", 0.9, 0.5, 0.18), ("SR", 0.8, 0.0, 0.37), ("ML", 0.85, 0.5, 0.18), ("MC", 0.95, 0.36, 0.18)],
)
def test_true_targets_are_learned_and_random_ones_are_not(family, best, chance, most, made, encoder, options):
    """Random targets: 3.7 standard deviations of a score of 100 examples on either side of a guess."""
    for random_targets in (False, True):
        some = made(family, random_targets=random_targets, batch=16, steps=60)
        tuner = FineTuner(encoder(), options())
        model, trained = tuner.finetune(some, SPEC, lr=5e-3, seed=0)
        assert trained.skipped == 0
        for scored in score(model, some, tuner.options).values():
            found = scored.metrics[some.metric]
            assert abs(found - chance) < most if random_targets else found > best


@EVERY
def test_a_dataset_without_a_train_part_is_scored_with_the_model_of_another_task(
    family, made, encoder, options
):
    some = made(family, batch=16, steps=2)
    other = made(family, train=0)
    assert other.inputs[0].flat.size == 0
    tuner = FineTuner(encoder(), options())
    model, _ = tuner.finetune(some, SPEC, lr=5e-3, seed=0)
    for part, scored in score(model, other, tuner.options).items():
        assert set(scored.metrics) == set(some.form.metrics)
        assert other.baselines["trivial"][other.metric][part] is not None
    assert "lexical" not in other.baselines


# ---------------------------------------------------------------- regression


def test_correlations_follow_from_the_predictions_and_one_number_for_all_texts_is_flagged(
    made, encoder, options
):
    some = made("SR")
    tuner = FineTuner(encoder(), options())
    model = tuner.fresh(some, 0).eval()
    scored = score(model, some, tuner.options)["test"]
    said, gold = scored.values["number_pairs"].T
    assert np.array_equal(said, scored.predictions["predictions"])
    assert gold.tolist() == some.gold["test"].tolist()
    pearson, spearman = stats.pearsonr(said, gold)[0], stats.spearmanr(said, gold)[0]
    assert scored.metrics == pytest.approx(
        {"pearson": pearson, "spearman": spearman, "pearson_spearman": (pearson + spearman) / 2}, abs=1e-6
    )
    assert not scored.constant
    with torch.no_grad():
        model.head.out.weight.zero_()
        model.head.out.bias.fill_(1.5)
    scored = score(model, some, tuner.options)["test"]
    assert scored.constant == "1.5"
    assert set(scored.metrics.values()) == {0.0}


def test_equal_pairs_are_nearer_by_words_than_unlike_ones(tokenization):
    form = CATALOG["stsb"].form
    pairs = [("a dog sees birds", "a dog sees birds", 5.0), ("a dog", "the garden", 0.0), ("a b", "a c", 3.0)]
    rows = [form.example(list(row), "here") for row in pairs * 3]
    some = family_of(replace(CATALOG["stsb"]), Examples(rows, rows, rows), tokenization, protocol="paper")
    assert some.baselines["lexical"]["spearman"]["test"] > 0.9


# ---------------------------------------------------------------- several labels


def test_scores_of_label_sets_are_those_of_scikit_learn(made, encoder, options):
    some = made("ML")
    tuner = FineTuner(encoder(), options())
    model = tuner.fresh(some, 0).eval()
    scored = score(model, some, tuner.options)["test"]
    said, gold = scored.predictions["predictions"], some.gold["test"]
    assert said.shape == gold.shape == (100, 3)
    assert scored.metrics["micro_f1"] == pytest.approx(f1_score(gold, said, average="micro", zero_division=0))
    assert scored.metrics["macro_f1"] == pytest.approx(
        f1_score(gold, said, average="macro", zero_division=np.nan)
    )
    assert entity_f1(scored.values["label_counts"]) == pytest.approx(scored.metrics["micro_f1"])
    with torch.no_grad():
        model.head.out.weight.zero_()
        model.head.out.bias.copy_(torch.tensor([1.0, -1.0, 1.0]))
    assert score(model, some, tuner.options)["test"].constant == "dog, garden"
    trivial = some.baselines["trivial"]["micro_f1"]
    all_labels = f1_score(some.gold["test"], np.ones((100, 3)), average="micro")
    assert trivial == pytest.approx(
        {"what": "all labels", "validation": trivial["validation"], "test": all_labels}
    )
    assert some.baselines["lexical"]["micro_f1"]["test"] > 0.95


# ---------------------------------------------------------------- choices


@pytest.mark.parametrize("tokens", [10_000, 60], ids=["one micro-batch", "several"])
@torch.no_grad()
def test_the_loss_of_choices_is_that_of_a_softmax_over_the_scores_of_each_question(
    tokens, made, encoder, options
):
    some = made("MC", batch=9)
    tuner = FineTuner(encoder(), options(train_tokens=tokens))
    model = tuner.fresh(some, 0).eval()
    batches = batches_of(some, 0, 0, tuner.options)
    assert (len(batches) > 1) == (tokens == 60)
    assert all(len(batch.inputs[0]) == 4 * batch.count for batch in batches), (
        "equal shapes, also of two choices"
    )
    loss = sum(some.loss_sum(model, batch).item() for batch in batches) / 9
    first = np.cumsum(some.counts["train"]) - some.counts["train"]
    scores = per_text(model, some.choices["train"], tuner.options)[:, 0]
    wanted = [
        -scores[first[row] : first[row] + some.counts["train"][row]].log_softmax(0)[
            some.answers["train"][row]
        ]
        for row in rows_of(some, 0, 0)
    ]
    assert loss == pytest.approx(torch.stack(wanted).mean().item(), rel=1e-5)


def test_a_choice_is_the_text_with_the_highest_score_and_the_baseline_is_guessing(made, encoder, options):
    some = made("MC")
    tuner = FineTuner(encoder(), options())
    model = tuner.fresh(some, 0).eval()
    scored = score(model, some, tuner.options)["test"]
    said = scored.predictions["predictions"]
    assert (said < some.counts["test"]).all()
    assert scored.metrics["accuracy"] == pytest.approx((said == some.answers["test"]).mean())
    guess = some.baselines["trivial"]["accuracy"]
    assert guess["validation"] >= np.mean(1 / some.counts["validation"]) - 1e-9
    with torch.no_grad():
        model.head.out.weight.zero_()
    assert score(model, some, tuner.options)["test"].constant == "choice 1"


# ---------------------------------------------------------------- the best epoch


def epochs_of(tuner, some, seed=0, **more):
    """The model with the best epoch, the weights after every epoch, and the summary."""
    after = {}

    def tell(step, steps):
        if step % some.epoch == 0 or step == steps:
            after[step] = {name: value.clone() for name, value in tuner.grid.model.state_dict().items()}

    spec = replace(SPEC, best_epoch=True)
    model, trained = tuner.finetune(some, spec, lr=2e-2, seed=seed, tell=tell, **more)
    return model, after, trained


@pytest.mark.parametrize("fused", [False, True])
def test_the_weights_of_the_epoch_that_is_best_on_validation_are_kept(fused, two_kinds, encoder, options):
    some = two_kinds(train=40, held_out=30, batch=8, steps=23)
    tuner = FineTuner(encoder(), options())
    if fused:
        tuner.encoder.fused = FusedTrunk(tuner.encoder.trunk, torch.float32)
    for seed in range(3):
        model, after, trained = epochs_of(tuner, some, seed)
        assert list(after) == [5, 10, 15, 20, 23]
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        kept_score = score(model, some, tuner.options)["validation"].metrics["accuracy"]
        reached = {}
        for step, weights in after.items():
            model.load_state_dict(weights)
            tuner.encoder.refresh()
            reached[step] = score(model, some, tuner.options)["validation"].metrics["accuracy"]
        best = max(reached, key=reached.__getitem__)  # of equal ones the first
        assert trained.best == (best, kept_score)
        assert all(torch.equal(kept[name], after[best][name]) for name in kept)
        assert trained.steps == 23, "all steps are trained"


def test_the_best_epoch_is_chosen_without_test_examples(two_kinds, encoder, options):
    chance = random.Random(1)
    outcomes = []
    for of_test in ([n % 2 for n in range(30)], [chance.randrange(2) for _ in range(30)]):
        labels = [n % 2 for n in range(70)] + of_test
        some = two_kinds(train=40, held_out=30, batch=8, steps=20, labels=labels)
        model, _, trained = epochs_of(FineTuner(encoder(), options()), some)
        outcomes.append((trained.best, {name: value.clone() for name, value in model.state_dict().items()}))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(outcomes[0][1][name], outcomes[1][1][name]) for name in outcomes[0][1])


@pytest.mark.parametrize("at", [3, 7, 12, 20])
def test_stopped_before_or_after_the_best_epoch_it_goes_on_to_the_same_bits(
    at, two_kinds, encoder, options, tmp_path
):
    some = two_kinds(train=40, held_out=30, batch=8, steps=20)
    store, asked = Store(tmp_path), iter(range(99))
    kept = Checkpoints(store, KEY, steps=99 if at < 20 else 20)
    stop = {"stop": lambda: next(asked) >= at - 1} if at < 20 else {}
    model, _, trained = epochs_of(FineTuner(encoder(), options()), some, checkpoints=kept, **stop)
    assert trained.steps == at
    if at == 20:  # trained, and stopped while it was scored
        tuner = FineTuner(encoder(), options())
        model, _, trained = epochs_of(tuner, some)
        assert kept.save(*tuner.grid.tensors(), trained.about())
    again = Checkpoints(store, KEY, steps=99)
    model, _, trained = epochs_of(FineTuner(encoder(), options()), some, checkpoints=again)
    whole, _, wanted = epochs_of(FineTuner(encoder(), options()), some)
    assert (trained.best, trained.losses) == (wanted.best, wanted.losses)
    assert all(torch.equal(value, whole.state_dict()[name]) for name, value in model.state_dict().items())
