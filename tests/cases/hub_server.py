"""A hub on this machine that knows the few requests of which an upload consists, as huggingface_hub sends them. All
files are taken as regular ones: how large ones go to its storage is not played here."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

TOKEN = "hf_right"


class Hub:
    """repositories: their files, by path. private: which are. refuse: the status of every answer, if it is not 200."""

    def __init__(self) -> None:
        self.address = ""
        self.repositories: dict[str, dict[str, bytes]] = {}
        self.private: set[str] = set()
        self.refuse = 200

    def answer(self, path: str, body: bytes, token: str) -> tuple[int, Any]:
        if self.refuse != 200 or token != TOKEN:
            return (self.refuse if token == TOKEN else 401), {"error": "refused"}
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path == "/api/validate-yaml":
            return 200, {"warnings": [], "errors": []}
        repository, _, rest = path.removeprefix("/api/models/").partition("/")
        name, _, what = rest.partition("/")
        return self._of_repository(f"{repository}/{name}", what, body)

    def _create(self, asked: dict[str, Any]) -> tuple[int, Any]:
        name = f"{asked['organization']}/{asked['name']}"
        answer = {"url": f"{self.address}/{name}", "name": name}
        if name in self.repositories:
            return 409, {**answer, "error": "You already created this model repo"}
        self.repositories[name] = {}
        if asked.get("private") or asked.get("visibility") == "private":
            self.private.add(name)
        return 200, answer

    def _of_repository(self, name: str, what: str, body: bytes) -> tuple[int, Any]:
        files = self.repositories[name]
        if what.startswith("preupload/"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            return 200, {"files": [{"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths]}
        if what.startswith("commit/"):
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
                elif entry["key"] == "deletedFile":
                    del files[entry["value"]["path"]]
            return 200, {"success": True, "commitOid": "c" * 40, "commitUrl": f"/{name}/commit/{'c' * 40}"}
        if what.startswith("tree/"):
            return 200, [{"type": "file", "path": p, "size": len(data), "oid": "0" * 40} for p, data in files.items()]
        siblings = [{"rfilename": path} for path in files]
        return 200, {"id": name, "sha": "0" * 40, "siblings": siblings, "private": name in self.private}


class _Handler(BaseHTTPRequestHandler):
    hub: ClassVar[Hub]

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        token = (self.headers.get("authorization") or "").removeprefix("Bearer ")
        status, value = self.hub.answer(self.path.partition("?")[0], body, token)
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_HEAD = _do  # noqa: N815

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub while the block runs, at its address."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        hub.address = f"http://127.0.0.1:{server.server_port}"
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
