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
        parameters = {name: one for name, one in model.named_parameters() if one.requires_grad}
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
    found: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, one in parameters.items():
        inside = name.startswith(f"{stack}.")
        depth = int(name.removeprefix(f"{stack}.").split(".")[0]) + 1 if inside else layers + 1
        found[0 if name in lowest else depth].append(one)
    return [
        {"params": some, "share": layer_decay ** (layers + 1 - depth)}
        for depth, some in sorted(found.items())
    ]


def _below(model: nn.Module, stack: str) -> set[str]:
    """Return the names of the parameters below the first layer: embeddings, and norms in the same module."""
    found: set[int] = set()
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and not name.startswith(f"{stack}."):
            parent = name.rpartition(".")[0]
            beside_layers = not parent or f"{stack}.".startswith(f"{parent}.")
            whole = module if beside_layers or not stack else model.get_submodule(parent)
            found |= {id(one) for one in whole.parameters()}
    return {name for name, one in model.named_parameters() if id(one) in found}


def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients in fp32."""
    gradients = [one.grad for one in parameters if one.grad is not None]
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
    parameters = [one for group in optimizer.param_groups for one in group["params"]]
    return fast.fast_on(parameters[0].device) and all(
        one.dtype == torch.float32 and one.is_contiguous() and (one.grad is None or one.grad.is_contiguous())
        for one in parameters
    )


@torch.no_grad()
def _in_one_pass(
    optimizer: torch.optim.AdamW, nonfinite: Tensor, shrink: Tensor, copies: dict[int, Tensor]
) -> None:
    """Run our AdamW kernel, which also writes the copies; torch's moves a third more memory and needs another pass."""
    from biphase.fast.kernels import adamw_  # needs Triton, which is installed only with a GPU

    for group in optimizer.param_groups:
        learned = [one for one in group["params"] if one.grad is not None]
        states = [_state(optimizer, one) for one in learned]
        if not learned:
            continue
        one_more = 1 - nonfinite  # passed as a list, since a single tensor would be read on the host
        torch._foreach_add_([state["step"] for state in states], [one_more] * len(states))
        rate = group["lr"]
        if not isinstance(rate, Tensor):
            rate = torch.full((), rate, dtype=torch.float32, device=nonfinite.device)
        for one, state in zip(learned, states, strict=True):
            adamw_(
                one,
                state["exp_avg"],
                state["exp_avg_sq"],
                copies.get(one.data_ptr()),
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
        for one in group["params"]:
            _state(optimizer, one)
    for what in ("step", "exp_avg", "exp_avg_sq"):
        torch._foreach_zero_([state[what] for state in optimizer.state.values()])


def optimizer_state(parameters: Mapping[str, Tensor], optimizer: torch.optim.AdamW) -> dict[str, Tensor]:
    """Return the optimizer state by kind and parameter name, e.g. `exp_avg.lm_head.weight`."""
    names = {id(one): name for name, one in parameters.items()}
    return {
        f"{what}.{names[id(parameter)]}": value.detach()
        for parameter, state in optimizer.state.items()
        for what, value in state.items()
    }


def restore_optimizer_state(
    parameters: Mapping[str, Tensor],
    optimizer: torch.optim.AdamW,
    saved: Callable[[str, str], Tensor | None],
) -> None:
    """Restore what `optimizer_state` returned; `saved(kind, name)` gives each tensor, or None."""
    for name, parameter in parameters.items():
        found = {what: saved(what, name) for what in ("step", "exp_avg", "exp_avg_sq")}
        state = {what: value.to(parameter.device) for what, value in found.items() if value is not None}
        if state:  # else the parameter never had a gradient
            optimizer.state[parameter] = state
