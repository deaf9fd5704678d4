"""A small hub on this machine that speaks as much of the real one's protocol as fetching models needs."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

SHA = "ab" * 20


class Hub(ThreadingHTTPServer):
    """`asked` are the paths, each with the range that was asked for."""

    def __init__(self, repositories: Mapping[str, Mapping[str, bytes]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories = repositories
        self.asked: list[tuple[str, str | None]] = []
        self.breaks_at: int | None = None  # bytes of a file, behind which the connection is closed once

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def weights_asked(self) -> list[str]:
        return [path for path, _ in self.asked if "/resolve/" in path and path.endswith((".safetensors", ".gguf"))]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        if self.command == "GET":
            self.server.asked.append((path, self.headers.get("range")))
        found = re.match(r"/api/models/([\w-]+/[\w-]+)(?:/(revision|tree)/([\w.-]+))?$", path)
        if found:
            self._describe(found[1], found[2], found[3])
        elif found := re.match(rf"/([\w-]+/[\w-]+)/resolve/{SHA}/(.+)$", path):
            self._file(self.server.repositories.get(found[1], {}).get(found[2]))
        else:
            self._json(404, {"error": "nothing"}, "EntryNotFound")

    def _describe(self, name: str, kind: str | None, revision: str | None) -> None:
        if name == "org/gated":
            self._json(401, {"error": "gated"}, "GatedRepo")
        elif (files := self.server.repositories.get(name)) is None:
            self._json(401, {"error": "unknown"}, "RepoNotFound")
        elif revision not in (None, "main", "v1", SHA):
            self._json(404, {"error": "unknown"}, "RevisionNotFound")
        elif kind == "tree":
            oids = {path: hashlib.sha1(data).hexdigest() for path, data in files.items()}
            self._json(200, [{"type": "file", "path": p, "size": len(d), "oid": oids[p]} for p, d in files.items()])
        else:
            siblings = [{"rfilename": path, "size": len(data)} for path, data in files.items()]
            self._json(
                200, {"id": name, "modelId": name, "sha": SHA, "siblings": siblings, "private": False, "tags": []}
            )

    def _file(self, data: bytes | None) -> None:
        if data is None:
            self._json(404, {"error": "nothing"}, "EntryNotFound")
            return
        start = int((self.headers.get("range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.sha256(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", SHA)
        self.send_header("Accept-Ranges", "bytes")
        self.end_headers()
        if self.command == "HEAD":
            return
        if (cut := self.server.breaks_at) is not None and len(data) > cut:
            self.server.breaks_at, self.close_connection = None, True
            self.wfile.write(data[:cut])
            self.wfile.flush()
            self.connection.close()
            return
        self.wfile.write(data[start:])

    def _json(self, status: int, said: Any, code: str = "") -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        if code:
            self.send_header("X-Error-Code", code)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextmanager
def running_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """One with these files by path, of models by name."""
    server = Hub(repositories)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
