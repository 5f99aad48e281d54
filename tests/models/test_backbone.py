"""Language models: new and loaded ones, losses, heads, rope bases, recomputation, LoRA, and `biphase.load`."""

import copy
import json
import shutil

import pytest
import torch
from families import tiny
from families.tiny import refused
from torch import nn
from transformers import AutoModel, AutoTokenizer, LlamaForCausalLM, PhiForCausalLM

import biphase
from biphase.attention import AttentionPattern, pattern_of
from biphase.data.stream import positions_of
from biphase.data.tokenizer import load_saved
from biphase.errors import SpecError
from biphase.export.checkpoint import write_encoder
from biphase.export.writing import tokenizer_of, write_tokenizer
from biphase.fast.trunk import cross_entropy_sum
from biphase.models.backbone import (
    Output,
    TokenizerInfo,
    add_adapter,
    from_hub,
    from_scratch,
    merge_adapter,
    rope_base_of,
    set_rope_base,
    stack_of,
)
from biphase.objectives import Batch, Vocabulary, apply
from biphase.randomness import salt
from biphase.specs import CLM, MLM, Hub, LoRA, Size

CPU = torch.device("cpu")
TINY = Size("t", 2, 32, 4, 2, 48, "fp32")


def new(size=TINY, *, vocab=64, seed=0):
    return from_scratch(size, vocab=vocab, mask_id=3, length=16, seed=seed)


# ---------------------------------------------------------------- new models


def test_weights_depend_on_the_seed_alone():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, same, other = (new(seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), same.parameters(), strict=True))
    assert not torch.equal(first.head, other.head)
    assert first.model.base_model.embed_tokens.padding_idx is None  # or the end token would not be trained


def batch_of(objective):
    ids = torch.randint(4, 64, (3, 16), generator=torch.Generator().manual_seed(0))
    vocabulary = Vocabulary.of(64, mask_id=3, special_ids=(0, 1))
    inputs = apply(objective, ids, None, torch.arange(3), seed=0, step=0, vocabulary=vocabulary)
    flat = inputs.labels.flatten()
    at = (flat >= 0).nonzero().flatten()
    positions = positions_of(None, 3, 16)
    batch = Batch(inputs.ids, positions, None, None, at, flat[at], len(at), inputs.causal, torch.arange(3))
    return batch, inputs.labels


@pytest.mark.parametrize("objective", [MLM(0.4), CLM()], ids=["mlm", "clm"])
def test_loss_and_gradients_equal_transformers(objective):
    model = new()
    batch, labels = batch_of(objective)
    loss = model.loss_sum(batch, AttentionPattern(batch.causal)) / batch.count
    loss.backward()
    theirs = model.model
    if batch.causal:  # EuroBERT cannot be causal in transformers; a Llama with its weights is
        theirs = tiny.with_head("llama", rms_norm_eps=1e-5)
        labels = batch.ids  # Llama shifts labels itself
    theirs = copy.deepcopy(theirs)
    theirs.load_state_dict(model.model.state_dict())
    theirs.zero_grad()
    theirs.set_attn_implementation("sdpa")
    right = theirs(input_ids=batch.ids, labels=labels).loss
    right.backward()
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-6)
    for (name, ours), other in zip(model.model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-4, atol=1e-6, msg=name)


# ---------------------------------------------------------------- models from a folder


def llama(**fields):
    return tiny.with_head("llama", **{"vocab_size": 60, "num_hidden_layers": 1, **fields})


def started(model, tokenizer, folder, **options):
    """The model and what a run starts with after loading it from a folder."""
    tiny.stirred(model, 0.1).save_pretrained(folder)
    return model, from_hub(Hub(str(folder)), tokenizer, **{"length": 16} | options)


def vocab_tables(model):
    """The tables with vocab rows: embedding, head, and the head's bias if there is one."""
    head = model.get_output_embeddings()
    tables = [model.get_input_embeddings().weight, head.weight, head.bias]
    return [table for table in tables if table is not None]


