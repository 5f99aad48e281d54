"""Gradients of several processes; what several do together is in test_distributed.py and test_sharding.py."""

import json
import subprocess
import sys

import torch

from biphase.training import distributed

# A parameter with a gradient in both processes, in the second alone, and in none.
RANK = """
import json, sys, torch, torch.distributed as dist
from biphase.training.distributed import Ranks
from biphase.training.distributed import Replicated
rank, meeting = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
both, one, none = (torch.nn.Parameter(torch.ones(3)) for _ in range(3))
gradients = Replicated([both, one, none], Ranks(rank, 2, torch.device("cpu")))
found = []
for step in range(2):
    both.grad, one.grad, none.grad = torch.full((3,), 1.0 + rank), torch.ones(3) if rank else None, None
    loss = gradients.total(torch.tensor(2.0 + rank + step)).item()
    found.append([loss, *(None if p.grad is None else p.grad.tolist() for p in (both, one, none))])
print(json.dumps(found))
dist.destroy_process_group()
"""


def test_what_has_no_gradient_in_any_process_is_left_alone_and_else_counts_as_zero(tmp_path):
    """Zeros would let the optimizer decay it, which one process alone does not."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(rank), str(tmp_path / "meeting")], stdout=subprocess.PIPE
        )
        for rank in range(2)
    ]
    said = [json.loads(one.communicate(timeout=120)[0]) for one in ranks]
    expected = [[loss, [3.0] * 3, [1.0] * 3, None] for loss in (5.0, 7.0)]
    assert said == [expected, expected]


def test_buckets_hold_every_parameter_once_in_order(monkeypatch):
    monkeypatch.setattr(distributed, "BUCKET", 10)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 5, 3, 20, 1)]
    buckets = list(distributed._buckets(parameters))
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[4, 5], [3], [20], [1]]
