"""Any model as an encoder: packed text gives what transformers' own forward gives of each text alone, or is refused."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    BertConfig,
    BertModel,
    BloomConfig,
    BloomModel,
    DebertaV2Config,
    DebertaV2Model,
    DistilBertConfig,
    DistilBertModel,
    EuroBertConfig,
    EuroBertModel,
    Gemma3TextConfig,
    Gemma3TextModel,
    GPT2Config,
    GPT2Model,
    Lfm2Config,
    Lfm2Model,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    LongformerConfig,
    LongformerModel,
    MambaConfig,
    MambaModel,
    MistralConfig,
    MistralModel,
    MobileBertConfig,
    MobileBertModel,
    ModernBertConfig,
    ModernBertModel,
    Phi3Config,
    Phi3Model,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
    T5Config,
    T5EncoderModel,
    T5Model,
)

from biphase.attention import AttentionPattern, segment_mask
from biphase.errors import ModelError
from biphase.models.encoder import Encoder, encoder_from_hub, pack, probe_encoder
from biphase.specs import Hub

VOCAB, CONTEXT, WINDOW = 64, 160, 6
LENGTHS = (20, 7, 150, 1, 12, 33)  # the third fills a row of its own, longer than every window
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": CONTEXT,
}  # fmt: skip
GROUPED = {**PLAIN, **NO_ENDS, "num_key_value_heads": 2}
DROPPED = {**PLAIN, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
T5 = {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def bert():
    return BertModel(BertConfig(**DROPPED))


def roberta():
    return RobertaModel(RobertaConfig(**DROPPED, type_vocab_size=1))


def distilbert():
    shape = {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}
    return DistilBertModel(DistilBertConfig(vocab_size=VOCAB, max_position_embeddings=CONTEXT, **shape))


def modernbert():
    """Layers of both kinds; a window of 12 reaches 6 tokens to each side."""
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    kinds = {"local_attention": 2 * WINDOW, "global_attn_every_n_layers": 2}
    return ModernBertModel(ModernBertConfig(**PLAIN, **ends, **kinds))


def eurobert():
    return EuroBertModel(EuroBertConfig(**GROUPED, mask_token_id=3))


def gemma3():
    """As EmbeddingGemma: a decoder turned, with windows."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    turned = {"use_bidirectional_attention": True, "sliding_window": WINDOW, "layer_types": kinds}
    return Gemma3TextModel(Gemma3TextConfig(**GROUPED, **turned, head_dim=8))


def llama():
    return LlamaModel(LlamaConfig(**GROUPED))


def qwen3():
    return Qwen3Model(Qwen3Config(**GROUPED, head_dim=8))


def mistral():
    return MistralModel(MistralConfig(**GROUPED, sliding_window=WINDOW))


def gpt2():
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    return GPT2Model(GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, **shape))


ENCODERS = (bert, roberta, distilbert, modernbert, eurobert, gemma3)
DECODERS = (llama, qwen3, mistral, gpt2)
WINDOWED = (modernbert, gemma3, mistral)
EVERY = pytest.mark.parametrize("make", ENCODERS + DECODERS, ids=lambda make: make.__name__)


def stirred(make):
    """A random model none of whose weights is 0 or 1: biases and norms count too."""
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.05)
    return model


def both(make, folder):
    """A model as transformers has it, and as we load it from its folder."""
    theirs = stirred(make)
    theirs.save_pretrained(folder)
    return theirs, encoder_from_hub(Hub(str(folder))).eval()


def texts(lengths=LENGTHS):
    draw = np.random.default_rng(3)
    return [draw.integers(4, VOCAB, length) for length in lengths]


def alone(model, text):
    """What transformers gives of one text, all of which is seen in both directions."""
    more = {}
    if model.config.model_type in {make.__name__ for make in DECODERS}:
        places = torch.arange(len(text))
        reach = getattr(model.config, "sliding_window", None) or len(text)
        near = (places[:, None] - places[None, :]).abs() < reach
        more = {"attention_mask": torch.zeros(near.shape).masked_fill(~near, float("-inf"))[None, None]}
    return model(input_ids=torch.from_numpy(text)[None], **more).last_hidden_state[0]


