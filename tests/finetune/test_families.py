"""The families of tasks: losses as in plain words, small data learned by heart, and nothing learned from chance."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from biphase import CATALOG
from biphase.attention import AttentionPattern
from biphase.export.tuned import KINDS
from biphase.finetune.families import CLASSES, family_of
from biphase.finetune.trial import FineTuner, batches_of, rows_of, score
from biphase.objectives import IGNORE
from biphase.specs import Finetune
from biphase.specs.tasks import FAMILIES, FAMILY_OF, LabelledText
from biphase.tasks.load import Examples, Library, Pair, Search, load

SPEC = Finetune((CATALOG["sources-mini"],))
PROTOCOLS = pytest.mark.parametrize("protocol", ["paper", "standard"])
TOKENS = pytest.mark.parametrize(
    "tokens", [10_000, 100, 1], ids=["one micro-batch", "several", "a text each"]
)


@pytest.fixture(scope="module")
def shipped():
    """The examples of the tasks that ship with the package, each read once."""
    return {name: load(task, documents="all") for name, task in CATALOG.items() if name.endswith("-mini")}


# As every part the same few examples, the short ones: what is learned is what is asked.


def few(name, shipped, count=8):
    """Some examples of a task that ships, the same in each part."""
    rows = shipped[name].train
    if name == "sources-mini":  # as many of each label
        short = sorted(rows, key=lambda one: len(one.text))
        rows = [one for label in range(3) for one in [each for each in short if each.label == label][:4]]
        count = 12
    elif name == "wikiann-mini":
        rows = [one for one in rows if any(one.tags)]
    else:
        rows = sorted(rows, key=lambda one: len(one.context if name == "squadshifts-mini" else one.document))
    some = rows[:count]
    if name != "scifact-mini":
        return Examples(some, some, some)
    documents = tuple(dict.fromkeys(one.document for one in some))
    library = Library(tuple(map(str, range(len(documents)))), documents)
    judged = tuple({documents.index(one.document): 1} for one in some)
    part = Search(library, tuple(map(str, range(count))), tuple(one.query for one in some), judged)
    return Examples(some, part, part)


def all_text(examples):
    """Everything that is read, for a vocabulary of its own."""
    return [f"{one.query}\n{one.document}" if isinstance(one, Pair) else one.text for one in examples.train]


def family(name, examples, tokenization, *, protocol="paper", **fields):
    return family_of(replace(CATALOG[name], **fields), examples, tokenization, protocol=protocol)


# ---------------------------------------------------------------- losses


def alone(model, ids):
    """What the head says of each token of one text, without a pack."""
    ids = torch.from_numpy(np.asarray(ids, np.int64))[None]
    hidden = model.encoder(ids, torch.arange(ids.shape[1])[None], AttentionPattern(False))[0]
    return model.head.out(hidden)


def loss_of(some, tuner, step=0, seed=0):
    """The mean loss of a step, as the loop makes it of micro-batches."""
    batches = batches_of(some, step, seed, tuner.options)
    model = tuner.fresh(some, seed)
    with torch.no_grad():
        total = sum(some.loss_sum(model, batch).item() for batch in batches)
    return total / sum(batch.count for batch in batches), len(batches)


@pytest.mark.parametrize(
    ("name", "protocol"),
    [("wikiann-mini", "paper"), ("squadshifts-mini", "paper"), ("squadshifts-mini", "standard")],
    ids=["tags", "in the answer or not", "start and end"],
)
@TOKENS
@torch.no_grad()
def test_the_loss_of_a_step_is_that_of_its_texts_alone_whatever_the_micro_batches(
    name, protocol, tokens, shipped, tokenization_of, encoder, options
):
    examples = few(name, shipped, 10)
    tokenization = tokenization_of(
        all_text(examples), length=56, vocab=400
    )  # a context takes several windows
    some = family(name, examples, tokenization, protocol=protocol, batch=9)
    tuner = FineTuner(encoder(vocab=400), options(train_tokens=tokens))
    loss, count = loss_of(some, tuner)
    assert (count == 1) == (tokens == 10_000)

    model, rows = tuner.fresh(some, 0), rows_of(some, 0, 0)
    train = some.encoded["train"]
    logits = [alone(model, train.ids[row]) for row in rows]
    if protocol == "standard":  # two choices among the tokens of a window
        padded = torch.full((len(rows), 70, 2), -1e9)
        for place, one in enumerate(logits):
            padded[place, : len(one)] = one
        bounds = torch.from_numpy(train.bounds[rows])
        assert 0 < (bounds > 0).all(1).sum() < 9, "some windows hold the answer, some do not"
        wanted = sum(F.cross_entropy(padded[..., side], bounds[:, side]) for side in (0, 1)) / 2
    else:  # a mean over all labelled tokens of the step
        labels = train.labels if name == "wikiann-mini" else train.inside
        right = torch.from_numpy(np.concatenate([labels[row] for row in rows]).astype(np.int64))
        assert (right == IGNORE).any() == (name == "wikiann-mini"), "a sentence's end has no tag"
        wanted = F.cross_entropy(torch.cat(logits), right, ignore_index=IGNORE)
    assert loss == pytest.approx(wanted.item(), abs=1e-5)


def test_every_family_has_its_class_here_and_in_the_export():
    assert CLASSES.keys() == KINDS.keys() == FAMILY_OF.keys()


# ---------------------------------------------------------------- by heart, and what is kept of it


@PROTOCOLS
@pytest.mark.parametrize(
    ("name", "steps", "lr", "before", "after"),
    [
        ("sources-mini", 40, 5e-3, {"accuracy": 0.7}, {"accuracy": 0.99}),
        ("wikiann-mini", 40, 1e-2, {"entity_f1": 0.3}, {"entity_f1": 0.9, "sentence_f1": 0.9}),
        ("squadshifts-mini", 60, 5e-3, {"f1": 0.5}, {"f1": 0.8, "exact_match": 0.8, "token_f1": 0.8}),
        ("scifact-mini", 40, 5e-3, {"ndcg@10": 0.9}, {"ndcg@10": 0.95, "mrr@10": 0.95}),
    ],
)
def test_a_few_examples_are_learned_by_heart(
    name, steps, lr, before, after, protocol, shipped, tokenization_of, encoder, options
):
    examples = few(name, shipped)
    vocab = 400 if name in ("sources-mini", "wikiann-mini") else 500
    tokenization = tokenization_of(all_text(examples), vocab=vocab)
    batch = len(examples.train)
    some = family(name, examples, tokenization, protocol=protocol, batch=batch, steps=steps)
    facts = FAMILIES[some.task.family]
    assert some.metric == facts.selects[protocol]
    assert set(some.baselines["trivial"]) == set(facts.metrics)
    tuner = FineTuner(encoder(vocab=vocab, width=64 if name == "squadshifts-mini" else 32), options())
    first = score(tuner.fresh(some, 0).eval(), some, tuner.options)["test"].metrics
    assert all(first[metric] < most for metric, most in before.items())
    model, trained = tuner.finetune(some, SPEC, lr=lr, seed=0)
    assert trained.skipped == 0
    for scored in score(model, some, tuner.options).values():
        assert all(scored.metrics[metric] > least for metric, least in after.items())
        assert set(scored.metrics) == set(facts.metrics)


# ---------------------------------------------------------------- collapse and baselines


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("sources-mini", "label"),
        ("wikiann-mini", "O"),
        ("squadshifts-mini", "no answer"),
        ("scifact-mini", "same"),
    ],
)
def test_a_model_that_says_the_same_of_every_example_is_flagged(
    name, said, shipped, tokenization_of, encoder, options
):
    examples = few(name, shipped)
    some = family(name, examples, tokenization_of(all_text(examples), vocab=400))
    tuner = FineTuner(encoder(vocab=400), options())
    model = tuner.fresh(some, 0).eval()
    assert not score(model, some, tuner.options)["test"].constant
    with torch.no_grad():
        if name == "scifact-mini":  # every query has the same embedding
            for weight in model.encoder.parameters():
                weight.zero_()
        else:  # one label has all the votes; of question answering: not in the answer
            model.head.out.weight.zero_()
            model.head.out.bias.copy_(torch.arange(len(model.head.out.bias), 0.0, -1.0))
    for scored in score(model, some, tuner.options).values():
        wanted = some.task.form.labels[0] if said == "label" else said
        assert wanted in scored.constant
        if name == "sources-mini":
            assert scored.metrics["mcc"] == 0


@pytest.mark.parametrize(
    ("name", "metric", "what", "scores"),
    [
        ("sources-mini", "accuracy", "TF-IDF and logistic regression", (0.9, 1.0)),
        ("wikiann-mini", "entity_f1", "the most frequent tag of each word", (0.02, 0.2)),
        ("scifact-mini", "ndcg@10", "BM25", (0.7, 1.0)),
    ],
)
def test_what_words_alone_achieve_is_a_baseline(name, metric, what, scores, shipped, tokenization):
    some = family(name, shipped[name], tokenization)
    found = some.baselines["lexical"]
    assert found.keys() == some.baselines["trivial"].keys()
    assert found[metric]["what"] == what
    both = [found[metric][part] for part in ("validation", "test")]
    assert scores[0] <= min(both) <= max(both) <= scores[1]
    assert found[metric]["test"] > some.baselines["trivial"][metric]["test"]


def trivial(some, metric, part="test"):
    one = some.baselines["trivial"][metric]
    return one["what"], one[part]


def test_the_baseline_of_labels_is_the_better_of_the_majority_of_the_training_part_and_chance(tokenization):
    def of(*counts):
        return [
            LabelledText(f"a dog {number}", label)
            for label, count in enumerate(counts)
            for number in range(count)
        ]

    task = CATALOG["sources-mini"]
    labels = task.form.labels
    some = family_of(task, Examples(of(1, 7, 2), of(2, 5, 3), of(6, 3, 1)), tokenization, protocol="paper")
    assert trivial(some, "accuracy") == (f"majority class: {labels[1]}", pytest.approx(0.3)), (
        "test is not asked"
    )
    assert trivial(some, "accuracy", "validation")[1] == pytest.approx(0.5)
    what, found = trivial(some, "macro_f1", "validation")
    assert what == "chance", "three labels are guessed better than one of them is"
    assert found == pytest.approx(np.mean([2 * n / 3 / (10 / 3 + n) for n in (2, 5, 3)]))
    assert trivial(some, "mcc")[1] == 0
    rare = family_of(task, Examples(of(5, 0, 0), of(0, 5, 5), of(1, 1, 1)), tokenization, protocol="paper")
    assert trivial(rare, "accuracy") == ("chance", pytest.approx(1 / 3))
    json.dumps(some.baselines, allow_nan=False)
