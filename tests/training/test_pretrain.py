"""Law 2: a resumed run equals one that never stopped. Weights, optimizer state, data and masks, bit for bit."""

import math
import shutil

import pytest
import torch

from biphase import CLM, MLM, MNTP, WSD, AdamW, Linear, Mix, Muon, Rows, Stage, Uniform, protocol
from biphase.attention import pattern_of
from biphase.data.shards import Shards
from biphase.errors import StoreError, TrainingError
from biphase.keys import checkpoint_key
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.objectives import assign
from biphase.store import publish, write_json
from biphase.study.plan import identities
from biphase.training import checkpoint
from biphase.training.distributed import Ranks
from biphase.training.pretrain import Pretraining

DRAWN = MLM(Uniform(0, 1), replace=(0.8, 0.1, 0.1), weight="1/ratio")
RUNS = {
    "clm": {"stages": (Stage(CLM(), 12),)},
    "mlm": {"stages": (Stage(MLM(0.4, replace=(0.8, 0.1, 0.1)), 12),)},
    "mntp": {"stages": (Stage(MNTP(0.3), 12),)},
    "clm-mlm": {"stages": (Stage(CLM(), 5), Stage(MLM(Linear(0.5, 0.2, steps=4)), 7))},
    "schedule": {
        "stages": (Stage(CLM(), 5), Stage(MLM(0.4), 7, peak=1e-3)),
        "schedule": WSD(3e-3, 3, 6, shape="1-sqrt", floor=0.1, warmup_from=0.1),
    },
    "frozen": {
        "stages": (
            Stage(CLM(), 5, freeze=("embeddings", "layers[:1]")),
            Stage(MLM(0.4), 4, freeze="layers[1]", layer_decay=0.5),
            Stage(CLM(), 3),
        )
    },
    "muon": {
        "optimizer": Muon(),
        "stages": (Stage(CLM(), 6, freeze="layers[0]"), Stage(MLM(0.4), 6, layer_decay=0.5)),
    },
    "z-loss": {"z_loss": 1e-2},
    "documents": {"packing": Rows(32, document_mask=True)},
    "mix": {
        "stages": (
            Stage(Mix({CLM(): 3, MNTP(0.3): 1}), 5),
            Stage(Mix({CLM(): Linear(1, 0, 6), DRAWN: 0.5}, weights={CLM(): 2}, mean_over="labels"), 7),
        )
    },
    "drawn": {"stages": (Stage(DRAWN, 12),), "packing": Rows(32)},
    "units": {"stages": (Stage(MLM(0.3, unit="word"), 5), Stage(MNTP(0.3, unit="span", mean_span=2), 7))},
}


def steps_of(optimizer_state):
    """The step counts of AdamW's state."""
    return {float(value) for name, value in optimizer_state.items() if name.startswith("step.")}


@pytest.mark.parametrize("fields", RUNS.values(), ids=RUNS)
def test_a_resumed_run_equals_one_that_never_stopped(tiny_run, train, store, other, same_checkpoint, fields):
    run = tiny_run("run", **fields)
    train(run, 12, other)
    for stop in (1, 4, 5, 9, 12):  # also at the switch, inside the decay and the ratio schedule
        train(run, stop, store, loaders=stop % 3)
    assert same_checkpoint(run, 12, store, other)


def in_frozen(name, layer):
    return f"layers.{layer}." in name or (layer == 0 and "embed_tokens" in name)


def test_frozen_weights_keep_their_bits_and_their_optimizer_state_rests(tiny_run, train, store, tensors):
    stages = Stage(CLM(), 4), Stage(CLM(), 4, freeze=("embeddings", "layers[:1]")), Stage(MLM(0.4), 4)
    run = tiny_run("frozen", *stages)
    kept = [checkpoint_key(run, step, identities(store)) for step in (4, 8, 12)]
    train(run, 12, store, needed=kept, checkpoint_steps=4)
    before, after, end = (tensors(store, run, step) for step in (4, 8, 12))
    for name, weight in before[0].items():
        assert torch.equal(weight, after[0][name]) == in_frozen(name, 0), name
        assert not torch.equal(end[0][name], after[0][name]), name
    for name, state in before[1].items():
        assert torch.equal(state, after[1][name]) == in_frozen(name, 0), name
        assert name[:5] != "step." or float(end[1][name]) == (8.0 if in_frozen(name, 0) else 12.0)