def read(encoder, some, *, layout="rows"):
    """The hidden states of all tokens, text after text."""
    if layout == "alone":
        return torch.cat([read(encoder, [text]) for text in some])
    packed = pack(some, varlen=layout == "one row")
    # The kernel for texts end to end runs on a GPU only; a mask by the same segments says the same.
    pattern = AttentionPattern(False, mask=segment_mask(packed.segments, causal=False))
    return encoder(packed.ids, packed.positions, pattern).flatten(0, 1)[packed.at]


# ---------------------------------------------------------------- parity


@EVERY
@torch.no_grad()
def test_packed_text_gives_what_transformers_gives_of_each_text_alone(make, tmp_path):
    theirs, ours = both(make, tmp_path)
    wanted = torch.cat([alone(theirs, text) for text in texts()])
    for layout in ("rows", "one row", "alone"):
        torch.testing.assert_close(read(ours, texts(), layout=layout), wanted, rtol=2e-5, atol=2e-5)


@EVERY
@torch.no_grad()
def test_the_longest_text_a_model_can_read_is_read_like_any_other(make, tmp_path):
    theirs, ours = both(make, tmp_path)
    assert ours.context == (CONTEXT - 2 if make is roberta else CONTEXT)
    longest = texts((ours.context,))[0]
    torch.testing.assert_close(read(ours, [longest]), alone(theirs, longest), rtol=2e-5, atol=2e-5)


@EVERY
@torch.no_grad()
def test_no_bit_of_a_text_depends_on_its_neighbours(make, tmp_path):
    _, ours = both(make, tmp_path)
    some = texts()
    owner = pack(some, varlen=False).owner
    for layout in ("rows", "one row"):
        before = read(ours, some, layout=layout)
        for number in range(len(some)):
            other = [(text + 1) % VOCAB if at == number else text for at, text in enumerate(some)]
            after = read(ours, other, layout=layout)
            assert torch.equal(after[owner != number], before[owner != number])
            assert (after[owner == number] != before[owner == number]).any(-1).all()


@EVERY
@torch.no_grad()
def test_every_token_is_felt_by_all_of_its_text_or_as_far_as_windows_reach(make, tmp_path):
    _, ours = both(make, tmp_path)
    some = texts((9, 14, 5))
    own = torch.arange(9, 9 + 14)
    before = read(ours, some)
    for at in range(14):
        some[1] = some[1].copy()
        some[1][at] = (some[1][at] + 1) % VOCAB
        after = read(ours, some)
        felt = (after != before).any(-1)[own]
        assert felt.all() or (make in WINDOWED and felt[max(0, at - 3) : at + 4].all())
        before = after


@torch.no_grad()
def test_a_windowed_layer_reaches_as_far_as_its_window_and_no_further(tmp_path):
    """One layer, so that what is felt is the window itself."""

    def make():
        return MistralModel(MistralConfig(**{**GROUPED, "num_hidden_layers": 1}, sliding_window=WINDOW))

    _, ours = both(make, tmp_path)
    some = texts((5, 30))
    changed = [some[0], some[1].copy()]
    changed[1][14] = (changed[1][14] + 1) % VOCAB
    felt = (read(ours, some) != read(ours, changed)).any(-1)[5:].nonzero().flatten()
    assert felt.tolist() == list(range(14 - (WINDOW - 1), 14 + WINDOW))


# ---------------------------------------------------------------- loading


def test_weights_come_in_fp32_however_they_were_saved(tmp_path):
    stirred(bert).to(torch.bfloat16).save_pretrained(tmp_path)
    ours = encoder_from_hub(Hub(str(tmp_path)))
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.float32}


@pytest.mark.parametrize("make", [bert, roberta, distilbert, gpt2], ids=lambda make: make.__name__)
def test_attention_drops_nothing_in_training_and_the_rest_of_dropout_stays(make, tmp_path):
    names = ("attention_probs_dropout_prob", "attention_dropout", "attn_pdrop")
    others = ("hidden_dropout_prob", "dropout", "resid_pdrop", "embd_pdrop")

    def only(kept):
        model = stirred(make)
        for name in names + others:
            if hasattr(model.config, name):
                setattr(model.config, name, 0.5 if name in kept else 0.0)
        model.save_pretrained(tmp_path)
        ours = encoder_from_hub(Hub(str(tmp_path)))
        return read(ours.train(), texts()), read(ours.eval(), texts())

    torch.testing.assert_close(*only(names), rtol=0, atol=0)
    trained, scored = only(others)
    assert not torch.equal(trained, scored)


