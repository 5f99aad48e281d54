"""The fused trunk reads copies of weights: as fresh as the weights, and none where it cannot be used."""

import pytest
import torch
from transformers import (
    BertConfig,
    BertForMaskedLM,
    EuroBertConfig,
    EuroBertModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from biphase.attention import NAME, AttentionPattern
from biphase.data.stream import positions_of
from biphase.fast.trunk import FusedTrunk, Joined, refusal
from biphase.models.adapters import add_adapter
from biphase.models.backbone import LanguageModel, from_scratch, set_rope_base
from biphase.models.encoder import Encoder
from biphase.objectives import Batch
from biphase.specs import AdamW, LoRA, Size
from biphase.training.distributed import Ranks, Replicated
from biphase.training.loop import PlainStep
from biphase.training.optimizer import build

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
IDS = torch.randint(4, 64, (3, 20), generator=torch.Generator().manual_seed(0))
AT = torch.arange(0, 60, 3)
BATCH = Batch(
    IDS, positions_of(None, 3, 20), None, None, AT, IDS.flatten()[AT + 1], len(AT), False, torch.arange(3)
)


def eurobert():
    return from_scratch(
        Size("t", 2, 64, 4, 2, 96, "fp32", init_std=0.1), vocab=64, mask_id=3, length=32, seed=0
    )


def fuse(model, dtype=torch.float32):
    """What `prepare` does on a GPU."""
    fused = model.reader[0].fused = FusedTrunk(model.model.base_model, dtype)
    model.head_copy = Joined(model.model.get_output_embeddings().weight, dtype=dtype)
    fused.watch(model.head_copy)


@torch.no_grad()
def loss_of(model):
    return model.loss_sum(BATCH, AttentionPattern(False))


def learned(model):
    """Torch's fused AdamW leaves no trace in the versions of what it changes: the step itself sees to the copies."""
    step = PlainStep(
        build(model, AdamW()),
        lambda batch: model.loss_sum(batch, AttentionPattern(False)),
        1.0,
        Replicated(list(model.parameters()), Ranks(0, 1, CPU)),
        model=model,
    )
    step([BATCH], BATCH.count, 0.1)


def loaded(model):
    model.load_state_dict({name: one * 1.5 for name, one in model.state_dict().items()})


@torch.no_grad()
def copied(model):
    part = model.model.base_model.layers[1].self_attn.k_proj.weight
    part.copy_(part.flip(0))


@torch.no_grad()
def turned_head(model):
    model.head.copy_(model.head.flip(0))


def turned(model):
    set_rope_base(model.model, 50.0)


def turned_twice(model):
    turned(model)
    loss_of(model)
    set_rope_base(model.model, 100.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("change", [learned, loaded, copied, turned_head, turned, turned_twice])
def test_what_changes_is_seen_by_the_next_forward(change, dtype):
    model = eurobert()
    fuse(model, dtype)
    before = loss_of(model)
    change(model)
    after = loss_of(model)
    fuse(model, dtype)
    assert torch.equal(after, loss_of(model))
    assert after != before


def test_a_refresh_makes_copies_anew_that_nothing_else_would_have_noticed():
    """A kernel that writes to weights leaves no trace of it; `data` neither."""
    model = eurobert()
    fuse(model, torch.bfloat16)
    loss_of(model)
    for one in model.parameters():
        one.data.mul_(1.25)
    model.refresh()
    copies = model.copies()
    matrices = [one for name, one in model.named_parameters() if one.ndim == 2 and "embed" not in name]
    assert len(matrices) == len(copies) == 15
    for one in matrices:
        assert torch.equal(copies[one.data_ptr()], one.bfloat16())


@pytest.mark.parametrize("move", [lambda one: one.double(), lambda one: one.to(CPU)], ids=["cast", "moved"])
def test_a_model_that_is_moved_or_cast_has_no_copies_any_more(move):
    model = eurobert()
    fuse(model)
    move(model)
    assert model.reader[0].fused is model.head_copy is None
    assert model.copies() == {}
    fuse(model)
    move(model.reader[0])
    assert model.reader[0].fused is None


def llama(**more):
    return LanguageModel(LlamaForCausalLM(LlamaConfig(**SHAPE, **({"head_dim": 16} | more))))


def bert():
    return BertForMaskedLM(BertConfig(**SHAPE | {"pad_token_id": 0}))


def adapted():
    made = llama()
    add_adapter(made, LoRA(rank=2), seed=1)
    return made.model


def with_rope(**said):
    return llama(rope_parameters={"rope_theta": 100.0, "factor": 2.0, **said}).model


REFUSED = [
    ("BertModel is not one of", bert),
    ("biases or adapters", lambda: llama(attention_bias=True).model),
    ("biases or adapters", lambda: llama(mlp_bias=True).model),
    ("biases or adapters", adapted),
    ("positions are of another kind", lambda: with_rope(rope_type="dynamic")),
    ("positions are of another kind", lambda: with_rope(rope_type="yarn")),
    ("activation", lambda: llama(hidden_act="gelu").model),
    ("heads are 12 wide", lambda: llama(head_dim=12).model),
    ("heads are 24 wide", lambda: llama(head_dim=24).model),
    ("heads are 8 wide", lambda: llama(head_dim=8).model),
    ("heads are 256 wide", lambda: llama(head_dim=256).model),
]


@pytest.mark.parametrize(("why", "make"), REFUSED)
def test_a_trunk_that_cannot_be_computed_here_is_refused_with_the_reason(why, make):
    assert why in refusal(make().base_model)


@pytest.mark.parametrize(
    "make",
    [
        eurobert,
        llama,
        lambda: llama(head_dim=128),
        lambda: llama(rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}),
    ],
)
def test_the_families_it_is_written_for_are_not_refused(make):
    assert refusal(make().model.base_model) == ""


def test_a_device_without_fast_kernels_reads_as_transformers_does():
    model = eurobert()
    assert model.prepare(CPU, "bf16") == "plain"
    assert model.reader[0].fused is model.head_copy is None
    assert not model.reader[0].graphable


def test_a_word_that_transformers_pads_with_gets_no_gradient_here_either():
    config = EuroBertConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32, pad_token_id=7, bos_token_id=1, eos_token_id=7, mask_token_id=3,
    )  # fmt: skip
    config._attn_implementation = NAME
    trunk = EuroBertModel(config).float()
    encoder = Encoder(trunk, context=32)
    ids, positions = torch.tensor([[4, 5, 7, 6]]), torch.arange(4)[None]
    for fused in (None, FusedTrunk(trunk, torch.float32)):
        trunk.zero_grad()
        encoder.fused = fused
        encoder(ids, positions, AttentionPattern(False)).square().sum().backward()
        felt = trunk.embed_tokens.weight.grad.abs().sum(1)
        assert felt[7] == 0
        assert (felt[[4, 5, 6]] > 0).all()
