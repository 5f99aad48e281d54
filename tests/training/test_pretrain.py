"""Law 2: continue = never stopped. Weights, moments, data and masks, compared bit for bit."""

import contextlib
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from biphase import CLM, MLM, MNTP, WSD, Chunks, Hub, Linear, Rows, Stage
from biphase.data.shards import Shards
from biphase.errors import ModelError, StoreError, TrainingError
from biphase.keys import checkpoint_key
from biphase.models.backbone import TokenizerInfo, from_hub
from biphase.store import Store
from biphase.study.plan import identities
from biphase.training import checkpoint, distributed
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining, heldout_losses

ALONE = Ranks(0, 1, torch.device("cpu"))


def train(run, step, store, *, needed=(), **options):
    """Bring `run` to `step` in `store`; gives the training job of work."""
    fingerprints = identities(store)
    job = Pretraining(
        run,
        step,
        store=store,
        shards=Shards.open(next(store.shards.iterdir())),
        identities=fingerprints,
        ranks=ALONE,
        needed=lambda: set(needed),
        flops_per_token=1.0,
        options=RuntimeOptions(quiet=True, **({"loaders": 0} | options)),
    )
    job.train()
    return job


def tensors(store, run, step):
    place = store.checkpoints / checkpoint_key(run, step, identities(store))
    return load_file(place / "model.safetensors"), load_file(place / "optimizer.safetensors")


def same(one, two):
    return all(
        set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, two, strict=True)
    )


@pytest.fixture
def other(tmp_path, shards):
    """A second store, to train the same thing in undisturbed."""
    made = Store(tmp_path / "other")
    made.shards.mkdir(parents=True)
    (made.shards / shards.name).symlink_to(shards)
    return made


RUNS = {
    "clm": (Stage(CLM(), 12),),
    "mlm": (Stage(MLM(0.4, replace=(0.8, 0.1, 0.1)), 12),),
    "mntp": (Stage(MNTP(0.3), 12),),
    "clm-mlm": (Stage(CLM(), 5), Stage(MLM(Linear(0.5, 0.2, steps=4)), 7)),
}


@pytest.mark.parametrize("stages", RUNS.values(), ids=RUNS)
def test_continue_is_never_stopped(tiny_run, store, other, stages):
    run = tiny_run("run", *stages)
    train(run, 12, other)
    for stop in (1, 4, 5, 9, 12):  # also at the switch, inside the decay and the ratio schedule
        train(run, stop, store, loaders=stop % 3)
    assert same(tensors(store, run, 12), tensors(other, run, 12))


def test_document_masked_rows_resume_alike(tiny_run, store, other):
    run = tiny_run(packing=Rows(32, document_mask=True))
    train(run, 12, other)
    train(run, 7, store)
    train(run, 12, store, loaders=2)
    assert same(tensors(store, run, 12), tensors(other, run, 12))


def test_a_branch_from_a_shared_trunk_equals_the_run_trained_alone(tiny_run, store, other):
    trunk, branch = tiny_run("clm"), tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    train(trunk, 6, store)
    train(trunk, 12, store)
    train(branch, 12, store)
    train(branch, 12, other)
    assert checkpoint_key(trunk, 6, identities(store)) == checkpoint_key(branch, 6, identities(store))
    assert same(tensors(store, branch, 12), tensors(other, branch, 12))
    assert not same(tensors(store, branch, 12), tensors(store, trunk, 12))


def test_a_run_goes_on_from_anothers_end_with_moments_and_data(tiny_run, store, other):
    base = tiny_run("base")
    on = tiny_run("on", Stage(MLM(0.4), 6), start=base)
    train(base, 12, store)
    job = train(on, 6, store)
    train(base, 12, other)
    train(on, 3, other)
    train(on, 6, other)
    assert same(tensors(store, on, 6), tensors(other, on, 6))
    assert job.progress.next_sample == 18 * 8
    steps = {float(value) for name, value in tensors(store, on, 6)[1].items() if name.startswith("step.")}
    assert steps == {18.0}


