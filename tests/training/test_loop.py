"""One optimizer step: all labels weigh alike, gradients are clipped, a nonfinite step is skipped."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from biphase.objectives import LossTerm
from biphase.specs import AdamW
from biphase.training.distributed import Ranks, Replicated
from biphase.training.loop import Hooks, PlainStep, train
from biphase.training.optimizer import build, forget, make_capturable

CPU = torch.device("cpu")
ALONE = Ranks(0, 1, CPU)


@dataclass(frozen=True)
class Rows:
    inputs: torch.Tensor
    wanted: torch.Tensor

    @property
    def count(self):
        return len(self.inputs)

    @property
    def term(self):
        return LossTerm(self.count)

    def to(self, device):
        return self


def model_of(seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)).to(dtype)


def steps_of(count, *, micro=(5, 3), scale=1.0):
    """Micro-batches of different sizes."""
    draw = torch.Generator().manual_seed(9)

    def rows(size):
        return Rows(
            torch.randn(size, 6, generator=draw) * scale, torch.randint(0, 3, (size,), generator=draw)
        )

    return [[rows(size) for size in micro] for _ in range(count)]


def loss_sum_of(model):
    return lambda batch: nn.functional.cross_entropy(
        model(batch.inputs).float(), batch.wanted, reduction="sum"
    )


def rate(step):
    return 1e-2 * (step + 1) / 10


def reference(model, steps, *, clip):
    """The same in separate passes: gradients multiplied by torch's own clipping, then plain AdamW."""
    spec = AdamW()
    adam = torch.optim.AdamW(
        model.parameters(), betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay
    )
    losses, norms = [], []
    for step, micro in enumerate(steps):
        adam.zero_grad()
        labels = sum(batch.count for batch in micro)
        loss = sum(loss_sum_of(model)(batch) for batch in micro) / labels
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip).item())
        if torch.isfinite(loss) and norms[-1] < float("inf"):
            adam.param_groups[0]["lr"] = rate(step)
            adam.step()
        losses.append(loss.item())
    return losses, norms


def plain_step(model, adam, clip=0.5):
    gradients = Replicated(list(model.parameters()), ALONE)
    return PlainStep(adam, loss_sum_of(model), clip, gradients)


def ours(model, steps, *, clip):
    seen = []
    step = plain_step(model, build(model, AdamW()), clip)
    train(step, steps, first=0, rate=rate, ranks=ALONE, hooks=Hooks(after=(seen.append,)))
    return seen


def assert_same_weights(one, other, **tolerance):
    for (name, value), wanted in zip(one.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, msg=name, **tolerance)


@pytest.mark.parametrize("clip", [1e6, 1.0, 0.05], ids=["never", "sometimes", "always"])
def test_steps_equal_torchs_clipping_and_adamw(clip):
    steps = steps_of(12, scale=1.5)
    mine, theirs = model_of(), model_of()
    done = ours(mine, steps, clip=clip)
    losses, norms = reference(theirs, steps, clip=clip)
    assert [one.loss.item() for one in done] == pytest.approx(losses, abs=1e-6)
    assert [one.norm.item() for one in done] == pytest.approx(norms, rel=1e-6)
    assert [one.labels for one in done] == [8] * 12
    assert_same_weights(mine, theirs, rtol=1e-6, atol=1e-6)
    clipped = sum(norm > clip for norm in norms)
    assert {1e6: clipped == 0, 1.0: 0 < clipped < 12, 0.05: clipped == 12}[clip]


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e25])  # 1e25: only the gradient is infinite
def test_a_nonfinite_step_is_skipped(wrong):
    steps = steps_of(6)
    bad = [Rows(torch.full((2, 6), wrong), torch.zeros(2, dtype=torch.long))]
    mine, theirs = model_of(), model_of()
    done = ours(mine, [*steps[:3], bad, *steps[4:]], clip=0.5)
    assert [one.nonfinite.item() for one in done] == [0, 0, 0, 1, 0, 0]
    reference(theirs, [*steps[:3], bad, *steps[4:]], clip=0.5)
    assert_same_weights(mine, theirs, rtol=1e-6, atol=1e-6)
    assert all(one.isfinite().all() for one in mine.parameters())


# ---------------------------------------------------------------- what graphs need


def state_of(model, adam):
    optimizer_state = [value.clone() for state in adam.state.values() for value in state.values()]
    return [one.detach().clone() for one in model.parameters()] + optimizer_state


def equal(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_an_idle_step_computes_the_loss_and_changes_nothing():
    model = model_of()
    adam = build(model, AdamW())
    forget(adam)
    step, (first, second) = plain_step(model, adam), steps_of(2)
    step(first, [8, 8], 1e-2)
    before = state_of(model, adam)
    idle = step(second, [8, 8], 1e-2, idle=True)
    assert equal(before, state_of(model, adam))
    assert all(one.grad is None for one in model.parameters())
    real = step(second, [8, 8], 1e-2)
    assert torch.equal(idle.loss, real.loss)
    assert torch.equal(idle.norm, real.norm)
    assert not equal(before, state_of(model, adam))


def test_rates_and_labels_on_the_device_give_the_same_step():
    outcomes = []
    for there in (False, True):
        model = model_of()
        adam = build(model, AdamW(layer_decay=0.5))
        forget(adam)
        if there:
            make_capturable(adam, CPU)
            assert len({id(group["lr"]) for group in adam.param_groups}) == len(adam.param_groups)
        step = plain_step(model, adam)
        for number, micro in enumerate(steps_of(4)):
            divisors, pace = (
                (torch.tensor([8.0, 8.0]), torch.tensor(rate(number))) if there else ([8, 8], rate(number))
            )
            step(micro, divisors, pace)
        outcomes.append(model)
    assert_same_weights(*outcomes, rtol=1e-6, atol=1e-7)