@EVERY
def test_every_parameter_gets_a_gradient(make, tmp_path):
    """A pooler or an unused embedding would be weights that decay and never learn."""
    _, ours = both(make, tmp_path)
    read(ours, texts()).square().sum().backward()
    without = {name for name, parameter in ours.named_parameters() if parameter.grad is None}
    assert not without


@pytest.mark.parametrize("training", [True, False])
def test_the_probe_leaves_the_mode_as_it_was(training, tmp_path):
    _, ours = both(bert, tmp_path)
    probe_encoder(ours.train(training))
    assert {module.training for module in ours.modules()} == {training}


def test_the_spread_of_new_heads_is_the_models_own(tmp_path):
    model = BertModel(BertConfig(**PLAIN, initializer_range=0.013))
    assert Encoder(model, context=8).init_std == 0.013


# ---------------------------------------------------------------- refusals


def t5():
    return T5Model(T5Config(**T5, decoder_start_token_id=0))


def half_of_t5():
    return T5EncoderModel(T5Config(**T5))


def deberta():
    kind = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_biased_input": False}
    return DebertaV2Model(DebertaV2Config(**PLAIN, **kind))


def bloom():
    return BloomModel(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=2, n_head=4))


def mobilebert():
    """Its embeddings mix each token with the next on either side, whatever attention says."""
    return MobileBertModel(MobileBertConfig(vocab_size=VOCAB, num_hidden_layers=1))


def lfm2():
    """Its convolutions look back over two tokens, and never ahead."""
    return Lfm2Model(Lfm2Config(**GROUPED, layer_types=["conv", "full_attention", "conv"]))


def mamba():
    return MambaModel(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2))


