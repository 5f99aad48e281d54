"""`biphase.load`: any folder as a model that fills masks and gives hidden states."""

import json
import shutil

import pytest
import torch
from transformers import (
    AutoModel,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    pipeline,
)

import biphase
from biphase.attention import NAME
from biphase.data.tokenizer import load_saved
from biphase.errors import ModelError, SpecError
from biphase.export.checkpoint import write_encoder
from biphase.export.writing import tokenizer_of, write_tokenizer
from biphase.models.backbone import LanguageModel

SHAPE = {"vocab_size": 320, "bos_token_id": 0, "eos_token_id": 0}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
QWEN = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
TEXT = "the cat <|mask|> on the <|mask|>"


def exported(model, shards, folder):
    words = tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=60, trained_here=True)
    model.set_attn_implementation(NAME)
    written = write_encoder(LanguageModel(model).eval(), words, folder)
    write_tokenizer(words, folder)
    return written


@pytest.mark.parametrize(
    ("family", "config"),
    [(GPT2LMHeadModel, GPT2Config(**SHAPE | GPT2)), (Qwen3ForCausalLM, Qwen3Config(**SHAPE | QWEN))],
    ids=["gpt2", "qwen3"],
)
def test_a_family_without_a_masked_class_fills_masks(family, config, shards, tmp_path):
    model = family(config).eval()
    assert exported(model, shards, tmp_path).edits["is_causal"] is False
    loaded = biphase.load(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state[0]
        logits = model.get_output_embeddings()(hidden)
    assert torch.allclose(loaded.hidden_states(TEXT), hidden, atol=1e-5)
    at = (ids[0] == loaded.tokenizer.mask_token_id).nonzero()[:, 0]
    for shifted in (False, True):
        said = loaded.fill_mask(TEXT, top=3, shifted=shifted)
        likely = logits[at - int(shifted)].softmax(-1).topk(3)
        assert [[token for token, _ in one] for one in said] == [
            [loaded.tokenizer.decode([number]) for number in row] for row in likely.indices.tolist()
        ]
        assert torch.allclose(
            torch.tensor([[share for _, share in one] for one in said]), likely.values, atol=1e-5
        )


def test_it_says_what_the_pipeline_says_where_there_is_one(shards, tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    told = {name: value for name, value in (SHAPE | QWEN).items() if name != "head_dim"}
    assert exported(LlamaForCausalLM(LlamaConfig(**told)), shards, tmp_path).native
    text = "the cat <|mask|> on the mat"
    theirs = pipeline("fill-mask", model=str(tmp_path))(text, top_k=3)
    ((*ours,),) = biphase.load(tmp_path).fill_mask(text, top=3)
    assert [share for _, share in ours] == pytest.approx([one["score"] for one in theirs], abs=1e-6)
    assert [token for token, _ in ours] == [one["token_str"] for one in theirs]


def test_what_cannot_be_asked_is_refused_in_one_line(shards, tmp_path):
    exported(GPT2LMHeadModel(GPT2Config(**SHAPE | GPT2)), shards, tmp_path / "model")
    loaded = biphase.load(tmp_path / "model")
    with pytest.raises(SpecError, match=r"<\|mask\|>"):
        loaded.fill_mask("the cat sat")
    for top in (0, 5_000):
        with pytest.raises(SpecError, match=rf"top={top}.*tokens"):
            loaded.fill_mask(f"the {loaded.mask_token}", top=top)
    with pytest.raises(ModelError, match="no folder /nope"):
        biphase.load("/nope")
    shutil.copytree(tmp_path / "model", tmp_path / "wide")
    config = json.loads((tmp_path / "wide" / "config.json").read_text())
    (tmp_path / "wide" / "config.json").write_text(json.dumps(config | {"n_positions": 96}))
    with pytest.raises(ModelError, match=r"wpe.weight.*\(64, \d+\).*\(96, \d+\).*config.json"):
        biphase.load(tmp_path / "wide")
    with pytest.raises(SpecError, match="reads 64"):
        loaded.hidden_states("the cat " * 40)
    shutil.copytree(tmp_path / "model", tmp_path / "plain")
    told = json.loads((tmp_path / "plain" / "tokenizer_config.json").read_text())
    del told["mask_token"]
    (tmp_path / "plain" / "tokenizer_config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match="no mask token"):
        biphase.load(tmp_path / "plain").fill_mask("the cat sat")