def test_frozen_layers_do_not_change_the_gradients_of_the_others(tiny_run, train, store, tensors):
    fields = {"optimizer": AdamW(clip=1e9), "schedule": WSD(3e-3, 1, 0)}  # no clipping by the norm of all
    every, some = (tiny_run("run", Stage(CLM(), 1, freeze=freeze), **fields) for freeze in ((), "layers[0]"))
    for run in (every, some):
        train(run, 1, store)
    (weights, state), (others, rested) = (tensors(store, run, 1) for run in (every, some))
    learned = {name for name in weights if "layers.0." not in name}
    assert all(torch.equal(weights[name], others[name]) for name in learned)
    assert {name for name in state if "layers.0." not in name} == rested.keys()


def test_a_z_loss_is_trained_on_and_not_measured_on_held_out_text(tiny_run, train, store):
    losses = {}
    for z in (0.0, 0.1):
        lines = train(tiny_run("run", z_loss=z, schedule=WSD(1e-9, 1, 0)), 5, store).meter.lines
        losses[z] = [line["loss"] for line in lines if "loss" in line], lines[-1]["heldout"]
    assert all(more > plain + 0.5 for plain, more in zip(losses[0.0][0], losses[0.1][0], strict=True))
    assert losses[0.1][1] == pytest.approx(losses[0.0][1], rel=1e-4)


def test_a_branch_from_a_shared_beginning_equals_the_run_trained_alone(
    tiny_run, train, store, other, same_checkpoint, tensors
):
    trunk, branch = tiny_run("clm"), tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    for run, step in ((trunk, 6), (trunk, 12), (branch, 12)):
        train(run, step, store)
    train(branch, 12, other)
    assert checkpoint_key(trunk, 6, identities(store)) == checkpoint_key(branch, 6, identities(store))
    assert same_checkpoint(branch, 12, store, other)
    weights = "lm_head.weight"
    assert not torch.equal(tensors(store, branch, 12)[0][weights], tensors(store, trunk, 12)[0][weights])


def test_a_run_continues_anothers_optimizer_state_and_data(
    tiny_run, train, store, other, same_checkpoint, tensors
):
    base = tiny_run("base")
    on = tiny_run("on", Stage(MLM(0.4), 6), start=base)
    train(base, 12, store)
    job = train(on, 6, store)
    for run, step in ((base, 12), (on, 3), (on, 6)):
        train(run, step, other)
    assert same_checkpoint(on, 6, store, other)
    assert job.progress.next_sample == 18 * 8
    assert steps_of(tensors(store, on, 6)[1]) == {18.0}
    reset = tiny_run("reset", Stage(MLM(0.4), 6), start=base, optimizer_state="reset", data="restart")
    assert train(reset, 6, store).progress.next_sample == 6 * 8
    assert steps_of(tensors(store, reset, 6)[1]) == {6.0}


def test_jobs_that_go_on_with_a_live_model_equal_jobs_that_load_it(
    tiny_run, train, store, other, same_checkpoint
):
    trunk, branch = tiny_run("clm"), tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6))
    more = tiny_run("more", Stage(MLM(0.4), 4), start=trunk)
    reset = tiny_run("reset", Stage(MLM(0.4), 4), start=trunk, optimizer_state="reset", data="restart")
    stretched = tiny_run("stretched", Stage(CLM(), 4, rope_base=5e5), start=trunk)
    jobs = [(trunk, 6), (trunk, 12), (branch, 12), (more, 4), (stretched, 2), (stretched, 4), (reset, 4)]
    kept = [checkpoint_key(run, step, identities(store)) for run, step in jobs]
    live, taken_over = None, []
    for run, step in jobs:
        before = live
        job = train(run, step, store, needed=kept, live=live)
        live = job.live_model()
        taken_over.append(before is not None and job.model is before.model)
        train(run, step, other, needed=kept)
    # The model whose RoPE base has changed cannot serve a run that keeps its own.
    assert taken_over == [False, True, True, True, True, True, False]
    for run, step in jobs:
        assert same_checkpoint(run, step, store, other)


def test_a_live_model_serves_only_the_same_model_and_the_checkpoint_it_published(
    tiny_run, train, job_of, store
):
    run = tiny_run("clm")
    live = train(run, 6, store).live_model()
    assert live.key == checkpoint_key(run, 6, identities(store))
    train(run, 12, store, needed=[live.key])
    for change in ({"precision": "bf16"}, {"freeze": "embeddings"}, {"optimizer": AdamW(weight_decay=0.0)}):
        job = job_of(tiny_run("on", Stage(CLM(), 4), start=run, **change), 4, store, live=live)
        job.load()
        assert job.model is not live.model, change
    late = job_of(run, 6, store)  # another worker publishes the same checkpoint before this one does
    shutil.rmtree(store.checkpoints / live.key)
    shutil.rmtree(store.checkpoints / checkpoint_key(run, 12, identities(store)))
    late.load()
    train(run, 6, store)
    late.train()
    assert late.live_model().key == ""


