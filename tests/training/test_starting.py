"""A run from an existing model: its options hold in every step, through every stop, and in what is made of its states."""

import contextlib
from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from biphase import CATALOG, CLM, MLM, SIZES, WSD, AdamW, Chunks, Finetune, Hub, LoRA, Stage
from biphase.attention import NAME, AttentionPattern, pattern_of
from biphase.data.shards import Shards
from biphase.data.stream import heldout_stream
from biphase.errors import ModelError, SpecError, StoreError
from biphase.finetune.encoder import encoder_of_checkpoint
from biphase.keys import checkpoint_key
from biphase.models.backbone import LanguageModel, add_adapter, rope_base_of
from biphase.store import Store
from biphase.study.plan import identities
from biphase.training import checkpoint, pretrain
from biphase.training.checkpoint import CheckpointRecord, Progress, Saver
from biphase.training.distributed import Placed, Ranks
from biphase.training.optimizer import build
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import (
    Pretraining,
    heldout_losses,
    model_of_checkpoint,
    refuse_unfit,
    starting_model,
    yardsticks,
)
from biphase.training.tensors import RowRange

ALONE = Ranks(0, 1, torch.device("cpu"))
SHAPE = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NO_ENDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
OLD, NEW = 10_000.0, 300.0


def llama(*, tied=False, layers=2):
    shape = SHAPE | {"num_hidden_layers": layers, "num_key_value_heads": 2}
    turned = {"rope_parameters": {"rope_type": "default", "rope_theta": OLD}}
    return LlamaForCausalLM(LlamaConfig(**shape, **NO_ENDS, **turned, tie_word_embeddings=tied))


def tied_llama():
    return llama(tied=True)


def gpt2():
    """Matrices kept the other way round, dropout, learned positions, a tied head."""
    shape = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2LMHeadModel(GPT2Config(vocab_size=320, bos_token_id=0, eos_token_id=0, **shape))


def bert():
    return BertForMaskedLM(BertConfig(**SHAPE))


