"""A run from an existing model: rotary base, adapters, frozen and slow layers, through stops and in its checkpoints."""

from itertools import pairwise

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from biphase import CATALOG, MLM, WSD, AdamW, Chunks, Finetune, Hub, LoRA, Stage
from biphase.attention import NAME, AttentionPattern, pattern_of
from biphase.data.shards import Shards
from biphase.data.stream import heldout_stream
from biphase.errors import ModelError, SpecError
from biphase.finetune.encoder import encoder_of_checkpoint
from biphase.keys import checkpoint_key
from biphase.models.backbone import LanguageModel, rope_base_of
from biphase.protocol import heldout_objectives
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.pretrain import heldout_losses, model_of_checkpoint, starting_model

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "num_key_value_heads": 2,
    "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
OLD, NEW = 10_000.0, 300.0
TWO_BASES = (Stage(MLM(0.4), 3), Stage(MLM(0.4), 3, rope_base=NEW))
ADAPTER = LoRA(rank=2, alpha=8)


def llama(*, tied=False):
    rope = {"rope_type": "default", "rope_theta": OLD}
    return LlamaForCausalLM(LlamaConfig(**SHAPE, rope_parameters=rope, tie_word_embeddings=tied))


def tied_llama():
    return llama(tied=True)


def gpt2():
    """Transposed matrices, dropout, learned positions, a tied head."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, bos_token_id=0, eos_token_id=0, **shape))


DECODERS = pytest.mark.parametrize("make", [llama, tied_llama, gpt2], ids=lambda make: make.__name__)


def initialized(make):
    """Weights large enough for positions and layers to matter."""
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(1)
        model = make()
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.1)
    return model


@pytest.fixture
def adapting(tiny_run, corpus, tmp_path):
    """Makes runs that start from a tiny model in a folder: `adapting(llama, Stage(MLM(0.4), 6))`."""

    def make(model, *stages, **fields):
        folder = tmp_path / model.__name__
        if not folder.exists():
            initialized(model).save_pretrained(folder)
        defaults = {
            "start": Hub(str(folder)),
            "corpus": corpus,
            "packing": Chunks(32, shortest=4),
            "batch_tokens": 128,
            "precision": "fp32",
            "schedule": WSD(1e-2, 1, 1),
            "seed": 7,
            "heldout_every": 3,
        }
        return tiny_run("adapted", *(stages or (Stage(MLM(0.4), 6),)), **defaults | fields)

    return make


@pytest.fixture
def trained(train):
    """Brings a run to one step after another, keeping every checkpoint; returns the last training job."""

    def make(store, run, *steps):
        kept = lambda: {folder.name for folder in store.checkpoints.iterdir()}  # noqa: E731
        return [train(run, step, store, needed=kept, flops=None) for step in steps][-1]

    return make


def shards_in(store):
    return Shards.open(next(store.shards.iterdir()))


def model_after(run, step, store):
    """The model after that step, as it is evaluated and exported; None: its start."""
    key = None if step is None else checkpoint_key(run, step, identities(store))
    return model_of_checkpoint(run, key, store, shards_in(store)).eval()


@torch.no_grad()
def outputs(model, what="logits"):
    ids = torch.randint(4, 320, (2, 24), generator=torch.Generator().manual_seed(1))
    return getattr(model, what)(ids, torch.arange(24).expand(2, 24), AttentionPattern(False))


def measured(model, run, store):
    """The held-out losses of a model, without a training job."""
    model.eval()
    return heldout_losses(
        lambda batch: model.loss_sum(batch, pattern_of(batch, varlen=False)),
        heldout_stream(shards_in(store), run.packing),
        heldout_objectives(run.stages[0].objective),
        rows=run.heldout_tokens // run.packing.length,
        micro_rows=4,
        ranks=Ranks(0, 1, CPU),
        autocast=torch.no_grad,
        fixed=False,
    )


# ---------------------------------------------------------------- rotary base


@pytest.mark.parametrize("stops", [(2,), (3,), (4,), (1, 3, 5)], ids=str)
def test_a_changed_rotary_base_resumes_alike(adapting, trained, store, other, same_checkpoint, stops):
    run = adapting(llama, *TWO_BASES)
    trained(store, run, *stops, 6)
    trained(other, run, 6)
    assert same_checkpoint(run, 6, store, other)


def test_a_checkpoint_has_the_rotary_base_of_its_last_step(adapting, trained, store, tensors):
    run, plain = adapting(llama, *TWO_BASES), adapting(llama, Stage(MLM(0.4), 6))
    for step, base in ((2, OLD), (3, OLD), (4, NEW), (6, NEW)):
        trained(store, run, step)
        assert rope_base_of(model_after(run, step, store).model) == base, step
    trained(store, plain, 4)
    assert checkpoint_key(run, 3, identities(store)) == checkpoint_key(plain, 3, identities(store))
    head = "lm_head.weight"
    assert not torch.equal(tensors(store, run, 4)[0][head], tensors(store, plain, 4)[0][head])
    end, config = model_after(run, 6, store), llama().config
    config.rope_parameters["rope_theta"] = NEW
    reference = LlamaForCausalLM(config)
    reference.set_attn_implementation(NAME)
    reference.load_state_dict(end.model.state_dict())
    assert torch.equal(outputs(LanguageModel(reference.eval())), outputs(end))
    assert rope_base_of(model_after(run, None, store).model) == OLD


def test_a_continued_run_keeps_the_rotary_base(adapting, trained, tiny_run, store, other, same_checkpoint):
    run = adapting(llama, *TWO_BASES)
    on = tiny_run("on", Stage(MLM(0.4), 3), start=run)
    trained(store, run, 6)
    trained(other, run, 4, 6)
    trained(store, on, 1, 3)
    trained(other, on, 3)
    assert same_checkpoint(on, 3, store, other)
    assert {rope_base_of(model_after(on, step, store).model) for step in (0, 1, 3)} == {NEW}


# ---------------------------------------------------------------- adapters


@DECODERS
def test_only_the_adapter_learns_and_is_merged_for_use(
    make, adapting, trained, store, other, same_checkpoint, tensors
):
    run = adapting(make, adapter=ADAPTER)
    job = trained(other, run, 6)
    trained(store, run, 1, 4, 6)
    assert same_checkpoint(run, 6, store, other)
    weights, optimizer_state = tensors(store, run, 6)
    start = starting_model(run, shards_in(store)).model.state_dict()
    learned = {name for name in weights if not torch.equal(weights[name], start[name])}
    assert learned == {name for name in weights if "lora_" in name}
    assert {name.partition(".")[2] for name in optimizer_state} == learned

    unmerged, merged = job.model.eval(), model_after(run, 6, store)
    assert (outputs(unmerged) - outputs(model_after(run, None, store))).abs().max() > 1e-2, "it learned"
    torch.testing.assert_close(outputs(merged), outputs(unmerged), rtol=1e-4, atol=1e-4)
    assert merged.model.state_dict().keys() == make().state_dict().keys()
    spec = Finetune((CATALOG["sources-mini"],), protocol="standard")
    key = checkpoint_key(run, 6, identities(store))
    tested = encoder_of_checkpoint(run, key, store, shards_in(store), spec)
    assert torch.equal(outputs(tested.encoder.eval(), "forward"), outputs(merged, "hidden"))
    assert all(parameter.requires_grad for parameter in tested.encoder.parameters())


def test_a_continued_run_keeps_the_adapter_and_its_optimizer_state(
    adapting, trained, tiny_run, store, other, same_checkpoint, tensors
):
    run = adapting(llama, adapter=ADAPTER)
    on = tiny_run("on", Stage(MLM(0.4), 4), start=run)
    assert on.adapter == ADAPTER
    for one in (store, other):
        trained(one, run, 6)
    trained(store, on, 4)
    job = trained(other, on, 2, 4)
    assert same_checkpoint(on, 4, store, other)
    optimizer_state = tensors(store, on, 4)[1]
    assert {float(value) for name, value in optimizer_state.items() if name.startswith("step.")} == {10.0}
    torch.testing.assert_close(
        outputs(model_after(on, 4, store)), outputs(job.model.eval()), rtol=1e-4, atol=1e-4
    )
    with pytest.raises(SpecError, match="another adapter"):
        tiny_run("on", Stage(MLM(0.4), 4), start=run, adapter=LoRA(rank=4))


@pytest.mark.parametrize(
    ("make", "fields", "fact"),
    [
        (llama, {"adapter": LoRA(targets=("query",))}, r"query.*q_proj"),
        (gpt2, {"stages": (Stage(MLM(0.4), 2, rope_base=NEW),)}, "rope_base"),
    ],
    ids=["unknown targets", "no rotary positions"],
)
def test_what_a_model_does_not_have_is_refused_before_it_trains(adapting, trained, store, make, fields, fact):
    with pytest.raises(ModelError, match=fact):
        trained(store, adapting(make, **fields), 2)
    assert not store.checkpoints.exists()


# ---------------------------------------------------------------- frozen and slow layers


@DECODERS
def test_a_frozen_embedding_stays_through_every_stop(
    make, adapting, trained, store, other, same_checkpoint, tensors
):
    run = adapting(make, freeze="embeddings")
    trained(other, run, 6)
    trained(store, run, 2, 6)
    assert same_checkpoint(run, 6, store, other)
    weights, optimizer_state = tensors(store, run, 6)
    start = starting_model(run, shards_in(store)).model.state_dict()
    embedding = "transformer.wte.weight" if make is gpt2 else "model.embed_tokens.weight"
    assert {name for name in weights if torch.equal(weights[name], start[name])} == {embedding}
    assert f"exp_avg.{embedding}" not in optimizer_state
    assert ("lm_head.weight" in weights) == (make is llama)


def test_layer_decay_resumes_alike_and_moves_lower_layers_less(
    adapting, trained, store, other, same_checkpoint, tensors
):
    run = adapting(llama, optimizer=AdamW(layer_decay=0.1, weight_decay=0.0))
    trained(other, run, 6)
    trained(store, run, 1, 4, 6)
    assert same_checkpoint(run, 6, store, other)
    start, weights = starting_model(run, shards_in(store)).model.state_dict(), tensors(store, run, 6)[0]
    ascending = ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]
    names = [*(f"model.{name}.weight" for name in ascending), "lm_head.weight"]
    moved = [(weights[name] - start[name]).abs().max().item() for name in names]
    assert all(low < 0.3 * high for low, high in pairwise(moved))


# ---------------------------------------------------------------- before the first step


def test_heldout_losses_of_a_hub_model_are_measured_before_the_first_step(adapting, trained, store):
    run = adapting(gpt2)
    start = measured(starting_model(run, shards_in(store)), run, store)
    lines = trained(store, run, 2, 4, 6).meter.lines
    heldout = [(line["step"], line["heldout"]) for line in lines if "heldout" in line]
    assert [step for step, _ in heldout] == [0, 2, 3, 4, 6]  # at each stop, too
    assert heldout[0][1] == start
    assert start.keys() == {"clm", "mlm40"}


def test_training_probes_a_hub_model_first(adapting, trained, store, tmp_path):
    run, broken = adapting(llama), initialized(llama)
    with torch.no_grad():
        broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    broken.save_pretrained(tmp_path / "llama")
    starting_model(run, shards_in(store))
    with pytest.raises(ModelError, match="not finite"):
        trained(store, run, 2)
    assert not store.checkpoints.exists()
