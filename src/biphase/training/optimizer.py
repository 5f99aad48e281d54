"""AdamW, and Muon beside it, with a step that is skipped if its loss or gradient is nonfinite.

`linear_rate` is the schedule of fine-tuning; that of pretraining is `Pretrain.learning_rate`. `build` makes the
optimizer, `begin_phase` says what it trains from now on, `update` takes one step with our fused kernel or torch's, and
`optimizer_state` and `restore_optimizer_state` convert its state for checkpoints.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from biphase import fast
from biphase.errors import ModelError
from biphase.models.backbone import LanguageModel, stack_of
from biphase.specs import AdamW, Muon
from biphase.specs.training import layers_of

STATE = ("step", "exp_avg", "exp_avg_sq")  # AdamW's state of each parameter
MUON_STATE = ("momentum_buffer",)


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
    model: nn.Module,
    spec: AdamW | Muon,
    parameters: dict[str, nn.Parameter] | None = None,
    *,
    layer_decays: tuple[float, ...] = (),
) -> AnyOptimizer:
    """Build AdamW with weight decay on every parameter, or Muon beside it for the matrices of the layers.

    AdamW is torch's fused one, which can skip a step by a flag on the device. `parameters` gives this process's rows by
    parameter name if the model is sharded. `layer_decays` are those that `begin_phase` will set.
    """
    if parameters is None:
        parameters = trainable(model)
    apart = any(decay != 1 for decay in layer_decays)
    matrices = _matrices_of_layers(model, parameters) if isinstance(spec, Muon) else {}
    rest = {name: weight for name, weight in parameters.items() if name not in matrices}
    adam = spec.adamw if isinstance(spec, Muon) else spec
    adamw = torch.optim.AdamW(
        by_depth(model, rest, spec.layer_decay, apart=apart),
        lr=0.0, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay, fused=True,
    )  # fmt: skip
    if not isinstance(spec, Muon):
        return adamw
    muon = torch.optim.Muon(
        by_depth(model, matrices, spec.layer_decay, apart=apart),
        lr=0.0, weight_decay=spec.weight_decay, momentum=spec.momentum, nesterov=spec.nesterov,
        ns_steps=spec.newton_schulz_steps, adjust_lr_fn=spec.adjust,
    )  # fmt: skip
    return MuonWithAdamW(muon, adamw)


def _matrices_of_layers(model: nn.Module, parameters: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Return the 2-D weights inside the layers, without embeddings."""
    stack, _ = stack_of(model)
    tables = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    return {
        name: weight
        for name, weight in parameters.items()
        if weight.ndim == 2 and _layer(name, stack) is not None and id(weight) not in tables
    }


