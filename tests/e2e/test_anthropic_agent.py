"""An agent made of Anthropic's SDK and its tool runner, on prompts of an agent's size: it ends with the right files.

The model is tiny and random; a transport between SDK and cluster forces its calls, which strict tools hold to what the
script says. `make check`: its tokenizer is fetched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import httpx
import httpx2
import psutil
import pytest
import torch
from anthropic import Anthropic, beta_tool
from transformers import LlamaConfig, LlamaForCausalLM

from tandem.checkpoints import find_model
from tandem.checkpoints.gguf import as_folder
from tests.e2e.cluster import RunningCluster, eventually, running_cluster
from tests.e2e.test_gateways import two_ports

pytestmark = pytest.mark.long
CONTEXT = 131_072
BOUND_S = 120.0
TEMPLATE = (
    '{% if tools %}<|im_start|>system\n# Tools\nCall as <tool_call>\n{"name": , "arguments": }\n</tool_call>\n'
    "{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
EPHEMERAL = {"type": "ephemeral"}
SCRIPT = ("write_notes", "append_notes", "read_notes")
WORDS = "Use this tool with care, and only where the task that the user has given asks for what it does. "


@dataclass
class AgentFleet:
    cluster: RunningCluster
    own: list[int]  # ports of gateways alone

    def busy(self) -> int | None:
        """The process id of a gateway with a request."""
        for port in self.own:
            try:
                load = httpx.get(f"http://127.0.0.1:{port}/load", timeout=10.0).json()
            except httpx.TransportError:
                continue
            if load["server_load"]:
                return self._pid(port)
        return None

    def _pid(self, port: int) -> int:
        for pid in self.cluster.pids("gateway"):
            if any(one.status == "LISTEN" and one.laddr.port == port for one in psutil.Process(pid).net_connections()):
                return pid
        raise AssertionError(f"no gateway listens on {port}")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("agents") / "tiny"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49_152, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=CONTEXT, tie_word_embeddings=True,
        eos_token_id=2, bos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    smollm = as_folder(find_model("smollm2").path)
    shutil.copy(smollm / "tokenizer.json", folder)
    tokens = json.loads((smollm / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**tokens, "chat_template": TEMPLATE}), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[AgentFleet]:
    own = two_ports()
    options = (f"--model-path={model}", "--gateways=2", f"--own-http-port={own}", "--dtype=float32")
    with running_cluster(tmp_path_factory.mktemp("fleet"), *options) as cluster:
        yield AgentFleet(cluster, [own, own + 1])


class Forcing(httpx2.HTTPTransport):
    """Makes the model call what the script says next, and say little once it is through."""

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[dict[str, Any]] = []
        self.statuses: list[int] = []
        self.before: list[threading.Event] = []

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        body = json.loads(request.read())
        blocks = [b for m in body["messages"] if isinstance(m["content"], list) for b in m["content"]]
        step = sum(block["type"] == "tool_result" for block in blocks)
        if step < len(SCRIPT):
            body["tool_choice"] = {"type": "tool", "name": SCRIPT[step]}
        else:
            body["max_tokens"] = 16
        self.bodies.append(body)
        content = json.dumps(body).encode()
        headers = {**request.headers, "content-length": str(len(content))}
        if step == 1:
            for event in self.before:
                event.set()
        answer = super().handle_request(httpx2.Request(request.method, request.url, headers=headers, content=content))
        self.statuses.append(answer.status_code)
        return answer


@dataclass
class Desk:
    """A folder, and the tools that work on it."""

    folder: Path
    used: Counter[str] = field(default_factory=Counter)

    def tools(self) -> list[Any]:
        notes = self.folder / "notes.txt"

        @beta_tool(strict=True, description="Write a file")
        def write_notes(path: Literal["notes.txt"], text: Literal["one\n"]) -> str:
            self.used["write_notes"] += 1
            (self.folder / path).write_text(text, encoding="utf-8")
            return "written"

        @beta_tool(strict=True, description="Append to a file")
        def append_notes(path: Literal["notes.txt"], text: Literal["two\n"], times: Literal[2]) -> str:
            self.used["append_notes"] += 1
            (self.folder / path).write_text(
                (self.folder / path).read_text(encoding="utf-8") + text * times, encoding="utf-8"
            )
            return "appended"

        @beta_tool(strict=True, description="Read a file", cache_control={"type": "ephemeral"})
        def read_notes(path: Literal["notes.txt"]) -> str:
            self.used["read_notes"] += 1
            return notes.read_text(encoding="utf-8")

        return [*map(other_tool, range(100)), write_notes, append_notes, read_notes]


def other_tool(number: int) -> Any:
    """One of the many that agents bring."""
    properties = {
        f"field_{i}": {"type": "string", "description": WORDS, "enum": ["a", "b"]} if i % 2 else {"type": "integer"}
        for i in range(6)
    }
    schema = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}

    @beta_tool(name=f"tool_{number}", description=WORDS * 2, input_schema=schema, strict=True)
    def other(**_: Any) -> str:
        raise AssertionError("not in the script")

    return other


def asked(fleet: AgentFleet, desk: Desk) -> dict[str, Any]:
    text = {"type": "text", "text": "You are an agent. " + WORDS * 40}
    task = {"type": "text", "text": "Take notes.", "cache_control": EPHEMERAL}
    return {
        "model": "tiny", "max_tokens": 32_000, "tools": desk.tools(),
        "system": [text, {**text, "cache_control": EPHEMERAL}],
        "messages": [{"role": "user", "content": [task]}],
        "thinking": {"type": "adaptive"}, "context_management": {"edits": []},
        "betas": ["context-management-2025-06-27"],
    }  # fmt: skip


def client_of(fleet: AgentFleet, forcing: Forcing) -> Anthropic:
    http = httpx2.Client(transport=forcing, timeout=BOUND_S)
    return Anthropic(base_url=fleet.cluster.http, api_key="none", http_client=http, _strict_response_validation=True)


def check(desk: Desk, last: Any) -> None:
    assert desk.used == Counter(SCRIPT)
    assert (desk.folder / "notes.txt").read_text(encoding="utf-8") == "one\ntwo\ntwo\n"
    assert last.stop_reason in ("max_tokens", "end_turn")


@pytest.mark.parametrize("stream", [False, True])
def test_a_session_ends_with_the_right_files(fleet: AgentFleet, tmp_path: Path, stream: bool) -> None:
    desk, forcing = Desk(tmp_path), Forcing()
    messages = []
    with client_of(fleet, forcing) as client:
        runner = client.beta.messages.tool_runner(**asked(fleet, desk), stream=stream)
        for turn in runner:
            messages.append(turn.get_final_message() if stream else turn)
    check(desk, messages[-1])
    assert [message.stop_reason for message in messages[:-1]] == ["tool_use"] * len(SCRIPT)
    assert forcing.statuses == [400, 200, 200, 200, 200]  # the first asked for a thread, which is not kept here
    uses = [message.usage for message in messages]
    whole = [use.input_tokens + use.cache_read_input_tokens + use.cache_creation_input_tokens for use in uses]
    assert min(whole) > 24_000
    assert all(use.cache_read_input_tokens > 20_000 for use in uses[1:])
    assert all(use.input_tokens < 16 for use in uses)


def test_a_gateway_killed_in_the_middle_costs_no_call_twice(fleet: AgentFleet, tmp_path: Path) -> None:
    eventually(lambda: len(fleet.cluster.pids("gateway")) == 2, BOUND_S, "two gateways")
    desk, forcing, begun = Desk(tmp_path), Forcing(), threading.Event()
    forcing.before.append(begun)
    killed: list[int] = []

    def kill() -> None:
        begun.wait(BOUND_S)
        while not killed:
            if (pid := fleet.busy()) is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)

    killing = threading.Thread(target=kill, daemon=True)
    killing.start()
    with client_of(fleet, forcing) as client:
        *_, last = client.beta.messages.tool_runner(**asked(fleet, desk))
    killing.join(BOUND_S)
    assert killed
    check(desk, last)
    assert len(forcing.bodies) > len(forcing.statuses)  # what was under way was asked again
