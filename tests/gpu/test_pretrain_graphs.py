"""On a CUDA device: pretraining steps as graphs are the steps taken one kernel at a time, also after a kill."""

import pytest
import torch
from common import store_with

from biphase import CLM, MLM, MNTP, WSD, Chunks, Linear, Mix, Muon, Pretrain, Rows, Size, Stage, Uniform
from biphase.data.shards import Shards
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
SMALL = Size("small", layers=2, hidden=128, heads=2, kv_heads=2, ffn=256)
CHUNKS = Chunks(128)
TWO_STAGES = (Stage(CLM(), 60), Stage(MLM(0.4), 60))


def run_of(corpus, packing=CHUNKS, stages=TWO_STAGES, **fields):
    defaults = {
        "schedule": WSD(1e-3, 5, 10),
        "precision": "bf16",
        "heldout_every": 50,
        "batch_tokens": 16 * 128,
    }
    return Pretrain("run", start=SMALL, corpus=corpus, packing=packing, stages=stages, **(defaults | fields))


def job_of(run, step, store, live=None, **options):
    job = Pretraining(
        run,
        step,
        store=store,
        shards=Shards.open(next(store.shards.iterdir())),
        identities=identities(store),
        ranks=Ranks(0, 1, CUDA),
        needed=set,
        flops_per_token=1.0,
        options=RuntimeOptions(quiet=True, **options),
        live=live,
    )
    job.train()
    return job


@pytest.fixture
def stores(tmp_path, shards):
    """Makes stores with the same tokens."""
    return lambda name: store_with(shards, tmp_path / name)


def losses(job):
    return torch.tensor([line["loss"] for line in job.meter.lines if "loss" in line])


def weights(job):
    return {name: tensor.cpu() for name, tensor in job.model.state_dict().items()}


def same_bits(one, other):
    mine, theirs = weights(one), weights(other)
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.parametrize("packing", [Chunks(128), Rows(128)], ids=str)
@pytest.mark.parametrize("micro_rows", [16, 8])
def test_captured_steps_have_the_losses_and_labels_of_plain_ones(corpus, stores, packing, micro_rows):
    run = run_of(corpus, packing)
    captured = job_of(run, 120, stores("graphs"), micro_rows=micro_rows)
    plain = job_of(run, 120, stores("plain"), micro_rows=micro_rows, graphs=False)
    assert len(captured.graphs.captured) == 2, "one graph for each objective"
    assert plain.graphs is None
    counts = [[line["labels"] for line in job.meter.lines if "labels" in line] for job in (captured, plain)]
    assert counts[0] == counts[1]
    apart = (losses(captured) - losses(plain)).abs()
    assert apart[:5].max() < 0.005, "the first steps differ by rounding alone"
    assert apart.max() < 0.1
    heldout = [
        [line["heldout"] for line in job.meter.lines if "heldout" in line][-1] for job in (captured, plain)
    ]
    assert heldout[0] == pytest.approx(heldout[1], abs=0.05)


def test_a_captured_step_never_sees_a_former_batch(corpus, stores):
    """Cuts and masks differ in every step: with those of the first batch losses would leave the plain ones at once."""
    run = run_of(corpus, stages=(Stage(MLM(0.4), 12),), schedule=WSD(1e-9, 0, 0))
    captured = losses(job_of(run, 12, stores("graphs")))
    plain = losses(job_of(run, 12, stores("plain"), graphs=False))
    assert plain.std() > 0.003, "batches differ"
    assert (captured - plain).abs().max() < 0.002


def test_a_stage_that_freezes_layers_is_captured_anew_and_changes_nothing_in_them(corpus, stores):
    frozen = Stage(CLM(), 20, freeze=("embeddings", "layers[:1]"), layer_decay=0.5)
    run = run_of(corpus, stages=(Stage(CLM(), 20), frozen, Stage(CLM(), 20)), z_loss=1e-3)
    store, jobs, live = stores("graphs"), [], None
    for step in (20, 30, 60):  # in the middle of the frozen stage, since at its end its graphs are dropped
        jobs.append(job_of(run, step, store, live))
        live = jobs[-1].live_model()
        jobs[-1] = weights(jobs[-1]), len(jobs[-1].graphs.captured), losses(jobs[-1])
    for (before, _, _), (after, captured, _), still in zip(jobs, jobs[1:], (True, False), strict=False):
        assert captured == 1
        for name in before:
            low = "layers.0." in name or "embed_tokens" in name
            assert torch.equal(before[name], after[name]) == (still and low), name
    plain = losses(job_of(run, 60, stores("plain"), graphs=False))
    assert (jobs[-1][2] - plain).abs().max() < 0.1


def test_muon_trains_on_the_fused_path_with_plain_steps(corpus, stores):
    job = job_of(run_of(corpus, optimizer=Muon()), 60, stores("muon"))
    assert (job.placed.path, job.graphs) == ("fused", None)
    assert losses(job)[-5:].mean() < losses(job)[:5].mean() - 0.3


