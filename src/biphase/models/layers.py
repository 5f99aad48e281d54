"""The blocks of a model: what is sharded, compiled and recomputed one at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from biphase.errors import ModelError
from biphase.models.encoder import Encoder


def stack_of(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """The name and the blocks of a model's longest list of modules."""
    lists = [(name, list(one)) for name, one in model.named_modules() if isinstance(one, nn.ModuleList)]
    return max(lists, key=lambda one: len(one[1]), default=("", []))


def recompute_layers(encoder: Encoder, *, compiled: bool) -> None:
    """Let blocks keep only their input for the backward pass, and compute again what they need."""
    trunk: Any = encoder.trunk
    said = encoder.said

    def again(layer: Callable[..., Any], *args: Any) -> Any:
        # Some families' layers learn from `said` who may see whom; by the backward pass it says nothing any more.
        sight = said.sight

        def computed(*args: Any) -> Any:
            before, said.sight = said.sight, sight
            try:
                return layer(*args)
            finally:
                said.sight = before

        return checkpoint(computed, *args, use_reentrant=False)

    def again_compiled(layer: Callable[..., Any], *args: Any) -> Any:
        return checkpoint(layer, *args, use_reentrant=False)  # the graph holds the second pass, too

    name = type(trunk).__name__
    if not getattr(trunk, "supports_gradient_checkpointing", False):
        raise ModelError(f"--recompute: the layers of {name} cannot be computed twice; leave it out")
    trunk._set_gradient_checkpointing(True, again_compiled if compiled else again)
