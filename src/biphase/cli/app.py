"""What all verbs share. Results go to stdout, progress to stderr; every refusal is one line that ends with what to type.

Exit codes: 0 done, 1 jobs failed, 2 wrong use. Imports stand inside the functions, so that a verb pays for
what it needs: `plan`, `status` and `--help` never import torch.
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
    help="biphase: the workbench for pretraining text encoders.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StudyFile = Annotated[
    Path, typer.Argument(metavar="STUDY", help="a study file (.py), or the plan.json of one")
]
StoreFolder = Annotated[
    Path, typer.Option("--store", envvar="BIPHASE_STORE", help="the folder of all results", show_default=True)
]
Verify = Annotated[
    bool,
    typer.Option("--verify", help="hash corpora, datasets and local models again, whatever is remembered"),
]
AsJson = Annotated[bool, typer.Option("--json", help="for a program to read")]
DEFAULT_STORE = Path("store")


def main() -> None:
    """Run a verb; a refusal becomes one line and exit code 2."""
    from biphase.errors import BiphaseError, one_line

    try:
        sys.exit(app(prog_name="biphase", standalone_mode=False) or 0)
    except BiphaseError as refusal:
        refuse(one_line(refusal))  # a name of somebody else's may hold anything
    except typer.TyperException as wrong:
        _refuse_words(wrong)
    except SystemExit as end:
        if end.code == 128 + signal.SIGINT:  # so typer ends what ^C has interrupted
            tell(
                "stopped at once; results and checkpoints are kept, what came after them will be computed again"
            )
        raise
    except OSError as wrong:
        if isinstance(wrong, BrokenPipeError):  # the reader of our output has gone, e.g. `| head`
            sys.stderr.close()
            sys.exit(0)
        refuse(f"{wrong.filename or 'the disk'}: {wrong.strerror or wrong}; {_way_out(wrong)}")
    except Exception as error:
        # So says Path.expanduser of ~NAME.
        if isinstance(error, RuntimeError) and "home directory" in str(error):
            refuse("there is no user whose name follows the ~ in a path; write the path in full")
        if "RANK" in os.environ:
            from biphase.cluster.launch import LOST, has_lost

            if has_lost(error):
                os._exit(LOST)
        raise


def _refuse_words(wrong: typer.TyperException) -> NoReturn:
    """What the option parser refuses, as one line. It says nothing where it has shown the help instead."""
    said, context = wrong.format_message(), getattr(wrong, "ctx", None)
    if not said:
        sys.exit(2)
    typed = context.command_path if context else "biphase"
    refuse(f"{said.rstrip('.')}; see {typed} --help")


def refuse(line: str) -> NoReturn:
    """End with one line and exit code 2. Of several processes that train together the parent says it, once."""
    if "RANK" in os.environ:
        from biphase.cluster.launch import report_to_parent

        if report_to_parent(line):
            os._exit(2)  # the group cannot be taken down in order: others may be waiting in it
    tell(f"error: {line}")
    sys.exit(2)


def _way_out(wrong: OSError) -> str:
    """What to do about what the system refused."""
    if wrong.errno in (errno.EMFILE, errno.ENFILE):
        return "too few files may be open at once; type ulimit -n 4096 and then the command again"
    if wrong.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return "see who may read and write there, or choose another --store"
    if wrong.errno in (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY):
        return "something else stands in its place: move it away, or choose another --store"
    return "free room there, or choose another --store"


def tell(text: str) -> None:
    """Progress and refusals, for people; an empty text is none."""
    if text:
        print(printable(text), file=sys.stderr, flush=True)


def show(text: str) -> None:
    """Results, for people."""
    print(printable(text), flush=True)


def give(as_json: bool, told: Callable[[], Any], text: Callable[[], str]) -> None:
    """A result: for a program as JSON, which escapes by itself, or for people."""
    if as_json:
        print(json.dumps(told(), indent=1), flush=True)
    else:
        show(text())


def store_at(folder: Path) -> Store:
    """The store of a verb that only reads: one that is not there is refused, never made."""
    from difflib import get_close_matches

    from biphase.errors import StoreError
    from biphase.store import Store

    if not folder.is_dir():
        stores = [one.parent.name for one in sorted(folder.parent.glob("*/studies"))]
        close = get_close_matches(folder.name, stores, n=1)
        other = f"type --store {shlex.quote(str(folder.parent / close[0]))}, or " if close else ""
        raise StoreError(
            f"there is no store {folder}, so nothing to read; {other}compute something first: biphase run STUDY"
        )
    return Store.open(folder)


def planned(
    path: Path, store_folder: Path, *, ask: bool = False, reads: bool = False, verify: bool = False
) -> tuple[Plan, Store, Identities]:
    """The plan of a study.

    With `ask`, hub models that have no commit yet get the one the hub shows. With `reads`, there must be a store. With
    `verify`, all inputs are hashed again; of several processes that train together the parent has done so.
    """
    from biphase.store import Store
    from biphase.study.load import load, pinned
    from biphase.study.plan import identities, make_plan

    loaded = load(path)
    store = store_at(store_folder) if reads else Store.open(store_folder)
    store.verify = verify and "RANK" not in os.environ
    fingerprints = identities(store)
    study = pinned(loaded.study, store, ask=ask)
    return make_plan(study, fingerprints, loaded.question), store, fingerprints


def with_store(study: Path, store: Path) -> str:
    """A study as it is typed after a verb, with its store where that is not the one taken without saying."""
    usual = os.environ.get("BIPHASE_STORE") or str(DEFAULT_STORE)
    words = [str(study)] if str(store) == usual else [str(study), "--store", str(store)]
    return shlex.join(words)
