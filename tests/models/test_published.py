"""The paper's checkpoints load as EuroBERT, bit for bit, by names alone; what has no place is refused in one line."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import EuroBertConfig, EuroBertForMaskedLM

from biphase.errors import ModelError
from biphase.models.hub import eurobert, is_published

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB = 3, 32, 4, 2, 48, 64
HEAD_WIDTH = HIDDEN // HEADS
IDS = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))

# A config.json as the published class writes it.
PUBLISHED = {
    "architectures": ["SLModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sl_model.SLModelConfig",
        "AutoModel": "modeling_sl_model.SLModel",
    },
    "bos_token_id": 5,
    "classifier_pooling": "mean",
    "eos_token_id": 6,
    "head_dim": HEAD_WIDTH,
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "initializer_range": 0.02,
    "intermediate_size": FFN,
    "is_causal": False,
    "mask_token_id": 7,
    "max_position_embeddings": 40,
    "mlp_bias": False,
    "model_type": "sl_model",
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "pad_token_id": 6,
    "pretraining_tp": 1,
    "retrieval_pooling": "mean",
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.48.3",
    "use_cache": False,
    "vocab_size": VOCAB,
}


def original(**more) -> EuroBertForMaskedLM:
    """A tiny model of the paper's shape, none of whose weights is one or zero by habit."""
    config = EuroBertConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=40,
        rms_norm_eps=1e-5,
        pad_token_id=6,
        **{"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}} | more,
    )
    torch.manual_seed(0)
    model = EuroBertForMaskedLM(config).eval()
    with torch.no_grad():
        for one in model.parameters():
            one.copy_(torch.randn_like(one) * 0.3)
    return model


def of_the_class(weights):
    """The names of the published class, whose trunk is saved alone."""
    return {name.removeprefix("model."): one for name, one in weights.items() if name != "lm_head.weight"}


def with_head(weights):
    return dict(weights)


def of_the_training(weights):
    """The names of the code that trained the models: blocks, one matrix for queries, keys and values."""
    made = {
        "embedding.weight": weights["model.embed_tokens.weight"],
        "final_layernorm.weight": weights["model.norm.weight"],
        "lm_head.weight": weights["lm_head.weight"],
    }
    for layer in range(LAYERS):
        here, there = f"model.layers.{layer}", f"blocks.{layer}"
        qkv = [weights[f"{here}.self_attn.{one}_proj.weight"] for one in "qkv"]
        made |= {
            f"{there}.attn.qkv_proj.weight": torch.cat(qkv),
            f"{there}.attn.out_proj.weight": weights[f"{here}.self_attn.o_proj.weight"],
            f"{there}.attn_norm.weight": weights[f"{here}.input_layernorm.weight"],
            f"{there}.mlp_norm.weight": weights[f"{here}.post_attention_layernorm.weight"],
            f"{there}.mlp.fc_1.weight": weights[f"{here}.mlp.gate_proj.weight"],
            f"{there}.mlp.fc_2.weight": weights[f"{here}.mlp.up_proj.weight"],
            f"{there}.mlp.proj.weight": weights[f"{here}.mlp.down_proj.weight"],
        }
    return made


LAYOUTS = [of_the_class, with_head, of_the_training]


