"""On a CUDA device: every fast kernel against the plain one, law 1 on the fused trunk, and steps that never wait."""

import warnings

import pytest
import torch

from biphase import CLM, MLM, WSD, Chunks, Pretrain, Rows, Size, Stage, attention
from biphase import fast as fast_module
from biphase.attention import AttentionPattern, segment_mask
from biphase.data.shards import Shards
from biphase.data.stream import boundaries_of, positions_of
from biphase.fast import plain, trunk
from biphase.models.backbone import from_scratch
from biphase.study.plan import identities
from biphase.training import optimizer
from biphase.training.distributed import Ranks
from biphase.training.options import RuntimeOptions
from biphase.training.pretrain import Pretraining

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
T = 256
GROUPED = Size("grouped", layers=3, hidden=256, heads=4, kv_heads=2, ffn=512)
WIDE = Size(
    "wide", layers=2, hidden=384, heads=4, kv_heads=4, ffn=512
)  # heads as wide as those of the 1B size


@pytest.fixture(scope="module")
def cuda():
    return fast_module.of(CUDA)  # asked for here: what they are written in is there only where there is a GPU


def drawn(*shape, dtype=torch.bfloat16):
    return torch.randn(*shape, device=CUDA).to(dtype)


def close(fast, exact, limit):
    fast, exact = fast.double(), exact.double()
    assert (fast - exact).norm() <= limit * exact.norm(), ((fast - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize(
    ("dtype", "limit"), [(torch.bfloat16, 5e-3), (torch.float32, 1e-5)], ids=["bf16", "fp32"]
)
@pytest.mark.parametrize("width", [768, 1152, 96, 10_000])
def test_kernels_equal_the_plain_ones(cuda, dtype, limit, width):
    count = 1_003
    x, y, grad, beside = (drawn(count, width, dtype=dtype) for _ in range(4))
    weight = drawn(width, dtype=torch.float32)
    for more in (y, None):
        fast, exact = (ops.add_norm(x, more, weight, 1e-5) for ops in (cuda, plain))
        for one, two in zip(fast, exact, strict=True):
            close(one, two, limit)
    scale = exact[2]
    for more in (beside, None):
        for again in (True, False):
            fast, exact = (
                ops.add_norm_backward(grad, x, weight, scale, more, again=again) for ops in (cuda, plain)
            )
            assert (fast[1] is None) == (exact[1] is None) == (not again)
            for one, two in zip(fast, exact, strict=True):
                if two is not None:
                    close(one, two, limit)
    head = {768: 64, 1152: 16, 96: 96}.get(width, 128)
    qkv, places = drawn(count, 9, head, dtype=dtype), torch.randint(0, 77, (count,), device=CUDA)
    cos, sin = (drawn(77, head // 2, dtype=torch.float32) for _ in "cs")
    for back in (False, True):
        fast, exact = qkv.clone(), qkv.clone()
        for ops, one in ((cuda, fast), (plain, exact)):
            ops.rotate_(one, places, cos, sin, turned=7, back=back)
        close(fast, exact, limit)
    parts = [one.contiguous() for one in qkv.split([5, 2, 2], dim=1)]
    close(cuda.unrotate(*parts, places, cos, sin), plain.unrotate(*parts, places, cos, sin), limit)
    gate_up, above = drawn(count, 2 * width, dtype=dtype), drawn(count, width, dtype=dtype)
    close(cuda.swiglu(gate_up), plain.swiglu(gate_up), limit)
    fast, exact, third = gate_up.clone(), gate_up.clone(), gate_up.clone()
    made = cuda.swiglu_backward_(above, fast, again=True)
    close(made, plain.swiglu_backward_(above, exact, again=True), limit)
    close(fast, exact, limit)
    assert cuda.swiglu_backward_(above, third, again=False) is None
    assert torch.equal(fast, third)


@pytest.mark.parametrize("words", [50, 4_096, 9_001, 128_256])
def test_errors_of_a_softmax_equal_the_plain_ones(cuda, words):
    logits, labels = 3 * drawn(67, words), torch.randint(0, words, (67,), device=CUDA)
    labels[5] = -100
    fast, exact = logits.clone(), logits.float()
    close(cuda.softmax_error_(fast, labels), plain.softmax_error_(exact, labels), 1e-5)
    close(fast, exact, 5e-3)
    assert fast[5].abs().max() == 0


@pytest.mark.parametrize("words", [50, 9_001, 128_256])
def test_a_z_loss_and_its_errors_equal_the_plain_ones(cuda, words):
    logits, labels = 3 * drawn(67, words), torch.randint(0, words, (67,), device=CUDA)
    labels[5] = -100
    fast, exact = logits.clone(), logits.float()
    close(cuda.softmax_error_(fast, labels, 0.01), plain.softmax_error_(exact, labels, 0.01), 1e-5)
    close(fast, exact, 5e-3)
    assert fast[5].abs().max() == 0
    without = logits.clone()
    assert (
        cuda.softmax_error_(without, labels) <= plain.softmax_error_(logits.float(), labels, 0.01) + 1e-3
    ).all()


def test_adamw_in_one_pass_equals_torchs():
    shapes = [(1_000, 77), (5,), (128, 1_024)]
    mine, theirs = (
        [torch.nn.Parameter(drawn(*shape, dtype=torch.float32)) for shape in shapes] for _ in "ab"
    )
    with torch.no_grad():
        for one, two in zip(mine, theirs, strict=True):
            two.copy_(one)
    ours = torch.optim.AdamW(mine, lr=0.0, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, fused=True)
    torchs = torch.optim.AdamW(theirs, lr=0.0, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.1, fused=True)
    copies = {one.data_ptr(): torch.empty_like(one, dtype=torch.bfloat16) for one in mine}
    zero, one_ = torch.zeros((), device=CUDA), torch.ones((), device=CUDA)
    for step in range(6):
        for one, two in zip(mine, theirs, strict=True):
            one.grad = drawn(*one.shape, dtype=torch.float32)
            two.grad = one.grad / 2
        nonfinite = one_ if step == 3 else zero
        assert optimizer.update(ours, rate=1e-2, nonfinite=nonfinite, shrink=2 * one_, copies=copies)
        if step != 3:
            torchs.param_groups[0]["lr"] = 1e-2
            torchs.step()
    for one, two in zip(mine, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)
        assert torch.equal(copies[one.data_ptr()], one.bfloat16())
        assert ours.state[one]["step"].item() == 5


def model_of(*, fused, size=GROUPED):
    model = from_scratch(size, vocab=513, mask_id=3, length=T, seed=0).to(CUDA)
    path = model.prepare(CUDA, "bf16" if fused else "fp32", compiled=False)
    assert path == ("fused" if fused else "plain")
    return model


def segments_at(*cuts):
    return sum((torch.arange(T) >= cut).long() for cut in cuts).expand(2, T).cuda()


def sight_for(causal, segments, kind, *, plainly=False):
    if segments is None:
        return AttentionPattern(causal)
    if plainly:
        return AttentionPattern(causal, mask=segment_mask(segments, causal=causal))
    return AttentionPattern(
        causal, boundaries_of(segments.cpu(), fixed=True).cuda(), T, steady=kind == "ragged"
    )


KINDS = ["rows", "flash", "ragged", "torch's rows"]


def case(kind):
    segments = None if "rows" in kind else segments_at(100)
    positions = positions_of(None if segments is None else segments.cpu(), 2, T).cuda()
    return segments, positions


def prefer(kind, monkeypatch):
    """Without NVIDIA's frontend, torch's kernels are used."""
    assert attention.cudnn_installed(), "pip install 'biphase[gpu]'"
    if kind == "torch's rows":
        monkeypatch.setattr(attention, "cudnn_installed", lambda: False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("lean", "size"),
    [(True, GROUPED), (False, GROUPED), (True, WIDE)],
    ids=["lean", "keeping", "heads of 96"],
)
def test_the_fused_trunk_follows_the_plain_one_forward_and_backward(kind, causal, lean, size, monkeypatch):
    prefer(kind, monkeypatch)
    monkeypatch.setattr(trunk, "RECOMPUTE_TOKENS", 2**15 if lean else 0)
    fast, exact = (model_of(fused=fused, size=size) for fused in (True, False))
    segments, positions = case(kind)
    ids = torch.randint(4, 512, (2, T), generator=torch.Generator().manual_seed(1)).cuda()
    at = torch.arange(0, 2 * T, 3, device=CUDA)
    labels = ids.flatten()[at]
    losses = []
    for model, plainly in ((fast, False), (exact, True)):
        loss = model(ids, positions, sight_for(causal, segments, kind, plainly=plainly), at, labels)
        loss.backward()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    truth = dict(exact.named_parameters())
    for name, parameter in fast.named_parameters():
        assert parameter.grad.dtype == torch.float32
        close(parameter.grad, truth[name].grad, 0.02)


def felt(model, kind, causal, at):
    segments, positions = case(kind)
    ids = torch.randint(4, 512, (2, T), generator=torch.Generator().manual_seed(1)).cuda()
    changed = ids.clone()
    changed[0, at] = 4 + (changed[0, at] - 3) % 508
    with torch.no_grad():
        before, after = (
            model.hidden(one, positions, sight_for(causal, segments, kind)) for one in (ids, changed)
        )
    assert torch.equal(before[1], after[1])
    return (before[0] != after[0]).any(-1).cpu()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [GROUPED, WIDE], ids=["heads of 64", "heads of 96"])
def test_law_one_on_every_kernel(kind, size, monkeypatch):
    prefer(kind, monkeypatch)
    model = model_of(fused=True, size=size).eval()
    for causal in (True, False, True):
        late, early = felt(model, kind, causal, 140), felt(model, kind, causal, 40)
        assert late[140:].all()
        assert late[100:140].any() == (not causal)
        assert late[:100].any() == (not causal and "rows" in kind)
        assert early[40:100].all()
        assert early[:40].any() == (not causal)
        assert early[100:].any() == ("rows" in kind)


def piece_of(run, step, store, **options):
    return Pretraining(
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


def run_of(corpus, packing, name="run", **fields):
    return Pretrain(
        name,
        start=GROUPED,
        corpus=corpus,
        packing=packing,
        batch_tokens=16 * 128,
        stages=(Stage(CLM(), 20), Stage(MLM(0.4), 20)),
        schedule=WSD(1e-3, 5, 10),
        precision="bf16",
        heldout_every=1000,
        **fields,
    )


PACKINGS = [Chunks(128), Rows(128, document_mask=True), Rows(128)]


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_two_deterministic_runs_are_equal_to_the_bit(corpus, store, packing):
    found = []
    for _ in range(2):
        job = piece_of(run_of(corpus, packing), 40, store, deterministic=True, micro_rows=8)
        job.load()
        assert job.placed.path == "fused"
        job._save = lambda done: None  # nothing is published: the second run starts anew
        job.train()
        found.append({name: one.clone() for name, one in job.model.state_dict().items()})
    assert all(torch.equal(one, found[1][name]) for name, one in found[0].items())


@pytest.mark.parametrize("packing", PACKINGS, ids=str)
def test_no_step_waits_for_the_device(corpus, store, packing):
    asked = []
    with warnings.catch_warnings():  # it says once that it is a prototype
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("default")

    def watch():  # asked before every step
        asked.append(True)
        torch.cuda.set_sync_debug_mode("error" if 3 < len(asked) < 38 else "default")
        return False

    job = piece_of(run_of(corpus, packing), 40, store, micro_rows=8, stop=watch)
    job.load()
    job.meter.every = 1_000  # logs are read behind the steps, not in them
    try:
        assert job.train()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(asked) == 40


def test_copies_follow_their_weights():
    model = model_of(fused=True)
    segments, positions = case("flash")
    ids = torch.randint(4, 512, (2, T)).cuda()
    look = sight_for(False, segments, "flash")
    before = model.hidden(ids, positions, look).detach()
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1)
        model.model.base_model.layers[0].mlp.down_proj.weight.mul_(2)
    assert not torch.equal(before, model.hidden(ids, positions, look))
