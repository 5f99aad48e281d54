"""On a CUDA device: law 1 on new models of other architectures, with windows, and a run of one that learns and resumes."""

import pytest
import torch

from biphase import CLM, MLM, WSD, Chunks, Config, Pretrain, Rows, Stage, modernbert
from biphase.attention import AttentionPattern, segment_mask
from biphase.data.shards import Shards
from biphase.data.stream import boundaries_of, positions_of
from biphase.keys import checkpoint_key
from biphase.models.backbone import from_scratch
from biphase.study.plan import identities
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
T, CUT, WINDOW = 256, 100, 32
WINDOWS = {"layer_types": ["sliding_attention"] * 2}
GROUPED = {
    "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "max_position_embeddings": 512,
}  # fmt: skip
# Of two layers with windows, each position depends on tokens at most 2 · WINDOW away.
SHAPES = {
    "modernbert": modernbert("m", layers=2, hidden=256, heads=4, ffn=384, local_attention=2 * WINDOW, **WINDOWS),
    "gemma3": Config("g", {"model_type": "gemma3_text", "sliding_window": WINDOW + 1, **WINDOWS, **GROUPED}),
}  # fmt: skip
MIXED = modernbert("mixed", layers=4, hidden=256, heads=4, ffn=384, local_attention=2 * WINDOW)
KINDS = ("rows", "masked chunks", "chunks")


def model_of(config, *, compiled):
    model = from_scratch(config, vocab=512, mask_id=3, length=T, seed=0).to(CUDA).eval()
    if compiled:
        model.compile_trunk()
    return model


def hidden(model, ids, causal, kind, *, exact=False):
    """Hidden states of two rows, whole or cut at CUT; `exact` in fp32 by masks."""
    segments = None if kind == "rows" else (torch.arange(T) >= CUT).long().expand(2, T)
    positions = positions_of(segments, 2, T).cuda()
    pattern = AttentionPattern(causal)
    if kind == "masked chunks" or (exact and segments is not None):
        pattern = AttentionPattern(causal, mask=segment_mask(segments.cuda(), causal=causal))
    elif segments is not None:
        pattern = AttentionPattern(causal, boundaries_of(segments, fixed=True).cuda(), T)
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16, enabled=not exact):
        return model.hidden(ids, positions, pattern)


def inputs():
    return torch.randint(4, 512, (2, T), generator=torch.Generator().manual_seed(1)).cuda()


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES)
def test_law_one_with_windows_as_on_the_masked_path(config, kind, compiled):
    model, exact, ids = model_of(config, compiled=compiled), model_of(config, compiled=False), inputs()
    for causal in (True, False, True):
        plain, fast = hidden(exact, ids, causal, kind, exact=True), hidden(model, ids, causal, kind)
        assert (fast.float() - plain).abs().max() < 0.05 * plain.abs().max()
        for at in (40, 150):
            changed = ids.clone()
            changed[0, at] = 4 + (changed[0, at] - 3) % 508
            before, after = (hidden(model, one, causal, kind) for one in (ids, changed))
            assert torch.equal(before[1], after[1]), "another row changed"
            moved = (before[0] != after[0]).any(-1).cpu()
            low, high = (0, T) if kind == "rows" else ((0, CUT) if at < CUT else (CUT, T))
            first, last = (
                max(low, at - (0 if causal else 2 * WINDOW)),
                min(high, at + 2 * WINDOW + 1),
            )
            assert not moved[:first].any()
            assert not moved[last:].any()
            assert moved[at : min(high, at + WINDOW)].all()
            assert moved[max(low, at - WINDOW) : at].any() == (not causal)


def train(run, step, store, **options):
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
    )
    job.train()
    return job


def run_of(corpus, config, name="run", packing=None, **fields):
    defaults = {
        "stages": (Stage(CLM(), 100), Stage(MLM(0.4), 100)),
        "schedule": WSD(3e-4, 5, 10),
        "precision": "bf16",
        "batch_tokens": 16 * 128,
        "heldout_every": 1000,
    }
    return Pretrain(name, start=config, corpus=corpus, packing=packing or Chunks(128), **(defaults | fields))


@pytest.mark.parametrize("packing", [Chunks(128), Rows(128, document_mask=True), Rows(128)], ids=str)
def test_a_modernbert_learns_follows_fp32_and_resumes_without_new_graphs(corpus, store, packing):
    run, graphs = run_of(corpus, MIXED, packing=packing), []

    def look():  # asked before every step
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        return False

    train(run, 130, store, micro_rows=8)
    job = train(run, 200, store, micro_rows=8, stop=look)
    plain = train(run_of(corpus, MIXED, "fp32", packing, precision="fp32"), 200, store, compiled=False)
    assert (job.placed.path, plain.placed.path) == ("compiled", "plain")
    fast, slow = (
        torch.tensor([line["loss"] for line in each.meter.lines if "loss" in line]) for each in (job, plain)
    )
    assert len(fast) == len(slow) == 200
    assert slow[-10:].mean() < slow[:5].mean() - 1
    apart = (fast - slow).abs()
    print(packing, f"first 5: {apart[:5].max():.4f}, all: {apart.max():.4f}, end: {apart[-10:].mean():.4f}")
    assert apart[:5].max() < 0.01
    assert apart[-10:].mean() < 0.05
    assert len(set(graphs[3:])) == 1, graphs
    assert store.has(store.checkpoints / checkpoint_key(run, 200, identities(store)))


def test_a_configuration_that_our_kernels_know_takes_them(corpus, store):
    llama = Config("llama", {"model_type": "llama", **GROUPED})
    job = train(run_of(corpus, llama, stages=(Stage(CLM(), 20),)), 20, store)
    assert job.placed.path == "fused"
