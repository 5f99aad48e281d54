"""A hub on this machine: the few answers that an upload asks for, and everything that was sent, kept to look at."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class StandIn:
    """What the hub knows."""

    endpoint: str = ""
    private: dict[str, bool] = field(default_factory=dict)  # repositories
    large: dict[str, bytes] = field(default_factory=dict)  # by hash
    files: dict[str, bytes] = field(default_factory=dict)  # of the last commit
    tokens: set[str] = field(default_factory=set)
    refuses: bool = False


def answer(hub: StandIn, method: str, path: str, body: bytes) -> tuple[int, dict]:
    """The status and the content for one request."""
    if hub.refuses and path == "/api/repos/create":
        return 403, {"error": "no write rights"}
    if path == "/api/repos/create":
        request = json.loads(body)
        name = "/".join(filter(None, (request.get("organization"), request["name"])))
        status = 409 if name in hub.private else 200
        hub.private.setdefault(name, request.get("private") or request.get("visibility") == "private")
        return status, {"url": f"{hub.endpoint}/{name}", "id": name}
    if path == "/api/validate-yaml":
        return 200, {"warnings": [], "errors": []}
    if path == "/api/whoami-v2":
        return 200, {"type": "user", "name": "me", "orgs": []}
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)", path):
        return 200, {
            "id": match[1],
            "private": hub.private[match[1]],
            "sha": "0" * 40,
            "siblings": [],
            "tags": [],
        }
    if "/preupload/" in path:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith((".safetensors", ".onnx")) else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        return 200, {"files": files}
    if path.endswith("/info/lfs/objects/batch"):
        objects = [
            {**item, "actions": {"upload": {"href": f"{hub.endpoint}/large/{item['oid']}", "header": {}}}}
            for item in json.loads(body)["objects"]
        ]
        return 200, {"transfer": "basic", "objects": objects}
    if method == "PUT" and path.startswith("/large/"):
        assert hashlib.sha256(body).hexdigest() == path.rsplit("/", 1)[1]
        hub.large[path.rsplit("/", 1)[1]] = body
        return 200, {}
    if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)/commit/main", path):
        for line in body.splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "file":
                hub.files[value["path"]] = base64.b64decode(value["content"])
            elif item["key"] == "lfsFile":
                hub.files[value["path"]] = hub.large[value["oid"]]
        return 200, {"commitUrl": f"{hub.endpoint}/{match[1]}/commit/{'a' * 40}", "commitOid": "a" * 40}
    return 404, {"error": f"nothing at {path}"}


class _Handler(BaseHTTPRequestHandler):
    hub: StandIn

    def _reply(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        self.hub.tokens.add(self.headers.get("Authorization", ""))
        status, content = answer(self.hub, self.command, self.path.split("?")[0], body)
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    do_GET = do_POST = do_PUT = do_HEAD = _reply

    def log_message(self, *args: object) -> None:
        """Nothing on the screen."""


def serve() -> tuple[StandIn, ThreadingHTTPServer]:
    """Start one; whoever asked shuts it down."""
    hub = StandIn()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return hub, server
