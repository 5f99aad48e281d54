"""Requests to the Hugging Face hub: asked again while it is busy, refused in one line that says what to type.

The hub's library asks again for listings and for parts of files, but not for the state of a repository, nor when storage
fails at the begin of a file; `patiently` covers these. `explained` turns its many errors into a reason and a remedy, and
`refusing` into an error of ours. `snapshot` fetches several files of one commit, all of them or none.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from biphase.errors import BiphaseError, SpecError, one_line

COMMIT = re.compile(r"[0-9a-f]{40}")
PAUSES = 1.0, 4.0, 10.0  # seconds before asking again
PATIENCE = 60.0  # seconds after which nothing is asked again: the library has its own repetitions
LONGEST_PAUSE = 300.0  # the hub counts requests in windows of five minutes
BUSY = (408, 429, 500, 502, 503, 504)
DROPPED = ("ReadError", "ReadTimeout", "RemoteProtocolError", "WriteError", "WriteTimeout")  # of httpx


def patiently(ask: Callable[[], Any]) -> Any:
    """Call a function of the hub's library, and again if the hub is busy or the connection was dropped."""
    until = time.monotonic() + PATIENCE
    for pause in PAUSES:
        try:
            return ask()
        except Exception as wrong:
            status = _status(wrong)
            wanted = _wanted_pause(wrong) if status in BUSY else None
            dropped = type(wrong).__name__ in DROPPED
            if not (status in BUSY or dropped) or (wanted or 0) > LONGEST_PAUSE or time.monotonic() > until:
                raise
            time.sleep(pause if wanted is None else wanted + 1)
    return ask()


def _status(wrong: BaseException) -> int:
    """Return the HTTP status of the hub's answer; 0 if the error is not an answer."""
    return getattr(getattr(wrong, "response", None), "status_code", 0)


def _wanted_pause(wrong: Any) -> float | None:
    """Return how many seconds the hub asks to wait, by either of its two headers."""
    headers = wrong.response.headers
    reset = re.search(r"r=0;\s*t=(\d+)", headers.get("RateLimit", "")) or re.fullmatch(
        r"(\d+)", headers.get("Retry-After", "")
    )
    return float(reset[1]) if reset else None


def explained(wrong: BaseException, page: str, remedy: str) -> str:
    """Return why the hub refused and what to type; `page`: the repository's, `remedy`: if the reason is another one."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    answer: Any = wrong
    while answer is not None and not _status(answer):
        answer = answer.__cause__ or answer.__context__
    status, address = _status(answer), f"{constants.ENDPOINT}/{page}"
    if isinstance(answer, GatedRepoError):
        return f"it is gated; accept its conditions at {address}, then type hf auth login"
    if isinstance(answer, RevisionNotFoundError):
        return f"it has no such revision; give a commit that {address}/commits/main shows"
    if isinstance(answer, RepositoryNotFoundError):
        return f"{address} does not exist, or is private; correct the name, or type hf auth login"
    if status == 401:
        return "the hub refuses the token; type hf auth login, or correct HF_TOKEN"
    if status == 403:
        return f"the token may not do that at {address}; type hf auth login with one that may"
    if status == 429:
        pause = _wanted_pause(answer)
        return f"too many requests; type the command again{f' in {pause:.0f} s' if pause else ' later'}"
    if status in BUSY:
        return f"the hub is failing, HTTP {status}; type the command again later, or {remedy}"
    return f"{one_line(wrong)}; {remedy}"


@contextlib.contextmanager
def refusing(kind: type[BiphaseError], what: str, page: str, remedy: str) -> Generator[None]:
    """Raise `kind`, which begins with `what` and goes on as `explained`, for any error of the hub's library."""
    try:
        yield
    except BiphaseError:
        raise
    except Exception as wrong:  # offline, refused, absent, interrupted: many types
        raise kind(f"{what}: {explained(wrong, page, remedy)}") from wrong


def refuse_branch(name: str, revision: str, kind: str = "model") -> None:
    """Refuse a branch in place of a commit or tag: it moves, and so would the results under one key."""
    if COMMIT.fullmatch(revision):
        return
    from huggingface_hub import HfApi

    branches = []
    with contextlib.suppress(Exception):  # no answer: what reads the files reports it, or has them already
        branches = patiently(lambda: HfApi().list_repo_refs(name, repo_type=kind)).branches
    for branch in branches:
        if branch.name == revision:
            raise SpecError(
                f"{name}: {revision!r} is a branch and moves; give the commit that it is at now: {branch.target_commit}"
            )


def snapshot(
    name: str, revision: str, allow: Sequence[str], *, ignore: Sequence[str] = (), kind: str = "model"
) -> Path:
    """Return a folder with the files of a commit that the patterns mean, fetching those that are not there yet."""
    from huggingface_hub import snapshot_download

    refuse_branch(name, revision, kind)
    patterns: Any = {"allow_patterns": [*allow], "ignore_patterns": [*ignore]}
    return Path(patiently(lambda: snapshot_download(name, repo_type=kind, revision=revision, **patterns)))
