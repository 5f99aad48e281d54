"""Weights, gradients and moments cut by rows over the processes: FSDP2, as a way to compute the same numbers.

    a block        its weights are fetched before it runs, forward and backward, and let go of behind it
    the embedding  the same, unless the head is the same matrix
    the rest       head, norms: fetched once a micro-batch

Where products are made in bf16 weights travel in bf16; gradients are summed in fp32 and weights are fp32 where they are
kept. FSDP would take the mean over processes; here each loss is divided by the labels of all, so gradients are summed.
Micro-batches are added up on each process and summed over processes once a step.

The optimizer never meets a DTensor: it holds this process's rows as plain parameters in the memory that FSDP fetches
from. So clipping, skipping and our AdamW kernel are those of a model that is not sharded.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from biphase.errors import ModelError, TrainingError
from biphase.models.backbone import LanguageModel
from biphase.models.layers import stack_of
from biphase.training.devices import Ranks
from biphase.training.manner import Sharding
from biphase.training.tensors import Rows


@dataclass(frozen=True)
class Part:
    """This process's rows of one parameter."""

    name: str  # as the language model has it
    whole: tuple[int, ...]  # the shape of the parameter
    first: int  # of its rows here
    rows: nn.Parameter  # shares its memory with `sharded`
    sharded: Any  # the parameter as FSDP has it


class Sharded:
    """A language model whose parameters are spread over processes, and the gradients of its steps."""

    def __init__(self, model: LanguageModel, sharding: Sharding, ranks: Ranks, precision: str) -> None:
        gc.collect()  # modules of FSDP refer to each other in circles: a piece before this one may still hold memory
        self.model, self.ranks = model, ranks
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world))
        self.together = sharding.groups_of(ranks.world, local)
        self.copies = ranks.world // self.together
        self.mesh = _mesh(ranks.device.type, self.copies, self.together)
        self.place = ranks.rank % self.together
        self._cut(precision)
        self.parts = [self._part(name, one) for name, one in model.named_parameters()]
        self.units = [one for one in model.modules() if isinstance(one, FSDPModule)]
        for unit in self.units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    @property
    def writes(self) -> bool:
        """Does this process write its rows of a checkpoint? Of several copies the first is written."""
        return self.ranks.rank < self.together

    def learned(self) -> dict[str, nn.Parameter]:
        """Rows that are trained, by the name of their parameter. A process may have no row of a short one."""
        return {one.name: one.rows for one in self.parts if one.sharded.requires_grad and one.rows.numel()}

    def rows(self) -> dict[str, Rows]:
        """The same as what they are of the model inside, under its own names."""
        return {
            one.name.removeprefix("model."): Rows(one.rows, one.whole, one.first)
            for one in self.parts
            if one.rows.numel()
        }

    def _cut(self, precision: str) -> None:
        policy = MixedPrecisionPolicy()
        if precision == "bf16":
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        how: dict[str, Any] = {"mesh": self.mesh, "mp_policy": policy}
        whole: Any = self.model.model
        scalars = [name for name, one in whole.named_parameters() if one.ndim == 0]
        if scalars:
            raise ModelError(
                f"--shard: {scalars[0]} of {type(whole).__name__} has no rows; type --shard none"
            )
        _, blocks = stack_of(whole.base_model)
        for block in blocks:
            fully_shard(block, **how)
        embedding = whole.get_input_embeddings()
        elsewhere = {id(one) for module in _apart_from(whole, embedding) for one in module.parameters(False)}
        if not any(id(one) in elsewhere for one in embedding.parameters()):
            fully_shard(embedding, **how)
        fully_shard(self.model, **how)

    def _part(self, name: str, sharded: Any) -> Part:
        rows = sharded.to_local().detach()
        most = -(-sharded.shape[0] // self.together)
        first = min(self.place * most, sharded.shape[0])
        assert len(rows) == min(most, sharded.shape[0] - first), "FSDP cuts rows as torch.chunk does"
        return Part(name, tuple(sharded.shape), first, nn.Parameter(rows, sharded.requires_grad), sharded)

    # ------------------------------------------------------------ in a step

    def collect(self, *, last: bool) -> None:
        """Before a micro-batch: its gradients stay here, but those of the last take all along."""
        root: Any = self.model
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)

    @torch.no_grad()
    def total(self, loss: Tensor) -> Tensor:
        """Hand the summed gradients to the optimizer's parameters; gives the sum of the losses."""
        for one in self.parts:
            if one.sharded.grad is None:
                continue
            if one.rows.numel():
                if one.sharded.to_local().data_ptr() != one.rows.data_ptr():
                    raise TrainingError(f"{one.name}: FSDP has moved its weights; type --shard none")
                one.rows.grad = one.sharded.grad.to_local()
            one.sharded.grad = None
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss

    def norm(self) -> Tensor:
        """The norm of all gradients: the same number for every process, or copies would drift apart."""
        own = [one.rows.grad for one in self.parts if one.rows.grad is not None]
        square = torch.zeros((), device=self.ranks.device)
        if own:
            square = nn.utils.get_total_norm(own, foreach=True).float().square()
        dist.all_reduce(square)
        return (square / self.copies).sqrt()

    def rest(self) -> None:
        """Let go of fetched weights: after reading without a backward pass the last ones would stay."""
        for unit in self.units:
            unit.reshard()


@lru_cache(maxsize=4)  # groups of processes are made once, not for every piece
def _mesh(kind: str, copies: int, together: int) -> DeviceMesh:
    if copies == 1:
        return init_device_mesh(kind, (together,), mesh_dim_names=("rows",))
    return init_device_mesh(kind, (copies, together), mesh_dim_names=("copies", "rows"))


def _apart_from(model: nn.Module, left_out: nn.Module) -> Iterator[nn.Module]:
    inside = set(left_out.modules())
    return (one for one in model.modules() if one not in inside)
