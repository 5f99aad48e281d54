"""AdamW as the paper, with a step that is skipped on the device when its numbers are not finite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from biphase.specs import AdamW


def build(model: nn.Module, spec: AdamW) -> torch.optim.AdamW:
    """One group: weight decay on every parameter. Fused, so that a step can be skipped without the host knowing."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        parameters, lr=0.0, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
    )


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients to a global norm of at most `limit`; gives the norm they had."""
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)


def update(optimizer: torch.optim.AdamW, *, rate: float, unsound: Tensor) -> None:
    """One step at `rate`; none at all (weights, moments, count) where `unsound` is 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.found_inf = unsound  # ty: ignore[missing-attribute]  (read by torch's fused kernels)
    optimizer.grad_scale = None  # ty: ignore[missing-attribute]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def moments(model: nn.Module, optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """The optimizer's state under the names of the parameters."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{what}.{names[id(parameter)]}": value.detach()
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
    }


def restore_moments(model: nn.Module, optimizer: torch.optim.AdamW, saved: dict[str, Tensor]) -> None:
    """Put back what `moments` gave, bit for bit."""
    for name, parameter in model.named_parameters():
        if f"step.{name}" not in saved:
            continue  # it had never had a gradient
        state = {what: saved[f"{what}.{name}"] for what in ("step", "exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {what: value.to(parameter.device) for what, value in state.items()}
