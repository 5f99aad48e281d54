"""Serve the page of a running study on localhost, and rebuild it when the store changes (`report --watch`).

`Watcher` polls the store and rebuilds the report; `Server` answers requests from memory. Only a few fixed paths are
served: no folder can be listed and no path leads to a file. Requests with another Host or Origin header are refused,
which prevents DNS rebinding: a web page cannot reach this server through a hostname that it controls.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from biphase.errors import BiphaseError, SpecError, one_line
from biphase.report.build import build
from biphase.report.content import Content
from biphase.report.page.render import render
from biphase.store import Store
from biphase.study import ledger
from biphase.study.plan import Plan
from biphase.text import duration

HOST = "127.0.0.1"
LOOK_SECONDS = 2.0  # between polls of the store
REST = 3.0  # after a rebuild, wait this many times its duration before the next
POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:; connect-src 'self'; "
    "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


@dataclass(frozen=True)
class Shown:
    """The texts served now, with hashes that the page polls."""

    texts: dict[str, tuple[str, bytes]]  # path → content type, content
    content: str  # hash of everything but the figures
    figures: str  # hash of the figures


def serve(
    make_plan: Callable[[], Plan], store: Store, folder: Path, *, port: int, say: Callable[[str], None]
) -> None:
    """Serve the page of a study until ^C. The plan is reloaded for each report."""
    watcher = Watcher(make_plan, store, folder, say=say)
    with listen(port) as server:
        watcher.look()
        server.watcher = watcher
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        say(f"watching {watcher.plan.study.name}: http://{HOST}:{server.server_port}/   (^C to stop)")
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(LOOK_SECONDS)
                watcher.look()
        server.shutdown()
    say(f"stopped watching; the page as it was last: {watcher.page}")


class Server(ThreadingHTTPServer):
    """An HTTP server that answers from its watcher's texts."""

    daemon_threads = True
    allow_reuse_address = True
    watcher: Watcher


def listen(port: int) -> Server:
    """Create a server on loopback; a port in use raises a one-line error."""
    try:
        return Server((HOST, port), _Answer)
    except OSError as wrong:
        if wrong.errno not in (errno.EADDRINUSE, errno.EACCES):
            raise
        why = "is in use" if wrong.errno == errno.EADDRINUSE else "is not allowed"
        raise SpecError(f"port {port} {why}; type --port 0 to take any that is free") from None


class _Answer(BaseHTTPRequestHandler):
    """Handles GET and HEAD of the known paths. HTTP/1.0: each connection closes after its answer."""

    timeout = 30

    def do_GET(self) -> None:
        content = self.do_HEAD()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(content)

    def do_HEAD(self) -> bytes:
        server = self.server
        assert isinstance(server, Server)
        ours = [f"{host}:{server.server_port}" for host in (HOST, "localhost")]
        origin = self.headers.get("Origin")  # set by browsers for scripted requests
        served = server.watcher.served(self.path.split("?", 1)[0])
        if self.headers.get("Host") not in ours or origin not in (None, *(f"http://{host}" for host in ours)):
            return self._send(403, "text/plain", b"this page is for this machine only\n")
        if served is None:
            return self._send(404, "text/plain", b"there is nothing here\n")
        return self._send(200, *served)

    def _send(self, code: int, kind: str, content: bytes) -> bytes:
        """Send the headers of an answer."""
        self.send_response(code)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Cross-Origin-Resource-Policy", "same-origin")
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        return content

    def version_string(self) -> str:
        return "biphase"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class Pace:
    """Rate limit: work again only after a change, and after a pause proportional to the last duration."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work, self._seen, self._not_before = work, "", 0.0

    def turn(self, seen: str) -> None:
        began = time.monotonic()
        if seen == self._seen or began < self._not_before:
            return
        try:
            self._work()
            self._seen = seen
        finally:
            now = time.monotonic()
            self._not_before = now + REST * (now - began)


class Watcher:
    """Polls the store, rebuilds the report when something changed, and reports the study's progress."""

    def __init__(
        self, make_plan: Callable[[], Plan], store: Store, folder: Path, *, say: Callable[[str], None]
    ) -> None:
        self.make_plan, self.store, self.folder, self.say = make_plan, store, folder, say
        self.plan = make_plan()
        self.page = folder
        self.progress: dict[str, Any] = {"said": "", "meters": {}, "running": []}
        self.shown = Shown({}, "", "")
        self._error = ""
        self._progress, self._report = Pace(self._survey), Pace(self._rebuild)

    def _survey(self) -> None:
        try:
            self.progress = progress(self.plan, self.store)
        except BiphaseError as wrong:
            said = f"how far it is cannot be told: {one_line(wrong)}"
            self.progress = {"said": said, "meters": {}, "running": []}

    def _rebuild(self) -> None:
        self.plan = self.make_plan()
        built = build(self.plan, self.store, self.folder, live=True, static=False)
        self.page, self.shown = built.page, _shown(built.content)

    def look(self) -> None:
        """Poll once. An error is printed once, and the page stays as it was."""
        try:
            seen = fingerprint(self.plan, self.store)
            self._progress.turn(seen)
            self._report.turn(seen)
            self._error = ""
        except (BiphaseError, OSError) as wrong:
            if not self.shown.texts:
                raise
            error = one_line(wrong)
            if error != self._error:
                self.say(f"the page could not be made anew: {error}")
            self._error = error

    def served(self, path: str) -> tuple[str, bytes] | None:
        """The content type and the content at a path; None: there is nothing."""
        shown = self.shown  # read once: another thread may replace it
        if path == "/status.json":
            status = {"content": shown.content, "figures": shown.figures, "progress": self.progress}
            return "application/json", json.dumps(status).encode()
        return shown.texts.get("/" if path == "/report.html" else path)


