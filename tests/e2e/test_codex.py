"""Codex, as it comes from npm, told by its configuration alone where to ask: it ends with the right files.

The model is tiny and random; a proxy between the two forces its calls, by tool_choice and by schemas that leave one
value. `make check`: program and tokenizer are fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import eventually
from tests.e2e.test_anthropic_agent import BOUND_S, WORDS, AgentFleet, fleet, model
from tests.gateway.recorded import codex_bodies, shape

__all__ = ["fleet", "model"]  # fixtures
pytestmark = pytest.mark.long
PACKAGE = "@openai/codex@0.169.0-linux-x64"
SCRIPT = ("echo one >> ran; echo hello > hello.txt", "echo two >> ran; cp hello.txt copy.txt", "echo three >> ran")
CONFIG = """
model = "tiny"
model_provider = "tandem"
approval_policy = "never"
sandbox_mode = "danger-full-access"
project_doc_max_bytes = 200000
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.tandem]
name = "Tandem"
base_url = "{url}/v1"
wire_api = "responses"
"""


@pytest.fixture(scope="module")
def codex(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to fetch codex with")
    folder = tmp_path_factory.mktemp("codex")
    packed = subprocess.run(
        ["npm", "pack", "--silent", PACKAGE],
        cwd=folder,
        check=True,
        timeout=BOUND_S * 3,
        capture_output=True,
        encoding="utf-8",
    )
    subprocess.run(["tar", "xzf", packed.stdout.split()[-1]], cwd=folder, check=True, timeout=BOUND_S)
    (program,) = folder.glob("package/vendor/*/bin/codex")
    return program


@dataclass
class ForcedSteps:
    """Requests, made to ask for the script's next step; one that comes again gets the same."""

    fleet: AgentFleet
    kills_at: int | None = None
    killed: list[int] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    ends: list[dict[str, Any]] = field(default_factory=list)

    def forced(self, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        step = sum(item["type"] == "function_call_output" for item in body["input"])
        if step == len(SCRIPT):
            schema = {"type": "json_schema", "name": "end", "schema": {"const": "done"}}
            return step, {**body, "tool_choice": "none", "text": {"format": schema}}
        for tool in body["tools"]:
            if tool.get("name") == "exec_command":
                properties = {"cmd": {"const": SCRIPT[step]}}
                tool["parameters"] = {
                    "type": "object", "properties": properties, "required": ["cmd"], "additionalProperties": False
                }  # fmt: skip
        return step, {**body, "tool_choice": {"type": "function", "name": "exec_command"}}

    def kill(self, step: int) -> None:
        """The gateway that has begun to answer."""
        if step != self.kills_at or self.killed:
            return
        eventually(lambda: self.fleet.busy() is not None, BOUND_S, "a gateway with a request")
        if (pid := self.fleet.busy()) is not None:
            os.kill(pid, signal.SIGKILL)
            self.killed.append(pid)


@contextmanager
def proxy(forcing: ForcedSteps) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None: ...

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            forcing.bodies.append(json.loads(json.dumps(body)))
            step, said = forcing.forced(body)
            url = f"{forcing.fleet.cluster.http}{self.path}"
            with suppress(httpx.TransportError), httpx.stream("POST", url, json=said, timeout=BOUND_S) as answer:
                self.send_response(answer.status_code)
                self.send_header("content-type", answer.headers["content-type"])
                self.end_headers()
                for line in answer.iter_lines():
                    if "response.created" in line:
                        forcing.kill(step)
                    self.wfile.write(line.encode() + b"\n")
                    if line.startswith('data: {"type":"response.completed"'):
                        forcing.ends.append(json.loads(line[6:])["response"])
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(BOUND_S)


def run_session(codex: Path, forcing: ForcedSteps, folder: Path) -> str:
    home, desk = folder / "home", folder / "desk"
    home.mkdir()
    desk.mkdir()
    (desk / "AGENTS.md").write_text(WORDS * 900, encoding="utf-8")
    nowhere = "http://127.0.0.1:9"
    env = {
        "HOME": str(home), "CODEX_HOME": str(home), "PATH": os.environ["PATH"], "http_proxy": nowhere,
        "https_proxy": nowhere, "no_proxy": "127.0.0.1",
    }  # fmt: skip
    with proxy(forcing) as url:
        (home / "config.toml").write_text(CONFIG.format(url=url), encoding="utf-8")
        done = subprocess.run(
            [str(codex), "exec", "--skip-git-repo-check", "make the files"], cwd=desk, env=env, timeout=3 * BOUND_S,
            stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8",
        )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    assert (desk / "ran").read_text(encoding="utf-8") == "one\ntwo\nthree\n"
    assert (desk / "copy.txt").read_text(encoding="utf-8") == "hello\n"
    assert len(forcing.ends) == len(SCRIPT) + 1
    return done.stderr


def test_a_session_ends_with_the_right_files(fleet: AgentFleet, codex: Path, tmp_path: Path) -> None:
    forcing = ForcedSteps(fleet)
    said = run_session(codex, forcing, tmp_path)
    assert min(end["usage"]["input_tokens"] for end in forcing.ends) > 24_000
    assert len(forcing.bodies) == len(SCRIPT) + 1
    assert "stream disconnected" not in said
    tools = [shape(body["tools"]) for body in (forcing.bodies[0], codex_bodies()[0])]
    assert tools[0] == tools[1], "Codex sends other tools than were recorded: tests/gateway/codex_bodies.json"


def test_a_gateway_killed_in_the_middle_costs_no_call_twice(fleet: AgentFleet, codex: Path, tmp_path: Path) -> None:
    eventually(lambda: len(fleet.cluster.pids("gateway")) == 2, BOUND_S, "two gateways")
    forcing = ForcedSteps(fleet, kills_at=1)
    run_session(codex, forcing, tmp_path)
    assert len(forcing.killed) == 1
    assert len(forcing.bodies) > len(SCRIPT) + 1  # what was under way was asked again