GROWING = {
    "llama": llama,
    "tied": lambda: llama(tie_word_embeddings=True),
    "phi": lambda: tiny.with_head("phi", vocab_size=60, num_hidden_layers=1),
    "bert": lambda: tiny.with_head("bert", vocab_size=60, num_hidden_layers=1),
}


@pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)
@pytest.mark.parametrize(
    ("tokenizer", "rows"),
    [
        (TokenizerInfo(61, mask=60), 61),  # added
        (TokenizerInfo(60, mask=17), 60),  # a reserved slot, whose row was never trained
        (TokenizerInfo(55, mask=54), 60),  # a row among those that pad the table
        (TokenizerInfo(60, mask=17, mask_is_new=False), 60),
    ],
    ids=["added", "reserved", "padded", "own"],
)
def test_a_new_mask_token_gets_the_mean_row_and_the_others_stay(make, tokenizer, rows, tmp_path):
    model, start = started(make(), tokenizer, tmp_path)
    for before, after in zip(vocab_tables(model), vocab_tables(start.model), strict=True):
        others = torch.arange(60) != tokenizer.mask
        assert len(after) == rows
        assert torch.equal(after[:60][others], before[others])
        right = before[others].mean(0) if tokenizer.mask_is_new else before[tokenizer.mask]
        assert torch.equal(after[tokenizer.mask], right)
    assert start.model.config.vocab_size == rows
    tied = start.head is start.model.get_input_embeddings().weight
    assert tied == model.config.tie_word_embeddings
    ids = torch.tensor([[5, tokenizer.mask, 7, 8]])
    assert start.logits(ids, torch.arange(4)[None], AttentionPattern(False)).shape == (1, 4, rows)


def test_the_end_token_is_trained_also_if_it_is_the_pad_token(tmp_path):
    _, start = started(llama(pad_token_id=2, eos_token_id=2), TokenizerInfo(61, mask=60), tmp_path)
    start.hidden(
        torch.tensor([[5, 2, 7, 60]]), torch.arange(4)[None], AttentionPattern(False)
    ).sum().backward()
    assert start.model.get_input_embeddings().weight.grad[2].abs().sum() > 0


def test_rows_longer_than_the_context_need_a_new_rope_base(tmp_path):
    tokenizer = TokenizerInfo(60, mask=59)
    _, start = started(llama(), tokenizer, tmp_path, length=128, stretched=True)
    assert start.model.config.max_position_embeddings == start.encoder.context == 128
    bert = tiny.with_head("bert", vocab_size=60)
    for model, options in ((llama(), {}), (bert, {"stretched": True})):  # BERT has learned positions
        assert "64 tokens" in refused(started, model, tokenizer, tmp_path / "other", length=128, **options)


# ---------------------------------------------------------------- output


