"""Settings of a gateway that runs: its file, what is set over it for a while, and by whom."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.admission import PriorityClass
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers
from tests.gateway.test_recent_traces import key_ring

URL = "/debug/settings"
BODY = {"model": MODEL, "prompt": "once upon", "max_tokens": 2}


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    with capture_logs() as logs:
        yield logs


@pytest.fixture
async def following(settings: GatewaySettings, peers: Peers, tmp_path: Path) -> AsyncIterator[tuple[Gateway, Path]]:
    file = tmp_path / "settings.json"
    file.write_text('{"max_queued": 100}', encoding="utf-8")
    async with make_gateway(settings.model_copy(update={"followed": file})) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        yield gateway, file


def url_of(gateway: Gateway) -> str:
    return f"http://127.0.0.1:{gateway.settings.http_port}"


def changes(logs: list[Any]) -> list[dict[str, Any]]:
    return [line for line in logs if line["event"] == "settings changed"]


async def test_the_file_is_followed_and_a_bad_one_changes_nothing(
    following: tuple[Gateway, Path], logs: list[Any]
) -> None:
    gateway, file = following
    assert gateway.shared.settings.max_queued == 100
    file.write_text(
        json.dumps({"classes": {"batch": {"weight": 7, "ttft_s": 9}}, "tenant_weights": {"acme": 3}}), encoding="utf-8"
    )
    await eventually(lambda: gateway.shared.settings.max_queued == 1024)
    assert gateway.shared.settings.classes["batch"].ttft_s == 9
    weights = gateway.directory.llm_of(None).admission._queue.weights
    assert (weights.of_class(PriorityClass.BATCH), weights.of_tenant("acme")) == (7, 3)
    (change,) = changes(logs)
    assert change["by"] == str(file)
    assert change["changes"]["max_queued"] == [100, 1024]
    for bad in ("{", "[]", '{"max_queued": 0}', '{"http_port": 1}'):
        file.write_text(bad, encoding="utf-8")
        num = len(logs)
        await eventually(lambda num=num: any("cannot be read" in line["event"] for line in logs[num:]))
    assert gateway.shared.settings.tenant_weights == {"acme": 3}


async def test_an_override_ends_by_itself(http: httpx.AsyncClient, gateway: Gateway, logs: list[Any]) -> None:
    said = {"settings": {"max_queued": 1, "log_level": "error"}, "ttl_s": 1.0}
    told = (await http.post(URL, json=said)).raise_for_status().json()
    assert told["settings"]["max_queued"] == 1
    assert set(told["ttl_s"]) == {"max_queued", "log_level"}
    await eventually(lambda: gateway.shared.settings.max_queued == 1024)
    assert (await http.post("/v1/completions", json={**BODY, "n": 2})).status_code == 200
    assert [(line["by"], line["changes"]["max_queued"]) for line in changes(logs)] == [
        ("anyone, from 127.0.0.1", [1024, 1]),
        ("time is over", [1, 1024]),
    ]


async def test_null_returns_a_setting_to_the_file(http: httpx.AsyncClient, gateway: Gateway) -> None:
    await http.post(URL, json={"settings": {"max_queued": 5}, "ttl_s": 600})
    assert gateway.shared.settings.max_queued == 5
    told = (await http.post(URL, json={"settings": {"max_queued": None}, "ttl_s": 600})).json()
    assert (told["settings"]["max_queued"], told["ttl_s"]) == (1024, {})


# What would leave no cluster that serves, or no arithmetic.
UNUSABLE: dict[str, list[Any]] = {
    "max_queued": [0, -1, 10**7, 10**400],
    "max_admitted_tokens": [0, 1, 2**50, 10**400],
    "timeout_s": [0, 1e-9, 1e9, float("inf"), float("nan")],
    "trace_sampling": [-0.1, 1.1, float("nan")],
    "tenant_weights": [{"a": weight} for weight in (0, 1e-9, 1e9, float("inf"), float("nan"))],
    "classes": [
        {"interactive": {name: value}}
        for name in ("weight", "ttft_s", "itl_s")
        for value in (0, 1e-9, 1e9, float("inf"), float("nan"), -1)
    ],
}


async def test_a_setting_that_leaves_nothing_usable_is_refused_by_name(
    following: tuple[Gateway, Path], logs: list[Any]
) -> None:
    gateway, file = following
    before = gateway.shared.settings
    async with httpx.AsyncClient(base_url=url_of(gateway)) as http:
        for name, value in ((name, value) for name, values in UNUSABLE.items() for value in values):
            answer = await http.post(URL, content=json.dumps({"settings": {name: value}, "ttl_s": 600}))
            assert answer.status_code == 400, (name, value, answer.text)
            message = answer.json()["error"]["message"]
            assert message.startswith(name), message
            assert "should be" in message
    file.write_text('{"max_queued": 50, "classes": {"batch": {"ttft_s": 1e-9}}}', encoding="utf-8")
    await eventually(lambda: any("cannot be read" in line["event"] for line in logs))
    assert gateway.shared.settings is before
    assert len([line for line in logs if "cannot be read" in line["event"]]) == 1


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "Expecting value"),
        (b"[" * 100_000, ""),
        (b'{"settings": {}}', "ttl_s"),
        (b'{"settings": [], "ttl_s": 1}', "object"),
        (b'{"settings": {}, "ttl_s": "1"}', "number"),
        (b'{"settings": {}, "ttl_s": true}', "number"),
        (b'{"settings": {}, "ttl_s": NaN}', "ttl_s"),
        (b'{"settings": {"max_queued": 1}, "ttl_s": 1e9}', "ttl_s"),
        (b'{"settings": {"redis_url": "x"}, "ttl_s": 1}', "redis_url"),
        (b'{"settings": {"redis_url": null}, "ttl_s": 1}', "redis_url"),
        (b'{"settings": {"max_queued": "many"}, "ttl_s": 1}', "max_queued"),
        (b'{"settings": {"trace_sampling": 2}, "ttl_s": 1}', "trace_sampling"),
        (b'{"settings": {"classes": {"batch": {"weight": 0}}}, "ttl_s": 1}', "classes"),
        (b'{"settings": {"classes": 7}, "ttl_s": 1}', "classes"),
        (b'{"settings": {"log_level": "loud"}, "ttl_s": 1}', "log_level"),
    ],
)
async def test_a_wrong_change_is_refused_and_changes_nothing(
    http: httpx.AsyncClient, gateway: Gateway, body: bytes, word: str
) -> None:
    before = gateway.shared.settings
    answer = await http.post(URL, content=body)
    assert answer.status_code in (400, 413)
    assert word in answer.json()["error"]["message"]
    assert gateway.shared.settings is before


async def test_only_a_key_that_manages_may_and_the_log_names_it(
    settings: GatewaySettings, peers: Peers, tmp_path: Path, logs: list[Any]
) -> None:
    said = key_ring(tmp_path / "keys.json", "acme", "admin")
    update = {"api_keys": tmp_path / "keys.json"}
    async with make_gateway(settings.model_copy(update=update)) as gateway, httpx.AsyncClient() as http:
        change = {"settings": {"max_queued": 5}, "ttl_s": 60}
        for headers, status in (({}, 401), (said["acme"], 403), (said["admin"], 200)):
            answer = await http.post(f"{url_of(gateway)}{URL}", json=change, headers=headers)
            assert answer.status_code == status
        assert (await http.get(f"{url_of(gateway)}{URL}", headers=said["acme"])).status_code == 403
        assert gateway.shared.settings.max_queued == 5
    (line,) = changes(logs)
    assert line["by"] == "key 00000001 of admin, from 127.0.0.1"


async def test_tandem_set_changes_gateways_and_workers_of_the_registry(
    settings: GatewaySettings, gateway: Gateway
) -> None:
    command = [
        sys.executable, "-m", "tandem", "set", "max-queued=7", "log_level=error", f"--redis-url={settings.redis_url}",
        f"--namespace={settings.namespace}",
    ]  # fmt: skip
    async with asyncio.timeout(30):
        while not await gateway._ports.registry.gateways.live():
            await asyncio.sleep(0.05)
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    assert b'"max_queued": 7' in said
    in_force = json.dumps({"settings": {"log_level": "error"}, "ttl_s": {"log_level": 600.0}})
    assert {f"d {in_force}", f"p {in_force}"} <= {*said.decode().splitlines()}
    assert (gateway.shared.settings.max_queued, gateway.shared.settings.log_level) == (7, "error")
