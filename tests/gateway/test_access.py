"""API keys: without one nothing is served, a tenant is who its key says, and the file is followed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from tandem.api_keys import read_keys
from tandem.commands.keys import main as keys_command
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually
from tests.gateway.peers import MODEL, Peers

BODY = {"model": MODEL, "prompt": "x" * 40, "seed": 0}
FAIRNESS = "x-llm-d-inference-fairness-id"


class KeyRing:
    """A file, written as an operator writes it."""

    def __init__(self, file: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.file = file
        self._capsys = capsys

    def add(self, tenant: str, *options: str) -> dict[str, str]:
        """A new key, as the header that brings it."""
        keys_command(["add", f"--tenant={tenant}", f"--file={self.file}", *options])
        return {"authorization": f"Bearer {self._capsys.readouterr().out.strip()}"}

    def revoke(self, header: dict[str, str]) -> None:
        keys_command(["revoke", header["authorization"].split("-")[1], f"--file={self.file}"])


@pytest.fixture
def ring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> KeyRing:
    return KeyRing(tmp_path / "keys.json", capsys)


@pytest.fixture
async def guarded(
    ring: KeyRing, settings: GatewaySettings, peers: Peers
) -> AsyncIterator[tuple[Gateway, httpx.AsyncClient]]:
    """A gateway that asks for keys; nobody has one yet."""
    ring.file.write_text("{}")
    async with make_gateway(settings.model_copy(update={"api_keys": ring.file})) as gateway:
        await eventually(lambda: gateway.llm.readiness()[0], 5.0)
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=10) as http:
            yield gateway, http


async def complete(http: httpx.AsyncClient, headers: dict[str, str], **body: Any) -> httpx.Response:
    return await http.post("/v1/completions", json={**BODY, **body}, headers=headers)


async def test_a_key_opens_both_doors_from_when_it_is_added_until_it_is_revoked(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing
) -> None:
    gateway, http = guarded
    refused = await complete(http, {})
    assert (refused.status_code, refused.json()["error"]["code"]) == (401, "missing_api_key")
    assert refused.headers["www-authenticate"] == "Bearer"
    assert (await http.get("/v1/models")).status_code == 401
    assert (await http.get("/health/ready")).status_code == 200
    key = ring.add("acme")

    async def opened() -> bool:
        return (await complete(http, key)).status_code == 200

    await eventually(opened)
    assert (await http.get("/v1/models", headers=key)).status_code == 200
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        service = llm_pb2_grpc.LLMServiceStub(channel)
        asked = llm_pb2.GenerateUnaryRequest(generate=llm_pb2.GenerateRequest(model=MODEL, prompt="x"))
        assert (await service.GenerateUnary(asked, metadata=tuple(key.items()))).text
        for metadata in ((), (("authorization", "Bearer tk-00000000-wrong"),)):
            models = service.ListModels(llm_pb2.ListModelsRequest(), metadata=metadata)
            for call in (service.GenerateUnary(asked, metadata=metadata), models):
                with pytest.raises(aio.AioRpcError) as error:
                    await call
                assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED
    ring.revoke(key)

    async def closed() -> bool:
        return (await complete(http, key)).status_code == 401

    await eventually(closed)


async def test_a_wrong_key_is_refused_whatever_is_wrong(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing
) -> None:
    _, http = guarded
    key = ring.add("acme")["authorization"]
    name = key.split("-")[1]
    wrong = (key[:-1], key + "x", key.replace("Bearer", "Basic"), f"Bearer tk-{name}-", f"Bearer {name}", "Bearer", "~")
    for said in wrong:
        assert (await complete(http, {"authorization": said})).status_code == 401, said


async def test_the_tenant_is_the_keys_unless_it_may_name_others(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing, peers: Peers
) -> None:
    _, http = guarded
    acme, proxy = ring.add("acme"), ring.add("front", "--names-tenants")

    async def known() -> bool:
        return (await complete(http, proxy)).status_code == 200

    await eventually(known)
    for key, tenant in ((acme, "acme"), (proxy, "other")):
        await complete(http, {**key, FAIRNESS: "other"}, user="another")
        assert peers.decode.seen[-1].tenant == tenant


async def test_no_tenant_learns_what_another_has_cached(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing, peers: Peers
) -> None:
    _, http = guarded
    keys = [ring.add("a"), ring.add("a"), ring.add("b")]

    async def known() -> bool:
        return (await complete(http, keys[-1])).status_code == 200

    await eventually(known)
    salts = []
    for key in keys:
        await complete(http, key, cache_salt="s")
        salts.append(peers.decode.seen[-1].cache_salt)
    assert salts[0] == salts[1] != salts[2]


async def test_a_file_that_turns_bad_changes_nothing(guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing) -> None:
    gateway, http = guarded
    key = ring.add("acme")

    async def known() -> bool:
        return (await complete(http, key)).status_code == 200

    await eventually(known)
    good = ring.file.read_text()
    for bad in ("{", json.dumps({**json.loads(good), "keyz": []}), good.replace('"acme"', '"acme", "tier": "gold"')):
        ring.file.write_text(bad)
        with pytest.raises(ValueError, match=r"keys\.json"):
            read_keys(ring.file)
        gateway.llm.access._follow(ring.file)
        assert await known()


def test_the_file_holds_no_secret_and_is_its_owners(ring: KeyRing) -> None:
    secret = ring.add("acme")["authorization"].rpartition("-")[2]
    assert secret not in ring.file.read_text()
    assert os.stat(ring.file).st_mode & 0o077 == 0
    assert [key.tenant for key in read_keys(ring.file).keys] == ["acme"]


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        (("add", "--tenant=x", "--tier=gold"), "has no tier 'gold'"),
        (("revoke", "00000000"), "has no key '00000000'"),
        (("add", "--tenant="), "tenant"),
    ],
)
def test_the_command_says_what_is_wrong(ring: KeyRing, options: tuple[str, ...], wrong: str) -> None:
    ring.file.write_text("{}")
    with pytest.raises(SystemExit, match=wrong):
        keys_command([*options, f"--file={ring.file}"])


@pytest.mark.parametrize("command", [["-m", "services.gateway", "--model-path=x"], ["-m", "tandem", "up"]])
def test_nothing_listens_beyond_loopback_without_keys(command: list[str]) -> None:
    ended = subprocess.run([sys.executable, *command, "--host=0.0.0.0"], capture_output=True, text=True, timeout=60)
    assert ended.returncode in (1, 2)
    assert "0.0.0.0 can be reached by others: give --api-keys, or --insecure" in ended.stderr
