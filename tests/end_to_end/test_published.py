"""A checkpoint as the paper published it is evaluated and trained further, and its own code is never run."""

import json
import re

import pytest
import torch
from safetensors.torch import save_file
from transformers import EuroBertConfig, EuroBertForMaskedLM

from biphase.models.encoder import encoder_from_hub
from biphase.specs import Hub
from biphase.store import Store, read_json


@pytest.fixture(scope="module")
def published(shards, tmp_path_factory):
    """A folder of that layout: the class's configuration and names, code that must not be run, a tokenizer."""
    folder = tmp_path_factory.mktemp("published") / "610m-clm-42k"
    folder.mkdir()
    shape = {
        "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "pad_token_id": 0,
        "bos_token_id": None, "eos_token_id": 0, "mask_token_id": 1, "tie_word_embeddings": False,
    }  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        turned = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
        weights = EuroBertForMaskedLM(EuroBertConfig(**shape, **turned)).state_dict()
    own = {
        "architectures": ["SLModel"], "model_type": "sl_model", "is_causal": False, "rope_theta": 10_000.0,
        "auto_map": {"AutoConfig": "configuration_sl_model.SLModelConfig", "AutoModel": "modeling_sl_model.SLModel"},
        "torch_dtype": "bfloat16", "hidden_act": "silu", "classifier_pooling": "mean",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(shape | own))
    for name in ("configuration_sl_model", "modeling_sl_model"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    save_file({name: one.bfloat16() for name, one in weights.items()}, str(folder / "model.safetensors"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((shards / "tokenizer" / name).read_bytes())
    yield folder
    assert not (folder / "ran").exists()


def test_a_published_checkpoint_is_evaluated(published, verb, tmp_path):
    options = ("--lrs", "1e-3", "--seeds", "0", "--steps", 2, "--precision", "fp32", "--quiet")
    code, out, err = verb(
        "evaluate", published, "--tasks", "sources-mini", "--store", tmp_path / "store", *options
    )
    assert code == 0, err
    assert re.search(r"610m-clm-42k +sources-mini +accuracy", out)
    assert len(list(Store(tmp_path / "store").trials.iterdir())) == 1
    assert encoder_from_hub(Hub(str(published))).context == 64


def test_a_published_checkpoint_is_trained_further(published, verb, corpus, tmp_path):
    store = Store(tmp_path / "store")
    text = ("--corpus", corpus.source, "--heldout", corpus.heldout, "--store", store.root)
    options = ("--steps", 2, "--batch", 4, "--length", 32, "--heldout-tokens", 256, "--quiet")
    code, out, err = verb("adapt", published, *text, *options)
    assert code == 0, err
    assert "masked 40%" in out
    steps = {read_json(path)["progress"]["step"] for path in store.checkpoints.glob("*/checkpoint.json")}
    assert 2 in steps