class ScaledAndCapped(PhiForCausalLM):
    """Everything at once after the matrix: a bias, a scale and a cap."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = 2.0 * torch.tanh(0.25 * output.logits / 2.0)
        return output


# The model, and what its head is: scale, cap, a layer of its own, a bias.
HEADS = {
    "llama": ({}, 1.0, None, False, False),
    "eurobert": ({}, 1.0, None, False, False),
    "cohere": ({"logit_scale": 0.0625}, 0.0625, None, False, False),
    "granite": ({"logits_scaling": 8.0}, 0.125, None, False, False),
    "gemma2": ({"final_logit_softcapping": 2.5}, 1.0, 2.5, False, False),
    "phi": ({}, 1.0, None, False, True),
    "gptj": ({}, 1.0, None, False, True),
    "scaled and capped": ({}, 0.25, 2.0, False, True),
    "bert": ({}, 1.0, None, True, True),
    "roberta": ({}, 1.0, None, True, True),
    "modernbert": ({}, 1.0, None, True, True),
    "opt": ({"word_embed_proj_dim": 16}, 1.0, None, False, False),  # its output is narrower than its layers
}


def model_with_head(name):
    if name == "scaled and capped":
        return tiny.stirred(ScaledAndCapped(tiny.config("phi")).eval())
    return tiny.stirred(tiny.with_head(name, **HEADS[name][0]).eval())


def texts():
    return torch.randint(4, 64, (2, 10), generator=torch.Generator().manual_seed(1))


def hidden_of(model):
    return model.base_model(input_ids=texts(), use_cache=False).last_hidden_state.flatten(0, 1)


def logits_of(model):
    return model(input_ids=texts()).logits.flatten(0, 1)


@pytest.mark.parametrize("name", HEADS)
def test_output_finds_the_parts_of_a_head_and_its_loss_is_that_of_the_models_own_logits(name):
    """Of some rows, in several slices, as training does; also after weights changed in place."""
    model = model_with_head(name)
    output, labels, rows = Output.of(model), texts().flatten(), torch.tensor([0, 3, 4, 11, 19])
    _, scale, cap, transforms, biased = HEADS[name]
    assert (output.scale, output.cap, output.transforms) == (scale, cap, transforms)
    assert (output.bias is not None) == biased
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.linspace(-0.1, 0.1, weight.numel()).view_as(weight))
        torch.testing.assert_close(output.logits(hidden_of(model)), logits_of(model), rtol=1e-5, atol=1e-5)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def gradients(loss):
        return torch.autograd.grad(loss, list(trained.values()), allow_unused=True)

    inputs = output.rows(hidden_of(model)[rows])
    loss = cross_entropy_sum(
        inputs, output.weight, labels[rows], bias=output.bias, cap=output.cap, slice_rows=2
    )
    right = nn.functional.cross_entropy(logits_of(model)[rows], labels[rows], reduction="sum")
    torch.testing.assert_close(loss, right, rtol=1e-5, atol=1e-5)
    for weight, ours, theirs in zip(trained, gradients(loss), gradients(right), strict=True):
        assert (ours is None) == (theirs is None), weight
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=weight)


@pytest.mark.parametrize(
    "change",
    [lambda x: x * x.abs(), lambda x: x + 3.0, lambda x: x * 0.0],
    ids=["squared", "shifted", "zero"],
)
def test_logits_that_are_neither_scaled_nor_capped_are_refused(change):
    class Odd(LlamaForCausalLM):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = change(output.logits)
            return output

    assert "Odd" in refused(Output.of, Odd(tiny.config("llama")))


# ---------------------------------------------------------------- rope base


OLD, NEW, WINDOWED = 10_000.0, 300.0, 500.0
MIXED = ["sliding_attention", "full_attention"]


def rope(base, **fields):
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base, **fields}}


def mixed(base, windows):
    parameters = {
        kind: rope(theta)["rope_parameters"] for kind, theta in zip(MIXED, (windows, base), strict=True)
    }
    return {"layer_types": MIXED, "rope_parameters": parameters}


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
ROPES = {
    "llama": lambda base, windows: ("llama", rope(base)),
    "llama3": lambda base, windows: ("llama", rope(base, **LLAMA3)),  # scaled by wavelength
    "eurobert": lambda base, windows: ("eurobert", rope(base)),
    "gpt_neox": lambda base, windows: ("gpt_neox", rope(base, partial_rotary_factor=0.5)),
    "gemma3": lambda base, windows: ("gemma3_text", mixed(base, windows) | {"sliding_window": 5}),
    "modernbert": lambda base, windows: ("modernbert", mixed(base, windows) | {"local_attention": 8}),
}


def rotary(name, base, windows=WINDOWED):
    """A model with weights so large that attention, and so positions, count."""
    family, fields = ROPES[name](base, windows)
    model = tiny.with_head(family, **fields).eval()
    for weight in model.parameters():
        nn.init.zeros_(weight)
    return tiny.stirred(model, 0.3)


@torch.no_grad()
def long_logits(model):
    ids = torch.randint(4, 64, (2, 40), generator=torch.Generator().manual_seed(1))
    return model(input_ids=ids).logits


@pytest.mark.parametrize("name", ROPES)
def test_a_changed_rope_base_gives_the_model_built_with_it(name):
    model, built = rotary(name, OLD), rotary(name, NEW)
    before, right = long_logits(model), long_logits(built)
    assert (before - right).abs().max() > 1e-2, "the base must matter"
    buffers = {key: buffer.data_ptr() for key, buffer in model.named_buffers()}
    set_rope_base(model, NEW)
    assert torch.equal(long_logits(model), right)
    assert rope_base_of(model) == NEW
    assert {key: buffer.data_ptr() for key, buffer in model.named_buffers()} == buffers  # for compiled graphs
    again = type(model)(copy.deepcopy(model.config)).eval()  # as a folder would be loaded
    again.load_state_dict(model.state_dict())
    assert torch.equal(long_logits(again), right)
    if name in ("gemma3", "modernbert"):
        parameters = model.config.rope_parameters
        assert {kind: parameters[kind]["rope_theta"] for kind in MIXED} == {MIXED[0]: WINDOWED, MIXED[1]: NEW}
        assert not torch.equal(right, long_logits(rotary(name, NEW, windows=NEW))), (
            "the windows' base must matter"
        )
    set_rope_base(model, OLD)
    assert torch.equal(long_logits(model), before)


# ---------------------------------------------------------------- recomputation


def chunked_batch(*, causal):
    ids = torch.randint(4, 64, (2, 16), generator=torch.Generator().manual_seed(2))
    segments = (torch.arange(16) >= 9).long().expand(2, 16)
    at = torch.arange(0, 32, 3)
    positions = torch.cat([torch.arange(9), torch.arange(7)]).expand(2, 16)
    return Batch(ids, positions, segments, None, at, ids.flatten()[at], len(at), causal, torch.arange(2))


def trainable(family, **fields):
    model = tiny.with_head(family, seed=1, **fields)
    model.get_input_embeddings().padding_idx = None
    return tiny.ours(model).train()


def loss_and_gradients(model, batch):
    torch.manual_seed(salt(0, "dropout"))
    loss = model.loss_sum(batch, pattern_of(batch, varlen=False))
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {}),
        ("gpt2", {"attn_pdrop": 0.0}),  # with dropout, which must fall alike both times
        ("bert", {"attention_probs_dropout_prob": 0.0}),
        ("opt", {}),
    ],
)
def test_recomputation_changes_neither_loss_nor_gradients(family, fields, causal):
    plain, recomputed = trainable(family, **fields), trainable(family, **fields)
    assert plain.prepare(CPU, "fp32") == recomputed.prepare(CPU, "fp32", recompute=True) == "plain"
    calls = []
    stack_of(recomputed.model.base_model)[1][0].register_forward_pre_hook(lambda *_: calls.append(1))
    first, second = (loss_and_gradients(model, chunked_batch(causal=causal)) for model in (plain, recomputed))
    assert len(calls) == 2, "once forward, once for the backward pass"
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(first, second, strict=True))


# ---------------------------------------------------------------- adapters


ADAPTED = pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])  # GPT-2's matrices are transposed


@torch.no_grad()
def logits(model):
    ids = torch.randint(4, 64, (2, 12), generator=torch.Generator().manual_seed(1))
    return model.logits(ids, torch.arange(12).expand(2, 12), AttentionPattern(False))


def trained(model):
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def stir_adapter(model):
    """As after some training: peft's second matrices begin at 0, where the adapter changes nothing."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in trained(model).values():
            weight.add_(torch.randn(weight.shape, generator=generator) * 0.2)


