"""A micro-batch on its way to a device: where it is there already, nothing is copied."""

import torch

from biphase.data.stream import boundaries_of, positions_of
from biphase.objectives import IGNORE, Batch

CPU = torch.device("cpu")
SEGMENTS = torch.tensor([[0, 0, 1, 1], [0, 1, 1, 1]])


def made(segments):
    boundaries = None if segments is None else boundaries_of(segments, fixed=False)
    ids, positions = torch.arange(8).view(2, 4), positions_of(segments, 2, 4)
    labels = torch.tensor([4, IGNORE])
    return Batch(ids, positions, segments, boundaries, torch.tensor([1, 0]), labels, 1, True, torch.arange(2))


def test_on_a_cpu_a_batch_is_ready_and_stays_what_and_where_it_is():
    for batch in (made(SEGMENTS), made(None)):
        before = {
            name: value.clone() for name, value in vars(batch).items() if isinstance(value, torch.Tensor)
        }
        there = batch.ready_for(CPU).to(CPU)
        assert (there.count, there.causal, there.steady) == (1, True, False)
        assert (there.segments is None) == (batch.segments is None)
        for name, value in before.items():
            assert torch.equal(getattr(there, name), value)
            assert getattr(there, name).data_ptr() == getattr(batch, name).data_ptr()