def drawn(make):
    """Weights large enough for positions and layers to count."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = make()
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
    return model


@pytest.fixture
def adapting(tiny_run, corpus, tmp_path):
    """Makes runs that start from a tiny model in a folder: `adapting(llama, Stage(MLM(0.4), 6))`."""

    def make(model, *stages, **fields):
        folder = tmp_path / model.__name__
        if not folder.exists():
            drawn(model).save_pretrained(folder)
        said = {
            "start": Hub(str(folder)),
            "corpus": corpus,
            "packing": Chunks(32, shortest=4),
            "batch_tokens": 128,
            "precision": "fp32",
            "schedule": WSD(1e-2, 1, 1),
            "seed": 7,
            "heldout_every": 3,
        }
        return tiny_run("adapted", *(stages or (Stage(MLM(0.4), 6),)), **said | fields)

    return make


@pytest.fixture
def other(tmp_path, shards):
    """A second store, to train the same thing in undisturbed."""
    made = Store(tmp_path / "other")
    made.shards.mkdir(parents=True)
    (made.shards / shards.name).symlink_to(shards)
    return made


def shards_in(store):
    return Shards.open(next(store.shards.iterdir()))


def train(run, step, store):
    """Bring `run` to `step` in `store`, keeping every state that was asked for; gives the training job of work."""
    known = identities(store)
    job = Pretraining(
        run,
        step,
        store=store,
        shards=shards_in(store),
        identities=known,
        ranks=ALONE,
        needed=lambda: {place.name for place in store.checkpoints.iterdir()},
        flops_per_token=None,
        options=RuntimeOptions(quiet=True, loaders=0),
    )
    job.train()
    return job


def tensors(store, run, step):
    place = store.checkpoints / checkpoint_key(run, step, identities(store))
    return load_file(place / "model.safetensors"), load_file(place / "optimizer.safetensors")


def same(one, two):
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, two, strict=True)
    )


def finished(run, step, store):
    """The model after that step, as it is evaluated and exported; None: its start."""
    key = None if step is None else checkpoint_key(run, step, identities(store))
    return model_of_checkpoint(run, key, store, shards_in(store)).eval()


@torch.no_grad()
def read(model, what="logits"):
    ids = torch.randint(4, 320, (2, 24), generator=torch.Generator().manual_seed(1))
    return getattr(model, what)(ids, torch.arange(24).expand(2, 24), AttentionPattern(False))


TWO_BASES = (Stage(MLM(0.4), 3), Stage(MLM(0.4), 3, rope_base=NEW))


class TestAnotherRotaryBase:
    @pytest.mark.parametrize("stops", [(2,), (3,), (4,), (1, 3, 5)], ids=str)
    def test_stopped_in_either_stage_it_ends_in_the_same_bits(self, adapting, store, other, stops):
        run = adapting(llama, *TWO_BASES)
        for step in (*stops, 6):
            train(run, step, store)
        train(run, 6, other)
        assert same(tensors(store, run, 6), tensors(other, run, 6))

    def test_it_is_felt_from_its_first_step_on(self, adapting, store):
        changed, plain = adapting(llama, *TWO_BASES), adapting(llama, Stage(MLM(0.4), 6))
        for run in (changed, plain):
            for step in (3, 4):
                train(run, step, store)
        known = identities(store)
        assert checkpoint_key(changed, 3, known) == checkpoint_key(plain, 3, known)
        assert not same(tensors(store, changed, 4)[:1], tensors(store, plain, 4)[:1])

    def test_a_state_has_the_base_its_last_step_was_made_with(self, adapting, store):
        run = adapting(llama, *TWO_BASES)
        for step, base in ((2, OLD), (3, OLD), (4, NEW), (6, NEW)):
            train(run, step, store)
            assert rope_base_of(finished(run, step, store).model) == base, step
        end, config = finished(run, 6, store), llama().config
        config.rope_parameters["rope_theta"] = NEW
        right = LlamaForCausalLM(config)
        right.set_attn_implementation(NAME)
        right.load_state_dict(end.model.state_dict())
        assert torch.equal(read(LanguageModel(right.eval())), read(end))
        assert rope_base_of(finished(run, None, store).model) == OLD

    def test_a_run_that_goes_on_keeps_it_and_stops_alike(self, adapting, tiny_run, store, other):
        run = adapting(llama, *TWO_BASES)
        on = tiny_run("on", Stage(MLM(0.4), 3), start=run)
        for one, stops in ((store, (6,)), (other, (4, 6))):
            for step in stops:
                train(run, step, one)
        train(on, 1, store)
        train(on, 3, store)
        train(on, 3, other)
        assert same(tensors(store, on, 3), tensors(other, on, 3))
        for step in (0, 1, 3):
            assert rope_base_of(finished(on, step, store).model) == NEW

    def test_the_start_of_a_run_that_changes_it_is_not_yet_changed(self, adapting, tiny_run, store):
        """Its first state is the other run's last, which counts its steps from another beginning."""
        run = adapting(llama, Stage(MLM(0.4), 3))
        on = tiny_run("on", Stage(MLM(0.4), 3, rope_base=NEW), start=run)
        further = tiny_run("further", Stage(MLM(0.4), 2, rope_base=500.0), start=on)
        for one, step in ((run, 3), (on, 3), (further, 1)):
            train(one, step, store)
        for one, step, base in ((on, 0, OLD), (on, 3, NEW), (further, 0, NEW), (further, 1, 500.0)):
            assert rope_base_of(finished(one, step, store).model) == base, (one.name, step)

    def test_the_last_heldout_loss_is_that_of_the_finished_model(self, adapting, store):
        run = adapting(llama, *TWO_BASES)
        job = train(run, 6, store)
        assert job.meter.lines[-1]["heldout"] == measured(finished(run, 6, store), run, store)

    def test_rows_may_then_be_longer_than_the_model_was_made_for(self, adapting, store):
        longer = {"packing": Chunks(128, shortest=4), "batch_tokens": 256}
        run = adapting(llama, Stage(MLM(0.4), 2, rope_base=NEW), **longer)
        train(run, 2, store)
        assert finished(run, 2, store).model.config.max_position_embeddings == 128
        with pytest.raises(ModelError, match="reads at most 64 tokens, rows have 128"):
            train(adapting(llama, Stage(MLM(0.4), 2), **longer), 2, store)

    def test_a_model_without_rotary_positions_is_refused_before_it_learns(self, adapting, store):
        with pytest.raises(ModelError, match="no rotary positions; leave out rope_base"):
            train(adapting(gpt2, Stage(MLM(0.4), 2, rope_base=NEW)), 2, store)
        assert not store.checkpoints.exists()