@ADAPTED
def test_only_the_adapter_is_trained_it_begins_as_zero_and_merges_into_a_plain_model(family):
    model = tiny.language_model(family)
    plain, names = logits(model), list(model.state_dict())
    modules = {name: type(module) for name, module in model.named_modules()}
    kinds = [type(module).__name__ for module in model.model.base_model.modules()]
    add_adapter(model, LoRA(rank=3, alpha=6), seed=1)
    assert len(trained(model)) == 2 * (kinds.count("Linear") + kinds.count("Conv1D"))
    assert all("lora_" in name and 3 in weight.shape for name, weight in trained(model).items())
    assert torch.equal(logits(model), plain)
    stir_adapter(model)
    adapted = logits(model)
    assert (adapted - plain).abs().max() > 0.05, "the adapter must matter"
    merge_adapter(model)
    torch.testing.assert_close(logits(model), adapted, rtol=1e-4, atol=1e-4)
    assert list(model.state_dict()) == names
    assert {name: type(module) for name, module in model.named_modules()} == modules
    assert len(trained(model)) == len(list(model.parameters()))
    add_adapter(model, LoRA(rank=4), seed=1)  # and can be adapted again
    assert {min(weight.shape) for weight in trained(model).values()} == {4}


@pytest.mark.parametrize("wrong", ["query", "embed_tokens", "lm_head", "input_layernorm", "proj"])
def test_a_target_that_is_no_matrix_is_refused(wrong):
    """Also beside a right one, where peft would ignore it."""
    message = refused(add_adapter, tiny.language_model("llama"), LoRA(targets=("q_proj", wrong)), seed=1)
    assert f"called {wrong};" in message
    assert message.endswith("v_proj")