def test_a_decoder_is_trained_both_ways_and_resumes(tiny_run, corpus, store, other, tmp_path):
    torch.manual_seed(0)
    decoder = GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=320))
    decoder.save_pretrained(tmp_path / "decoder")
    run = tiny_run(
        "adapted",
        Stage(MNTP(0.3), 6),
        Stage(MLM(0.4), 6),
        start=Hub(str(tmp_path / "decoder")),
        corpus=corpus,
        packing=Chunks(32, shortest=4),
        batch_tokens=256,
        precision="fp32",
        schedule=WSD(3e-3, 2, 3),
    )
    train(run, 12, other)
    train(run, 7, store)
    job = train(run, 12, store)
    block = job.model.model.transformer.h[0]
    assert (block.attn.attn_dropout.p, block.attn.resid_dropout.p) == (0.0, 0.1)
    assert same(tensors(store, run, 12), tensors(other, run, 12))


def test_reset_moments_and_restarted_data_are_what_they_say(tiny_run, store):
    base = tiny_run("base")
    on = tiny_run("on", Stage(MLM(0.4), 6), start=base, optimizer_state="reset", data="restart")
    train(base, 12, store)
    job = train(on, 6, store)
    assert job.progress.next_sample == 6 * 8
    steps = {float(value) for name, value in tensors(store, on, 6)[1].items() if name.startswith("step.")}
    assert steps == {6.0}


def test_the_stages_keep_weights_moments_rate_and_data_at_the_switch(tiny_run, store):
    run = tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6), schedule=WSD(3e-3, 2, 0))
    job = train(run, 12, store)
    lines = [line for line in job.meter.lines if "loss" in line]
    assert [line["objective"] for line in lines] == ["clm"] * 6 + ["mlm 40%"] * 6
    assert lines[5]["rate"] == lines[6]["rate"] == 3e-3
    assert job.progress.next_sample == 12 * 8
    assert {float(v) for n, v in tensors(store, run, 12)[1].items() if n.startswith("step.")} == {12.0}


def test_accumulation_gives_the_same_gradient_up_to_rounding(tiny_run, store, other, tmp_path, shards):
    run = tiny_run("mlm", Stage(MLM(0.3), 50), schedule=WSD(3e-3, 2, 3))
    train(run, 50, store, micro_rows=8)
    train(run, 50, other, micro_rows=3)
    whole, parts = tensors(store, run, 50)[0], tensors(other, run, 50)[0]
    assert max((whole[name] - parts[name]).abs().max() for name in whole) <= 1e-5


def test_it_learns(tiny_run, store):
    """Both objectives fall well below the entropy of single tokens on the tiny corpus."""
    entropy = Shards.open(next(store.shards.iterdir())).card["unigram_entropy"]
    for objective in (CLM(), MLM(0.15)):
        run = tiny_run("learn", Stage(objective, 150), schedule=WSD(1e-2, 10, 30), heldout_every=150)
        losses = [line["loss"] for line in train(run, 150, store).meter.lines if "loss" in line]
        assert losses[0] == pytest.approx(math.log(320), abs=0.2)
        assert losses[-1] < entropy - 0.8, objective


def test_heldout_losses_are_measured_for_both_objectives_at_the_stated_steps(tiny_run, store):
    job = train(tiny_run("mlm20", Stage(MLM(0.2), 12)), 12, store)
    measured = {line["step"]: line["heldout"] for line in job.meter.lines if "heldout" in line}
    assert list(measured) == [5, 10, 12]
    assert all(set(losses) == {"clm", "mlm40", "mlm20"} for losses in measured.values())


def test_measuring_changes_nothing(tiny_run, store, other):
    often, never = tiny_run(heldout_every=1), tiny_run(heldout_every=1000)
    train(often, 12, store)
    train(never, 12, other)
    assert same(tensors(store, often, 12), tensors(other, never, 12))


