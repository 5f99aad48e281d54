"""Contrastive stages: the loss against a plain reference, which pairs a step has, resuming, and keys."""

import json
import math

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from biphase import CATALOG, CLM, MLM, WSD, Config, Contrastive, Pairs, Pretrain, Stage
from biphase.attention import AttentionPattern
from biphase.data.shards import Shards
from biphase.data.tokenizer import load_saved
from biphase.errors import DataError, SpecError, StoreError, TrainingError
from biphase.keys import checkpoint_key
from biphase.models.backbone import from_scratch
from biphase.study.plan import identities
from biphase.training.contrastive import PairStream
from biphase.training.distributed import Ranks

ALONE = Ranks(0, 1, torch.device("cpu"))
THINGS = "the cat", "a dog", "our teacher", "the river", "every student", "two birds", "the garden"


def rows(count):
    return [
        {
            "query": f"who sees {THINGS[n % 7]} {n}",
            "positive": f"{THINGS[(n + 1) % 7]} sees {THINGS[n % 7]} {n}",
        }
        for n in range(count)
    ]


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


@pytest.fixture
def pairs(tmp_path):
    return Pairs(str(write(tmp_path / "pairs.jsonl", rows(40))))


@pytest.fixture
def stream_of(tiny_run, shards):
    """Makes the pairs of a run that trains on them."""

    def make(*pairs, budget=4_096, seed=7, **fields):
        objective = Contrastive(pairs, **({"batch": 8, "length": 16, "heldout": 0.0} | fields))
        run = tiny_run("run", Stage(CLM(), 2), Stage(objective, 10), seed=seed)
        return PairStream.of(objective, run, Shards.open(shards), budget=budget, varlen=False)

    return make


@pytest.fixture
def model(tiny_run, shards):
    opened = Shards.open(shards)
    made = from_scratch(tiny_run().start, vocab=opened.vocab, mask_id=opened.mask_id, length=32, seed=1)
    with torch.no_grad():  # at its beginning a model gives all texts nearly the same mean
        for weight in made.parameters():
            weight += 0.3 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(2))
    return made


# ---------------------------------------------------------------- the loss


def reference(model, texts, temperature):
    """InfoNCE by the book: each text alone, then each query against the positives that are not right for it too."""
    ids = load_saved(texts["shards"].tokenizer).model

    def embed(text):
        tokens = torch.tensor(
            [[*ids.encode(text, add_special_tokens=False).ids, texts["shards"].card["eos_id"]]]
        )
        positions = torch.arange(tokens.shape[1])[None]
        hidden = model.encoder(tokens, positions, AttentionPattern(causal=False))
        return F.normalize(hidden[0].mean(0), dim=0)

    queries, positives = ([embed(text) for text in texts[side]] for side in ("queries", "positives"))
    total = torch.zeros(())
    for one, query in enumerate(queries):
        logits = [
            query @ positive / temperature
            for other, positive in enumerate(positives)
            if other == one
            or (
                texts["positives"][other] != texts["positives"][one]
                and texts["queries"][other] != texts["queries"][one]
            )
        ]
        right = query @ positives[one] / temperature
        total = total + torch.stack(logits).logsumexp(0) - right
    return total


@pytest.mark.parametrize("budget", [4_096, 24])
def test_loss_and_gradients_are_those_of_a_plain_reference(model, stream_of, shards, tmp_path, budget):
    records = rows(8)
    records[3]["positive"] = records[5]["positive"]  # the same text for two queries
    records[6]["query"] = records[1]["query"]  # two texts for one query
    source = Pairs(str(write(tmp_path / "some.jsonl", records)))
    stream = stream_of(source, budget=budget, temperature=0.1)
    batch = stream.batch(0, 0, 1)
    assert (len(batch.inputs) > 3) == (budget < 100), "small budgets divide the texts"
    loss = batch.loss_sum(model, ALONE)
    loss.backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    order = stream.at(0)[0]
    texts = {
        side: [records[n][one] for n in order]
        for side, one in (("queries", "query"), ("positives", "positive"))
    }
    expected = reference(model, texts | {"shards": Shards.open(shards)}, 0.1)
    expected.backward()
    assert expected > 1
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    for name, weight in model.named_parameters():
        if weight.grad is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], weight.grad, rtol=1e-3, atol=1e-5)


