"""Gradients of two processes, summed during the backward pass, beside sums of whole gradients: for every kind of model.

    python exchange_driver.py

Prints for each case and rank: whether both gradients are the same bits, and of each sum in a step its bytes, and whether
it began while the backward pass had still to reach the lowest trained weight.
"""

import json
import os
import socket
import sys

import torch
import torch.distributed as dist

from biphase import LoRA, Size
from biphase.attention import AttentionPattern
from biphase.fast.trunk import FusedTrunk, Joined
from biphase.models.backbone import add_adapter, freeze_embeddings, from_scratch
from biphase.models.encoder import EmbeddingHead, embed_texts, pack
from biphase.objectives import Batch
from biphase.specs import AdamW
from biphase.training import distributed
from biphase.training.distributed import Ranks, Replicated
from biphase.training.optimizer import begin_phase, build, trainable

distributed.BUCKET = 5_000  # elements: a few of a tiny model
VOCAB, LENGTH = 80, 16
CASES = {
    "untied": {}, "tied": {"tied": True}, "fused": {"fused": True}, "fused, tied": {"tied": True, "fused": True},
    "layers frozen": {"freeze": ("layers[0]",)}, "fused, layers frozen": {"freeze": ("layers[0]",), "fused": True},
    "embeddings frozen": {"embeddings": False}, "adapter": {"adapter": True},
    "pairs": {"pairs": True}, "fused, pairs": {"pairs": True, "fused": True},
    "head in one process": {"alone": True},
}  # fmt: skip


def model_of(*, tied=False, fused=False, embeddings=True, adapter=False):
    size = Size("tiny", layers=3, hidden=32, heads=2, kv_heads=1, ffn=64, precision="fp32", tied=tied)
    model = from_scratch(size, vocab=VOCAB, mask_id=3, length=LENGTH, seed=1)
    if adapter:
        add_adapter(model, LoRA(4), seed=1)
    if not embeddings:
        freeze_embeddings(model)
    if fused:
        model.encoder.fused = FusedTrunk(model.model.base_model, torch.float32)
        model.head_copy = Joined(model.head, dtype=torch.float32)
        model.encoder.fused.watch(model.head_copy)
    return model


def batch_of(seed):
    drawn = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, VOCAB, (2, LENGTH), generator=drawn)
    at = torch.randperm(2 * LENGTH, generator=drawn)[:10]
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    return Batch(ids, positions, None, None, at, ids.flatten()[at], 10, False, torch.arange(2))


def loss_of(model, seed, case, rank):
    if case.get("pairs"):  # texts of several inputs, which are computed again in the backward pass
        drawn = torch.Generator().manual_seed(seed)
        texts = [torch.randint(4, VOCAB, (n,), generator=drawn).numpy() for n in (5, 9, 3, 7)]
        head = EmbeddingHead()
        inputs = [pack(texts[:2], varlen=False), pack(texts[2:], varlen=False)]

        def embed(packed):
            return head(model.encoder(packed.ids, packed.positions, packed.pattern), packed)

        return (embed_texts(embed, inputs, torch.arange(4)) ** 3).sum()
    batch = batch_of(seed)
    if case.get("alone") and rank:
        return model.hidden(batch.ids, batch.positions, AttentionPattern(False)).square().sum()
    return model.loss_sum(batch, AttentionPattern(False))


class Recorder:
    """Wraps torch's all_reduce; `steps` has the sums of each step."""

    def __init__(self):
        self.plain, self.steps, self.before_end = dist.all_reduce, [], False

    def __call__(self, tensor, *args, **kwargs):
        if tensor.is_floating_point() and self.steps:
            self.steps[-1].append([tensor.nbytes, self.before_end])
        return self.plain(tensor, *args, **kwargs)

    def backward_of(self, loss, lowest):
        def end(_):
            self.before_end = False

        hook = lowest.register_post_accumulate_grad_hook(end)
        self.before_end = True
        loss.backward()
        self.before_end = False
        hook.remove()


def compared(ranks, case, recorder):
    """Take two steps of two micro-batches; return what was compared."""
    shape = {name: case[name] for name in ("tied", "fused", "embeddings", "adapter") if name in case}
    model, whole = model_of(**shape), model_of(**shape)
    for each in (model, whole):
        head = not case.get("pairs")
        begin_phase(
            each,
            trainable(each),
            build(each, AdamW()),
            freeze=case.get("freeze", ()),
            layer_decay=1.0,
            head=head,
        )
    learned = trainable(model)
    gradients = Replicated([*learned.values()], ranks)
    same, recorder.steps = True, []
    for step in range(2):
        recorder.steps.append([])
        for number in range(2):
            gradients.collect(last=number == 1)
            loss = loss_of(model, 4 * step + 2 * ranks.rank + number, case, ranks.rank)
            recorder.backward_of(loss, next(iter(learned.values())))
        gradients.total(loss.detach())
        for number in range(2):
            loss_of(whole, 4 * step + 2 * ranks.rank + number, case, ranks.rank).backward()
        for mine, other in zip(learned.values(), trainable(whole).values(), strict=True):
            wanted = torch.zeros_like(other) if other.grad is None else other.grad
            recorder.plain(wanted)
            same &= torch.equal(torch.zeros_like(mine) if mine.grad is None else mine.grad, wanted)
            mine.grad = other.grad = None
    size = sum(parameter.nbytes for parameter in gradients.trained)
    return {"same": same, "steps": recorder.steps, "bytes": size}


def main(rank):
    dist.all_reduce = recorder = Recorder()
    dist.init_process_group("gloo", rank=rank, world_size=2)
    ranks = Ranks(rank, 2, torch.device("cpu"))
    results = {name: compared(ranks, case, recorder) for name, case in CASES.items()}
    every = ranks.gather(results)
    dist.destroy_process_group()
    if ranks.first:
        print(json.dumps({name: [of_rank[name] for of_rank in every] for name in CASES}))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    child = os.fork()
    main(1 if child == 0 else 0)
    if child == 0:
        sys.stdout.flush()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    sys.exit(os.waitstatus_to_exitcode(status))
