"""AdamW as the paper, with a step that is skipped on the device when its numbers are not finite."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from biphase.specs import AdamW


def build(model: nn.Module, spec: AdamW) -> torch.optim.AdamW:
    """Weight decay on every parameter. Fused, so that a step can be skipped without the host knowing."""
    parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
    groups = by_depth(model, parameters, spec.layer_decay)
    return torch.optim.AdamW(
        groups, lr=0.0, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
    )


def by_depth(
    model: nn.Module, parameters: dict[str, nn.Parameter], layer_decay: float
) -> list[dict[str, Any]]:
    """Groups of parameters with the share of the rate they learn at: 1 behind the last layer, less below it."""
    if layer_decay == 1:
        return [{"params": list(parameters.values()), "share": 1.0}]
    lists = [(name, len(one)) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    stack, layers = max(lists, key=lambda one: one[1], default=("", 0))
    lowest = _below(model, stack)
    found: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, one in parameters.items():
        inside = name.startswith(f"{stack}.")
        depth = int(name.removeprefix(f"{stack}.").split(".")[0]) + 1 if inside else layers + 1
        found[0 if id(one) in lowest else depth].append(one)
    return [
        {"params": some, "share": layer_decay ** (layers + 1 - depth)}
        for depth, some in sorted(found.items())
    ]


def _below(model: nn.Module, stack: str) -> set[int]:
    """What stands below the first layer: embeddings, and what is in one module with them, as their norm."""
    found: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not name.startswith(f"{stack}."):
            parent = name.rpartition(".")[0]
            beside_layers = not parent or f"{stack}.".startswith(f"{parent}.")
            whole = module if beside_layers or not stack else model.get_submodule(parent)
            found |= {id(one) for one in whole.parameters()}
    return found


def clip_gradients(parameters: list[nn.Parameter], limit: float) -> Tensor:
    """Scale the gradients to a global norm of at most `limit`; gives the norm they had."""
    return nn.utils.clip_grad_norm_(parameters, limit, foreach=True)


def update(optimizer: torch.optim.AdamW, *, rate: float, unsound: Tensor) -> None:
    """One step at `rate`; none at all (weights, moments, count) where `unsound` is 1."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("share", 1.0)
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
