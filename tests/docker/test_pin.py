"""A release is built on images that it names by digest, as `make pin` gets them from a registry."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from hashlib import sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from deploy.docker.pin import BASES
from tests.docker.steps import DOCKERFILE, ROOT

INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
needs_skopeo = pytest.mark.skipif(not shutil.which("skopeo"), reason="skopeo is what asks registries")


def index_of(*cpus: str) -> bytes:
    image = {"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": "sha256:" + 64 * "0", "size": 2}
    images = [image | {"platform": {"architecture": cpu, "os": "linux"}} for cpu in cpus]
    return json.dumps({"schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": images}).encode()


INDICES = {"both": index_of("amd64", "arm64"), "one": index_of("amd64")}


class Shelf(BaseHTTPRequestHandler):
    """A registry's answers."""

    def do_GET(self) -> None:
        found = re.fullmatch(r"/v2/(\w+)/manifests/1\.2", self.path)
        index = INDICES.get(found[1]) if found else b"{}" if self.path == "/v2/" else None
        self.send_response(404 if index is None else 200)
        self.send_header("content-type", INDEX_TYPE)
        self.end_headers()
        self.wfile.write(index or b"")

    def log_message(self, format: str, *args: object) -> None:
        """Nowhere."""


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Its host and port."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Shelf) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"127.0.0.1:{server.server_port}"
        (folder := tmp_path / ".config" / "containers").mkdir(parents=True)
        (folder / "registries.conf").write_text(
            f'[[registry]]\nlocation = "{address}"\ninsecure = true\n', encoding="utf-8"
        )
        monkeypatch.setenv("HOME", str(tmp_path))
        yield address
        server.shutdown()


def pin(file: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.docker.pin", str(file)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, encoding="utf-8", timeout=60, check=False)


@pytest.mark.long
@needs_skopeo
def test_each_base_gets_the_digest_that_its_tag_has_now(registry: str, tmp_path: Path) -> None:
    old, new = f"@sha256:{64 * '1'}", f"@sha256:{sha256(INDICES['both']).hexdigest()}"
    before = f"ARG BASE={registry}/both:1.2\nARG ACCELERATOR=cpu\nARG CUDA_IMAGE={registry}/both:1.2"
    (file := tmp_path / "Dockerfile").write_text(f"{before}{old}\nFROM ${{BASE}}\n", encoding="utf-8")
    done = pin(file)
    assert done.returncode == 0, done.stderr
    assert file.read_text(encoding="utf-8") == before.replace(":1.2", f":1.2{new}") + "\nFROM ${BASE}\n"


@pytest.mark.long
@needs_skopeo
@pytest.mark.parametrize(("name", "said"), [("one", "there is none for arm64"), ("none", "404")])
def test_a_base_that_is_not_for_every_cpu_or_not_there_is_refused(
    registry: str, tmp_path: Path, name: str, said: str
) -> None:
    (file := tmp_path / "Dockerfile").write_text(text := f"ARG BASE={registry}/{name}:1.2\n", encoding="utf-8")
    done = pin(file)
    assert done.returncode == 1
    assert f"{registry}/{name}:1.2: " in done.stderr
    assert said in done.stderr
    assert file.read_text(encoding="utf-8") == text


def test_a_release_names_its_bases_by_digest() -> None:
    """From the commit on that gives the topmost version of CHANGELOG its date."""
    bases = BASES.findall(DOCKERFILE.read_text(encoding="utf-8"))
    assert [line for line, _, _ in bases] == ["ARG BASE=", "ARG CUDA_IMAGE="]
    latest = re.search(r"^## .*$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert latest
    if "not released" not in latest[0]:
        assert all(digest for _, _, digest in bases), "run `make pin`"
