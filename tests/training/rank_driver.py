"""Runs `biphase run` in several processes that train together, one command after another, importing once.

    python rank_driver.py '[[2, "STUDY", "STORE", "--for", "0.05s"], [2, "STUDY", "STORE", "--stop-after", "30"] …]'

torchrun starts each process anew, which costs seconds of imports; here every rank is a fork that finds its
place in the same environment variables. `--stop-after`: the wish to stop comes when it is asked for so often, which is
once a step, instead of by the clock. `--count FILE`: leave there what each rank sent, in bytes. `--own-seeds`: every
rank draws other initial weights, as a CPU of another kind would.
"""

import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

import biphase.cluster.launch
import biphase.study.describe
import biphase.study.worker
from biphase.cli import app
from biphase.training import distributed

distributed.BUCKET = 2**10  # elements: a tiny model has many buckets


def stop_after(often):
    class Stop(biphase.cluster.launch.Stop):
        left = often

        def __call__(self):
            self.left -= 1
            return self.left < 0

    biphase.cluster.launch.Stop = Stop


def own_seeds(rank):
    plain = torch.manual_seed
    torch.manual_seed = lambda seed: plain(seed + rank)


def count_bytes(sent):
    """Wrap torch's collectives. A ring sends (n − 1) / n of what is gathered or cut, and twice that of a sum.

    Numbers that are no tensors of a model (labels, losses, norms) do not count. The last sum that begins in a backward
    pass counts apart: nothing is left to compute beside it.
    """
    # What it is, the names that versions of torch have for it, the names of its first tensors: the last is what is sent.
    for kind, rounds, names, order in (
        ("sum", 2, ("all_reduce",), ("tensor",)),
        ("gather", 1, ("all_gather_into_tensor", "all_gather_single"), ("output_tensor",)),
        ("cut", 1, ("reduce_scatter_tensor", "reduce_scatter_single"), ("output", "input")),
    ):
        for name in names:
            if hasattr(dist, name):
                setattr(dist, name, _counting(sent, kind, getattr(dist, name), rounds, order))


def _counting(sent, kind, plain, rounds, order):
    latest = [0]

    def counting(*args, **kwargs):
        tensor = args[len(order) - 1] if len(args) >= len(order) else kwargs[order[-1]]
        members = dist.get_world_size(kwargs.get("group"))
        if tensor.is_floating_point() and tensor.numel() > 1:
            sent[kind] = sent.get(kind, 0) + rounds * (members - 1) * tensor.nbytes // members
        if kind == "sum" and torch._C._current_graph_task_id() >= 0:
            latest[0] = rounds * (members - 1) * tensor.nbytes // members
        elif latest[0]:
            sent[f"last {kind}"] = sent.get(f"last {kind}", 0) + latest[0]
            sent[kind] -= latest[0]
            latest[0] = 0
        return plain(*args, **kwargs)

    return counting


def taken_out(arguments, option):
    """The value of an option of the driver's own."""
    if option not in arguments:
        return None
    at = arguments.index(option)
    value = arguments[at + 1]
    del arguments[at : at + 2]
    return value


def together(count, arguments):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = []
    for rank in range(count):
        child = os.fork()
        if child == 0:
            os.environ |= {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
            }  # fmt: skip
            code = 1
            sent = {}
            if "--own-seeds" in arguments:
                arguments.remove("--own-seeds")
                own_seeds(rank)
            if often := taken_out(arguments, "--stop-after"):
                stop_after(int(often))
            if counted := taken_out(arguments, "--count"):
                count_bytes(sent)
                distributed.leave = lambda code, **_: sys.exit(code)  # else nothing could be written after it
            try:
                app(["run", *arguments, "--quiet"], standalone_mode=False)
            except SystemExit as end:
                code = end.code or 0
            except BaseException:
                traceback.print_exc()
            finally:
                if counted and rank == 0:
                    Path(counted).write_text(json.dumps(sent))
                os._exit(code)
        ranks.append(child)
    codes = []
    while ranks:
        child, status = os.wait()
        ranks.remove(child)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:  # as torchrun does: the others would wait for it forever
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return codes


for count, study, store, *more in json.loads(sys.argv[1]):
    codes = together(count, [study, "--store", store, *more])
    if any(codes):
        sys.exit(f"exit codes {codes}")
