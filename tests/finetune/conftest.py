"""Shared by the tests of fine-tuning: tiny encoders, tokens, and small datasets made in memory."""

from __future__ import annotations

import random

import pytest
import torch
from common import OBJECTS, SUBJECTS, VERBS
from families import tiny
from transformers import BertConfig, BertModel

from biphase.attention import NAME
from biphase.data.tokenizer import load_saved, train
from biphase.finetune.encoder import TuningOptions
from biphase.finetune.families import family_of
from biphase.models.encoder import Encoder, encoder_from_hub
from biphase.specs import BPE, Choose, Classify, Corpus, Hub, MultiLabel, Regress, Task
from biphase.specs.tasks import LabelledText
from biphase.tasks.encode import Tokenization
from biphase.tasks.load import Examples


@pytest.fixture
def options():
    """Makes settings for this CPU: `options(train_tokens=64)`."""

    def make(precision="fp32", *, train_tokens=4_096, score_tokens=4_096, varlen=False):
        return TuningOptions(torch.device("cpu"), precision, varlen, train_tokens, score_tokens)

    return make


@pytest.fixture
def encoder():
    """Makes small EuroBERTs, their weights a function of the seed."""

    def make(*, vocab=320, width=32, layers=2, context=512, seed=0):
        fields = {
            "vocab_size": vocab, "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
            "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": context,
        }  # fmt: skip
        trunk = tiny.trunk("eurobert", seed=seed, **fields)
        trunk.set_attn_implementation(NAME)
        return Encoder(trunk, context=context)

    return make


@pytest.fixture
def dropping(tmp_path):
    """Makes a BERT with dropout, so that its draws count too."""
    torch.manual_seed(4)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    BertModel(BertConfig(vocab_size=320, hidden_dropout_prob=0.2, **shape)).save_pretrained(tmp_path / "bert")
    return lambda: encoder_from_hub(Hub(str(tmp_path / "bert")))


@pytest.fixture(scope="session")
def tokenization(shards):
    """How a model trained on the tiny corpus reads."""
    saved = load_saved(shards / "tokenizer")
    return Tokenization(saved.model, (), (saved.special.eos,), 64, "tiny")


@pytest.fixture(scope="session")
def tokenization_of():
    """Makes a tokenization whose vocabulary is trained on the texts themselves."""

    def make(texts, *, length=256, vocab=900):
        made = train(Corpus("mine", "./x", BPE(vocab)), texts, lambda text: None)
        return Tokenization(made.model, (), (made.special.eos,), length, "mine")

    return make


def sentence(number: int, label: int) -> LabelledText:
    """Of one to five clauses; label 1 has nothing but a dog in it, label 0 no dog at all."""
    clauses = []
    for k in range(1 + number % 5):
        subject = "a dog" if label else SUBJECTS[(number * 7 + k) % 6].replace("a dog", "a hen")
        clauses.append(f"{subject} {VERBS[(number * 3 + k) % 5]} {OBJECTS[(number + k * k) % 6]}")
    return LabelledText(f"{'. '.join(clauses)}. {number * 7919 % 10007}", label)


@pytest.fixture(scope="session")
def two_kinds(tokenization):
    """Makes a task of telling two kinds of sentences apart: `two_kinds(train=40, batch=8, steps=5)`."""

    def make(*, train=40, held_out=20, labels=None, protocol="paper", **fields):
        kinds = [number % 2 for number in range(train + 2 * held_out)]
        texts = [sentence(number, kind) for number, kind in enumerate(kinds)]
        if labels is not None:  # others than the texts say
            texts = [LabelledText(text.text, label) for text, label in zip(texts, labels, strict=True)]
        parts = texts[:train], texts[train : train + held_out], texts[train + held_out :]
        task = Task("kinds", Classify("{text}", ("other", "dog")), "./nowhere", **fields)
        return family_of(task, Examples(*parts), tokenization, protocol=protocol)

    return make


# ---------------------------------------------------------------- tasks of texts, made in memory


WORDS = [
    "the", "cat", "sees", "a", "mountain", "and", "likes", "garden", "every", "student", "paints", "birds",
]  # fmt: skip


def text(number):
    """Some words, of which a share is "dog"."""
    draw = random.Random(number)
    share = draw.random()
    return " ".join("dog" if draw.random() < share else draw.choice(WORDS) for _ in range(20))


def family_with(name, form, row, tokenization, train=64, held_out=100, **fields):
    rows = [form.example(row(number), "here") for number in range(train + 2 * held_out)]
    parts = Examples(rows[:train], rows[train : train + held_out], rows[train + held_out :])
    return family_of(Task(name, form, "./nowhere", **fields), parts, tokenization, protocol="standard")


def regression(tokenization, *, random_targets=False, columns=1, **fields):
    """Rate texts by how often they say "dog", or by chance."""
    form = Regress("{one}" if columns == 1 else "A: {one}\nB: {other}", "rating")

    def row(number):
        said = text(number)
        rating = random.Random(-number - 1).random() * 4 if random_targets else said.split().count("dog") / 5
        return [*[said, text(number + 10_000)][:columns], rating]

    return family_with("ratings", form, row, tokenization, **fields)


def multilabel(tokenization, *, random_targets=False, **fields):
    """Say which of three words a text has, or a chance set of labels."""
    form = MultiLabel("{one}", ("dog", "cat", "garden"))

    def row(number):
        draw = random.Random(number)
        there = [name for name in form.labels if draw.random() < 0.5]
        said = [draw.choice(("sees", "likes", "paints")) for _ in range(3)] + there
        draw.shuffle(said)
        gold = [name for name in form.labels if draw.random() < 0.5] if random_targets else there
        return [" ".join(said), gold]

    return family_with("words", form, row, tokenization, **fields)


def choices(tokenization, *, random_targets=False, fewer=True, **fields):
    """Find the choice with a dog among two to four, or one by chance."""
    form = Choose("{question} {choice}", answer="answer")

    def row(number):
        draw = random.Random(number)
        texts = [
            draw.choice(("the cat sees", "every student", "two birds"))
            for _ in range(2 + number % 3 if fewer else 4)
        ]
        right = draw.randrange(len(texts))
        texts[right] = "a dog likes"
        gold = draw.randrange(len(texts)) if random_targets else right
        return [f"who {draw.choice(WORDS)}?", texts, gold]

    return family_with("choices", form, row, tokenization, **fields)


def kinds(tokenization, *, random_targets=False, **fields):
    """Say whether a text says "dog", or by chance."""
    form = Classify("{one}", ("other", "dog"))

    def row(number):
        animal = "dog" if number % 2 else "hen"
        said = f"{text(number).replace('dog', animal)} {animal}"
        return [said, random.Random(-number - 1).randrange(2) if random_targets else number % 2]

    return family_with("kinds", form, row, tokenization, **fields)


@pytest.fixture(scope="session")
def made(tokenization):
    """Makes a task of a family: `made("SR", random_targets=True, batch=9)`."""
    makers = {"SC": kinds, "SR": regression, "ML": multilabel, "MC": choices}
    return lambda family, **fields: makers[family](tokenization, **fields)
