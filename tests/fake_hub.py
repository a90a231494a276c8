"""A local model hub with the calls that huggingface_hub makes.

It creates repositories, takes binary files by git-LFS's batch calls and others inside the commit,
lists and serves what was uploaded. It has no Xet, which the real hub prefers.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from outrider.conf import hub as conf_hub

TOKEN = "hf_aVerySecretTokenOfATest"
LFS = (".safetensors",)


class Hub:
    """Content of the hub, and the requests it received.

    Attributes:
        repos: name -> whether it is private, and its files by name.
        blobs: bytes by sha256.
        sent: names of objects that were uploaded, in order.
        refuse_after: number of objects accepted before uploads are refused; None: all.
        open: whether tokens are accepted.
    """

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Any]] = {}
        self.blobs: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.requests: list[str] = []
        self.commits = 0
        self.refuse_after: int | None = None
        self.open = True
        self.url = ""
        self.lock = threading.Lock()


@contextmanager
def running(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Run a hub that huggingface_hub of this process uses, with a token."""
    from huggingface_hub import constants

    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    template = "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + template)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    as_if_not_asked(monkeypatch)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


def as_if_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo what an earlier test of this process found about its hub."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(conf_hub, "_reached", set[str]())
    monkeypatch.setattr(conf_hub, "_missed", set[str]())


class Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        body = self._body()
        if not self._authorised():
            return
        if self.path == "/api/validate-yaml":
            self._reply({"errors": [], "warnings": []})
        elif self.path == "/api/repos/create":
            self._create(json.loads(body))
        elif "/preupload/" in self.path:
            files = json.loads(body)["files"]
            self._reply({"files": [self._mode(file["path"]) for file in files]})
        elif self.path.endswith("/info/lfs/objects/batch"):
            self._reply({"objects": [self._batch(item) for item in json.loads(body)["objects"]]})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/main", self.path):
            self._commit(match[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._reply({"error": "unknown"}, 404)

    def do_PUT(self) -> None:
        body, oid = self._body(), self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid, "the bytes are not the ones announced"
        with self.hub.lock:  # uploads run in parallel
            full = self.hub.refuse_after is not None and len(self.hub.sent) >= self.hub.refuse_after
            if not full:
                self.hub.blobs[oid] = body
                self.hub.sent.append(oid)
        if full:
            self._reply({"error": f"go away, {TOKEN}"}, 403)
        else:
            self._reply({})

    def do_GET(self) -> None:
        if not self._authorised():
            return
        if match := re.match(r"/api/models/(.+)/tree/", self.path):
            files = self.hub.repos[match[1]]["files"]
            self._reply([self._entry(name, data) for name, data in files.items()])
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(/revision/main)?", self.path):
            self._info(match[1])
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", self.path):
            data = self.hub.repos[match[1]]["files"].get(match[2])
            self._send(b"" if data is None else data, 404 if data is None else 200)
        else:
            self._reply({"error": "unknown"}, 404)

    do_HEAD = do_GET

    # ---- requests ----

    def _authorised(self) -> bool:
        self.hub.requests.append(f"{self.command} {self.path}")
        good = self.hub.open and self.headers.get("authorization") == f"Bearer {TOKEN}"
        if not good:
            self._reply({"error": f"no such token: {TOKEN}"}, 401)
        return good

    def _create(self, request: dict[str, Any]) -> None:
        name = f"{request['organization']}/{request['name']}"
        private = request.get("private", request.get("visibility") == "private")
        known = name in self.hub.repos
        self.hub.repos.setdefault(name, {"private": private, "files": {}})
        self._reply({"url": f"{self.hub.url}/{name}"}, 409 if known else 200)

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(LFS) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": None}

    def _batch(self, item: dict[str, Any]) -> dict[str, Any]:
        out = {"oid": item["oid"], "size": item["size"]}
        if item["oid"] in self.hub.blobs:
            return out
        return {**out, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}}

    def _commit(self, repo: str, lines: list[dict[str, Any]]) -> None:
        files = self.hub.repos[repo]["files"]
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.blobs[value["oid"]]
        self.hub.commits += 1
        oid = f"{self.hub.commits:040x}"
        self._reply({"success": True, "commitOid": oid, "commitUrl": f"{self.hub.url}/{repo}"})

    def _info(self, repo: str) -> None:
        if repo not in self.hub.repos:
            self._reply({"error": "Repository not found"}, 404)
            return
        content = self.hub.repos[repo]
        siblings = [{"rfilename": name} for name in content["files"]]
        sha = f"{self.hub.commits:040x}"
        about = {"id": repo, "sha": sha, "private": content["private"], "siblings": siblings}
        self._reply(about)

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        oid = hashlib.sha256(data).hexdigest()[:40]
        return {"type": "file", "path": name, "size": len(data), "oid": oid}

    # ---- replies ----

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("transfer-encoding", ""):
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _reply(self, value: object, code: int = 200) -> None:
        self._send(json.dumps(value).encode(), code)

    def _send(self, data: bytes, code: int) -> None:
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", f"{self.hub.commits:040x}")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)
