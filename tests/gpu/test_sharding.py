"""On CUDA devices: a sharded model in a group of one, over NCCL, compiled or not, beside our kernels; two GPUs if there are."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from biphase import MLM, AdamW, Chunks, Size
from biphase.attention import pattern_of, varlen_works
from biphase.data.shards import Shards
from biphase.data.stream import Stream
from biphase.models.backbone import from_scratch
from biphase.training import distributed
from biphase.training.distributed import Ranks, Replicated, shard
from biphase.training.loop import PlainStep
from biphase.training.optimizer import build
from biphase.training.options import Sharding

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
SMALL = Size("small", layers=3, hidden=256, heads=4, kv_heads=2, ffn=512)
STEPS = 20


@pytest.fixture(scope="module", autouse=True)
def group():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.cuda.set_device(CUDA)
    backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def losses(shards, *, cut, **how):
    """Of steps of two micro-batches in bf16, on the text of the tiny corpus."""
    text, ranks = Shards.open(shards), Ranks(0, 1, CUDA)
    model = from_scratch(SMALL, vocab=text.vocab, mask_id=text.mask_id, length=32, seed=1).train()
    if cut:
        path = model.prepare(CUDA, "bf16", cut=True, **how)
        gradients = shard(model, Sharding("full"), ranks, "bf16")
        adam = build(model, AdamW(), gradients.learned())
    else:
        path = model.to(CUDA).prepare(CUDA, "bf16", **how)
        gradients, adam = Replicated(list(model.parameters()), ranks), build(model, AdamW())
    varlen = varlen_works(CUDA, "bf16")

    def loss_sum(batch):
        with distributed.autocast(CUDA, "bf16"):
            return model.loss_sum(batch, pattern_of(batch, varlen=varlen))

    step = PlainStep(adam, loss_sum, 1.0, gradients, model.encoder)
    stream = Stream.of(text, Chunks(32, shortest=4), 7)
    found = []
    for number in range(STEPS):
        draws = torch.arange(number * 16, (number + 1) * 16)
        micro = [
            stream.batch(MLM(0.4), part, step=number, fixed=path == "compiled") for part in draws.split(8)
        ]
        found.append(step(micro, [sum(one.count for one in micro)] * len(micro), 1e-3).loss)
    return path, torch.stack(found).cpu()


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # asked by torch.compile, which hides it
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_sharded_model_learns_as_our_kernels_do(shards, compiled, recompute):
    path, plain = losses(shards, cut=False)
    assert path == "fused"
    path, cut = losses(shards, cut=True, compiled=compiled, recompute=recompute)
    assert path == ("compiled" if compiled else "plain")
    assert plain[-1] < plain[0] - 0.5
    torch.testing.assert_close(cut, plain, rtol=0.02, atol=0)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("shard", ["none", "full"])
def test_two_gpus_train_a_study_and_go_on(corpus, tmp_path, shard):
    study = tmp_path / "study.py"
    size = "Size('small', layers=3, hidden=256, heads=4, kv_heads=2, ffn=512)"
    study.write_text(
        "from biphase import *\n"
        f"text = Corpus('tiny', {corpus.source!r}, BPE(320), heldout='heldout.jsonl')\n"
        f"study = Study('two', (Pretrain('clm', {size}, text, (Stage(CLM(), 60),), packing=Chunks(32, 4),"
        " batch_tokens=256, schedule=WSD(1e-3, 5, 5), heldout_every=60, heldout_tokens=512),))\n"
    )
    for more in (("--for", "1s"), ()):
        words = [
            "run",
            study,
            "--store",
            tmp_path / "store",
            "--processes",
            "2",
            "--shard",
            shard,
            "--checkpoint",
            "10",
        ]
        command = [sys.executable, "-m", "biphase", *map(str, words), *more]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-2000:]
    assert list(Path(tmp_path / "store" / "checkpoints").glob("*/model.safetensors"))
