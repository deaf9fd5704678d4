"""`tandem logs`: what all processes of a running cluster write, as it is written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tandem.commands.clusters.running import noted
from tandem.process.child_process import dying_with_parent


def test_all_processes_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    gateway, decode = tmp_path / "gateway.log", tmp_path / "decode-0.log"
    gateway.write_text("serving\n", encoding="utf-8")
    decode.write_text("ready\n", encoding="utf-8")
    said = dict.fromkeys(("model", "http", "grpc", "workers"), "x")
    with noted({**said, "logs": str(tmp_path)}):
        command = dying_with_parent(sys.executable, "-m", "tandem", "logs")
        with subprocess.Popen(command, stdout=subprocess.PIPE, encoding="utf-8") as following:
            seen = "".join(following.stdout.readline() for _ in range(5))
            assert "serving" in seen
            assert "ready" in seen
            with gateway.open("a", encoding="utf-8") as file:
                file.write("a request\n")
            while "a request" not in following.stdout.readline():
                pass
            following.kill()
    nobody = subprocess.run([sys.executable, "-m", "tandem", "logs"], capture_output=True, encoding="utf-8", timeout=60)
    assert "no such cluster" in nobody.stderr