def write(folder: Path, weights, config=PUBLISHED) -> Path:
    """A stand-in for a repository of the paper's organisation."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    save_file(
        {name: one.contiguous() for name, one in weights.items()},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder


def read(folder: Path):
    return json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")


def trunk_of(config: EuroBertConfig, weights):
    model = EuroBertForMaskedLM(config).eval()
    said = model.load_state_dict(weights, strict=False)
    assert not said.unexpected_keys
    assert set(said.missing_keys) <= {"lm_head.weight"}
    return model.base_model


@torch.no_grad()
def hidden(trunk):
    return trunk(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state


@pytest.mark.parametrize("layout", LAYOUTS)
def test_hidden_states_are_equal_bit_for_bit(layout, tmp_path):
    model = original()
    config, weights = eurobert(*read(write(tmp_path, layout(model.state_dict()))))
    assert torch.equal(hidden(trunk_of(config, weights)), hidden(model.base_model))
    if "lm_head.weight" in layout(model.state_dict()):
        assert torch.equal(weights["lm_head.weight"], model.lm_head.weight)
    else:
        assert "lm_head.weight" not in weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_stored_in_bf16_come_in_fp32_with_the_same_values(layout, tmp_path):
    model = original().bfloat16()
    _, weights = eurobert(*read(write(tmp_path, layout(model.state_dict()))))
    assert all(one.dtype == torch.float32 for one in weights.values())
    assert all(torch.equal(one, model.state_dict()[name].float()) for name, one in weights.items())


def test_the_config_keeps_its_shape_its_tokens_and_its_positions():
    config, _ = eurobert(PUBLISHED, of_the_class(original().state_dict()))
    assert config.model_type == "eurobert"
    for name in ("bos_token_id", "eos_token_id", "pad_token_id", "mask_token_id", "max_position_embeddings"):
        assert getattr(config, name) == PUBLISHED[name], name
    assert config.rope_parameters["rope_theta"] == 10_000.0
    assert config.classifier_pooling == "mean"
    assert not config.use_cache


@pytest.mark.parametrize(
    ("said", "base"),
    [
        ({"rope_theta": 777.0}, 777.0),
        ({}, 250_000.0),  # the published class' own default
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 55.0}}, 55.0),
        ({"rope_theta": 777.0, "rope_scaling": {"rope_type": "default"}}, 777.0),
    ],
)
def test_the_base_of_the_rotary_positions_is_the_published_one(said, base):
    config = {name: value for name, value in PUBLISHED.items() if not name.startswith("rope")} | said
    model = original(rope_parameters={"rope_type": "default", "rope_theta": base})
    native, weights = eurobert(config, of_the_class(model.state_dict()))
    assert torch.equal(hidden(trunk_of(native, weights)), hidden(model.base_model))
    assert said.get("rope_scaling") in (None, {"rope_type": "default"})  # what was given is not written into


def test_stretched_positions_in_the_older_spelling_are_understood():
    config = PUBLISHED | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    model = original(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10_000.0})
    native, weights = eurobert(config, of_the_class(model.state_dict()))
    assert torch.equal(hidden(trunk_of(native, weights)), hidden(model.base_model))
    assert not torch.equal(hidden(model.base_model), hidden(original().base_model))


def test_a_causal_model_is_the_same_weights():
    weights = of_the_class(original().state_dict())
    _, one = eurobert(PUBLISHED | {"is_causal": True}, weights)
    _, two = eurobert(PUBLISHED, weights)
    assert all(torch.equal(one[name], two[name]) for name in one.keys() | two.keys())


def test_biases_are_placed_too():
    model = original(attention_bias=True, mlp_bias=True)
    config = PUBLISHED | {"attention_bias": True, "mlp_bias": True}
    native, weights = eurobert(config, of_the_class(model.state_dict()))
    assert torch.equal(hidden(trunk_of(native, weights)), hidden(model.base_model))


def test_a_tied_head_is_the_embedding_or_is_refused():
    weights = dict(original().state_dict())
    tied = PUBLISHED | {"tie_word_embeddings": True}
    with pytest.raises(ModelError, match=r"ties the head .* set tie_word_embeddings to false"):
        eurobert(tied, weights)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    native, placed = eurobert(tied, weights)
    assert native.tie_word_embeddings
    assert placed["lm_head.weight"] is placed["model.embed_tokens.weight"]


# ---------------------------------------------------------------- what is no such model


def refused(config, weights) -> str:
    with pytest.raises(ModelError) as caught:
        eurobert(config, weights)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_missing_weight_is_refused_by_its_name(layout):
    whole = layout(original().state_dict())
    for name in whole.keys() - {"lm_head.weight"}:
        said = refused(PUBLISHED, {other: one for other, one in whole.items() if other != name})
        assert "missing" in said
        if layout is not of_the_training:  # whose names are told in EuroBERT's words
            assert f"model.{name.removeprefix('model.')} " in said


@pytest.mark.parametrize(
    "name",
    [
        "classifier.weight",
        "layers.3.mlp.up_proj.weight",  # a layer more than the config has
        "layers.0.self_attn.q_proj.bias",
        "layers.0.self_attn.q_norm.weight",
        "blocks.0.attn.proj.weight",
        "rotary_emb.inv_freq",
        "lm_head.bias",
        "model.model.norm.weight",
        "model.",
        "",
    ],
)
def test_a_weight_without_a_place_is_refused_by_its_name(name):
    weights = of_the_class(original().state_dict()) | {name: torch.zeros(HIDDEN)}
    assert repr(name) in refused(PUBLISHED, weights)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_wrong_shape_is_refused_by_its_name(layout):
    whole = layout(original().state_dict())
    for name, one in whole.items():
        for wrong in (one[:-1], one[None], one.flatten()[0]):
            said = refused(PUBLISHED, whole | {name: wrong})
            assert repr(name) in said
            assert str(list(wrong.shape)) in said or "rows" in said


def test_one_matrix_for_queries_keys_and_values_must_be_as_wide_as_the_model():
    whole = of_the_training(original().state_dict())
    name = "blocks.1.attn.qkv_proj.weight"
    assert repr(name) in refused(PUBLISHED, whole | {name: whole[name][:, :-1]})


def test_a_weight_under_two_names_is_refused():
    weights = of_the_class(original().state_dict())
    assert "two names" in refused(PUBLISHED, weights | {"model.norm.weight": weights["norm.weight"]})


def test_numbers_that_are_codes_are_refused():
    weights = of_the_class(original().state_dict())
    codes = weights["layers.0.mlp.up_proj.weight"].to(torch.int8)
    said = refused(PUBLISHED, weights | {"layers.0.mlp.up_proj.weight": codes})
    assert "int8" in said
    assert "layers.0.mlp.up_proj.weight" in said


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "wide"),
        ("hidden_size", 33),
        ("num_key_value_heads", 0),
        ("vocab_size", -1),
        ("hidden_act", "no such function"),
        ("rope_scaling", {"rope_type": "no such kind"}),
        ("rope_scaling", "twice"),
        ("rope_theta", "ten thousand"),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", LAYERS - 1),
        ("num_hidden_layers", LAYERS + 1),
        ("intermediate_size", FFN + 1),
        ("head_dim", HEAD_WIDTH + 2),
        ("num_key_value_heads", HEADS),
        ("pad_token_id", VOCAB),
    ],
)
def test_a_config_that_fits_no_model_or_not_its_weights_is_refused(field, value):
    for layout in LAYOUTS:
        refused(PUBLISHED | {field: value}, layout(original().state_dict()))


def test_a_field_that_may_change_what_comes_out_is_refused_unless_it_is_off():
    weights = of_the_class(original().state_dict())
    assert "'logit_scale'" in refused(PUBLISHED | {"logit_scale": 2.0}, weights)
    assert "'quantization_config'" in refused(PUBLISHED | {"quantization_config": {"bits": 4}}, weights)
    eurobert(PUBLISHED | {"hidden_dropout": 0.0, "sliding_window": None, "use_qk_norm": False}, weights)
    eurobert(PUBLISHED | {"_attn_implementation_autoset": True, "mask_token": "<|mask|>"}, weights)


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (PUBLISHED, True),
        ({"model_type": "sl_model"}, True),
        ({"auto_map": {"AutoConfig": "MLMvsCLM/610m-clm-42k--configuration_sl_model.SLModelConfig"}}, True),
        ({"model_type": "eurobert"}, False),
        ({"model_type": "eurobert", "auto_map": {"AutoConfig": "x.EuroBertConfig"}}, False),
        ({"model_type": "llama", "auto_map": ["SLModelConfig"]}, False),
        ({"model_type": None, "auto_map": None}, False),
        ({}, False),
    ],
)
def test_the_papers_class_is_told_from_others(config, wanted):
    assert is_published(config) is wanted