def measured(model, run, store):
    """The held-out losses of a model, by no training job of work."""
    model.eval()
    return heldout_losses(
        lambda batch: model.loss_sum(batch, pattern_of(batch, varlen=False)),
        heldout_stream(shards_in(store), run.packing),
        yardsticks(run.stages[0].objective, 0),
        rows=run.heldout_tokens // run.packing.length,
        micro_rows=4,
        ranks=ALONE,
        autocast=torch.no_grad,
        fixed=False,
    )


ADAPTER = LoRA(rank=2, alpha=8)
DECODERS = pytest.mark.parametrize("make", [llama, tied_llama, gpt2], ids=lambda make: make.__name__)


class TestAdapters:
    @DECODERS
    def test_only_the_adapter_learns_and_it_resumes_alike(self, make, adapting, store, other):
        run = adapting(make, adapter=ADAPTER)
        train(run, 6, other)
        for step in (1, 4, 6):
            train(run, step, store)
        weights, optimizer_state = tensors(store, run, 6)
        assert same((weights, optimizer_state), tensors(other, run, 6))
        begun = starting_model(run, shards_in(store)).model.state_dict()
        learned = {name for name in weights if not torch.equal(weights[name], begun[name])}
        assert learned == {name for name in weights if "lora_" in name}
        assert {name.partition(".")[2] for name in optimizer_state} == learned

    @DECODERS
    def test_what_is_used_of_it_is_the_model_with_the_adapter_merged(self, make, adapting, store, shards):
        run = adapting(make, adapter=ADAPTER)
        job = train(run, 6, store)
        beside, merged = job.model.eval(), finished(run, 6, store)
        assert (read(beside) - read(finished(run, None, store))).abs().max() > 1e-2, "it must have learned"
        torch.testing.assert_close(read(merged), read(beside), rtol=1e-4, atol=1e-4)
        assert merged.model.state_dict().keys() == drawn(make).state_dict().keys()
        spec = Finetune((CATALOG["sources-mini"],), protocol="standard")
        key = checkpoint_key(run, 6, identities(store))
        subject = encoder_of_checkpoint(run, key, store, Shards.open(shards), spec)
        assert torch.equal(read(subject.encoder.eval(), "forward"), read(merged, "hidden"))
        assert all(one.requires_grad for one in subject.encoder.parameters())

    def test_a_run_that_goes_on_goes_on_with_the_same_adapter(self, adapting, tiny_run, store, other):
        run = adapting(llama, adapter=ADAPTER)
        on = tiny_run("on", Stage(MLM(0.4), 4), start=run)
        assert on.adapter == ADAPTER
        for one in (store, other):
            train(run, 6, one)
        train(on, 4, store)
        train(on, 2, other)
        job = train(on, 4, other)
        assert same(tensors(store, on, 4), tensors(other, on, 4))
        steps = {float(value) for name, value in tensors(store, on, 4)[1].items() if name.startswith("step.")}
        assert steps == {10.0}
        torch.testing.assert_close(read(finished(on, 4, store)), read(job.model.eval()), rtol=1e-4, atol=1e-4)

    def test_another_adapter_or_none_cannot_go_on(self, adapting, tiny_run):
        run = adapting(llama, adapter=ADAPTER)
        with pytest.raises(SpecError, match="trained with another adapter"):
            tiny_run("on", Stage(MLM(0.4), 4), start=run, adapter=LoRA(rank=4))

    def test_unknown_targets_are_refused_before_anything_is_trained(self, adapting, store):
        with pytest.raises(ModelError, match=r"no matrix called query; it has .*q_proj"):
            train(adapting(llama, adapter=LoRA(targets=("query",))), 6, store)
        assert not store.checkpoints.exists()

    def test_a_state_with_an_adapter_does_not_load_without_one(self, adapting, store):
        run = adapting(llama, adapter=ADAPTER)
        train(run, 2, store)
        key = checkpoint_key(run, 2, identities(store))
        with pytest.raises(StoreError, match=r"holds another model \(.*base_layer"):
            checkpoint.load_weights(store, key, starting_model(replace(run, adapter=None), shards_in(store)))


