"""A run from an existing model: rotary base, adapters, frozen and slow layers, through stops and in its checkpoints."""

from itertools import pairwise

import pytest
import torch
from families.tiny import stirred, with_head
from transformers import LlamaForCausalLM

from biphase import CATALOG, MLM, MNTP, WSD, AdamW, Chunks, Contrastive, Finetune, Hub, LoRA, Stage
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
OLD, NEW = 10_000.0, 300.0
TWO_BASES = (Stage(MLM(0.4), 3), Stage(MLM(0.4), 3, rope_base=NEW))
ADAPTER = LoRA(rank=2, alpha=8)
PAIRS = (
    Stage(MNTP(0.3), 1), Stage(Contrastive(CATALOG["scifact-mini"], batch=12, length=16), 4), Stage(MLM(0.4), 1),
)  # fmt: skip


def llama(*, tied=False):
    return with_head("llama", vocab_size=320, tie_word_embeddings=tied)


def tied_llama():
    return llama(tied=True)


def gpt2():
    """Transposed matrices, dropout, learned positions, a tied head."""
    return with_head("gpt2", vocab_size=320)


DECODERS = pytest.mark.parametrize("make", [llama, tied_llama, gpt2], ids=lambda make: make.__name__)


def initialized(make):
    """Weights large enough for positions and layers to matter."""
    return stirred(make(), 0.1)


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
        fixed=False,
    )


# ---------------------------------------------------------------- law 2


RUNS = {
    "rope base": (llama, {"stages": TWO_BASES}),
    "adapter": (tied_llama, {"adapter": ADAPTER}),
    "adapter with dropout": (gpt2, {"adapter": ADAPTER}),
    "frozen embedding": (tied_llama, {"freeze": "embeddings"}),
    "layer decay": (llama, {"optimizer": AdamW(layer_decay=0.1, weight_decay=0.0)}),
    "dropout": (gpt2, {"stages": (Stage(MNTP(0.3), 3), Stage(MLM(0.4), 3))}),
    "pairs": (llama, {"stages": PAIRS}),
    "pairs and an adapter": (llama, {"stages": PAIRS, "adapter": ADAPTER}),
}


@pytest.mark.parametrize(("make", "fields"), RUNS.values(), ids=RUNS)
def test_a_run_and_the_one_that_continues_it_resume_alike(
    adapting, trained, tiny_run, store, other, same_checkpoint, make, fields
):
    run = adapting(make, **fields)
    on = tiny_run("on", Stage(MLM(0.4), 3), start=run)
    for one, stops, further in ((store, (1, 2, 3, 4, 6), (1, 3)), (other, (6,), (3,))):
        trained(one, run, *stops)
        trained(one, on, *further)
    assert same_checkpoint(run, 6, store, other)
    assert same_checkpoint(on, 3, store, other)


# ---------------------------------------------------------------- rotary base


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


def test_a_continued_run_keeps_the_rotary_base(adapting, trained, tiny_run, store):
    run = adapting(llama, *TWO_BASES)
    on = tiny_run("on", Stage(MLM(0.4), 3), start=run)
    trained(store, run, 6)
    trained(store, on, 1, 3)
    assert {rope_base_of(model_after(on, step, store).model) for step in (0, 1, 3)} == {NEW}


# ---------------------------------------------------------------- adapters


@DECODERS
def test_only_the_adapter_learns_and_is_merged_for_use(make, adapting, trained, store, tensors):
    run = adapting(make, adapter=ADAPTER)
    job = trained(store, run, 6)
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
    adapting, trained, tiny_run, store, tensors
):
    run = adapting(llama, adapter=ADAPTER)
    on = tiny_run("on", Stage(MLM(0.4), 4), start=run)
    assert on.adapter == ADAPTER
    trained(store, run, 6)
    job = trained(store, on, 4)
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
def test_a_frozen_embedding_stays_through_every_stop(make, adapting, trained, store, tensors):
    run = adapting(make, freeze="embeddings")
    trained(store, run, 2, 6)
    weights, optimizer_state = tensors(store, run, 6)
    start = starting_model(run, shards_in(store)).model.state_dict()
    embedding = "transformer.wte.weight" if make is gpt2 else "model.embed_tokens.weight"
    assert {name for name in weights if torch.equal(weights[name], start[name])} == {embedding}
    assert f"exp_avg.{embedding}" not in optimizer_state
    assert ("lm_head.weight" in weights) == (make is llama)


def test_layer_decay_moves_lower_layers_less(adapting, trained, store, tensors):
    run = adapting(llama, optimizer=AdamW(layer_decay=0.1, weight_decay=0.0))
    trained(store, run, 6)
    start, weights = starting_model(run, shards_in(store)).model.state_dict(), tensors(store, run, 6)[0]
    ascending = ["embed_tokens", "layers.0.mlp.up_proj", "layers.1.mlp.up_proj"]
    names = [*(f"model.{name}.weight" for name in ascending), "lm_head.weight"]
    moved = [(weights[name] - start[name]).abs().max().item() for name in names]
    assert all(low < 0.3 * high for low, high in pairwise(moved))


# ---------------------------------------------------------------- before the first step


def test_heldout_losses_of_a_hub_model_are_measured_before_the_first_step(adapting, trained, store):
    run = adapting(gpt2)
    start = measured(starting_model(run, shards_in(store)), run, store)
    job = trained(store, run, 2, 4, 6)
    block, lines = job.model.model.transformer.h[0], job.meter.lines
    assert (block.attn.attn_dropout.p, block.attn.resid_dropout.p) == (0.0, 0.1)
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
