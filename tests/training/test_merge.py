"""A merge is the weighted mean of checkpoints: the same bits however it is written, and a start like any other."""

import json

import pytest
import torch
from families.tiny import with_head
from safetensors.torch import load_file

from biphase import CLM, MLM, SIZES, WSD, Chunks, Hub, Kept, Merge, Pretrain, Stage, Study
from biphase.data.shards import Shards
from biphase.errors import ModelError
from biphase.export.card import recipe, titled
from biphase.export.folder import saved_checkpoint
from biphase.keys import Keyring, checkpoint_key
from biphase.metadata import read_checkpoint_file, read_lines
from biphase.presets import sources_of
from biphase.study.build import AdaptOptions, adaptation
from biphase.study.load import run_named
from biphase.study.plan import identities, make_plan
from biphase.training.distributed import Ranks
from biphase.training.merge import mean, publish_merge
from biphase.training.pretrain import model_of_checkpoint


@pytest.fixture
def merged():
    """Publishes the checkpoint that a run starts from."""

    def make(run, store):
        shards = Shards.open(next(store.shards.iterdir()))
        publish_merge(
            run,
            store=store,
            sources={sources_of(run)[0]: shards},
            identities=identities(store),
            ranks=Ranks(0, 1, torch.device("cpu")),
        )
        return store.checkpoints / checkpoint_key(run, 0, identities(store))

    return make


@pytest.fixture
def runs(tiny_run):
    """A run with kept steps, and another that shares its first six."""
    stable = tiny_run("stable", keep=(4, 8), schedule=WSD(3e-3, 2, 0))
    return stable, tiny_run("two", Stage(CLM(), 6), Stage(MLM(0.4), 6), schedule=WSD(3e-3, 2, 0))


@pytest.fixture
def trained(runs, train, store, other):
    for run in runs:
        needed = [checkpoint_key(runs[0], step, identities(store)) for step in (4, 8)]
        for place in (store, other):
            train(run, 4, place, needed=needed)
            train(run, 8, place, needed=needed)
            train(run, 12, place, needed=needed)
    return runs


def weights(store, run, step):
    return load_file(store.checkpoints / checkpoint_key(run, step, identities(store)) / "model.safetensors")


def test_a_mean_of_kept_steps_is_the_sum_in_fp32_in_the_order_of_keys(trained, merged, store):
    stable, _ = trained
    run = Pretrain("wsm", Merge((Kept(stable, 4), 0.2), (Kept(stable, 8), 0.3), (stable, 0.5)))
    found = load_file(merged(run, store) / "model.safetensors")
    share = {
        checkpoint_key(stable, step, identities(store)): (step, part)
        for step, part in ((4, 0.2), (8, 0.3), (12, 0.5))
    }
    for name, tensor in found.items():
        total = torch.zeros_like(tensor)
        for key in sorted(share):
            step, part = share[key]
            total += part * weights(store, stable, step)[name]
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, total), name
    assert set(found) == set(weights(store, stable, 12))


def test_the_written_order_changes_neither_key_nor_bits(trained, merged, store, other):
    one, two = trained
    folders = [
        merged(Pretrain("a", Merge((one, 0.3), (two, 0.5), (Kept(one, 4), 0.2))), store),
        merged(Pretrain("b", Merge((Kept(one, 4), 0.2), (two, 0.5), (one, 0.3))), other),
    ]
    assert folders[0].name == folders[1].name
    contents = [(folder / "model.safetensors").read_bytes() for folder in folders]
    assert contents[0] == contents[1]


def test_a_merge_is_a_checkpoint_without_optimizer_state_whose_held_out_losses_are_its_own(
    trained, merged, store
):
    stable, two = trained
    run = Pretrain("mean", Merge(stable, two))
    folder = merged(run, store)
    assert load_file(folder / "optimizer.safetensors") == {}
    about, lines = read_checkpoint_file(folder), read_lines(folder)
    assert (about["origin_step"], about["progress"]["step"]) == (12, 0)
    last = {
        name: [line["heldout"] for line in read_lines(path) if "heldout" in line][-1]
        for name, path in (
            ("mean", folder),
            ("stable", store.checkpoints / checkpoint_key(stable, 12, identities(store))),
        )
    }
    assert last["mean"].keys() == last["stable"].keys()
    assert last["mean"] != last["stable"]
    assert lines[-1]["step"] == 12
    model = model_of_checkpoint(run, folder.name, store, Shards.open(next(store.shards.iterdir())))
    assert torch.equal(
        model.model.state_dict()["lm_head.weight"], load_file(folder / "model.safetensors")["lm_head.weight"]
    )


def test_the_checkpoint_of_a_merge_says_nothing_of_what_trains_on_after_it(trained, merged, store):
    """So that its key can be evaluated, adapted and exported; other bytes than without that run it has none."""
    fields = {"stages": Stage(MLM(0.4), 6), "schedule": WSD(3e-3, 2, 2), "keep": (2,)}
    on = Pretrain("on", Merge(*trained), heldout_tokens=512, **fields)
    key = merged(on, store).name
    found = saved_checkpoint(key, store)
    assert (found.run.start, found.run.stages, found.run.keep, found.step) == (on.start, (), (), 0)
    assert titled(found) == "on"
    assert not [what for what, _ in recipe(found).rows if what.startswith("on, step")]
    read = run_named(key[:8], store)
    plan = make_plan(Study("evaluated", (read,)), identities(store))
    assert plan.results == {"on": key}
    adapted = make_plan(adaptation(key[:8], AdaptOptions(steps=8), store), identities(store))
    (run,) = adapted.study.runs
    assert (run.start, run.data, run.steps, run.packing) == (on.start, "restart", 8, on.packing)
    assert adapted.jobs[adapted.results[run.name]].run.sources == on.sources
    assert key in adapted.jobs