class TestWhatIsFrozenOrSlow:
    @DECODERS
    def test_a_frozen_embedding_stays_through_every_stop(self, make, adapting, store, other):
        run = adapting(make, freeze="embeddings")
        train(run, 6, other)
        for step in (2, 6):
            train(run, step, store)
        weights, optimizer_state = tensors(store, run, 6)
        assert same((weights, optimizer_state), tensors(other, run, 6))
        begun = starting_model(run, shards_in(store)).model
        embedding = "transformer.wte.weight" if make is gpt2 else "model.embed_tokens.weight"
        still = {name for name in weights if torch.equal(weights[name], begun.state_dict()[name])}
        assert still == {embedding}
        assert f"exp_avg.{embedding}" not in optimizer_state
        assert ("lm_head.weight" in weights) == (make is llama)

    def test_layers_that_learn_at_their_share_resume_alike(self, adapting, store, other):
        run = adapting(llama, optimizer=AdamW(layer_decay=0.3))
        train(run, 6, other)
        for step in (1, 4, 6):
            train(run, step, store)
        assert same(tensors(store, run, 6), tensors(other, run, 6))

    def test_lower_layers_move_less(self, adapting, store):
        run = adapting(llama, optimizer=AdamW(layer_decay=0.1, weight_decay=0.0))
        train(run, 6, store)
        begun, weights = starting_model(run, shards_in(store)).model.state_dict(), tensors(store, run, 6)[0]

        def moved(name):
            return (weights[name] - begun[name]).abs().max().item()

        layers = [moved(f"model.layers.{number}.mlp.up_proj.weight") for number in (0, 1)]
        assert moved("model.embed_tokens.weight") < 0.3 * layers[0]
        assert layers[0] < 0.3 * layers[1]
        assert layers[1] < 0.3 * moved("lm_head.weight")


class TestWhatItCouldDoBefore:
    def test_heldout_losses_are_measured_before_the_first_step_and_never_again(self, adapting, store):
        run = adapting(gpt2)
        begun = measured(starting_model(run, shards_in(store)), run, store)
        for step in (2, 4, 6):
            lines = train(run, step, store).meter.lines
        heldout = [(line["step"], line["heldout"]) for line in lines if "heldout" in line]
        assert [step for step, _ in heldout] == [0, 2, 3, 4, 6]  # at each stop, too
        assert heldout[0][1] == begun
        assert begun.keys() == {"clm", "mlm40"}

    def test_neither_a_new_model_nor_a_run_that_goes_on_measures_its_beginning(
        self, adapting, tiny_run, store
    ):
        run = adapting(llama)
        on = tiny_run("on", Stage(CLM(), 3), start=run, heldout_every=3)
        train(run, 6, store)
        steps = [line["step"] for line in train(on, 3, store).meter.lines if "heldout" in line]
        assert steps == [0, 3, 6, 9]
        lines = train(tiny_run(heldout_every=6), 6, store).meter.lines
        assert [line["step"] for line in lines if "heldout" in line] == [6]


class TestTheStart:
    def test_a_mask_token_that_texts_never_had_is_the_mean_and_an_own_one_is_kept(self, adapting, shards):
        run, opened = adapting(llama), Shards.open(shards)
        before = drawn(llama).get_input_embeddings().weight
        for rule, kept in (("own", True), ("reserved", False), ("added", False)):
            told = Shards(opened.folder, opened.card | {"mask_rule": rule})
            row = starting_model(run, told).model.get_input_embeddings().weight[opened.mask_id]
            assert torch.equal(row, before[opened.mask_id]) == kept, rule

    def test_probes_run_where_they_are_asked_for(self, adapting, store, tmp_path):
        run = adapting(llama)
        broken = drawn(llama)
        with torch.no_grad():
            broken.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
        broken.save_pretrained(tmp_path / "llama")
        starting_model(run, shards_in(store))
        with pytest.raises(ModelError, match="not finite; look at its weights"):
            train(run, 2, store)
        assert not store.checkpoints.exists()

    def test_the_seed_of_the_adapter_is_that_of_the_first_run(self, adapting, tiny_run, shards):
        run = adapting(llama, adapter=ADAPTER)
        on = tiny_run("on", Stage(MLM(0.4), 4), start=run, seed=8, data="restart")
        first, second, third = (
            starting_model(one, Shards.open(shards)).model.state_dict()
            for one in (run, on, replace(run, seed=8))
        )
        assert same([first], [second])
        assert not same([first], [third])