@pytest.mark.parametrize("packing", [Chunks(128), Rows(128)], ids=str)
def test_a_stopped_and_resumed_run_ends_in_the_same_bits(corpus, stores, packing):
    run = run_of(corpus, packing)
    whole = job_of(run, 120, stores("whole"), deterministic=True)
    store, taken = stores("cut"), []

    def stop():
        taken.append(None)
        return len(taken) in (31, 31 + 47)  # in either phase

    for _ in range(3):
        cut = job_of(run, 120, store, stop=stop, deterministic=True)
    assert cut.progress.step == 120
    assert torch.equal(losses(cut), losses(whole))
    assert same_bits(cut, whole)


def test_a_job_goes_on_with_the_graphs_of_the_live_model(corpus, stores):
    run = run_of(corpus, stages=(Stage(MLM(0.4), 80),))
    store = stores("live")
    first = job_of(run, 40, store, deterministic=True)
    graphs = dict(first.graphs.captured)
    second = job_of(run, 80, store, live=first.live_model(), deterministic=True)
    assert dict(second.graphs.captured) == graphs, "captured anew"
    other = stores("loaded")
    job_of(run, 40, other, deterministic=True)
    assert same_bits(second, job_of(run, 80, other, deterministic=True))


def test_a_branch_from_an_earlier_checkpoint_does_not_replay_steps_of_later_weights(corpus, stores):
    trunk = run_of(corpus, stages=(Stage(CLM(), 60),), keep=(30,))
    branch = run_of(corpus, stages=(Stage(CLM(), 30), Stage(MLM(0.4), 30)), schedule=trunk.schedule)
    store = stores("live")
    job_of(trunk, 30, store, deterministic=True)
    end = job_of(trunk, 60, store, deterministic=True)
    live = job_of(branch, 60, store, live=end.live_model(), deterministic=True)
    other = stores("alone")
    assert torch.equal(losses(live), losses(job_of(branch, 60, other, deterministic=True)))


def test_a_new_rope_base_is_read_by_captured_steps(corpus, stores):
    stages = (Stage(MLM(0.4), 20), Stage(MLM(0.4), 20, rope_base=500.0))
    run = run_of(corpus, stages=stages)
    captured, plain = job_of(run, 40, stores("graphs")), job_of(run, 40, stores("plain"), graphs=False)
    assert captured.graphs.captured
    assert (losses(captured) - losses(plain)).abs().max() < 0.02


DRAWN = MNTP(Uniform(0.1, 1), weight="1/ratio")
MIXTURES = [
    (Mix({CLM(): 3, MLM(0.4): 1}), 1),
    (Mix({CLM(): 3, DRAWN: 1}, weights={CLM(): 2}, mean_over="labels"), 1),
    (Mix({CLM(): 31, DRAWN: 1}), 2),  # one masked row of 16, or none
]


@pytest.mark.parametrize(("mix", "graphs"), MIXTURES, ids=["quarter", "by label", "half a row"])
@pytest.mark.parametrize("packing", [Chunks(128), Rows(128)], ids=str)
def test_captured_steps_of_a_mixture_have_the_losses_of_plain_ones(corpus, stores, packing, mix, graphs):
    run = run_of(corpus, packing, stages=(Stage(mix, 60),))
    captured = job_of(run, 60, stores("graphs"))
    plain = job_of(run, 60, stores("plain"), graphs=False)
    assert len(captured.graphs.captured) == graphs
    assert {True, False} == {batch.causal for step in range(10) for batch in captured._batches(step)}
    apart = (losses(captured) - losses(plain)).abs()
    assert apart[:5].max() < 0.01, "the first steps differ by rounding alone"
    assert apart.max() < 0.3


def test_a_mixture_resumes_to_the_same_bits(corpus, stores):
    run = run_of(corpus, stages=(Stage(Mix({CLM(): 3, DRAWN: 1}), 60),))
    whole = job_of(run, 60, stores("whole"), deterministic=True)
    store = stores("cut")
    answers = iter([*[False] * 22, True])
    job_of(run, 60, store, stop=lambda: next(answers, False), deterministic=True)
    assert same_bits(job_of(run, 60, store, deterministic=True), whole)


def test_a_changing_mixture_compiles_a_few_shapes(corpus, stores):
    """All shapes would exceed the limit of compiled graphs, and the run would fail."""
    mix = Mix({CLM(): Linear(1, 0, 60), MLM(0.4): Linear(0, 1, 60)})
    run = run_of(corpus, stages=(Stage(mix, 60),))
    assert job_of(run, 60, stores("compiled"), compiled=True).placed.path == "compiled"


def test_large_models_are_not_captured(corpus, stores, monkeypatch):
    monkeypatch.setattr("biphase.training.loop.CAPTURED_WORK", 0)
    assert job_of(run_of(corpus), 5, stores("large")).graphs is None


def test_documents_and_scheduled_ratios_are_not_captured(corpus, stores):
    documents = job_of(run_of(corpus, Rows(128, document_mask=True)), 20, stores("documents"))
    assert not documents.graphs.captured
    scheduled = run_of(corpus, stages=(Stage(MLM(Linear(0.4, 0.2, 15)), 20),))
    assert not job_of(scheduled, 20, stores("scheduled")).graphs.captured