def _shown(content: Content) -> Shown:
    page = render(content, live=True)
    texts = {
        "/": ("text/html", page.html.encode()),
        "/main.html": ("text/html", page.main.encode()),
        "/figures.json": ("application/json", page.figures.encode()),
    }
    return Shown(texts, _hash(page.main), _hash(page.figures))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def fingerprint(plan: Plan, store: Store) -> str:
    """A hash that changes when the report would: names of results, failures and leases, sizes of live files."""
    study = store.studies / plan.study.name
    folders = [store.checkpoints, store.trials, store.leases, study / "failures"]
    folders += [store.metadata / "checkpoints", store.metadata / "trials"]
    parts = [_names(folder) for folder in folders]
    for key in plan.jobs:
        path = ledger.live_file(plan, store, key)
        with contextlib.suppress(OSError):
            parts.append(f"{key} {path.stat().st_size}")
    return _hash("\n".join(parts))


def _names(folder: Path) -> str:
    try:
        return " ".join(sorted(path.name for path in folder.iterdir()))
    except OSError:
        return ""


def progress(plan: Plan, store: Store) -> dict[str, Any]:
    """The progress of a study, as the strings that the page shows."""
    entries = ledger.survey_jobs(plan, store)
    tuned = ledger.survey_trials(plan, store)
    trained = sum(entry.standing == "done" for entry in entries.values())
    running = []
    for entry in entries.values():
        if entry.holder:
            name = ", ".join(entry.job.results) or entry.job.run.name
            latest = ledger.latest(plan, store, entry.job)
            running.append(f"{name} on {entry.holder.host}{f': {latest}' if latest else ''}")
    running += [f"{training.title(plan)} on {holder.host}" for training, holder in tuned.running.values()]
    failed = sum(entry.standing == "failed" for entry in entries.values()) + len(tuned.failed)
    jobs, trials = (trained, len(entries)), (tuned.done, tuned.of)
    done = all(count == of for count, of in (jobs, trials))
    state = "all done" if done else f"{len(running)} running" if running else "nothing is running"
    return {
        "said": f"{state}, {failed} failed" if failed else state,
        "meters": {
            "training jobs": _meter(*jobs, ledger.seconds_left(entries)),
            "fine-tunings": _meter(*trials, tuned.seconds_left),
        },
        "running": running,
    }


def _meter(done: int, of: int, left: float | None) -> dict[str, Any]:
    return {"done": done, "of": of, "left": duration(left) if left and done < of else ""}
