"""The way from hidden states to logits is read off a model: each kind of head gives what the model itself gives."""

import pytest
import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    CohereConfig,
    CohereForCausalLM,
    EuroBertConfig,
    EuroBertForMaskedLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    OPTConfig,
    OPTForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
)

from biphase.errors import ModelError
from biphase.fast.trunk import cross_entropy_sum
from biphase.models.backbone import Output

VOCAB = 64
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PLAIN = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "max_position_embeddings": 40,
}  # fmt: skip
GROUPED = {**PLAIN, **NO_ENDS, "num_key_value_heads": 2}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}


class Cooled(PhiForCausalLM):
    """Everything at once after the matrix: a bias, a scale and a cap."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = 2.0 * torch.tanh(0.25 * out.logits / 2.0)
        return out


# The model, and what its head is: scale, cap, a layer of its own, a bias.
HEADS = {
    "llama": (lambda: LlamaForCausalLM(LlamaConfig(**GROUPED)), 1.0, None, False, False),
    "eurobert": (lambda: EuroBertForMaskedLM(EuroBertConfig(**GROUPED, mask_token_id=3)), 1.0, None, False, False),
    "cohere": (lambda: CohereForCausalLM(CohereConfig(**GROUPED, logit_scale=0.0625)), 0.0625, None, False, False),
    "granite": (lambda: GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=8.0)), 0.125, None, False, False),
    "gemma2": (
        lambda: Gemma2ForCausalLM(Gemma2Config(**GROUPED, head_dim=8, final_logit_softcapping=2.5)), 1.0, 2.5, False, False,
    ),
    "phi": (lambda: PhiForCausalLM(PhiConfig(**GROUPED)), 1.0, None, False, True),
    "gptj": (
        lambda: GPTJForCausalLM(GPTJConfig(vocab_size=VOCAB, n_positions=40, n_embd=32, n_layer=1, n_head=4, rotary_dim=4)),
        1.0, None, False, True,
    ),
    "cooled": (lambda: Cooled(PhiConfig(**GROUPED)), 0.25, 2.0, False, True),
    "bert": (lambda: BertForMaskedLM(BertConfig(**PLAIN)), 1.0, None, True, True),
    "roberta": (lambda: RobertaForMaskedLM(RobertaConfig(**PLAIN, type_vocab_size=1)), 1.0, None, True, True),
    "modernbert": (lambda: ModernBertForMaskedLM(ModernBertConfig(**PLAIN, **ENDS)), 1.0, None, True, True),
    "opt": (  # its trunk gives narrower rows than its layers have
        lambda: OPTForCausalLM(
            OPTConfig(
                vocab_size=VOCAB, hidden_size=32, word_embed_proj_dim=16, ffn_dim=48, num_hidden_layers=1,
                num_attention_heads=4, max_position_embeddings=40, bos_token_id=0, eos_token_id=0, pad_token_id=None,
            )
        ),
        1.0, None, False, False,
    ),
}  # fmt: skip
EVERY = pytest.mark.parametrize("name", HEADS)


def stirred(make):
    """Without dropout, and none of its weights 0 or 1: biases and norms count too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make().eval()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.2)
    return model


def texts():
    return torch.randint(4, VOCAB, (2, 10), generator=torch.Generator().manual_seed(1))


def hidden_of(model):
    return model.base_model(input_ids=texts(), use_cache=False).last_hidden_state.flatten(0, 1)


@EVERY
def test_the_parts_of_a_head_are_found(name):
    make, scale, cap, transforms, biased = HEADS[name]
    output = Output(stirred(make))
    assert (output.scale, output.cap, output.transforms) == (scale, cap, transforms)
    assert (output.bias is not None) == biased


@EVERY
@torch.no_grad()
def test_logits_are_the_models_own(name):
    model = stirred(HEADS[name][0])
    ours = Output(model).logits(hidden_of(model)).view(2, 10, VOCAB)
    torch.testing.assert_close(ours, model(input_ids=texts()).logits, rtol=1e-5, atol=1e-5)


@EVERY
def test_the_loss_and_its_gradients_are_those_of_the_models_own_logits(name):
    """Over some rows, in several slices: as training does it."""
    model = stirred(HEADS[name][0])
    output, labels, some = Output(model), texts().flatten(), torch.tensor([0, 3, 4, 11, 19])
    # The embedding among them, which is often the head as well.
    trained = {name: one for name, one in model.named_parameters() if one.requires_grad}

    def gradients(loss):
        return torch.autograd.grad(loss, list(trained.values()), allow_unused=True)

    rows = output.rows(hidden_of(model)[some])
    ours = cross_entropy_sum(
        rows, output.weight, labels[some], bias=output.bias, cap=output.cap, slice_rows=2
    )
    logits = model(input_ids=texts()).logits.flatten(0, 1)[some]
    plain = nn.functional.cross_entropy(logits, labels[some], reduction="sum")
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)
    for what, one, two in zip(trained, gradients(ours), gradients(plain), strict=True):
        assert (one is None) == (two is None), what
        if one is not None:
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5, msg=what)


@EVERY
def test_weights_that_change_in_place_are_followed(name):
    """The copy of the shell shares the model's weights, as an optimizer changes them and a state fills them."""
    model = stirred(HEADS[name][0])
    output = Output(model)
    with torch.no_grad():
        before = output.logits(hidden_of(model))
        for weight in model.parameters():
            weight.add_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))
        ours = output.logits(hidden_of(model)).view(2, 10, VOCAB)
        torch.testing.assert_close(ours, model(input_ids=texts()).logits, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(ours.flatten(0, 1), before, atol=1e-2)


def test_looking_at_a_head_changes_neither_the_model_nor_the_generator():
    model = stirred(HEADS["bert"][0]).train()
    before = {name: one.clone() for name, one in model.state_dict().items()}
    torch.manual_seed(3)
    generator = torch.get_rng_state()
    modules = dict(model.named_modules())
    Output(model)
    assert torch.equal(generator, torch.get_rng_state())
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert {name: id(one) for name, one in model.named_modules()} == {
        name: id(one) for name, one in modules.items()
    }
    assert model.training
    assert all(one.training for one in model.modules())


class Squared(LlamaForCausalLM):
    """Its logits go through something that no loss here knows."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * out.logits.abs()
        return out


class Shifted(LlamaForCausalLM):
    """The softmax would not mind, but a number is added that is not known to be the same for each word."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits + 3.0
        return out


class Silent(LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 0.0
        return out


@pytest.mark.parametrize("kind", [Squared, Shifted, Silent])
def test_logits_that_go_through_something_else_are_refused_in_one_line(kind):
    with pytest.raises(ModelError, match="neither a scale nor a cap") as refused:
        Output(kind(LlamaConfig(**GROUPED)))
    assert kind.__name__ in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_model_without_a_head_is_refused_in_one_line():
    with pytest.raises(ModelError, match="no matrix that turns hidden states into words"):
        Output(LlamaModel(LlamaConfig(**GROUPED)))


def test_a_shape_without_numbers_is_not_measured():
    with torch.device("meta"):
        model = GraniteForCausalLM(GraniteConfig(**GROUPED, logits_scaling=8.0))
    assert Output(model).weight.is_meta
