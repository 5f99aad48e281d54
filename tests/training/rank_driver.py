"""Runs `biphase run` in several processes that train together, one command after another, importing once.

    python rank_driver.py '[[2, "STUDY", "STORE", "--for", "0.05s"], [2, "STUDY", "STORE", "--stop-after", "30"] …]'

torchrun starts each process anew, which costs seconds of imports; here every rank is a fork that finds its
place in the same environment variables. `--stop-after`: the wish to stop comes when it is asked for so often, which is
once a step, instead of by the clock.
"""

import json
import os
import signal
import socket
import sys

import biphase.study.launch
import biphase.study.summary
import biphase.study.worker
from biphase.cli import app


def stop_after(often):
    class Stop(biphase.study.launch.Stop):
        left = often

        def __call__(self):
            self.left -= 1
            return self.left < 0

    biphase.study.launch.Stop = Stop


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
            if "--stop-after" in arguments:
                at = arguments.index("--stop-after")
                stop_after(int(arguments[at + 1]))
                del arguments[at : at + 2]
            try:
                app(["run", *arguments, "--quiet"], standalone_mode=False)
            except SystemExit as end:
                code = end.code or 0
            finally:
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