def test_an_adapted_model_is_averaged_with_the_one_that_it_was_adapted_from(
    corpus, train, merged, store, tmp_path
):
    decoder = with_head("gpt2", vocab_size=320)
    decoder.save_pretrained(tmp_path / "decoder")
    adapted = Pretrain(
        "adapted", Hub(str(tmp_path / "decoder")), corpus, Stage(MLM(0.4), 4), WSD(3e-3, 1, 1), batch_tokens=256,
        packing=Chunks(32, shortest=4), precision="fp32", heldout_tokens=512,
    )  # fmt: skip
    train(adapted, 4, store)
    run = Pretrain("mean", Merge((Kept(adapted, 0), 0.25), (adapted, 0.75)))
    found = load_file(merged(run, store) / "model.safetensors")
    end, start = weights(store, adapted, 4), decoder.state_dict()
    assert found.keys() == end.keys()  # the tied head is saved once
    name = "transformer.h.1.mlp.c_fc.weight"
    assert torch.allclose(found[name], 0.25 * start[name] + 0.75 * end[name], atol=1e-7)


def test_a_run_from_a_merge_begins_with_a_new_optimizer_state_and_resumes_to_the_same_bits(
    trained, merged, train, store, other, tensors, same_checkpoint
):
    stable, two = trained
    run = Pretrain(
        "on", Merge(stable, two), stages=Stage(MLM(0.4), 6), schedule=WSD(3e-3, 2, 2), heldout_tokens=512
    )
    for place in (store, other):
        merged(run, place)
    train(run, 6, other)
    for step in (1, 4):
        train(run, step, store, loaders=1)
    job = train(run, 6, store)
    assert same_checkpoint(run, 6, store, other)
    assert job.progress.next_sample == 18 * 8
    assert {
        float(value) for name, value in tensors(store, run, 6)[1].items() if name.startswith("step.")
    } == {6.0}


def test_a_killed_merge_leaves_nothing_that_looks_finished(trained, merged, store):
    run = Pretrain("mean", Merge(*trained))
    leftover = store.new_attempt(f"checkpoint-{checkpoint_key(run, 0, identities(store))}")
    (leftover / "model.safetensors").write_bytes(b"cut")
    folder = merged(run, store)
    assert store.has(folder)
    assert not leftover.exists()
    assert json.loads((folder / "manifest.json").read_text())["key"] == folder.name


@pytest.mark.parametrize(
    ("one", "two"), [(torch.zeros(2, 3), torch.zeros(3, 2)), (torch.ones(1).long(), torch.zeros(1).long())]
)
def test_other_models_are_refused(one, two):
    with pytest.raises(ModelError, match="two"):
        mean([("one", 0.5, {"a": one}), ("two", 0.5, {"a": two})])


def test_a_plan_computes_the_parts_of_a_merge_before_it_and_nothing_twice(runs, store):
    stable, two = runs
    first = Pretrain("first", Merge(Kept(stable, 2), Kept(stable, 10)))
    last = Pretrain(
        "last", Merge((first, 0.5), (two, 0.5)), stages=Stage(MLM(0.4), 4), schedule=WSD(1e-3, 1, 1)
    )
    plan = make_plan(Study("s", (last, first)), identities(store))
    keyring, seen = Keyring(identities(store)), set()
    for key, job in plan.jobs.items():
        assert seen.issuperset(job.needs), job
        seen.add(key)
    merge = plan.jobs[plan.results["first"]]
    assert (merge.merge, merge.parent, merge.steps) == (True, keyring.at(stable, 10), 0)
    assert set(merge.needs) == {keyring.at(stable, 2), keyring.at(stable, 10)}
    assert plan.steps_to_compute == 10 + 6 + 4  # `stable` to its tenth step, the rest of `two`, and `last`
    assert plan.needed_for([plan.results["last"]]) == set(plan.jobs)
    assert plan.left(()) == list(plan.jobs)
    done = {plan.results["first"], *plan.jobs} - {plan.results["last"]}
    assert plan.left(done) == [plan.results["last"]]
    # A pruned part is trained again only where the merge is missing.
    assert plan.left(set(plan.jobs) - {keyring.at(stable, 2)}) == []
    assert keyring.at(stable, 2) in plan.left(
        set(plan.jobs)
        - {keyring.at(stable, 2), plan.results["first"], plan.results["last"]}
        - {job.key for job in plan.jobs.values() if job.run is last}
    )


def test_a_run_from_a_merge_inherits_from_the_part_with_the_most_steps(runs):
    stable, _ = runs
    short = Pretrain(
        "short",
        SIZES["1m"],
        "builtin",
        Stage(CLM(), 4),
        WSD(1e-3, 1, 1),
        batch_tokens=2048,
        packing=stable.packing,
    )
    long = Pretrain("long", short, stages=Stage(CLM(), 4), schedule=WSD(2e-3, 0, 1), batch_tokens=4096)
    run = Pretrain("on", Merge(short, long), stages=Stage(CLM(), 4))
    assert (run.batch_tokens, run.schedule) == (4096, WSD(2e-3, 0, 1))
    assert (run.origin_step, run.origin_sample) == (8, long.origin_sample + 4 * long.rows_per_step)
    assert run.root is short
    assert run.lineage == (short, long, run)
