"""Gradients of several processes; what several do together is in test_distributed.py and test_sharding.py."""

import torch

from biphase.training import gradients


def test_buckets_hold_every_parameter_once_in_order(monkeypatch):
    monkeypatch.setattr(gradients, "BUCKET", 10)
    parameters = [torch.nn.Parameter(torch.zeros(size)) for size in (4, 5, 3, 20, 1)]
    buckets = list(gradients._buckets(parameters))
    assert [[p.numel() for p in bucket] for bucket in buckets] == [[4, 5], [3], [20], [1]]
