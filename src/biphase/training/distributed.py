"""Processes and devices: process groups, precision, gradient reduction, FSDP sharding and model placement.

`Ranks` is this process among its peers. `place` brings a model to its device, whole (`Replicated` gradients) or sharded
over the processes (`Sharded`), and builds its optimizer.

Replicated gradients are summed once per step in fixed buckets, each during the backward pass of the last micro-batch, as
soon as it and all buckets before it are complete. torch's DDP regroups its buckets after the first backward pass, so a
resumed run would add in another order than an uninterrupted one, and with three or more processes that changes bits.
The loss is already divided by the labels of all processes, so the sum is the exact mean over labels even if processes
have different numbers of labels.

Sharding is FSDP2: weights, gradients and optimizer state are split by rows over the processes.

    a block        its weights are gathered before its forward and backward pass, and freed after it
    the embedding  the same, unless it is tied to the head
    the rest       head, norms: gathered once per micro-batch

With bf16, weights are communicated in bf16, gradients are summed in fp32, and stored weights are fp32. FSDP's mean over
processes is turned into a sum, since each loss is divided by the labels of all. Gradients are accumulated over
micro-batches in each process and reduced once per step. The optimizer never sees a DTensor: it holds this process's
rows as plain parameters that share memory with FSDP's, so clipping, skipping and our AdamW kernel work as for an
unsharded model.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import platform
import sys
import weakref
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from biphase.errors import ModelError, TrainingError
from biphase.models.backbone import LanguageModel, freeze_embeddings, stack_of
from biphase.specs import Muon, Pretrain
from biphase.training import optimizer
from biphase.training.optimizer import AnyOptimizer, gradient_norm
from biphase.training.options import RuntimeOptions, Sharding
from biphase.training.tensors import RowRange
from biphase.version import code_version, source_hash

# Long, since processes wait for each other's fine-tunings, which can differ by hours. Dead ones are noticed at once.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Ranks:
    """This process's rank, the number of processes, and its device."""

    rank: int
    world: int
    device: torch.device

    @property
    def first(self) -> bool:
        return self.rank == 0

    @property
    def verifies(self) -> bool:
        """Whether this process verifies files that every process of its machine reads."""
        return self.first or os.environ.get("LOCAL_RANK", "0") == "0"

    def sum(self, *numbers: int) -> list[int]:
        """Sum integers over all processes, on the host."""
        return self.start_sum(*numbers)()

    def start_sum(self, *numbers: int) -> Callable[[], list[int]]:
        """Start to sum integers over all processes, on the host; the returned function waits for the sums."""
        if self.world == 1:
            return lambda: list(numbers)
        total = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(total, async_op=True)

        def sums() -> list[int]:
            work.wait()
            return total.tolist()

        return sums

    def sum_float(self, number: float) -> float:
        """Sum a number over all processes, on the host."""
        if self.world == 1:
            return number
        total = torch.tensor(number, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total)

    def share(self, value: Any) -> Any:
        """Broadcast the first process's value. JSON values only: torch's own helper would pickle them."""
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
        """Return every process's value in the order of ranks, on all processes. JSON values only."""
        if self.world == 1:
            return [value]
        text = json.dumps(value).encode()
        lengths = self.sum(*(len(text) if rank == self.rank else 0 for rank in range(self.world)))
        padded = torch.frombuffer(bytearray(text.ljust(max(lengths))), dtype=torch.uint8)
        texts = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(texts, padded)
        return [json.loads(bytes(text.tolist())) for text in texts]

    @torch.no_grad()
    def broadcast(self, tensor: Tensor) -> Tensor:
        """Overwrite a tensor with the first process's bits, and return it."""
        if self.world > 1 and tensor.numel():
            whole = tensor.contiguous()
            dist.broadcast(whole.reshape(-1).view(torch.uint8), src=0)
            if whole is not tensor:
                tensor.copy_(whole)
        return tensor

    def equalize(self, model: nn.Module) -> None:
        """Give every process the first one's weights and buffers."""
        for tensor in (*model.parameters(), *model.buffers()):
            self.broadcast(tensor.detach())

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def check(self) -> None:
        """Raise TrainingError if known numbers do not arrive as they were sent, on the device or on the host."""
        if self.world == 1:
            return
        names = self.gather(platform.node())
        for device in dict.fromkeys((torch.device("cpu"), self.device)):  # in the same order everywhere
            sent = torch.arange(1, 65, dtype=torch.float64, device=device)
            total = sent * (self.rank + 1)
            parts = [torch.empty_like(sent) for _ in range(self.world)]
            dist.all_gather(parts, total)
            dist.all_reduce(total)
            wrong = [rank for rank, part in enumerate(parts) if not torch.equal(part, sent * (rank + 1))]
            if wrong or not torch.equal(total, sent * (self.world * (self.world + 1) // 2)):
                whose = f"process {wrong[0]} on {names[wrong[0]]}" if wrong else "the sum of all"
                raise TrainingError(
                    f"known numbers arrived changed on {platform.node()} ({device.type}, {whose}); "
                    "examine the network and the GPUs there"
                )


ALONE = Ranks(0, 1, torch.device("cpu"))


def join() -> Ranks:
    """Select the device, and join the process group if torchrun started this process."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank, local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world > 1 and not dist.is_initialized():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo") if _one_machine() else None
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        try:
            dist.init_process_group(backend, timeout=PATIENCE)
        except RuntimeError:
            raise TrainingError(
                f"processes on {platform.node()} cannot reach the others: allow all TCP ports between the machines, or name "
                "the network with export GLOO_SOCKET_IFNAME=…"
            ) from None
    return Ranks(rank, world, device)


def _one_machine() -> bool:
    return os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")


def finish(device: torch.device) -> None:
    """Wait until a GPU has done all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def leave(code: int, *, at_once: bool = False) -> NoReturn:
    """Leave the process group and exit; `at_once`: without Python's shutdown, which may wait for other threads."""
    if dist.is_initialized():
        dist.destroy_process_group()
    elif not at_once:
        sys.exit(code)
    # Python's normal shutdown sometimes aborts while threads of gloo and NCCL still run, and the whole launch would
    # count as failed.
    exit_now(code)


def exit_now(code: int) -> NoReturn:
    """End the process without Python's shutdown, when all results are written."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def autocast(device: torch.device, precision: str) -> contextlib.AbstractContextManager[object]:
    """Return the autocast context of a precision: bf16 autocast over fp32 weights, or none for fp32."""
    match precision:
        case "fp32":
            return contextlib.nullcontext()
        case "bf16":
            return torch.autocast(device.type, torch.bfloat16)
        case _:
            raise TrainingError(f"precision={precision!r} is not known; say precision='bf16'")


@contextlib.contextmanager
def repeatable(*, enabled: bool) -> Generator[None]:
    """Make GPU computation deterministic inside the context; slower, since some kernels must add in a fixed order."""
    settings: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), settings.fill_uninitialized_memory
    if enabled:
        # Required by cuBLAS, and read when it is first used.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
        settings.fill_uninitialized_memory = False  # our code never reads uninitialized memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        settings.fill_uninitialized_memory = before[1]


def seed_device(seed: int, device: torch.device) -> None:
    """Seed torch's generators on the host and on `device`.

    torch.manual_seed also seeds device types that are not in use, and records a stack trace for each, which takes the
    host longer than the seeding itself in every step.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device.type != "cpu":
        torch.manual_seed(seed)
    torch.default_generator.manual_seed(seed)


def poor_precision(device: torch.device, precision: str, where: str) -> str:
    """Return a warning if this machine computes `precision` very slowly, else ""."""
    if precision not in ("bf16", "pure-bf16") or device.type != "cpu" or _cpu_has_bf16():
        return ""
    return (
        "this CPU has no bf16 units and computes bf16 about 50 times slower than fp32; "
        f"here, say precision='fp32' in {where}"
    )


def _cpu_has_bf16() -> bool:
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def memory_of(device: torch.device) -> int:
    """Return the bytes of a GPU's memory; 0 for a CPU."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def joules(device: torch.device) -> float | None:
    """Return the GPU's energy in joules since its driver was loaded; None on a CPU or without nvidia-ml-py."""
    if device.type != "cuda":
        return None
    try:
        pynvml = importlib.import_module("pynvml")
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        return pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000
    except Exception:  # no library, no driver, or a GPU without the counter: NVML has many exceptions
        return None


def machine(device: torch.device) -> dict[str, str]:
    """Return the device and the software versions, which are recorded in a checkpoint but are not part of its key."""
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


def alike() -> dict[str, str]:
    """Return what must be equal on all machines that train together, whatever they train."""
    return {
        "biphase's source": source_hash(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "the kind of device": "cuda" if torch.cuda.is_available() else "cpu",
    }


# ---------------------------------------------------------------- gradients


BUCKET = 2**23  # elements per bucket: 32 MB of fp32 gradients, large enough to saturate a link


class Replicated:
    """Gradients of a model that every process holds entirely.

    The order of the buckets is that of the parameters, last first, in which a backward pass completes their gradients.
    The embedding comes last, tied to the head or not: its gradient is complete only when the backward pass ends.
    """

    def __init__(self, parameters: list[nn.Parameter], ranks: Ranks) -> None:
        self.parameters, self.ranks = parameters, ranks
        self.trained: list[nn.Parameter] = []  # in this phase, last first
        self.buckets: list[list[nn.Parameter]] = []
        # Autograd's ends of the trained parameters, with our hooks; held here, since a tensor does not keep its own.
        self.ends: list[tuple[GradientEdge, Any]] = []
        # Of this step's last micro-batch: how many gradients each bucket waits for. Empty before it.
        self.waiting: list[int] = []
        self.sums: list[Any] = []  # of the buckets so far
        self.present: list[bool] = []  # which parameters of these buckets had a gradient
        self.last: tuple[list[bool], Tensor] | None = None  # the same of a whole step, also as a tensor

    def collect(self, *, last: bool) -> None:
        """If the backward pass that follows is the last of the step, sum each bucket during it."""
        if not last or self.ranks.world == 1:
            return
        trained = [parameter for parameter in reversed(self.parameters) if parameter.requires_grad]
        if [*map(id, trained)] != [*map(id, self.trained)]:
            self._fill_buckets(trained)
        self.waiting = [len(bucket) for bucket in self.buckets]

    def _fill_buckets(self, trained: list[nn.Parameter]) -> None:
        for _, hook in self.ends:
            hook.remove()
        self.trained, self.buckets, self.ends = trained, [*_buckets(trained)], []
        # A hook that held `self` would be a cycle, and a finished job's model would stay in memory.
        me = weakref.ref(self)

        def complete(number: int, *_: object) -> None:
            if (gradients := me()) is not None:
                gradients._complete(number)

        for number, bucket in enumerate(self.buckets):
            for parameter in bucket:
                end = get_gradient_edge(parameter)
                # A hook of the node, since a parameter's own is not called if its gradient is written directly.
                self.ends.append((end, end.node.register_hook(partial(complete, number))))

    def _complete(self, number: int) -> None:
        """Note that a gradient of a bucket is complete; sum the buckets that need not wait any longer."""
        if not self.waiting:  # not the last micro-batch
            return
        self.waiting[number] -= 1
        while len(self.sums) < len(self.buckets) and not self.waiting[len(self.sums)]:
            self._start_sum()

    def _start_sum(self) -> None:
        """Start to sum the next bucket over all processes; its gradients become views of the sum."""
        bucket = self.buckets[len(self.sums)]
        self.present += [parameter.grad is not None for parameter in bucket]
        for parameter in bucket:
            if parameter.grad is None:  # it may have a gradient in another process
                parameter.grad = torch.zeros_like(parameter)
        gradients = [parameter.grad.flatten() for parameter in bucket if parameter.grad is not None]
        flat = torch.cat(gradients) if len(bucket) > 1 else gradients[0]
        self.sums.append(dist.all_reduce(flat, async_op=True))
        for parameter, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            parameter.grad = part.view_as(parameter)

    def total(self, loss: Tensor) -> Tensor:
        """Sum the gradients over all processes; return the sum of the losses."""
        if self.ranks.world == 1:
            return loss
        if not self.waiting:  # no micro-batch in this process
            self.collect(last=True)
        while len(self.sums) < len(self.buckets):  # some parameter had no gradient
            self._start_sum()
        summed = torch.cat([loss.detach().reshape(1), self._on_device(self.present, loss)])
        dist.all_reduce(summed)
        for each in self.sums:  # on a GPU this is a wait of the device, not of the host
            each.wait()
        if not all(self.present):
            # A parameter without a gradient in any process gets none, as with one process: a zero gradient would apply
            # weight decay. This is the only place where the host waits for the device.
            for parameter, count in zip(self.trained, summed[1:].tolist(), strict=True):
                if not count:
                    parameter.grad = None
        self.waiting, self.sums, self.present = [], [], []
        return summed[0]

    def _on_device(self, present: list[bool], like: Tensor) -> Tensor:
        if self.last is None or self.last[0] != present:
            self.last = present, torch.tensor(present, dtype=like.dtype, device=like.device)
        return self.last[1]

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


# ---------------------------------------------------------------- sharding


@dataclass(frozen=True)
class ShardPart:
    """This process's rows of one parameter."""

    name: str  # in the LanguageModel
    whole: tuple[int, ...]  # the shape of the whole parameter
    first: int  # index of the first row here
    rows: nn.Parameter  # shares memory with `sharded`
    sharded: Any  # FSDP's DTensor parameter


@dataclass(frozen=True)
class Sharded:
    """A language model whose parameters `shard` has sharded over processes by FSDP2, and the gradients of its steps."""

    model: LanguageModel
    ranks: Ranks
    group: int  # processes that hold one copy of the model together
    parts: list[ShardPart]

    @property
    def copies(self) -> int:
        return self.ranks.world // self.group

    @property
    def writes(self) -> bool:
        """Whether this process writes its rows of a checkpoint: only the first copy of the model is written."""
        return self.ranks.rank < self.group

    def learned(self) -> dict[str, nn.Parameter]:
        """Return the trainable rows by parameter name. A process may have no row of a short parameter."""
        return {
            part.name: part.rows for part in self.parts if part.sharded.requires_grad and part.rows.numel()
        }

    def rows(self) -> dict[str, RowRange]:
        """Return all rows of this process, including frozen ones, under the names of the inner transformers model."""
        return {
            part.name.removeprefix("model."): RowRange(part.rows, part.whole, part.first)
            for part in self.parts
            if part.rows.numel()
        }

    def collect(self, *, last: bool) -> None:
        """Reduce gradients over processes after the last micro-batch only; accumulate them locally before."""
        root: Any = self.model
        root.set_requires_gradient_sync(last)
        root.set_is_last_backward(last)

    @torch.no_grad()
    def total(self, loss: Tensor) -> Tensor:
        """Assign the reduced gradients to the optimizer's parameters; return the sum of the losses."""
        for part in self.parts:
            if part.sharded.grad is None:
                continue
            if part.rows.numel():
                if part.sharded.to_local().data_ptr() != part.rows.data_ptr():
                    raise TrainingError(f"{part.name}: FSDP has moved its weights; type --shard none")
                if part.rows.requires_grad:  # FSDP computes gradients of frozen weights too
                    part.rows.grad = part.sharded.grad.to_local()
            part.sharded.grad = None
        loss = loss.clone()
        dist.all_reduce(loss)
        return loss

    def norm(self) -> Tensor:
        """Return the global gradient norm; it must be the same in every process, or copies would diverge."""
        own = [part.rows.grad for part in self.parts if part.rows.grad is not None]
        square = torch.zeros((), device=self.ranks.device)
        if own:
            square = nn.utils.get_total_norm(own, foreach=True).float().square()
        dist.all_reduce(square)
        return (square / self.copies).sqrt()

    def rest(self) -> None:
        """Free gathered weights: after a forward pass without a backward pass the last ones would stay in memory."""
        for unit in _units(self.model):
            unit.reshard()


def _units(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def shard(model: LanguageModel, sharding: Sharding, ranks: Ranks, precision: str) -> Sharded:
    """Shard a model's parameters over the processes, and move this process's rows to its device."""
    gc.collect()  # FSDP modules form reference cycles: an earlier training job may still hold memory
    group = sharding.groups_of(ranks.world, int(os.environ.get("LOCAL_WORLD_SIZE", ranks.world)))
    policy = MixedPrecisionPolicy()
    if precision == "bf16":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    how: dict[str, Any] = {
        "mesh": _mesh(ranks.device.type, ranks.world // group, group),
        "mp_policy": policy,
    }
    whole: Any = model.model
    scalars = [name for name, parameter in whole.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ModelError(f"--shard: {scalars[0]} of {type(whole).__name__} has no rows; type --shard none")
    _, blocks = stack_of(whole.base_model)
    for block in blocks:
        fully_shard(block, **how)
    embedding = whole.get_input_embeddings()
    inside = set(embedding.modules())
    others = (module for module in whole.modules() if module not in inside)
    elsewhere = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    if not any(id(parameter) in elsewhere for parameter in embedding.parameters()):  # not tied to the head
        fully_shard(embedding, **how)
    fully_shard(model, **how)
    for unit in _units(model):
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    parts = [_part(name, sharded, ranks.rank % group, group) for name, sharded in model.named_parameters()]
    return Sharded(model, ranks, group, parts)


def _part(name: str, sharded: Any, number: int, group: int) -> ShardPart:
    rows = sharded.to_local().detach()
    most = -(-sharded.shape[0] // group)
    first = min(number * most, sharded.shape[0])
    assert len(rows) == min(most, sharded.shape[0] - first), "FSDP cuts rows as torch.chunk does"
    return ShardPart(name, tuple(sharded.shape), first, nn.Parameter(rows, sharded.requires_grad), sharded)


@lru_cache(maxsize=4)  # create process groups once, not for every training job
def _mesh(kind: str, copies: int, group: int) -> DeviceMesh:
    if copies == 1:
        return init_device_mesh(kind, (group,), mesh_dim_names=("rows",))
    return init_device_mesh(kind, (copies, group), mesh_dim_names=("copies", "rows"))


# What turns the gradients of micro-batches into those that the optimizer reads. `collect` is called before each
# micro-batch of a step.
Gradients = Replicated | Sharded


# ---------------------------------------------------------------- placing


@dataclass(frozen=True)
class Placed:
    """A model's optimizer and parameters after it was brought to its device."""

    path: str  # "fused", "compiled" or "plain"
    optimizer: AnyOptimizer
    sharded: Sharded | None
    learned: dict[str, nn.Parameter]  # those of the optimizer by name: whole ones, or this process's rows
    rows: dict[str, RowRange]  # this process's rows of every parameter by name, including frozen ones


def layer_decays(run: Pretrain) -> tuple[float, ...]:
    """Return the layer decays of stages that have one of their own."""
    return tuple(phase.layer_decay for phase in run.phases if phase.layer_decay)


def place(model: LanguageModel, run: Pretrain, ranks: Ranks, options: RuntimeOptions) -> Placed:
    """Bring `model` to its device, choose its compute path and build its optimizer."""
    if run.freeze == "embeddings":
        freeze_embeddings(model)
    model.train()
    cut = options.sharding.kind != "none" and ranks.world > 1
    if cut and isinstance(run.optimizer, Muon):
        raise TrainingError(
            f"{run.name}: Muon needs whole matrices, not the rows of --shard; type --shard none"
        )
    if not cut:
        model.to(ranks.device)
    # To be sharded, it is prepared on the host, compiled block by block: each block moves to the device when it is
    # sharded, and only its rows stay there.
    path = model.prepare(
        ranks.device, run.precision, compiled=options.compiled, recompute=options.recompute, cut=cut
    )
    sharded = shard(model, options.sharding, ranks, run.precision) if cut else None
    if sharded:
        learned, rows = sharded.learned(), sharded.rows()
    else:
        learned = optimizer.trainable(model)
        # Including frozen ones: a run that continues this one may train them again with their optimizer state.
        rows = {name: RowRange.all_of(weight) for name, weight in model.model.named_parameters()}
    adam = optimizer.build(model, run.optimizer, learned, layer_decays=layer_decays(run))
    return Placed(path, adam, sharded, learned, rows)
