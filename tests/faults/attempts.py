"""Runs verbs in forked processes. Everything is imported once, so that faults fall into the work and not into imports."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet  # noqa: F401
import torch.utils.tensorboard  # noqa: F401
import typer.rich_utils  # noqa: F401  (another user may not read where Python is)

import biphase.cluster.slurm
import biphase.cluster.workers
import biphase.data.tokenize
import biphase.report.build
import biphase.study.describe
import biphase.study.worker  # noqa: F401
from biphase.cli import app, main


def import_the_rest(study: str, store: str) -> None:
    """What a verb imports when it is called."""
    with (
        Path(os.devnull).open("w") as quiet,
        contextlib.redirect_stdout(quiet),
        contextlib.suppress(SystemExit),
    ):
        app(["plan", study, "--store", store], standalone_mode=False)


def attempt(words: list[str], log: Path, disturb: Callable[[], None] = lambda: None) -> int:
    """Fork a process that runs a verb, with a fault from its beginning on; return its pid."""
    child = os.fork()
    if child:
        return child
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.argv = ["biphase", *words]
    code = 70
    try:
        disturb()
        main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def code_of(child: int) -> int:
    """How a process ended: its exit code, or the negative number of the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