def test_the_next_word_is_seen_and_texts_do_not_see_each_other(model, stream_of, pairs):
    stream = stream_of(pairs)
    whole = stream.batch(0, 0, 1)
    with torch.no_grad():
        logits = whole.logits(model, ALONE)
        first = whole.inputs[0]
        changed = first.ids.clone()
        last = first.at[(first.owner == 0).nonzero()[-2]]  # the word before the end token of the first text
        changed.view(-1)[last] = (changed.view(-1)[last] + 1) % 300
        inputs = (type(first)(**{**vars(first), "ids": changed}), *whole.inputs[1:])
        others = type(whole)(**{**vars(whole), "inputs": inputs}).logits(model, ALONE)
    moved = logits != others
    assert moved.any()
    text = int((whole.order == 0).nonzero())
    only = np.zeros((8, 8), bool)
    only[(text, slice(None)) if text < 8 else (slice(None), text - 8)] = True
    assert (moved.numpy() <= only).all()


# ---------------------------------------------------------------- the pairs of a step


def test_every_epoch_has_each_pair_once_in_an_order_of_its_own(stream_of, pairs):
    stream = stream_of(pairs)
    epochs = [np.concatenate([stream.at(5 * epoch + step)[0] for step in range(5)]) for epoch in range(3)]
    for one in epochs:
        assert sorted(one) == list(range(40))
    assert len({tuple(one) for one in epochs}) == 3
    assert tuple(stream_of(pairs, seed=8).at(0)[0]) != tuple(epochs[0][:8])


def test_held_out_queries_are_not_trained_on(stream_of, tmp_path):
    records = rows(200) + [{**row, "positive": f"{row['positive']} again"} for row in rows(200)]
    source = Pairs(str(write(tmp_path / "many.jsonl", records)))
    stream = stream_of(source, heldout=0.25)
    assert 60 < len(stream.heldout) < 140
    assert sorted([*stream.trained, *stream.heldout]) == list(range(400))
    queries = [{records[n]["query"] for n in part} for part in (stream.trained, stream.heldout)]
    assert not queries[0] & queries[1]
    assert list(stream.heldout) != sorted(stream.heldout)


def test_sources_follow_each_other_and_a_task_gives_its_training_pairs(stream_of, pairs):
    task = CATALOG["scifact-mini"]
    both = stream_of(pairs, task, batch=4)
    assert len(both.same) == 40 + len(stream_of(task, batch=4).same)
    assert len(stream_of(Pairs(pairs.source, rows=10)).same) == 10


# ---------------------------------------------------------------- training


def test_a_run_on_pairs_learns_them_and_goes_on_with_the_next_rows(tiny_run, train, store, pairs):
    objective = Contrastive(pairs, batch=8, length=16, heldout=0.3)
    stages = Stage(MLM(0.4), 4), Stage(objective, 40), Stage(CLM(), 2)
    job = train(tiny_run("run", *stages, schedule=WSD(3e-3, 2, 0)), 46, store)
    assert job.progress.next_sample == 6 * 8, "a step on pairs reads no rows"
    lines = [line for line in job.meter.lines if line.get("objective") == objective.label]
    losses = [line["loss"] for line in lines]
    assert len(losses) == 40
    assert losses[0] == pytest.approx(math.log(8), abs=0.7)
    assert np.mean(losses[-5:]) < losses[0] - 0.4
    assert lines[-1]["labels"] == 8
    spent = np.diff([line["tokens"] for line in lines])
    assert (spent > 8 * 2 * 4).all()
    assert (spent <= objective.most_tokens).all()
    heldout = [line for line in job.meter.lines if "contrastive" in line.get("heldout", {})]
    assert [line["step"] for line in heldout] == [5, 10, 15, 20, 25, 30, 35, 40]
    assert heldout[-1]["heldout"]["contrastive"] < heldout[0]["heldout"]["contrastive"]
    assert heldout[-1]["accuracy"] > 2 / 8