def test_a_switch_of_objectives_keeps_optimizer_state_rate_and_data(tiny_run, train, store, tensors):
    run = tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6), schedule=WSD(3e-3, 2, 0))
    job = train(run, 12, store)
    lines = [line for line in job.meter.lines if "loss" in line]
    assert [line["objective"] for line in lines] == ["clm"] * 6 + ["mlm 40%"] * 6
    assert ["ratio" in line for line in lines] == [False] * 6 + [True] * 6
    assert lines[5]["rate"] == lines[6]["rate"] == 3e-3
    assert job.progress.next_sample == 12 * 8
    assert steps_of(tensors(store, run, 12)[1]) == {12.0}


def test_both_objectives_learn_more_than_the_frequency_of_tokens(tiny_run, train, store):
    entropy = Shards.open(next(store.shards.iterdir())).card["unigram_entropy"]
    for objective in (CLM(), MLM(0.15)):
        run = tiny_run("learn", Stage(objective, 150), schedule=WSD(1e-2, 10, 30), heldout_every=150)
        losses = [line["loss"] for line in train(run, 150, store).meter.lines if "loss" in line]
        assert losses[0] == pytest.approx(math.log(320), abs=0.2)
        assert losses[-1] < entropy - 0.8, objective


# ---------------------------------------------------------------- mixtures and drawn ratios

MIX = {CLM(): 2, MNTP(0.3): 1, DRAWN: 1}
WAYS = [
    Mix(MIX),
    Mix(MIX, weights={CLM(): 2, DRAWN: 0.5}),
    Mix(MIX, weights={CLM(): 2}, mean_over="labels"),
    DRAWN,
]


def loss_by_hand(job, objective, step):
    """The loss of a step, row by row and label by label, with torch's own cross-entropy."""
    run = job.run
    sums, masses = {}, {}
    for each in assign(objective, step * run.rows_per_step, run.rows_per_step, seed=run.seed, step=step):
        sums[each.objective] = masses[each.objective] = 0.0
        for sample in each.samples.tolist():
            batch = job.stream.batch(each.objective, torch.tensor([sample]), step=step)
            pattern = pattern_of(batch, varlen=False)
            logits = job.model.logits(batch.ids, batch.positions, pattern).flatten(0, 1)[batch.label_at]
            losses = torch.nn.functional.cross_entropy(logits, batch.labels, reduction="none")
            weights = torch.ones(len(losses)) if batch.weights is None else batch.weights
            sums[each.objective] += float(losses.double() @ weights.double())
            masses[each.objective] += batch.term.mass
    parts = objective.parts_at(step)
    if getattr(objective, "mean_over", "labels") == "labels":
        return sum(part.weight * sums[part.objective] for part in parts) / sum(masses.values())
    return sum(part.share * part.weight * sums[part.objective] / masses[part.objective] for part in parts)


@pytest.mark.parametrize("micro_rows", [8, 3])
@pytest.mark.parametrize("objective", WAYS, ids=lambda one: one.label)
def test_the_loss_of_a_step_is_the_stated_mean(tiny_run, job_of, store, objective, micro_rows):
    run = tiny_run("mix", Stage(objective, 6))
    job = job_of(run, 6, store, micro_rows=micro_rows)
    job.load()
    with torch.no_grad():
        wanted = loss_by_hand(job, objective, 0)
    job.train()
    assert job.meter.lines[0]["loss"] == pytest.approx(wanted, rel=1e-5)
    assert job.meter.lines[0]["objective"] == objective.label


def test_each_micro_batch_of_a_mixture_attends_in_the_direction_of_its_objective(tiny_run, job_of, store):
    """Law 1: causal rows never see the future, the others do, and no chunk sees another."""
    job = job_of(tiny_run("mix", Stage(Mix(MIX), 6)), 6, store, micro_rows=3)
    job.load()
    directions = set()
    for batch in job._batches(0):
        directions.add(batch.causal)
        pattern = pattern_of(batch, varlen=False)
        changed = batch.ids.clone()
        changed[:, 20] = (changed[:, 20] + 7) % 300
        with torch.no_grad():
            moved = [job.model.hidden(ids, batch.positions, pattern) for ids in (batch.ids, changed)]
        seen = (moved[0] != moved[1]).any(-1)
        same = batch.segments == batch.segments[:, 20:21]
        after = torch.arange(32) >= 20
        assert torch.equal(seen, same & after if batch.causal else same)
    assert directions == {True, False}


# ---------------------------------------------------------------- held-out losses


