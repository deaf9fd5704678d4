from __future__ import annotations

import json
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from tandem.commands.fetch import FetchSettings, fetch, main

pytestmark = pytest.mark.fast

CONTENT = {"config.json": b"{}", "model.safetensors": b"\0" * 1000, "nested/tokenizer.json": b"[]"}
DIGESTS = {name: sha256(content).hexdigest() for name, content in CONTENT.items()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        path = tmp_path / "source" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "source"


def files(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_all_files_and_their_digests_where_none_are_named(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([source.as_uri(), str(tmp_path / "to")])
    assert json.loads(capsys.readouterr().out) == {"files": DIGESTS}
    assert files(tmp_path / "to") == CONTENT


def test_only_named_files_are_taken_and_those_that_are_whole_stay(source: Path, tmp_path: Path) -> None:
    named = {name: DIGESTS[name] for name in ("config.json", "model.safetensors")}
    settings = FetchSettings(url=source.as_uri(), folder=tmp_path / "to", files=named)
    assert fetch(settings) == named
    (source / "config.json").unlink()
    assert fetch(settings) == named
    assert files(tmp_path / "to").keys() == named.keys()


class Bucket(BaseHTTPRequestHandler):
    """As much of S3 as answers for one object."""

    def do_GET(self) -> None:
        content = CONTENT.get(self.path.removeprefix("/bucket/model/"))
        self.send_response(200 if content is not None else 404)
        self.send_header("content-length", str(len(content or b"")))
        self.send_header("last-modified", "Sun, 22 Nov 2026 10:00:00 GMT")
        self.send_header("etag", '"1"')
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content or b"")

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


def test_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Bucket) as server:
        Thread(target=server.serve_forever).start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        try:
            fetch(FetchSettings(url="s3://bucket/model", folder=tmp_path / "to", files=DIGESTS))
        finally:
            server.shutdown()
    assert files(tmp_path / "to") == CONTENT


@pytest.mark.parametrize("bad", [b"\1" * 1000, b"\0" * 999])
def test_other_bytes_are_refused_and_not_kept(source: Path, tmp_path: Path, bad: bytes) -> None:
    (source / "model.safetensors").write_bytes(bad)
    with pytest.raises(ValueError, match=r"model.safetensors: its SHA-256 is [0-9a-f]{64}, and should be"):
        fetch(FetchSettings(url=source.as_uri(), folder=tmp_path / "to", files=DIGESTS))
    assert "model.safetensors" not in files(tmp_path / "to")


def test_a_damaged_file_is_fetched_again(source: Path, tmp_path: Path) -> None:
    settings = FetchSettings(url=source.as_uri(), folder=tmp_path / "to", files=DIGESTS)
    fetch(settings)
    (tmp_path / "to" / "model.safetensors").write_bytes(b"half")
    assert fetch(settings) == DIGESTS


@pytest.mark.parametrize(("url", "words"), [("file:///nowhere", "nowhere"), ("nothing://x", "nothing")])
def test_what_is_not_there_is_named(url: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=words):
        main([url, str(tmp_path)])
