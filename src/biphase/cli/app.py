"""The command line's shared parts: options, error handling, output, and loading of a study's plan.

Results go to stdout, progress to stderr. Every refusal is one line that ends with what to type. Exit codes: 0 done, 1
jobs failed, 2 wrong use. Imports are inside the functions, so that a verb pays only for what it needs: `plan`, `status`
and `--help` never import torch.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from biphase.text import printable

if TYPE_CHECKING:
    from biphase.keys import Identities
    from biphase.store import Store
    from biphase.study.plan import Plan

app = typer.Typer(
    help="Pretrain text encoders, fine-tune them, and report which pretraining is better.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="study file (.py), or its plan.json in a store")
]
StoreFolder = Annotated[
    Path, typer.Option("--store", envvar="BIPHASE_STORE", help="folder with all results", show_default=True)
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="hash corpora, datasets and local models again, ignoring cached hashes"),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]
DEFAULT_STORE = Path("store")
# Options of several verbs.
Device = Annotated[str, typer.Option(help="estimate costs on this device; default: this machine's")]
TextColumn = Annotated[str, typer.Option(help="column or field with the text")]
Heldout = Annotated[
    str, typer.Option(help="file, folder or pattern to hold out; default: 1 document of 1,000")
]
Tokenizer = Annotated[
    str,
    typer.Option(help="bpe:32000 trains one; or a folder, a tokenizer.json, or owner/name@revision"),
]
Tasks = Annotated[
    str,
    typer.Option(
        help="tasks by name, 'paper', a family (SC, TC, QA, IR, SR, ML, MC), or a folder or file of your own"
    ),
]
Processes = Annotated[
    int,
    typer.Option(min=1, help="processes on each machine, which train together (torchrun) or fine-tune apart"),
]
Nodes = Annotated[int, typer.Option(min=1, help="machines that work together; type the command on each")]
Node = Annotated[int, typer.Option(min=0, help="with --nodes: which of them this is, from 0")]
Head = Annotated[
    str,
    typer.Option(
        metavar="HOST:PORT",
        help="with --nodes: address of node 0, and a free port there (validate: the first of five)",
    ),
]
Profile = Annotated[
    Path | None,
    typer.Option("--slurm", metavar="PROFILE", help="submit it as Slurm jobs by this TOML file"),
]
ForTime = Annotated[
    str, typer.Option("--for", metavar="TIME", help="stop after e.g. 9m or 2h, with a checkpoint")
]
Quiet = Annotated[bool, typer.Option("--quiet", help="show no progress within a job")]


def _trackers(typed: list[str]) -> list[str]:
    from biphase.tracking import trackers_named

    return trackers_named(typed)


Track = Annotated[
    list[str],
    typer.Option(
        "--track",
        envvar="BIPHASE_TRACK",
        callback=_trackers,
        metavar="tensorboard|wandb|trackio|mlflow",
        help="send metrics and scores to a tracker; may be repeated",
    ),
]
NO_TRACK: list[str] = []


def main() -> None:
    """Run a verb; an error of ours becomes one line and exit code 2."""
    from biphase.errors import BiphaseError, one_line

    try:
        sys.exit(app(prog_name="biphase", standalone_mode=False) or 0)
    except BiphaseError as refusal:
        refuse(one_line(refusal))  # a name from outside may contain anything
    except typer.TyperException as error:
        _refuse_options(error)
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:  # typer's exit code after ^C
            tell("stopped at once; results and checkpoints are kept, steps after them will be computed again")
        raise
    except BrokenPipeError:  # the reader of our output is gone, e.g. `| head`
        sys.stderr.close()
        sys.exit(0)
    except OSError as error:
        refuse(f"{error.filename or 'the disk'}: {error.strerror or error}; {_advice(error)}")
    except Exception as error:
        # Path.expanduser raises this for an unknown ~NAME.
        if isinstance(error, RuntimeError) and "home directory" in str(error):
            refuse("there is no user whose name follows the ~ in a path; write the path in full")
        if "RANK" in os.environ:
            from biphase.cluster.launch import LOST, has_lost

            if has_lost(error):
                os._exit(LOST)
        raise


def _refuse_options(error: typer.TyperException) -> NoReturn:
    """Print the option parser's error as one line; it has none if it printed the help instead."""
    message, context = error.format_message(), getattr(error, "ctx", None)
    if not message:
        sys.exit(2)
    command = context.command_path if context else "biphase"
    refuse(f"{message.rstrip('.')}; see {command} --help")


def refuse(line: str) -> NoReturn:
    """Print one line and exit with code 2. Of several training processes, the parent prints it, once."""
    if "RANK" in os.environ:
        from biphase.cluster.launch import report_to_parent

        if report_to_parent(line):
            os._exit(2)  # an orderly shutdown could hang: other ranks may be waiting in a collective
    tell(f"error: {line}")
    sys.exit(2)


def _advice(error: OSError) -> str:
    """Return what to do about an error of the operating system."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too few files may be open at once; type ulimit -n 4096 and then the command again"
    if error.errno == errno.ENOENT:
        return "make its folder first, or name another place"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "change its permissions, or choose another --store"
    if error.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
        return "another file or folder is in its place: move it away, or choose another --store"
    return "free disk space there, or choose another --store"


def tell(text: str) -> None:
    """Print progress and refusals to stderr; nothing for an empty text."""
    if text:
        print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Print results to stdout."""
    print(printable(text), flush=True)


def give(as_json: bool, data: Callable[[], Any], text: Callable[[], str]) -> None:
    """Print a result as JSON (which escapes by itself), or as text."""
    if as_json:
        print(json.dumps(data(), indent=1, default=str), flush=True)
    else:
        show(text())


def store_at(folder: Path) -> Store:
    """Open the store of a verb that only reads; a missing store is refused, never created."""
    from difflib import get_close_matches

    from biphase.errors import StoreError
    from biphase.store import Store

    if not folder.is_dir():
        stores = [studies.parent.name for studies in sorted(folder.parent.glob("*/studies"))]
        close = get_close_matches(folder.name, stores, n=1)
        other = f"type --store {shlex.quote(str(folder.parent / close[0]))}, or " if close else ""
        raise StoreError(
            f"there is no store {folder}, so nothing to read; {other}compute something first: biphase run STUDY"
        )
    return Store.open(folder)


def planned(
    path: Path, store_folder: Path, *, ask: bool = False, reads: bool = False, verify: bool = False
) -> tuple[Plan, Store, Identities]:
    """Load a study and make its plan.

    `ask`: pin hub models without a commit to the hub's current one. `reads`: the store must exist. `verify`: hash all
    inputs again, unless this is one of several training processes, whose parent has done so.
    """
    from biphase.store import Store
    from biphase.study.load import load, pinned
    from biphase.study.plan import identities, make_plan

    loaded = load(path)
    store = store_at(store_folder) if reads else Store.open(store_folder)
    store.verify = verify and "RANK" not in os.environ
    if ask:  # workers that start at once share what they hash, through the store
        store.root.mkdir(parents=True, exist_ok=True)
    fingerprints = identities(store)
    study = pinned(loaded.study, store, ask=ask)
    return make_plan(study, fingerprints, loaded.question), store, fingerprints


def with_store(study: Path, store: Path) -> str:
    """Return a study as typed after a verb, with --store unless it is the default."""
    default = os.environ.get("BIPHASE_STORE") or str(DEFAULT_STORE)
    return shlex.join([str(study)] if str(store) == default else [str(study), "--store", str(store)])