def longformer():
    return LongformerModel(LongformerConfig(**PLAIN, attention_window=8))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (t5, "is an encoder and a decoder"),
        (half_of_t5, "lacks 28 of its weights"),
        (deberta, "computes by itself what its tokens see"),
        (bloom, "computes by itself what its tokens see"),
        (mobilebert, "looks across the boundary"),
        (lfm2, "not attention over tokens"),
        (mamba, "not attention over tokens"),
        (longformer, "computes by itself what its tokens see"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_model_that_cannot_keep_packed_texts_apart_is_refused_in_one_line(make, reason, tmp_path):
    stirred(make).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refused:
        encoder_from_hub(Hub(str(tmp_path)))
    assert "\n" not in str(refused.value)


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    with pytest.raises(ModelError, match="cannot be loaded") as refused:
        encoder_from_hub(Hub(str(tmp_path / "nowhere")))
    assert "\n" not in str(refused.value)


def test_pickled_weights_are_never_opened(tmp_path):
    stirred(bert).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be loaded"):
        encoder_from_hub(Hub(str(tmp_path)))


def rewritten(folder, change):
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return Hub(str(folder))


def test_weights_that_would_be_drawn_at_random_are_refused(tmp_path):
    stirred(bert).save_pretrained(tmp_path)
    lacking = "encoder.layer.1.attention.self.query.weight"
    with pytest.raises(ModelError, match=f"lacks 1 of its weights, {lacking} among them") as refused:
        encoder_from_hub(rewritten(tmp_path, lambda weights: weights.pop(lacking)))
    assert "\n" not in str(refused.value)


def test_a_checkpoint_without_a_pooler_is_complete(tmp_path):
    """As models trained with a masked loss are saved."""
    theirs = stirred(bert)
    theirs.save_pretrained(tmp_path)
    where = rewritten(
        tmp_path, lambda weights: [weights.pop(f"pooler.dense.{one}") for one in ("weight", "bias")]
    )
    ours = encoder_from_hub(where).eval()
    with torch.no_grad():
        torch.testing.assert_close(read(ours, texts()[:1]), alone(theirs, texts()[0]), rtol=2e-5, atol=2e-5)


def test_weights_of_another_shape_or_damaged_ones_are_refused_in_one_line(tmp_path):
    stirred(bert).save_pretrained(tmp_path)
    name = "embeddings.word_embeddings.weight"
    where = rewritten(tmp_path, lambda weights: weights.update({name: torch.ones(3, 32)}))
    for told in ("embeddings.word_embeddings.weight", "cannot be loaded"):
        with pytest.raises(ModelError, match=told) as refused:
            encoder_from_hub(where)
        assert "\n" not in str(refused.value)
        (tmp_path / "model.safetensors").write_bytes(b"not a model")


def test_code_beside_a_model_is_never_run(tmp_path, monkeypatch):
    """A type that transformers knows but has no plain model for, with a class of its own in the folder."""
    monkeypatch.setattr("builtins.input", lambda *said: "y")
    config = {"model_type": "bridgetower_text_model", "auto_map": {"AutoModel": "modeling_evil.Evil"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "modeling_evil.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Evil: ...\n"
    )
    save_file({"x": torch.zeros(1)}, str(tmp_path / "model.safetensors"))
    with pytest.raises(ModelError, match="code of its own") as refused:
        encoder_from_hub(Hub(str(tmp_path)))
    assert "trust_remote_code" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_model_that_fails_in_transformers_itself_is_refused_with_what_that_says(tmp_path):
    GPT2Model(GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=2)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match="fails in transformers itself") as refused:
        encoder_from_hub(Hub(str(tmp_path)))
    assert "IndexError" in str(refused.value)
    assert "attention" not in str(refused.value)


def test_an_adapter_beside_a_model_is_merged_into_it(tmp_path):
    from peft import LoraConfig, get_peft_model

    def hidden(alpha):
        told = json.loads((tmp_path / "adapter_config.json").read_text()) | {"lora_alpha": alpha}
        (tmp_path / "adapter_config.json").write_text(json.dumps(told))
        encoder = encoder_from_hub(Hub(str(tmp_path))).eval()
        assert not [name for name, _ in encoder.named_parameters() if "lora" in name]
        assert all(weight.requires_grad for weight in encoder.parameters())
        encoder.trunk.save_pretrained(tmp_path / "again")
        assert load_file(tmp_path / "again" / "model.safetensors").keys() == encoder.trunk.state_dict().keys()
        with torch.no_grad():
            return encoder(torch.arange(5)[None], torch.arange(5)[None], AttentionPattern(True))

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**GROUPED))
        model.save_pretrained(tmp_path)
        adapted = get_peft_model(
            model, LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "v_proj"])
        )
    adapted.save_pretrained(tmp_path)
    with torch.no_grad():
        right = adapted.base_model.model.eval().model(torch.arange(5)[None]).last_hidden_state
    assert torch.allclose(hidden(8), right, atol=1e-5)
    assert not torch.allclose(hidden(80), right, atol=1e-3)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
        hidden(8)


def test_weights_that_lie_elsewhere_are_not_read(tmp_path):
    folder = tmp_path / "model"
    LlamaForCausalLM(LlamaConfig(**GROUPED)).save_pretrained(folder)
    (folder / "deeper").mkdir()
    (folder / "model.safetensors").rename(folder / "deeper" / "other.safetensors")
    told = json.loads((folder / "config.json").read_text()) | {
        "transformers_weights": "deeper/other.safetensors"
    }
    (folder / "config.json").write_text(json.dumps(told))
    with pytest.raises(ModelError, match=r"deeper/other\.safetensors"):
        encoder_from_hub(Hub(str(folder)))


def test_no_text_is_turned_by_the_length_of_another(tmp_path):
    """Positions that are scaled by the longest text of a batch: the model reads only as far as that does not happen."""
    scaled = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    shape = GROUPED | {
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
    }
    config = Phi3Config(**shape, rope_parameters=scaled)
    Phi3Model(config).save_pretrained(tmp_path)
    assert encoder_from_hub(Hub(str(tmp_path))).context == 32
