"""AdamW, with a step that is skipped on the device if its loss or gradient is nonfinite.

`linear_rate` is the schedule of fine-tuning; that of pretraining is `Pretrain.learning_rate`. `build` makes the
optimizer, `update` takes one step with our fused kernel or torch's, and `optimizer_state` and `restore_optimizer_state`
convert its state for checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from biphase import fast
from biphase.models.backbone import stack_of
from biphase.specs import AdamW

STATE = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of each parameter


def linear_rate(step: int, steps: int, *, peak: float, warmup: float) -> float:
    """Return the learning rate of a fine-tuning step: linear warmup over the share `warmup`, then linear decay to 0.

    Equal to transformers' linear schedule, whose first step has rate 0.
    """
    rising = math.ceil(warmup * steps)
    if step < rising:
        return peak * step / rising
    return peak * (steps - step) / max(1, steps - rising)


# ---------------------------------------------------------------- optimizer


def build(
    model: nn.Module, spec: AdamW, parameters: dict[str, nn.Parameter] | None = None
) -> torch.optim.AdamW:
    """Build AdamW with weight decay on every parameter.

    It is torch's fused AdamW, which can skip a step by a flag on the device. `parameters` gives this process's rows by
    parameter name if the model is sharded.
    """
    if parameters is None:
        parameters = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    groups = by_depth(model, parameters, spec.layer_decay)
    return torch.optim.AdamW(
        groups, lr=0.0, betas=spec.betas, eps=spec.eps, weight_decay=spec.weight_decay, fused=True
    )


def by_depth(
    model: nn.Module, parameters: dict[str, nn.Parameter], layer_decay: float
) -> list[dict[str, Any]]:
    """Group parameters by depth, each group with its share of the learning rate.

    The share is 1 after the last layer, and is multiplied by `layer_decay` for each layer below it.
    """
    if layer_decay == 1:
        return [{"params": list(parameters.values()), "share": 1.0}]
    stack, blocks = stack_of(model)
    layers, lowest = len(blocks), _below(model, stack)
    depths: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        inside = name.startswith(f"{stack}.")
        depth = int(name.removeprefix(f"{stack}.").split(".")[0]) + 1 if inside else layers + 1
        depths[0 if name in lowest else depth].append(parameter)
    return [
        {"params": group, "share": layer_decay ** (layers + 1 - depth)}
        for depth, group in sorted(depths.items())
    ]


def _below(model: nn.Module, stack: str) -> set[str]:
    """Return the names of the parameters below the first layer: embeddings, and norms in the same module."""
    ids: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not name.startswith(f"{stack}."):
            parent = name.rpartition(".")[0]
            beside_layers = not parent or f"{stack}.".startswith(f"{parent}.")
            whole = module if beside_layers or not stack else model.get_submodule(parent)
            ids |= {id(parameter) for parameter in whole.parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in ids}


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients in fp32."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return nn.utils.get_total_norm(gradients, foreach=True).float()


def update(
    optimizer: torch.optim.AdamW,
    *,
    rate: float | Tensor,
    nonfinite: Tensor,
    shrink: Tensor | None = None,
    copies: dict[int, Tensor] | None = None,
) -> bool:
    """Take one step at `rate` with the gradients divided by `shrink`, then clear the gradients.

    If `nonfinite` is 1, neither weights nor optimizer state change. `copies` are 16-bit copies of weights, by the
    address of the weight. Returns True if the kernel has refreshed them.
    """
    for group in optimizer.param_groups:
        own = rate * group.get("share", 1.0)
        if not isinstance(group["lr"], Tensor):
            group["lr"] = own
        elif isinstance(own, Tensor):
            group["lr"].copy_(own)
        else:
            group["lr"].fill_(own)
    in_one_pass = _suits_one_pass(optimizer)
    if in_one_pass:
        _in_one_pass(
            optimizer, nonfinite, torch.ones_like(nonfinite) if shrink is None else shrink, copies or {}
        )
    else:
        # torch's fused kernel reads both, so dividing needs no extra pass over the gradients.
        optimizer.found_inf = nonfinite  # ty: ignore[missing-attribute]
        optimizer.grad_scale = shrink  # ty: ignore[missing-attribute]
        optimizer.step()
        optimizer.found_inf = optimizer.grad_scale = None  # ty: ignore[missing-attribute]
    optimizer.zero_grad(set_to_none=True)
    return in_one_pass


def _suits_one_pass(optimizer: torch.optim.AdamW) -> bool:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return fast.fast_on(parameters[0].device) and all(
        p.dtype == torch.float32 and p.is_contiguous() and (p.grad is None or p.grad.is_contiguous())
        for p in parameters
    )


@torch.no_grad()
def _in_one_pass(
    optimizer: torch.optim.AdamW, nonfinite: Tensor, shrink: Tensor, copies: dict[int, Tensor]
) -> None:
    """Run our AdamW kernel, which also writes the copies; torch's moves a third more memory and needs another pass."""
    from biphase.fast.kernels import adamw_  # needs Triton, which is installed only with a GPU

    for group in optimizer.param_groups:
        learned = [parameter for parameter in group["params"] if parameter.grad is not None]
        states = [_state(optimizer, parameter) for parameter in learned]
        if not learned:
            continue
        increment = 1 - nonfinite  # passed as a list, since a single tensor would be read on the host
        torch._foreach_add_([state["step"] for state in states], [increment] * len(states))
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            rate = torch.full((), rate, dtype=torch.float32, device=nonfinite.device)
        for parameter, state in zip(learned, states, strict=True):
            adamw_(
                parameter,
                state["exp_avg"],
                state["exp_avg_sq"],
                copies.get(parameter.data_ptr()),
                steps=state["step"],
                rate=rate,
                shrink=shrink,
                nonfinite=nonfinite,
                betas=group["betas"],
                eps=group["eps"],
                decay=group["weight_decay"],
            )


def _state(optimizer: torch.optim.AdamW, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's optimizer state, created with zeros before its first step, on the parameter's device."""
    if parameter not in optimizer.state:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer.state[parameter]


def make_capturable(optimizer: torch.optim.AdamW, device: torch.device) -> None:
    """Prepare the optimizer for CUDA graphs: each group's learning rate becomes a tensor on the device."""
    for group in optimizer.param_groups:
        group["capturable"], group["lr"] = True, torch.zeros((), device=device)
    # A capturable optimizer warns if it steps outside a graph, which is intended here.
    optimizer._warned_capturable_if_run_uncaptured = True


@torch.no_grad()
def forget(optimizer: torch.optim.AdamW) -> None:
    """Reset the optimizer state of every parameter to zero, in place if it exists."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _state(optimizer, parameter)
    for kind in STATE:
        torch._foreach_zero_([state[kind] for state in optimizer.state.values()])


def optimizer_state(parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the optimizer state by kind and parameter name, e.g. `exp_avg.lm_head.weight`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        f"{kind}.{names[id(parameter)]}": value.detach()
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    }


def restore_optimizer_state(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    saved: Callable[[str, str], Tensor | None],
) -> None:
    """Restore what `optimizer_state` returned; `saved(kind, name)` gives each tensor, or None."""
    for name, parameter in parameters.items():
        values = {kind: saved(kind, name) for kind in STATE}
        state = {kind: value.to(parameter.device) for kind, value in values.items() if value is not None}
        if state:  # else the parameter never had a gradient
            optimizer.state[parameter] = state
