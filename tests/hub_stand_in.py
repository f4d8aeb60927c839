"""A stand-in for the hub's API, over HTTP: what huggingface_hub's own client asks of it to publish a model.

Knows tokens, repositories, licences, large files (LFS) and commits, and can lose the connection at a request.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

from ruamel.yaml import YAML

TOKEN = "hf_may_write"
LARGE = (".safetensors", ".png")
LICENCES = ("apache-2.0", "mit", "cc-by-sa-3.0")


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    commits: int = 0


@dataclass
class Hub:
    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    objects: dict[str, bytes] = field(default_factory=dict)
    """Large files that were sent, by SHA-256."""
    requests: list[str] = field(default_factory=list)
    lose: str = ""
    """A pattern: at each request that matches it, the connection is lost."""


@contextmanager
def hub_stand_in() -> Iterator[Hub]:
    hub = Hub()

    class Handler(_Handler):
        of = hub

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    of: Hub
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._take()

    do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815 - named by http.server

    def log_message(self, *_: object) -> None:
        """Nothing: it would be in the test's output."""

    def _take(self) -> None:
        asked, body = f"{self.command} {self.path}", self._body()
        self.of.requests.append(asked)
        if self.of.lose and re.search(self.of.lose, asked):
            self.close_connection = True
            self.connection.close()
            return
        open_to_all = asked.startswith(("PUT /objects/", "POST /api/validate-yaml"))
        if not open_to_all and self.headers["Authorization"] != f"Bearer {TOKEN}":
            status, content = 401, {"error": "Invalid username or password."}
        else:
            status, content = _reply(self.of, asked.partition("?")[0], body)
        answer = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))


def _reply(hub: Hub, asked: str, body: bytes) -> tuple[int, Any]:
    """Status and content."""
    match re.split("[ /]+", asked):
        case ["PUT", "objects", digest]:
            hub.objects[digest] = body
            right = hashlib.sha256(body).hexdigest() == digest
            return (200, {}) if right else (400, {"error": "the content has another digest"})
        case ["POST", "api", "models", owner, name, "commit", "main"]:
            return _commit(hub, f"{owner}/{name}", body)
        case ["GET", "api", "whoami-v2"]:
            return 200, {"name": "somebody", "type": "user"}
    content = json.loads(body or b"null")
    match re.split("[ /]+", asked):
        case ["POST", "api", "validate-yaml"]:
            metadata = YAML(typ="safe").load(content["content"].split("---\n")[1])
            if metadata.get("license") in (*LICENCES, None):
                return 200, {"errors": [], "warnings": []}
            return 400, {"errors": [{"message": f'"license" must be one of [{", ".join(LICENCES)}]'}], "warnings": []}
        case ["POST", "api", "repos", "create"]:
            return _create(hub, content)
        case ["DELETE", "api", "repos", "delete"]:
            del hub.repositories[f"{content['organization']}/{content['name']}"]
            return 200, {}
        case ["POST", "api", "models", _, _, "preupload", "main"]:
            modes = {file["path"]: "lfs" if file["path"].endswith(LARGE) else "regular" for file in content["files"]}
            files = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]
            return 200, {"files": files}
        case ["POST", _, _, "info", "lfs", "objects", "batch"]:
            href = f"{hub.url}/objects/"
            objects = [{**each, "actions": {"upload": {"href": href + each["oid"]}}} for each in content["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
    return 404, {"error": f"the stand-in does not know {asked}"}


def _create(hub: Hub, asked: dict[str, Any]) -> tuple[int, Any]:
    name = f"{asked['organization']}/{asked['name']}"
    if asked["organization"] != "somebody":
        return 403, {"error": f"You don't have the rights to create a model in {asked['organization']}"}
    if name in hub.repositories:
        return 409, {"error": "You already created this model repo", "url": f"{hub.url}/{name}"}
    hub.repositories[name] = Repository(private=asked.get("visibility") == "private")
    return 200, {"url": f"{hub.url}/{name}", "name": name}


def _commit(hub: Hub, name: str, body: bytes) -> tuple[int, Any]:
    repository = hub.repositories[name]
    for line in map(json.loads, body.splitlines()):
        value = line["value"]
        if line["key"] == "file":
            repository.files[value["path"]] = base64.b64decode(value["content"])
        elif line["key"] == "lfsFile":
            repository.files[value["path"]] = hub.objects[value["oid"]]
    repository.commits += 1
    return 200, {"commitUrl": f"{hub.url}/{name}/commit/1", "commitOid": "1" * 40, "success": True}
