"""The learning rates of a run are those of torch's schedulers where torch has the same form."""

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from biphase import CLM, SIZES, WSD, Pretrain, Rows, Stage

STEPS, PEAK = 30, 0.01


def torchs(scheduler_of, steps):
    """The rates that torch gives to each of `steps` steps."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=PEAK)
    scheduler = scheduler_of(optimizer)
    rates = []
    for _ in range(steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return rates


def rates(schedule):
    packing = Rows(64)
    run = Pretrain(
        "run", SIZES["1m"], "builtin", Stage(CLM(), STEPS), schedule, batch_tokens=128, packing=packing
    )
    return [run.learning_rate(step) for step in range(STEPS)]


@pytest.mark.parametrize("floor", [0.0, 0.1])
def test_a_decay_is_torchs(floor):
    for shape, scheduler in (
        ("cosine", lambda adam: CosineAnnealingLR(adam, T_max=STEPS, eta_min=floor * PEAK)),
        ("linear", lambda adam: LinearLR(adam, 1.0, floor, total_iters=STEPS)),
    ):
        expected = torchs(scheduler, STEPS)
        assert rates(WSD(PEAK, 0, STEPS, shape=shape, floor=floor)) == pytest.approx(expected, abs=1e-12)


def test_a_warmup_from_a_share_is_torchs_linear_rate_one_step_ahead():
    # Ours reaches the peak with the last step of the warmup, torch's with the step after it.
    parts = lambda adam: [LinearLR(adam, 0.1, 1.0, total_iters=8), LinearLR(adam, 1.0, 1.0)]  # noqa: E731
    expected = torchs(lambda adam: SequentialLR(adam, parts(adam), milestones=[8]), STEPS)
    assert rates(WSD(PEAK, 8, 0, warmup_from=0.1))[:-1] == pytest.approx(expected[1:], abs=1e-12)