def test_moments_of_what_is_frozen_wait_for_the_run_that_trains_it_again(tiny_run, store, shards):
    first = tiny_run("first", Stage(CLM(), 6))
    frozen = tiny_run("frozen", Stage(CLM(), 6), start=first, freeze="embeddings")
    after = tiny_run("after", Stage(CLM(), 6), start=frozen, freeze="nothing")
    for run in (first, frozen, after):
        train(run, 6, store)
    name = "model.embed_tokens.weight"
    taken = [checkpoint_of(run, store, "optimizer")[f"step.{name}"].item() for run in (first, frozen, after)]
    assert taken == [6, 6, 12]


def checkpoint_of(run, store, kind):
    return load_file(store.checkpoints / checkpoint_key(run, 6, identities(store)) / f"{kind}.safetensors")


STATE = "1" * 32


class TestStatesAndModels:
    def saved(self, model, store):
        wrapped = LanguageModel(model)
        rows = {name: RowRange.all_of(one) for name, one in wrapped.model.named_parameters()}
        placed = Placed("plain", build(wrapped, AdamW()), None, list(wrapped.parameters()), rows)
        saver = Saver(store, Ranks(0, 1, torch.device("cpu")), wrapped, placed, job="training job")
        about = {"run": {"kind": "Pretrain"}, "origin_step": 0, "epochs": 0.0}
        saver.begin(
            CheckpointRecord(STATE, about | {"progress": asdict(Progress(step=0, draw=0))}, []), last=True
        )
        saver.finish()
        return wrapped

    @pytest.mark.parametrize("make", [llama, tied_llama, gpt2, bert], ids=lambda make: make.__name__)
    def test_a_state_fills_a_model_of_its_kind_tied_or_not(self, make, store):
        right = self.saved(drawn(make), store)
        filled = LanguageModel(make())
        checkpoint.load_weights(store, STATE, filled)
        assert same([right.model.state_dict()], [filled.model.state_dict()])

    def test_a_state_that_lacks_a_weight_is_refused(self, store):
        """A tied head was written once; a model with a head of its own must not keep a random one."""
        self.saved(drawn(tied_llama), store)
        with pytest.raises(StoreError, match=r"holds another model \(lm_head.weight\); remove it"):
            checkpoint.load_weights(store, STATE, LanguageModel(llama()))

    @pytest.mark.parametrize(("has", "wants"), [(1, 2), (2, 1)], ids=["fewer", "more"])
    def test_a_state_of_another_depth_is_refused(self, has, wants, store):
        self.saved(llama(layers=has), store)
        with pytest.raises(StoreError, match=r"holds another model \(model.layers.1"):
            checkpoint.load_weights(store, STATE, LanguageModel(llama(layers=wants)))

    def test_a_state_without_its_adapter_is_refused(self, store):
        self.saved(llama(), store)
        wants = LanguageModel(llama())
        add_adapter(wants, ADAPTER, seed=1)
        with pytest.raises(StoreError, match="holds another model"):
            checkpoint.load_weights(store, STATE, wants)


def test_a_precision_that_the_device_does_not_have_is_refused_before_any_text_is_read(tiny_run):
    run = tiny_run("eight", Stage(CLM(), 12), precision="fp8")
    with pytest.raises(
        ModelError, match=r"eight: precision='fp8' cannot be had \(.*cpu\); say precision='bf16'"
    ):
        refuse_unfit(run, torch.device("cpu"))


@pytest.mark.parametrize(
    ("fields", "why"),
    [({"ffn": 72}, "multiples of 16"), ({"hidden": 80, "heads": 2}, "heads are 40 wide"), ({}, "")],
)
def test_shapes_that_have_no_products_in_eight_bits_are_refused_too(tiny_run, monkeypatch, fields, why):
    monkeypatch.setattr(pretrain, "fp8_refusal", lambda device: "")  # as on a GPU that has units for it
    size = replace(SIZES["1m"], name="odd", **({"hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 64} | fields))
    run = replace(tiny_run("eight", precision="fp8"), start=size)
    with pytest.raises(ModelError, match=why) if why else contextlib.nullcontext():
        refuse_unfit(run, torch.device("cpu"))