def test_heldout_losses_are_measured_for_every_objective_at_the_stated_steps(tiny_run, train, store):
    mix = Mix({CLM(): 3, MNTP(Linear(0.5, 0.2, 6)): 1, DRAWN: 1})
    for objective, own in ((MLM(0.2), ["mlm20"] * 3), (mix, ["mntp30", "mntp20", "mntp20"])):
        lines = train(tiny_run("run", Stage(objective, 12)), 12, store).meter.lines
        measured = {line["step"]: set(line["heldout"]) for line in lines if "heldout" in line}
        drawn = {DRAWN.column} if objective is mix else set()
        usual = {"clm", "mlm40"} | drawn
        assert measured == {step: usual | {name} for step, name in zip((5, 10, 12), own, strict=True)}


def test_measuring_changes_no_weight(tiny_run, train, store, other, same_checkpoint):
    train(tiny_run(heldout_every=1), 12, store)
    train(tiny_run(heldout_every=1000), 12, other)
    assert same_checkpoint(tiny_run(), 12, store, other)


# ---------------------------------------------------------------- stops and checkpoints


def test_intermediate_checkpoints_are_pruned_except_needed_ones(tiny_run, train, store):
    run = tiny_run()
    key = {step: checkpoint_key(run, step, identities(store)) for step in range(13)}
    train(run, 12, store, checkpoint_steps=2, needed={key[4], key[12]})
    assert {folder.name for folder in store.checkpoints.iterdir()} == {key[4], key[12]}
    assert not list(store.attempts.iterdir())


def test_a_plan_made_during_training_protects_its_checkpoints(tiny_run, train, store):
    run = tiny_run()
    key = checkpoint_key(run, 3, identities(store))
    job = train(
        run,
        12,
        store,
        needed=lambda: {key} if store.has(store.checkpoints / key) else set(),
        flops=None,
        checkpoint_steps=3,
    )
    assert job.published
    assert store.has(store.checkpoints / key)
    assert job.progress.flops is None, "an unknown cost is not zero, and can be written"


def test_a_stop_leaves_a_checkpoint_after_the_current_step(tiny_run, train, store, other, same_checkpoint):
    run = tiny_run()
    answers = iter([False, False, True])
    job = train(run, 12, store, stop=lambda: next(answers, False))
    assert job.progress.step == 3
    key = checkpoint_key(run, 3, identities(store))
    assert checkpoint.nearest(run, 12, store, identities(store)) == (3, key)
    resumed = train(run, 12, store)
    assert [line["step"] for line in resumed.meter.lines if "loss" in line] == list(range(1, 13))
    train(run, 12, other)
    assert same_checkpoint(run, 12, store, other)


def test_a_worker_that_lost_its_lease_publishes_nothing_more(tiny_run, train, store):
    job = train(tiny_run(), 12, store, lost=lambda: True)
    assert job.progress.step == 1
    assert not store.checkpoints.exists() or not list(store.checkpoints.iterdir())


def test_a_nonfinite_step_is_skipped_and_counted(tiny_run, train, store, tensors, monkeypatch):
    run, plain, calls = tiny_run(), Pretraining._loss_sum, []

    def poisoned(self, batch):
        calls.append(batch.samples[0])
        return plain(self, batch) * (float("nan") if self.model.training and len(calls) == 3 else 1.0)

    monkeypatch.setattr(Pretraining, "_loss_sum", poisoned)
    job = train(run, 4, store)
    (skipped,) = [line for line in job.meter.lines if line.get("skipped")]
    assert (skipped["step"], skipped["samples"], skipped["loss"]) == (3, [16, 23], None)
    assert job.progress.skipped == 1
    weights, optimizer_state = tensors(store, run, 4)
    assert all(torch.isfinite(value).all() for value in weights.values())
    assert steps_of(optimizer_state) == {3.0}


def test_muon_skips_a_nonfinite_step_as_adamw_does(tiny_run, train, store, tensors, monkeypatch):
    run = tiny_run("muon", optimizer=Muon())
    kept = [checkpoint_key(run, step, identities(store)) for step in (4, 5, 6)]
    plain = Pretraining._loss_sum

    def broken(job, batch):
        return plain(job, batch) * (math.inf if job.progress.step == 4 else 1.0)

    monkeypatch.setattr(Pretraining, "_loss_sum", broken)
    job = train(run, 6, store, needed=kept, checkpoint_steps=1)
    assert job.progress.skipped == 1
    (before, state), (after, rested), (end, _) = (tensors(store, run, step) for step in (4, 5, 6))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert all(torch.equal(state[name], rested[name]) for name in state)
    assert not any(torch.equal(after[name], end[name]) for name in after)