# ---------------------------------------------------------------- biphase.load


TEXT = "the cat <|mask|> on the <|mask|>"


def exported(family, shards, folder):
    tokenizer = tokenizer_of(load_saved(shards / "tokenizer"), bos=False, context=60, trained_here=True)
    model = tiny.language_model(family, vocab_size=320, bos_token_id=0, eos_token_id=0)
    written = write_encoder(model, tokenizer, folder)
    write_tokenizer(tokenizer, folder)
    return model, written


@pytest.mark.parametrize("family", ["gpt2", "qwen3"])
def test_load_fills_masks_for_families_without_a_masked_class(family, shards, tmp_path):
    model, written = exported(family, shards, tmp_path)
    assert written.edits["is_causal"] is False
    loaded = biphase.load(tmp_path)
    ids = AutoTokenizer.from_pretrained(tmp_path)(TEXT, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        hidden = AutoModel.from_pretrained(tmp_path)(ids).last_hidden_state[0]
        right = model.model.get_output_embeddings()(hidden)
    assert torch.allclose(loaded.hidden_states(TEXT), hidden, atol=1e-5)
    at = (ids[0] == loaded.tokenizer.mask_token_id).nonzero()[:, 0]
    for shifted in (False, True):
        filled = loaded.fill_mask(TEXT, top=3, shifted=shifted)
        likely = right[at - int(shifted)].softmax(-1).topk(3)
        tokens = [[loaded.tokenizer.decode([number]) for number in row] for row in likely.indices.tolist()]
        assert [[token for token, _ in row] for row in filled] == tokens
        shares = torch.tensor([[share for _, share in row] for row in filled])
        assert torch.allclose(shares, likely.values, atol=1e-5)


def test_load_refuses_what_cannot_be_answered(shards, tmp_path):
    exported("gpt2", shards, tmp_path / "model")
    loaded = biphase.load(tmp_path / "model")
    assert "<|mask|>" in refused(loaded.fill_mask, "the cat sat", error=SpecError)
    assert "top=0" in refused(loaded.fill_mask, f"the {loaded.mask_token}", 0, error=SpecError)
    assert "64" in refused(loaded.hidden_states, "the cat " * 40, error=SpecError)
    assert "/nope" in refused(biphase.load, "/nope")
    for file, change, facts in (
        ("config.json", {"n_positions": 96}, ["wpe.weight", "(64, ", "(96, ", "config.json"]),
        ("tokenizer_config.json", {"mask_token": None}, ["no mask token"]),
    ):
        folder = shutil.copytree(tmp_path / "model", tmp_path / file)
        content = json.loads((folder / file).read_text()) | change
        (folder / file).write_text(json.dumps(content))
        message = refused(lambda folder=folder: biphase.load(folder).fill_mask("the cat sat"))
        assert [fact for fact in facts if fact not in message] == []
