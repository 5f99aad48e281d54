"""A small Hugging Face hub on this machine, for the hub's own client.

It answers as the hub does what `huggingface_hub` asks of it: repositories with commits, branches and tags, listings in
pages, files with redirects, ranges and hashes, tokens, gated repositories, and uploads (preupload, LFS, one commit). Xet
is never offered. Large files are at another origin, as the hub's are, which refuses a request that carries a token.
`Fault`s make it slow, busy or broken. The client reads its address when it is imported, so it runs in another process:
`Client` imports everything once and forks for each command.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".safetensors", ".parquet", ".zst", ".gz", ".bin", ".gguf", ".onnx")  # kept in LFS
PAGE = 3  # entries of a page; the hub's has 1,000


def sha1(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Repository:
    name: str
    kind: str = "model"
    private: bool = False
    gated: bool = False  # and nobody is on the list of those who may read it
    branches: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)  # the files of each

    def commit(self, files: Mapping[str, bytes | None], branch: str = "main") -> str:
        """Change files on a branch (None: remove one) and return the commit."""
        tree = {**self.commits.get(self.branches.get(branch, ""), {}), **files}
        kept = {name: data for name, data in tree.items() if data is not None}
        oid = hashlib.sha1(repr((self.name, len(self.commits), sorted(kept))).encode()).hexdigest()
        self.commits[oid] = kept
        self.branches[branch] = oid
        return oid

    def resolve(self, revision: str) -> str | None:
        every = {**dict.fromkeys(self.commits), **self.branches, **self.tags}
        return (every.get(revision) or revision) if revision in every else None

    def files(self, branch: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches[branch]]


@dataclass
class Fault:
    """What goes wrong with requests "METHOD /path" that match, for the first so many `times`."""

    match: str
    status: int = 0  # answer this
    headers: dict[str, str] = field(default_factory=dict)
    after: int | None = (
        None  # send so many bytes of the answer's body, if it has one, then drop the connection
    )
    times: int = 10**9
    seconds: float = 0  # wait before the answer, and with `after` between pieces of it
    seen: int = 0


class Hub(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.stored: dict[str, bytes] = {}  # LFS, by hash
        self.tokens: dict[str, str] = {"hf_owner": "me"}
        self.faults: list[Fault] = []
        self.asked: list[str] = []  # "METHOD /path", with the range if there is one

    @property
    def port(self) -> int:
        return self.server_address[1]

    def add(
        self, name: str, files: Mapping[str, bytes | str] | Path, kind: str = "model", **more: Any
    ) -> Repository:
        """Make a repository of files, or of a folder."""
        if isinstance(files, Path):
            files = {
                path.relative_to(files).as_posix(): path.read_bytes()
                for path in files.rglob("*")
                if path.is_file()
            }
        made = Repository(name, kind, **more)
        made.commit({path: data.encode() if isinstance(data, str) else data for path, data in files.items()})
        self.repositories[kind, name] = made
        return made

    @contextlib.contextmanager
    def failing(self, *faults: Fault) -> Generator[list[str]]:
        """Have these faults inside the context; gives the requests that were made in it."""
        before = len(self.asked)
        self.faults, asked = [*faults], []
        try:
            yield asked
        finally:
            self.faults = []
            asked += self.asked[before:]

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), OSError):  # a client may go away
            traceback.print_exc()


class Drop(Exception):
    """The connection is to be dropped."""


class Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    # ------------------------------------------------------------ sending

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        fault = self.fault
        if fault and fault.after is not None and not body:
            raise Drop
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if fault and fault.after is not None:
            self.wfile.write(body[: fault.after])
            raise Drop
        step = len(body) // 8 + 1
        for start in range(0, len(body), step):
            self.wfile.write(body[start : start + step])
            time.sleep(fault.seconds / 8 if fault else 0)

    def give(self, content: Any, status: int = 200, **headers: str) -> None:
        self.send(status, json.dumps(content).encode(), Content_Type="application/json", **headers)

    def refuse(self, status: int, code: str = "", message: str = "", **headers: str) -> None:
        named = {"X_Error_Code": code} if code else {}
        self.give({"error": message}, status, X_Error_Message=message, **named, **headers)

    # ------------------------------------------------------------ dispatch

    def _any(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        self.sent = self.rfile.read(length) if length else b""
        url = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(url.query).items()}
        asked = f"{self.command} {url.path}"
        self.server.asked.append(f"{asked} {self.headers['Range']}" if "Range" in self.headers else asked)
        self.fault = next(
            (one for one in self.server.faults if re.search(one.match, asked) and one.seen < one.times), None
        )
        if self.fault:
            self.fault.seen += 1
        try:
            if self.fault and self.fault.status:
                time.sleep(self.fault.seconds)
                self.send(self.fault.status, **self.fault.headers)
            else:
                self._route([unquote(part) for part in url.path.strip("/").split("/")])
        except Drop:
            self.close_connection = True

    do_GET = do_HEAD = do_POST = do_PUT = _any

    def _route(self, parts: list[str]) -> None:
        match parts:
            case ["lfs", oid]:
                self._large_file(oid)
            case ["api", "whoami-v2"] if user := self._user():
                role = "read" if user.endswith("-reads") else "write"
                self.give({"type": "user", "name": user, "auth": {"accessToken": {"role": role}}})
            case ["api", "whoami-v2"]:
                self.refuse(401, message="Invalid username or password.")
            case ["api", "validate-yaml"]:
                self.give({"errors": [], "warnings": []})
            case ["api", "repos", "create"]:
                self._create(json.loads(self.sent))
            case ["api", "resolve-cache", kind, owner, name, oid, *path]:
                data = self.server.repositories[kind[:-1], f"{owner}/{name}"].commits[oid]["/".join(path)]
                self._bytes(data, sha1(data), X_Repo_Commit=oid)
            case ["api", ("models" | "datasets") as kind, owner, name, *rest]:
                if repository := self._repository(kind[:-1], f"{owner}/{name}"):
                    self._api(repository, *(rest or ["revision", "main"]))
            case [owner, git, "info", "lfs", "objects", "batch"]:
                self._batch(f"{owner}/{git.removesuffix('.git')}")
            case ["datasets", owner, name, "resolve", revision, *path]:
                self._file(self._repository("dataset", f"{owner}/{name}"), revision, "/".join(path))
            case [owner, name, "resolve", revision, *path]:
                self._file(self._repository("model", f"{owner}/{name}"), revision, "/".join(path))
            case [""]:
                self.send(200)
            case _:
                self.refuse(404, message=f"{self.command} /{'/'.join(parts)} is not known to this server")

    # ------------------------------------------------------------ who asks, and for what

    def _user(self) -> str:
        """Return who asks, "" if nobody says so or the token is unknown."""
        return self.server.tokens.get(self.headers.get("Authorization", "").removeprefix("Bearer "), "")

    def _repository(self, kind: str, name: str) -> Repository | None:
        """Return a repository, or refuse."""
        repository = self.server.repositories.get((kind, name))
        if "Authorization" in self.headers and not self._user():
            self.refuse(401, message="Invalid credentials in Authorization header")
        elif repository and (not repository.private or name.split("/")[0] == self._user()):
            return repository
        elif self._user():
            self.refuse(404, "RepoNotFound", "Repository not found")
        else:  # the hub does not say which names it knows
            self.refuse(401, "RepoNotFound", "Invalid username or password.")
        return None

    def _may_write(self, name: str) -> bool:
        """Whether who asks may write there; if not, refuse."""
        may = self._user() == name.split("/")[0]
        if not may:
            self.refuse(403 if self._user() else 401, message=f"no right to write to {name}")
        return may

    # ------------------------------------------------------------ /api

    def _create(self, wanted: dict[str, Any]) -> None:
        name = f"{wanted['organization'] or self._user()}/{wanted['name']}"
        if not self._may_write(name):
            return
        url = {"url": f"http://127.0.0.1:{self.server.port}/{name}"}
        if ("model", name) in self.server.repositories:
            self.give({"error": "You already created this model repo", **url}, 409)
            return
        private = wanted.get("visibility") == "private"
        self.server.add(name, {".gitattributes": "*.safetensors filter=lfs\n"}, private=private)
        self.give(url)

    def _api(self, repository: Repository, action: str, revision: str = "", *path: str) -> None:
        if action in ("branch", "commit", "preupload") and not self._may_write(repository.name):
            return
        oid = repository.resolve(revision)
        if action == "refs":
            named = {"branches": repository.branches, "tags": repository.tags, "converts": {}}
            self.give({kind: [_ref(*one) for one in refs.items()] for kind, refs in named.items()})
        elif action == "branch":
            self._branch(repository, revision)
        elif oid is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif action == "revision":
            self.give(self._info(repository, oid))
        elif action == "tree":
            self._tree(repository.commits[oid], oid, "/".join(path))
        elif action == "commits":
            about = {"authors": [], "date": "2026-01-01T00:00:00.000Z", "title": "", "message": ""}
            self.give([{"id": commit, **about} for commit in reversed(repository.commits)])
        elif action == "preupload":
            names = [file["path"] for file in json.loads(self.sent)["files"]]
            self.give({"files": [_mode(name, repository.commits[oid].get(name)) for name in names]})
        elif action == "commit":
            self._commit(repository, revision)
        else:
            self.refuse(404, message=f"{action} is not known to this server")

    def _info(self, repository: Repository, oid: str) -> dict[str, Any]:
        return {
            "_id": "0", "id": repository.name, "modelId": repository.name, "sha": oid,
            "private": repository.private, "gated": "manual" if repository.gated else False, "disabled": False,
            "downloads": 0, "likes": 0, "tags": [], "author": repository.name.split("/")[0],
            "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
            "siblings": [{"rfilename": path} for path in repository.commits[oid]],
        }  # fmt: skip

    def _branch(self, repository: Repository, branch: str) -> None:
        start = json.loads(self.sent or b"{}").get("startingPoint", "main")
        if branch in repository.branches:
            self.refuse(409, message=f"Reference already exists: refs/heads/{branch}")
        else:
            repository.branches[branch] = repository.resolve(start) or ""
            self.give({})

    def _tree(self, files: dict[str, bytes], oid: str, folder: str) -> None:
        inside = f"{folder}/" if folder else ""
        entries = {path: _entry(path, data) for path, data in files.items() if path.startswith(inside)}
        if not entries:
            self.refuse(404, "EntryNotFound", f"{folder} does not exist on {oid}", X_Repo_Commit=oid)
            return
        for path in [*entries]:
            for above in map(str, PurePosixPath(path).parents):
                if above.startswith(inside) and above != ".":
                    entries[above] = {"type": "directory", "path": above, "oid": oid, "size": 0}
        recursive = self.query.get("recursive") == "true"
        names = sorted(path for path in entries if recursive or "/" not in path[len(inside) :])
        first = int(self.query.get("cursor", 0))
        following = f"{urlsplit(self.path).path}?recursive={str(recursive).lower()}&cursor={first + PAGE}"
        link = {"Link": f'<http://127.0.0.1:{self.server.port}{following}>; rel="next"'}
        page = [entries[name] for name in names[first : first + PAGE]]
        self.give(page, **link if len(names) > first + PAGE else {})

    def _commit(self, repository: Repository, branch: str) -> None:
        files: dict[str, bytes | None] = {}
        for operation in map(json.loads, self.sent.splitlines()):
            value = operation["value"]
            if operation["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                files[value["path"]] = self.server.stored[value["oid"]]
            elif operation["key"] == "deletedFile":
                files[value["path"]] = None
        oid = repository.commit(files, branch)
        url = f"http://127.0.0.1:{self.server.port}/{repository.name}/commit/{oid}"
        self.give({"success": True, "commitOid": oid, "commitUrl": url, "pullRequestUrl": None})

    # ------------------------------------------------------------ files

    def _file(self, repository: Repository | None, revision: str, path: str) -> None:
        if repository is None:
            return
        oid = repository.resolve(revision)
        if oid is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        elif repository.gated:
            status = 403 if self._user() else 401  # not on the list, or nobody says who asks
            self.refuse(status, "GatedRepo", f"Access to {repository.name} is restricted.")
        elif path not in repository.commits[oid]:
            self.refuse(404, "EntryNotFound", "Entry not found", X_Repo_Commit=oid)
        else:
            data = repository.commits[oid][path]
            about = {"X_Repo_Commit": oid, "X_Linked_Size": str(len(data))}
            if path.endswith(LARGE):
                hashed = sha256(data)
                self.server.stored[hashed] = data
                where = f"http://localhost:{self.server.port}/lfs/{hashed}"
                self.send(302, X_Linked_Etag=f'"{hashed}"', Location=where, **about)
            else:
                where = f"/api/resolve-cache/{repository.kind}s/{repository.name}/{oid}/{quote(path)}"
                self.send(307, X_Linked_Etag=f'"{sha1(data)}"', Location=where, **about)

    def _bytes(self, data: bytes, etag: str, **headers: str) -> None:
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        headers |= {"ETag": f'"{etag}"', "Accept_Ranges": "bytes"}
        if self.command == "HEAD":
            self.send(200, **headers, **{"Content-Length": str(len(data))})
        elif not wanted:
            self.send(200, data, **headers)
        elif int(wanted[1]) >= len(data):
            self.send(416, Content_Range=f"bytes */{len(data)}")
        else:
            part = data[int(wanted[1]) : int(wanted[2]) + 1 if wanted[2] else len(data)]
            last = int(wanted[1]) + len(part) - 1
            self.send(206, part, Content_Range=f"bytes {wanted[1]}-{last}/{len(data)}", **headers)

    def _large_file(self, oid: str) -> None:
        if "Authorization" in self.headers:  # as storage does with addresses that are signed
            self.refuse(400, message="Only one auth mechanism allowed")
        elif self.command == "PUT":
            self.server.stored[sha256(self.sent)] = self.sent
            self.send(200, ETag=f'"{oid}"')
        else:
            self._bytes(self.server.stored[oid], oid)

    def _batch(self, name: str) -> None:
        if not self._may_write(name):
            return
        objects = json.loads(self.sent)["objects"]
        for one in objects:
            if one["oid"] not in self.server.stored:
                one["actions"] = {"upload": {"href": f"http://localhost:{self.server.port}/lfs/{one['oid']}"}}
        self.give({"transfer": "basic", "objects": objects})


def _entry(path: str, data: bytes) -> dict[str, Any]:
    entry = {"type": "file", "path": path, "oid": sha1(data), "size": len(data)}
    lfs = {"lfs": {"oid": sha256(data), "size": len(data), "pointerSize": 134}}
    return entry | (lfs if path.endswith(LARGE) else {})


def _ref(name: str, oid: str) -> dict[str, str]:
    return {"name": name, "ref": f"refs/heads/{name}", "targetCommit": oid}


def _mode(path: str, now: bytes | None) -> dict[str, Any]:
    large = path.endswith(LARGE)
    hashed = {} if now is None else {"oid": sha256(now) if large else sha1(now)}
    return {"path": path, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, **hashed}


@contextlib.contextmanager
def serving() -> Generator[Hub]:
    hub = Hub()
    thread = threading.Thread(target=hub.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        thread.join()
        hub.server_close()


# ---------------------------------------------------------------- the process that asks


class Client:
    """A process with the hub's address; `client("tokenize", …)` gives exit code, stdout and stderr of a command.

    `client("-c", CODE, …)` runs Python code, which finds the other words in `given`.
    """

    def __init__(self, address: str, home: Path) -> None:
        settings = {
            "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DOWNLOAD_TIMEOUT": "3", "HF_HUB_ETAG_TIMEOUT": "3",
            "NO_PROXY": "*",
        }  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        self.cache = home / "hub"
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve())],
            env={**environment, **settings},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: object, **environment: str) -> tuple[int, str, str]:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(json.dumps([[*map(str, words)], environment]) + "\n")
        self.process.stdin.flush()
        code, out, err = json.loads(self.process.stdout.readline())
        return code, out, err

    def close(self) -> None:
        self.process.communicate()


def _run(words: list[str], environment: dict[str, str], seconds: int = 300) -> tuple[int, str, str]:
    """Run a command of biphase in a fork, so that nothing is remembered from one to the next."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [Path(folder, name) for name in ("out", "err")]
        if not (child := os.fork()):
            code = 70
            try:
                signal.alarm(seconds)
                for number, path in enumerate(streams, 1):
                    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
                os.environ.update(environment)
                if words[0] == "-c":
                    exec(words[1], {"given": words[2:]})
                    raise SystemExit(0)
                sys.argv = ["biphase", *words]
                main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else bool(ended.code)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status), *(path.read_text() for path in streams)


if __name__ == "__main__":
    import huggingface_hub  # noqa: F401
    import pyarrow.parquet  # noqa: F401

    import biphase.export.checkpoint
    import biphase.study.worker  # noqa: F401
    from biphase.cli import main

    for line in sys.stdin:
        print(json.dumps(_run(*json.loads(line))), flush=True)
