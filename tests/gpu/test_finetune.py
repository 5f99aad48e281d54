"""On a CUDA device: packed texts are blind to each other, both layouts agree, and every family fine-tunes."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from biphase import CATALOG, SIZES, Finetune
from biphase.attention import varlen_works
from biphase.data.tokenizer import train as train_tokenizer
from biphase.finetune.encoder import TuningOptions
from biphase.finetune.families import family_of, search
from biphase.finetune.trial import FineTuner, score
from biphase.models.backbone import from_scratch
from biphase.models.encoder import Encoder, pack
from biphase.presets import CORPORA
from biphase.tasks.encode import Tokenization
from biphase.tasks.load import load

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
VOCAB = 2_048


def encoder():
    model = from_scratch(SIZES["8m"], vocab=VOCAB, mask_id=1, length=256, seed=0)
    return Encoder(model.model.base_model, context=256)


def texts(*lengths):
    rng = np.random.default_rng(0)
    return [rng.integers(3, VOCAB, length) for length in lengths]


def test_texts_end_to_end_are_blind_to_each_other_to_the_bit():
    model = encoder().to(CUDA, torch.bfloat16).eval()
    several = texts(5, 90, 33, 17)
    changed = [one.copy() for one in several]
    changed[1][40] = (changed[1][40] + 1) % VOCAB
    outputs = []
    for some in (several, changed):
        packed = pack(some, varlen=True).to(CUDA)
        with torch.no_grad():
            outputs.append(model(packed.ids, packed.positions, packed.pattern)[0])
    moved = (outputs[0] != outputs[1]).any(-1).cpu()
    inside = torch.zeros(5 + 90 + 33 + 17, dtype=torch.bool)
    inside[5:95] = True
    assert not moved[~inside].any()
    assert moved[inside].all()


def test_both_layouts_give_the_same_hidden_states():
    model = encoder().to(CUDA).eval()
    several = texts(5, 90, 33, 17, 128, 2)
    found = []
    for varlen in (True, False):
        packed = pack(several, varlen=varlen).to(CUDA)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            found.append(model(packed.ids, packed.positions, packed.pattern).flatten(0, 1)[packed.at])
    assert torch.allclose(found[0], found[1], rtol=0.05, atol=0.05)


def test_search_finds_the_same_as_on_the_cpu():
    generator = torch.Generator().manual_seed(0)
    queries, documents = torch.randn(20, 32, generator=generator), torch.randn(5_000, 32, generator=generator)
    here = search(queries, 5_000, lambda numbers: documents[numbers], block=700)
    on_device = documents.cuda()
    there = search(queries.cuda(), 5_000, lambda numbers: on_device[numbers.cuda()], block=700)
    assert (here == there.cpu()).float().mean() > 0.999  # sums in another order may swap neighbours


@pytest.fixture(scope="module")
def tokenizer():
    from biphase.data.corpus import resolve
    from biphase.data.documents import texts_of

    corpus = CORPORA["builtin"]
    return train_tokenizer(corpus, texts_of(corpus, resolve(corpus).train), print)


@pytest.mark.parametrize("protocol", ["paper", "standard"])
@pytest.mark.parametrize("name", ["sources-mini", "wikiann-mini", "squadshifts-mini", "scifact-mini"])
def test_every_family_learns(name, protocol, tokenizer):
    spec = Finetune(CATALOG[name], protocol=protocol)
    task = replace(CATALOG[name], steps=60)
    reading = Tokenization(tokenizer.model, (), (tokenizer.special.eos,), 250, "test")
    family = family_of(task, load(task, documents=spec.documents), reading, protocol=protocol)
    setting = TuningOptions.of(CUDA, spec.precision, varlen=varlen_works(CUDA, "bf16"))
    bench = FineTuner(encoder(), setting)
    model, trained = bench.finetune(family, spec, lr=1e-3, seed=0)
    losses = list(trained.losses.values())
    assert trained.finished
    assert trained.skipped == 0
    assert np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])
    scored = score(model, family, setting)
    assert all(np.isfinite(value) for part in scored.values() for value in part.metrics.values())
    if name == "sources-mini":
        assert scored["test"].metrics["accuracy"] > 0.5
