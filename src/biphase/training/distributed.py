"""Processes and devices: who computes what, and how they agree."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import sys
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, NoReturn, Protocol

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from biphase.errors import ModelError, TrainingError
from biphase.models.adapters import freeze_embeddings
from biphase.models.backbone import LanguageModel, stack_of
from biphase.specs import Pretrain
from biphase.training import optimizer
from biphase.training.optimizer import gradient_norm
from biphase.training.options import RuntimeOptions, Sharding
from biphase.training.tensors import RowRange
from biphase.version import code_version

# Processes wait for each other's fine-tunings, of which one may take hours longer. One that died is noticed at once.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process among its peers."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    def sum(self, *numbers: int) -> list[int]:
        """The sums of some integers over all processes, on the host."""
        if self.world == 1:
            return list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(total)
        return total.tolist()

    def sum_float(self, number: float) -> float:
        """The sum of a number over all processes, on the host."""
        if self.world == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def share(self, value: Any) -> Any:
        """The first process's value, for all. JSON values only: torch's own helper would pickle them."""
        if self.world == 1:
            return value
        text = json.dumps(value if self.first else None).encode()
        length = self.sum(len(text) if self.first else 0)[0]
        data = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8)
            if self.first
            else torch.empty(length, dtype=torch.uint8)
        )
        dist.broadcast(data, src=0)
        return json.loads(bytes(data.tolist()))

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, for all, in the order of ranks. JSON values only."""
        if self.world == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = self.sum(*(len(text) if rank == self.rank else 0 for rank in range(self.world)))
        padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        all_of_them = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(all_of_them, padded)
        return [json.loads(bytes(one.tolist())) for one in all_of_them]

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()


def join() -> Ranks:
    """Find the device, and the other processes if torchrun started us among them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo") if _one_machine() else None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=PATIENCE)
    return Ranks(rank, world, device)


def _one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def leave(code: int) -> NoReturn:
    """End this process, and its part in the group."""
    if not dist.is_initialized():
        sys.exit(code)
    dist.destroy_process_group()
    # All is written. Taking a process of a group down training job by training job, with threads of gloo's and NCCL's own, now and
    # then ends in an abort, and the whole launch would count as failed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """fp32 weights, 16-bit products: bf16 under autocast; fp32 as it is."""
    match precision:
        case "fp32":
            return contextlib.nullcontext()
        case "bf16" | "fp8":  # what is not made in 8 bits is made in 16
            return torch.autocast(device.type, torch.bfloat16)
        case _:
            raise TrainingError(f"precision={precision!r} is not known; say precision='bf16'")


@contextlib.contextmanager
def repeatable(*, enabled: bool) -> Generator[None]:
    """While this lasts, equal inputs give equal bits on a GPU too. Slower: some kernels must not add in any order."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if enabled:
        os.environ.setdefault(
            "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
        )  # what cuBLAS wants, if it was not used before
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # nothing here reads what was not written
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def seed_device(seed: int, device: torch.device) -> None:
    """What is drawn from now on, on the host and on `device`, follows from `seed`.

    As torch.manual_seed, but for the kinds of devices that are not used: to each of those that one tells who called,
    which takes the host longer than the seeding, in every step.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


def poor_precision(device: torch.device, precision: str, where: str) -> str:
    """What to tell a user whose machine cannot do `precision` well; empty if it can."""
    if precision not in ("bf16", "pure-bf16") or device.type != "cpu" or _cpu_has_bf16():
        return ""
    return (
        "this CPU has no bf16 units and computes bf16 about 50 times slower than fp32; "
        f"here, say precision='fp32' in {where}"
    )


def _cpu_has_bf16() -> bool:
    has = [getattr(torch.cpu, name, None) for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported")]
    return any(check() for check in has if check)


def micro_rows(device: torch.device, rows: int, length: int) -> int:
    """Rows a micro-batch where the user says nothing: what keeps this kind of device busy."""
    tokens = 8_192
    if device.type == "cuda":
        large = torch.cuda.get_device_properties(device).total_memory > 100 * 2**30
        tokens = 49_152 if large else 24_576
    most = max(1, min(rows, tokens // length))
    # Equal micro-batches if that costs little: a smaller last one would be one more shape to compile.
    return next((count for count in range(most, most // 2, -1) if rows % count == 0), most)


def joules(device: torch.device) -> float | None:
    """What the GPU has used since its driver was loaded; None where nothing tells: a CPU, or no nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # no library, no driver, or a GPU that does not count: whatever NVML calls it
        return None


