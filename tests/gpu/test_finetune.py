"""On a CUDA device: packed texts are blind to each other, and both layouts agree."""

import numpy as np
import pytest
import torch

from biphase import SIZES
from biphase.models.backbone import from_scratch
from biphase.models.encoder import Encoder, pack

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