class MuonWithAdamW:
    """Muon and AdamW as one optimizer: their groups one after the other, and one state by parameter."""

    def __init__(self, muon: torch.optim.Muon, adamw: torch.optim.AdamW) -> None:
        self.muon, self.adamw = muon, adamw
        muon.state = self.state = adamw.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [*self.adamw.param_groups, *self.muon.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in (self.adamw, self.muon):
            optimizer.zero_grad(set_to_none)


AnyOptimizer = torch.optim.AdamW | MuonWithAdamW


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a whole model that are trained, by name."""
    return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}


def by_depth(
    model: nn.Module, parameters: dict[str, nn.Parameter], layer_decay: float, *, apart: bool = False
) -> list[dict[str, Any]]:
    """Group parameters by depth, each group with its share of the learning rate.

    The share is 1 after the last layer, and is multiplied by `layer_decay` for each layer below it. `above` is the
    number of these factors. `apart`: group by depth also if all shares are 1.
    """
    if layer_decay == 1 and not apart:
        return [{"params": list(parameters.values()), "share": 1.0, "above": 0}]
    stack, blocks = stack_of(model)
    layers, lowest = len(blocks), _below(model, stack)
    depths: dict[int, list[nn.Parameter]] = defaultdict(list)
    for name, parameter in parameters.items():
        layer = _layer(name, stack)
        depths[0 if name in lowest else layers + 1 if layer is None else layer + 1].append(parameter)
    return [
        {"params": group, "share": layer_decay ** (layers + 1 - depth), "above": layers + 1 - depth}
        for depth, group in sorted(depths.items())
    ]


def _layer(name: str, stack: str) -> int | None:
    """Return the number of the layer that a parameter is in, from 0; None if it is in none."""
    inside = name.startswith(f"{stack}.")
    return int(name.removeprefix(f"{stack}.").split(".")[0]) if inside else None


def begin_phase(
    model: LanguageModel,
    learned: Mapping[str, nn.Parameter],
    optimizer: AnyOptimizer,
    *,
    freeze: tuple[str, ...],
    layer_decay: float,
    head: bool = True,
) -> tuple[bool, bool]:
    """Train all of `learned` but what `freeze` names, at the shares of `layer_decay`; return whether each is new.

    A frozen weight gets no gradient, so that neither it nor its optimizer state changes. Without `head`, nothing outside
    the backbone is used: it is frozen too, so that processes need not exchange its absent gradients.
    """
    stack, blocks = stack_of(model)
    layers = layers_of(freeze, len(blocks))
    embedding = {id(weight) for weight in model.model.get_input_embeddings().parameters()}
    backbone = {id(weight) for weight in model.model.base_model.parameters()}
    frozen = {
        name
        for name, weight in model.named_parameters()
        if _layer(name, stack) in layers
        or ("embeddings" in freeze and id(weight) in embedding)
        or (not head and id(weight) not in backbone)
    }
    if learned and frozen >= learned.keys():
        raise ModelError(f"Stage.freeze={freeze} leaves no weight to train; freeze fewer layers")
    refrozen = rescaled = False
    for name, weight in learned.items():
        refrozen |= weight.requires_grad == (name in frozen)
        weight.requires_grad_(name not in frozen)
    for group in optimizer.param_groups:
        share = layer_decay ** group["above"]
        rescaled |= share != group["share"]
        group["share"] = share
    return refrozen, rescaled


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
    optimizer: AnyOptimizer,
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
    if isinstance(optimizer, MuonWithAdamW):
        _update_both(optimizer, nonfinite, shrink, copies)
        return False  # Muon does not refresh copies
    in_one_pass = _take_adamw(optimizer, nonfinite, shrink, copies)
    optimizer.zero_grad(set_to_none=True)
    return in_one_pass


def _update_both(
    optimizer: MuonWithAdamW, nonfinite: Tensor, shrink: Tensor | None, copies: dict[int, Tensor] | None
) -> None:
    _take_adamw(optimizer.adamw, nonfinite, shrink, copies)
    if not nonfinite.item():  # Muon has no flag on the device, so the host waits for it here
        weights = [weight for group in optimizer.muon.param_groups for weight in group["params"]]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        if shrink is not None and gradients:
            torch._foreach_div_(gradients, shrink)
        optimizer.muon.step()
    optimizer.zero_grad(set_to_none=True)


def _take_adamw(
    optimizer: torch.optim.AdamW, nonfinite: Tensor, shrink: Tensor | None, copies: dict[int, Tensor] | None
) -> bool:
    """Take AdamW's step with our kernel or torch's; return whether ours has refreshed the copies."""
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


def optimizer_state(parameters: Mapping[str, Tensor], optimizer: AnyOptimizer) -> dict[str, Tensor]:
    """Return the optimizer state by kind and parameter name, e.g. `exp_avg.lm_head.weight`."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        f"{kind}.{names[id(parameter)]}": value.detach()
        for parameter, state in optimizer.state.items()
        for kind, value in state.items()
    }


def restore_optimizer_state(
    parameters: Mapping[str, Tensor],
    optimizer: AnyOptimizer,
    saved: Callable[[str, str], Tensor | None],
) -> None:
    """Restore what `optimizer_state` returned; `saved(kind, name)` gives each tensor, or None."""
    for name, parameter in parameters.items():
        values = {kind: saved(kind, name) for kind in (*STATE, *MUON_STATE)}
        state = {kind: value.to(parameter.device) for kind, value in values.items() if value is not None}
        if state:  # else the parameter never had a gradient
            optimizer.state[parameter] = state