def test_a_job_on_pairs_that_another_worker_has_published_is_left_as_it_is(tiny_run, train, store, pairs):
    run = tiny_run("run", Stage(CLM(), 2), Stage(Contrastive(pairs, batch=8, length=16), 4))
    train(run, 6, store)
    assert train(run, 6, store).published


# ---------------------------------------------------------------- keys and refusals


def test_random_weights_are_not_trained_on_pairs_first(tiny_run, pairs):
    new = Config("new", {"model_type": "modernbert", "hidden_size": 32})
    for start in (tiny_run().start, new):
        with pytest.raises(SpecError, match="begin with another stage"):
            Pretrain("run", start, "builtin", Stage(Contrastive(pairs, length=16), 4), WSD(1e-3, 0, 0))


def test_a_key_tells_what_the_pairs_are_and_not_where_they_are(tiny_run, store, pairs, tmp_path):
    def key(source, **fields):
        run = tiny_run("run", Stage(CLM(), 2), Stage(Contrastive(source, length=16, **fields), 4))
        return checkpoint_key(run, 4, identities(store))

    (tmp_path / "elsewhere").mkdir()
    copy = Pairs(str(write(tmp_path / "elsewhere" / "pairs.jsonl", rows(40))))
    assert key(pairs) == key(copy)
    changed = rows(40)
    changed[7]["positive"] += "!"
    other = Pairs(str(write(tmp_path / "other.jsonl", changed)))
    others = [
        key(other),
        key((pairs, copy)),
        key(Pairs(pairs.source, rows=39)),
        *(
            key(pairs, **{name: value})
            for name, value in (("batch", 8), ("temperature", 0.1), ("heldout", 0.1))
        ),
    ]
    assert len({key(pairs), *others}) == 7
    task = CATALOG["scifact-mini"]
    assert key(task) == key(type(task)(task.name, task.form, task.source, task.splits, steps=3, batch=9))


def test_pairs_that_changed_since_the_plan_are_refused(tiny_run, job_of, store, pairs, tmp_path):
    run = tiny_run("run", Stage(CLM(), 2), Stage(Contrastive(pairs, batch=8, length=16), 4))
    job = job_of(run, 6, store)
    write(tmp_path / "pairs.jsonl", rows(41))
    with pytest.raises((DataError, StoreError), match=r"pairs\.jsonl.*planned") as caught:
        job.train()
    assert "\n" not in str(caught.value)
    assert not (store.checkpoints / job.key).exists()


@pytest.mark.parametrize(
    ("records", "fields", "facts"),
    [
        (rows(6), {}, r"6 pairs.*batch=3"),
        ([], {}, "no rows"),
        ([{"query": "who?", "positive": ""}], {}, r"pairs\.jsonl.*positive"),
        ([{"asked": "who?", "positive": "the cat"}], {}, r"query\|anchor\|question"),
    ],
)
def test_pairs_that_cannot_be_trained_on_are_refused_in_one_line(stream_of, tmp_path, records, fields, facts):
    with pytest.raises(DataError, match=facts) as caught:
        stream_of(Pairs(str(write(tmp_path / "pairs.jsonl", records))), **fields)
    assert "\n" not in str(caught.value)


def test_more_processes_than_pairs_are_refused(tiny_run, job_of, store, pairs):
    run = tiny_run("run", Stage(CLM(), 2), Stage(Contrastive(pairs, batch=2, length=16), 4))
    job = job_of(run, 6, store)
    job.load()
    job.ranks = Ranks(0, 3, torch.device("cpu"))
    with pytest.raises(TrainingError, match="3 processes cannot share 2 pairs"):
        job.pairs.clear() or job._load_pairs()