def test_too_many_nonfinite_steps_in_a_row_fail(tiny_run, train, store, monkeypatch):
    monkeypatch.setattr(Pretraining, "_loss_sum", lambda self, batch: self.model.head.sum() * float("inf"))
    with pytest.raises(TrainingError, match=r"20 .*samples 152 to 159"):
        train(tiny_run("bad", Stage(CLM(), 40)), 40, store)
    assert not store.checkpoints.exists()


@pytest.mark.parametrize("kind", ["model", "optimizer"])
def test_a_damaged_checkpoint_is_refused_not_used(tiny_run, train, store, kind):
    run = tiny_run()
    train(run, 5, store)
    path = store.checkpoints / checkpoint_key(run, 5, identities(store)) / f"{kind}.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=path.parent.name):
        train(run, 12, store)


def test_a_job_that_cannot_begin_is_refused(tiny_run, job_of, store):
    with pytest.raises(TrainingError, match="9 processes"):
        job_of(tiny_run(), 12, store, ranks=Ranks(0, 9, torch.device("cpu"))).load()
    on = tiny_run("on", Stage(MLM(0.4), 6), start=tiny_run("base"))
    with pytest.raises(
        StoreError, match="from base"
    ):  # its parent is missing, and is not replaced by new weights
        job_of(on, 6, store).load()
    assert not store.checkpoints.exists()


def test_a_resumed_run_takes_the_threads_and_micro_batch_of_its_checkpoint(tiny_run, train, store):
    """Sums over threads and micro-batches depend on their order, so the checkpoint records both."""
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


def _moved(store, step, tmp_path):
    """Make a checkpoint look as if another device had written it."""
    (folder,) = (
        folder
        for folder in store.checkpoints.iterdir()
        if read_checkpoint_file(folder)["progress"]["step"] == step
    )
    about = read_checkpoint_file(folder)
    about["progress"]["machine"]["device"] = "a larger GPU"
    copy = shutil.copytree(folder, tmp_path / folder.name)
    write_json(copy / "checkpoint.json", about)
    shutil.rmtree(folder)
    publish(copy, folder)


def test_a_run_that_goes_on_elsewhere_takes_a_micro_batch_that_fits_and_records_both_machines(
    tiny_run, train, store, tmp_path, monkeypatch
):
    train(tiny_run(), 4, store)
    train(tiny_run(), 5, store)
    _moved(store, 5, tmp_path)
    monkeypatch.setitem(protocol.MICRO_TOKENS, "cpu", 64)  # two rows of eight fit here
    job = train(tiny_run(), 6, store)
    assert job.micro_rows == 2
    told = [(part["first_step"], part["micro_rows"]) for part in job.progress.segments]
    assert told == [(0, 8), (5, 2)]
    assert train(tiny_run(), 7, store).progress.segments == job.progress.segments
    monkeypatch.setitem(protocol.MICRO_TOKENS, "cpu", 32)
    assert train(tiny_run(), 8, store).micro_rows == 2, "the device is the one that it was"
    _moved(store, 8, tmp_path)
    assert train(tiny_run(), 9, store, deterministic=True).micro_rows == 2
    _moved(store, 9, tmp_path)
    assert train(tiny_run(), 10, store).micro_rows == 1
    _moved(store, 10, tmp_path)
    monkeypatch.setitem(protocol.MICRO_TOKENS, "cpu", 128)
    last = train(tiny_run(), 11, store)
    assert last.micro_rows == 4, "one row would not keep a larger device busy"
    told = [(part["first_step"], part["micro_rows"]) for part in last.progress.segments]
    assert told == [(0, 8), (5, 2), (9, 1), (10, 4)]


def test_metrics_have_each_line_once_however_often_the_run_was_stopped(tiny_run, train, store):
    run = tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6), heldout_every=2)
    on = tiny_run("on", Stage(MLM(0.4), 6), start=run, heldout_every=2, heldout_tokens=256)
    stops = iter([False, True] * 20)
    for part, until in ((run, 12), (on, 6)):
        while not train(part, until, store, stop=lambda: next(stops)).published:
            pass
    (folder,) = (folder for folder in store.checkpoints.iterdir() if len(read_lines(folder)) > 25)
    lines = [(line["step"], "loss" in line) for line in read_lines(folder)]
    trained = [step for step, trained in lines if trained]
    assert trained == list(range(1, 19))
    # The heldout text of the second run is another one, so both measure at the step where it begins.
    assert [step for step, trained in lines if not trained] == [2, 4, 6, 8, 10, 12, 12, 14, 16, 18]