def test_states_on_the_way_are_pruned_but_never_a_needed_one(tiny_run, store):
    run = tiny_run()
    key = {step: checkpoint_key(run, step, identities(store)) for step in range(13)}
    train(run, 12, store, checkpoint_steps=2, needed={key[4], key[12]})
    assert {place.name for place in store.checkpoints.iterdir()} == {key[4], key[12]}
    assert not list(store.attempts.iterdir())


def test_a_stop_leaves_a_checkpoint_after_the_current_step(tiny_run, store, other):
    run = tiny_run()
    asked = iter([False, False, True])
    job = train(run, 12, store, stop=lambda: next(asked, False))
    assert job.progress.step == 3
    assert checkpoint.nearest(run, 12, store, identities(store)) == (
        3,
        checkpoint_key(run, 3, identities(store)),
    )
    train(run, 12, store)
    train(run, 12, other)
    assert same(tensors(store, run, 12), tensors(other, run, 12))


def test_a_worker_that_lost_its_lease_publishes_nothing_more(tiny_run, store):
    job = train(tiny_run(), 12, store, lost=lambda: True)
    assert job.progress.step == 1
    assert not store.checkpoints.exists() or not list(store.checkpoints.iterdir())


def test_the_curve_of_a_resumed_piece_has_every_step_once(tiny_run, store):
    run = tiny_run()
    train(run, 5, store)
    job = train(run, 12, store)
    steps = [line["step"] for line in job.meter.lines if "loss" in line]
    assert steps == list(range(1, 13))


def test_an_unsound_step_changes_nothing_and_is_counted(tiny_run, store, monkeypatch):
    run = tiny_run()
    plain = Pretraining._loss_sum
    calls = []

    def poisoned(self, batch):
        calls.append(batch.samples[0])
        return plain(self, batch) * (float("nan") if self.model.training and len(calls) == 3 else 1.0)

    monkeypatch.setattr(Pretraining, "_loss_sum", poisoned)
    job = train(run, 4, store)
    skipped = [line for line in job.meter.lines if line.get("skipped")]
    assert [line["step"] for line in skipped] == [3]
    assert skipped[0]["samples"] == [16, 23]
    assert skipped[0]["loss"] is None
    assert job.progress.skipped == 1
    weights, optimizer_state = tensors(store, run, 4)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert {float(v) for n, v in optimizer_state.items() if n.startswith("step.")} == {3.0}


def test_too_many_unsound_steps_stop_the_run_with_a_clear_error(tiny_run, store, monkeypatch):
    monkeypatch.setattr(Pretraining, "_loss_sum", lambda self, batch: self.model.head.sum() * float("inf"))
    run = tiny_run("bad", Stage(CLM(), 40))
    with pytest.raises(TrainingError, match=r"20 steps in a row.*samples 152 to 159.*lower"):
        train(run, 40, store)
    assert not store.checkpoints.exists()


def test_a_damaged_checkpoint_is_refused_not_used(tiny_run, store):
    run = tiny_run()
    train(run, 5, store)
    place = store.checkpoints / checkpoint_key(run, 5, identities(store))
    data = bytearray((place / "model.safetensors").read_bytes())
    data[-3] ^= 1
    (place / "model.safetensors").write_bytes(data)
    with pytest.raises(StoreError, match="has changed since it was written"):
        train(run, 12, store)


def test_more_processes_than_rows_are_refused(tiny_run, store):
    with pytest.raises(TrainingError, match="use fewer"):
        Pretraining(
            tiny_run(),
            12,
            store=store,
            shards=Shards.open(next(store.shards.iterdir())),
            identities=identities(store),
            ranks=Ranks(0, 9, torch.device("cpu")),
            needed=set,
            flops_per_token=1.0,
            options=RuntimeOptions(),
        ).load()


def test_a_checkpoint_holds_only_safetensors_and_json(tiny_run, store):
    run = tiny_run()
    train(run, 12, store)
    place = store.checkpoints / checkpoint_key(run, 12, identities(store))
    names = {path.name for path in place.iterdir()}
    assert names == {
        "model.safetensors",
        "optimizer.safetensors",
        "checkpoint.json",
        "metrics.jsonl",
        "manifest.json",
    }
    state = json.loads((place / "checkpoint.json").read_text())
    assert state["progress"]["step"] == 12
    assert state["progress"]["tokens"] == 12 * 256
    assert state["epochs"] > 0