def machine(device: torch.device) -> dict[str, str]:
    """What computed a state: recorded, never part of its key."""
    name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else platform.processor() or platform.machine()
    )
    versions = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "biphase": code_version(),
    }
    return {"device": name, **versions, "python": platform.python_version()}


# ---------------------------------------------------------------- gradients
# The gradients of a step, over all processes.
#
# Where every process keeps the whole model they are summed once a step, behind the last micro-batch, in a fixed order of
# fixed buckets. torch's DDP wrapper regroups its buckets after the first backward, so a resumed run would add in another
# order than one that never stopped; with three or more processes that changes bits. The loss is already divided by the
# labels of all processes, so a sum is the exact mean over labels whatever each process happened to draw.


BUCKET = 2**25  # elements a bucket: 128 MB of fp32 gradients, large enough to fill a link


class Gradients(Protocol):
    """From the backward passes of micro-batches to what the optimizer reads."""

    def collect(self, *, last: bool) -> None:
        """Asked before each micro-batch of a step."""
        ...

    def total(self, loss: Tensor) -> Tensor:
        """Sum the gradients over all processes; gives the sum of the losses."""
        ...

    def norm(self) -> Tensor:
        """The norm of all gradients, the same for every process."""
        ...


class Replicated:
    """Every process has the whole model, and all gradients."""

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.known: tuple[list[bool], Tensor] | None = None  # who had gradients last time, and on the device

    def collect(self, *, last: bool) -> None:
        """They add up in place."""

    def total(self, loss: Tensor) -> Tensor:
        if self.ranks.world == 1:
            return loss
        there = [parameter.grad is not None for parameter in self.parameters]
        for parameter in self.parameters:
            if parameter.grad is None:  # it saw no label here, but perhaps elsewhere
                parameter.grad = torch.zeros_like(parameter)
        for bucket in _buckets(self.parameters):
            gradients = [parameter.grad for parameter in bucket if parameter.grad is not None]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            dist.all_reduce(flat)
            torch._foreach_copy_(
                gradients, [p.view_as(g) for p, g in zip(_split(flat, gradients), gradients, strict=True)]
            )
        summed = torch.cat([loss.detach().reshape(1), self._on_device(there, loss)])
        dist.all_reduce(summed)
        if not all(there):
            # What has no gradient anywhere is left alone, as one process leaves it: zeros would let it decay.
            # Only here the host waits for the device: for models some of whose weights are not trained.
            for parameter, count in zip(self.parameters, summed[1:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
        return summed[0]

    def _on_device(self, there: list[bool], like: Tensor) -> Tensor:
        if self.known is None or self.known[0] != there:
            self.known = there, torch.tensor(there, dtype=like.dtype, device=like.device)
        return self.known[1]

    def norm(self) -> Tensor:
        return gradient_norm(self.parameters)


def _buckets(parameters: Iterable[nn.Parameter]) -> Iterable[list[nn.Parameter]]:
    bucket: list[nn.Parameter] = []
    held = 0
    for parameter in parameters:
        if bucket and held + parameter.numel() > BUCKET:
            yield bucket
            bucket, held = [], 0
        bucket.append(parameter)
        held += parameter.numel()
    if bucket:
        yield bucket


def _split(flat: Tensor, like: list[Tensor]) -> list[Tensor]:
    return list(flat.split([one.numel() for one in like]))


# ---------------------------------------------------------------- sharding
# Weights, gradients and moments cut by rows over the processes: FSDP2, as a way to compute the same numbers.
#
#     a block        its weights are fetched before it runs, forward and backward, and let go of behind it
#     the embedding  the same, unless the head is the same matrix
#     the rest       head, norms: fetched once a micro-batch
#
# Where products are made in bf16 weights travel in bf16; gradients are summed in fp32 and weights are fp32 where they are
# kept. FSDP would take the mean over processes; here each loss is divided by the labels of all, so gradients are summed.
# Micro-batches are added up on each process and summed over processes once a step.
#
# The optimizer never meets a DTensor: it holds this process's rows as plain parameters in the memory that FSDP fetches
# from. So clipping, skipping and our AdamW kernel are those of a model that is not sharded.


@dataclass(frozen=True)
class ShardPart:
    """This process's rows of one parameter."""

    name: str  # as the language model has it
    whole: tuple[int, ...]  # the shape of the parameter
    first: int  # of its rows here
    rows: nn.Parameter  # shares its memory with `sharded`
    sharded: Any  # the parameter as FSDP has it


class Sharded:
    """A language model whose parameters are spread over processes, and the gradients of its steps."""

    def __init__(self, model: LanguageModel, sharding: Sharding, ranks: Ranks, precision: str) -> None:
        gc.collect()  # modules of FSDP refer to each other in circles: a training job before this one may still hold memory
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

    def rows(self) -> dict[str, RowRange]:
        """The same as what they are of the model inside, under its own names."""
        return {
            one.name.removeprefix("model."): RowRange(one.rows, one.whole, one.first)
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

    def _part(self, name: str, sharded: Any) -> ShardPart:
        rows = sharded.to_local().detach()
        most = -(-sharded.shape[0] // self.together)
        first = min(self.place * most, sharded.shape[0])
        assert len(rows) == min(most, sharded.shape[0] - first), "FSDP cuts rows as torch.chunk does"
        return ShardPart(
            name, tuple(sharded.shape), first, nn.Parameter(rows, sharded.requires_grad), sharded
        )

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


@lru_cache(maxsize=4)  # groups of processes are made once, not for every training job
def _mesh(kind: str, copies: int, together: int) -> DeviceMesh:
    if copies == 1:
        return init_device_mesh(kind, (together,), mesh_dim_names=("rows",))
    return init_device_mesh(kind, (copies, together), mesh_dim_names=("copies", "rows"))


def _apart_from(model: nn.Module, left_out: nn.Module) -> Iterator[nn.Module]:
    inside = set(left_out.modules())
    return (one for one in model.modules() if one not in inside)


# ---------------------------------------------------------------- placing
# A model with its weights, brought to where it is trained: whole in each process, or cut over all of them.


@dataclass(frozen=True)
class Placed:
    """What takes the steps."""

    path: str  # "fused", "compiled" or "plain"
    optimizer: torch.optim.AdamW
    sharded: Sharded | None
    parameters: list[nn.Parameter]  # that the optimizer has: whole ones, or this process's rows
    rows: dict[
        str, RowRange
    ]  # what this process has of every parameter, frozen ones included, under its name


def place(model: LanguageModel, run: Pretrain, ranks: Ranks, options: RuntimeOptions) -> Placed:
    """Bring `model` to its device, and choose how it is computed there."""
    if run.freeze == "embeddings":
        freeze_embeddings(model)
    model.train()
    if options.sharding.kind != "none" and ranks.world > 1:
        # Compiled by blocks and on the host: each block comes to the device when it is cut, and only its rows stay.
        path = model.prepare(
            ranks.device, run.precision, compiled=options.compiled, recompute=options.recompute, cut=True
        )
        sharded = Sharded(model, options.sharding, ranks, run.precision)
        learned = sharded.learned()
        adam = optimizer.build(model, run.optimizer, learned)
        return Placed(path, adam, sharded, list(learned.values()), sharded.rows())
    path = model.to(ranks.device).prepare(
        ranks.device, run.precision, compiled=options.compiled, recompute=options.recompute
    )
    # Frozen ones too: a run that goes on from this one may train them again, with the moments they had.
    rows = {name: RowRange.all_of(one) for name, one in model.model.named_parameters()}
    learned = [one for one in model.model.parameters() if one.requires_grad]
    return Placed(path, optimizer.build(model, run.optimizer), None, learned, rows)
