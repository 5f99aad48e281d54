"""What a trained family is on disk: transformers reads it as we do, and it is a start again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from families.build import CONTEXT
from families.reading import LENGTH, close, texts, whole
from families.training import last_state, shards_in
from torch import Tensor
from transformers import AutoModel

from biphase import Hub, Pretrain
from biphase.attention import NAME, AttentionPattern
from biphase.data.tokenizer import load_saved
from biphase.export.checkpoint import export_checkpoint, write_encoder
from biphase.export.folder import SavedCheckpoint, find
from biphase.export.writing import tokenizer_of
from biphase.models.backbone import LanguageModel, TokenizerInfo, from_hub, probe
from biphase.store import Store
from biphase.training.pretrain import model_of_checkpoint

SHORT = 9  # tokens of the second text, the rest of its row is padding


def export(run: Pretrain, store: Store, folder: Path) -> str:
    """Export the end of the run; gives the class it was written as."""
    found = find(last_state(run, store), store)
    assert isinstance(found, SavedCheckpoint)
    return export_checkpoint(found, store, folder, onnx=False, say=lambda text: None).written.architecture


def opened(model: Any, tokenizer: Path, folder: Path) -> str:
    """The class that a model is written as where its windows were opened, or were never switched on."""
    model.set_attn_implementation(NAME)
    words = tokenizer_of(load_saved(tokenizer), bos=False, context=CONTEXT)
    folder.mkdir()
    return write_encoder(LanguageModel(model, windows=False).eval(), words, folder).architecture


def check_exported(run: Pretrain, store: Store, folder: Path) -> None:
    """Plain transformers gives the hidden states of the trained model, and as a start it goes on from there."""
    trained = model_of_checkpoint(run, last_state(run, store), store, shards_in(store)).eval()
    _check_plain_transformers(trained, folder)
    _check_start(trained, folder, store)


@torch.no_grad()
def _check_plain_transformers(trained: LanguageModel, folder: Path) -> None:
    ids, seen = texts(2), torch.ones(2, LENGTH, dtype=torch.long)
    seen[1, SHORT:] = 0
    theirs = AutoModel.from_pretrained(folder).eval()(input_ids=ids, attention_mask=seen).last_hidden_state
    ours = [_hidden(trained, ids[:1]), _hidden(trained, ids[1:, :SHORT])]
    assert close(ours[0], theirs[:1]), "the folder gives other hidden states"
    assert close(ours[1], theirs[1:, :SHORT]), "the folder gives other hidden states beside padding"


@torch.no_grad()
def _check_start(trained: LanguageModel, folder: Path, store: Store) -> None:
    shards, ids = shards_in(store), texts(2)
    words = TokenizerInfo(shards.vocab, shards.mask_id, mask_is_new=False)
    again = from_hub(Hub(str(folder)), words, length=32).eval()
    probe(again, vocab=shards.vocab)
    for causal in (True, False):
        ours, theirs = (model.logits(ids, whole(ids), AttentionPattern(causal)) for model in (again, trained))
        assert close(ours, theirs), "as a start, the folder gives other logits"


def _hidden(model: LanguageModel, ids: Tensor) -> Tensor:
    return model.hidden(ids, whole(ids), AttentionPattern(causal=False))