def test_a_resumed_run_takes_the_thread_count_and_micro_batch_its_state_was_made_with(tiny_run, store):
    """Sums over threads and micro-batches are sums in another order: the state remembers how it was summed."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        train(tiny_run(), 5, store, micro_rows=3)
        torch.set_num_threads(1)
        job = train(tiny_run(), 6, store)
        assert torch.get_num_threads() == 2
        assert job.micro_rows == 3
    finally:
        torch.set_num_threads(before)


def test_a_missing_parent_is_refused_and_never_replaced_by_new_weights(tiny_run, store):
    on = tiny_run("on", Stage(MLM(0.4), 6), start=tiny_run("base"))
    with pytest.raises(StoreError, match="goes on from base"):
        train(on, 6, store)
    assert not store.checkpoints.exists()


def test_a_plan_made_while_a_piece_runs_protects_its_states(tiny_run, store):
    run = tiny_run()
    wanted = checkpoint_key(run, 3, identities(store))
    needed = lambda: {wanted} if store.has(store.checkpoints / wanted) else set()  # noqa: E731
    job = Pretraining(
        run,
        12,
        store=store,
        shards=Shards.open(next(store.shards.iterdir())),
        identities=identities(store),
        ranks=ALONE,
        needed=needed,
        flops_per_token=None,
        options=RuntimeOptions(quiet=True, loaders=0, checkpoint_steps=3),
    )
    assert job.train()
    assert store.has(store.checkpoints / wanted)
    assert job.progress.flops is None, "an unknown cost is not zero, and can be written"


def test_an_added_mask_token_is_the_exact_mean_for_every_process(tmp_path):
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=60, **shape)).save_pretrained(tmp_path / "decoder")
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(from_hub(Hub(str(tmp_path / "decoder")), TokenizerInfo(61, mask=60), length=16))
    for weights in zip(*(model.parameters() for model in models), strict=True):
        assert torch.equal(*weights)
    assert torch.equal(models[0].head[60], models[0].head[:60].mean(0))


def test_a_decoder_whose_context_is_too_short_is_refused(tmp_path):
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=60, max_position_embeddings=64, **shape)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ModelError, match=r"reads at most 64 tokens.*Chunks\(64\)"):
        from_hub(Hub(str(tmp_path)), TokenizerInfo(60, mask=59), length=128)


def test_a_process_without_heldout_rows_measures_nothing_and_does_not_fail(tiny_run, store):
    run = tiny_run(heldout_tokens=32, heldout_every=6)
    job = train(run, 6, store)
    assert sum("heldout" in line for line in job.meter.lines) == 1
    losses = heldout_losses(
        job._loss_sum,
        job.heldout,
        (CLM(),),
        rows=0,
        micro_rows=4,
        ranks=ALONE,
        autocast=contextlib.nullcontext,
        fixed=True,
    )
    assert losses == {}


def test_micro_rows_are_not_carried_to_rows_of_another_length(tiny_run, store):
    base = tiny_run("base")
    on = tiny_run("on", Stage(CLM(), 6), start=base, packing=Chunks(64), batch_tokens=512, data="restart")
    train(base, 12, store, micro_rows=2)
    assert train(on, 6, store).micro_rows == 8


def test_energy_adds_up_over_a_resume_and_is_unknown_where_a_part_was_not_measured(
    tiny_run, store, monkeypatch
):
    counter = iter(range(0, 1000, 10))
    monkeypatch.setattr(distributed, "joules", lambda device: float(next(counter)))
    run = tiny_run("run", Stage(CLM(), 12))
    assert train(run, 4, store).progress.joules == 10.0
    assert train(run, 8, store).progress.joules == 20.0  # the first part's and this one's
    monkeypatch.setattr(distributed, "joules", lambda device: None)
    assert train(run, 10, store).progress.joules is None
