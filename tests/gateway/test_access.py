"""API keys: without one nothing is served, a tenant is who its key says, and the file is followed."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from services.gateway.__main__ import make_gateway
from services.gateway.access import Access
from services.gateway.access.access import FOLLOW_S
from services.gateway.errors import Unauthorized
from services.gateway.text import CheckedIds, Tokenizer
from tandem.adapters import AdapterRef
from tandem.commands.keys import main as keys_command
from tandem.registry import Registry
from tandem.security import read_keys
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

    def listed(self) -> dict[str, str]:
        """Models of each tenant's key."""
        keys_command(["list", f"--file={self.file}"])
        rows = [line.split(maxsplit=4) for line in self._capsys.readouterr().out.splitlines()[1:]]
        return {tenant: models for _, tenant, _, _, models in rows}

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
    ring.file.write_text("{}", encoding="utf-8")
    async with make_gateway(settings.model_copy(update={"api_keys": ring.file})) as gateway:
        await eventually(lambda: gateway.readiness()[0])
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{settings.http_port}", timeout=60) as http:
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


async def test_prompts_are_cached_by_the_salt_of_their_blocks(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, http = guarded
    salts, encode = list[str](), Tokenizer.encode_chat

    async def noted(self: Tokenizer, text: str, salt: str) -> CheckedIds:
        salts.append(salt)
        return await encode(self, text, salt)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    keys = [ring.add("a"), ring.add("b")]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

    async def known() -> bool:
        return (await http.post("/v1/chat/completions", json=body, headers=keys[-1])).status_code == 200

    await eventually(known)
    for key in keys:
        await http.post("/v1/chat/completions", json={**body, "cache_salt": "s"}, headers=key)
        assert salts[-1] == peers.decode.seen[-1].cache_salt
        await http.post("/v1/messages", json=body, headers=key)
        assert salts[-1] == peers.decode.seen[-1].cache_salt
        for path in ("/v1/messages/count_tokens", "/tokenize"):
            await http.post(path, json={"model": MODEL, "messages": body["messages"]}, headers=key)
            assert salts.pop() == salts[-1]
    assert len(set(salts)) == 4


async def test_a_file_that_turns_bad_changes_nothing(guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing) -> None:
    gateway, http = guarded
    key = ring.add("acme")

    async def known() -> bool:
        return (await complete(http, key)).status_code == 200

    await eventually(known)
    good = ring.file.read_text(encoding="utf-8")
    for bad in ("{", json.dumps({**json.loads(good), "keyz": []}), good.replace('"acme"', '"acme", "tier": "gold"')):
        ring.file.write_text(bad, encoding="utf-8")
        with pytest.raises(ValueError, match=r"keys\.json"):
            read_keys(ring.file)
        await gateway.shared.access._follow(ring.file)
        assert await known()


async def test_a_revocation_counts_whatever_the_stamp_of_the_file_says(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing
) -> None:
    """Two writes within a tick of the file system's clock, or a copy that keeps times, leave it as it was."""
    _, http = guarded
    key = ring.add("acme")

    async def status(wanted: int) -> bool:
        return (await complete(http, key)).status_code == wanted

    await eventually(partial(status, 200))
    before, content = os.stat(ring.file), ring.file.read_text(encoding="utf-8")
    digest = read_keys(ring.file).keys[0].sha256
    ring.file.write_text(content.replace(digest, "0" * 64), encoding="utf-8")
    os.utime(ring.file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert os.stat(ring.file).st_mtime_ns == before.st_mtime_ns
    await eventually(partial(status, 401))


async def test_a_revocation_counts_once_the_file_can_be_read_again(ring: KeyRing) -> None:
    """A process may have no file descriptor left just then."""
    ring.file.write_text("{}", encoding="utf-8")
    key = ring.add("acme")
    access = Access(ring.file, share_prefixes=False)
    following = asyncio.create_task(access.run())
    ring.revoke(key)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        await asyncio.sleep(3 * FOLLOW_S)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert access.authenticate(key).tenant == "acme"
    async with asyncio.timeout(20):
        while True:
            try:
                access.authenticate(key)
            except Unauthorized:
                break
            await asyncio.sleep(0.05)
    following.cancel()


def test_the_file_holds_no_secret_and_is_its_owners(ring: KeyRing) -> None:
    secret = ring.add("acme")["authorization"].split("-", 2)[2]  # which may have a "-" itself
    assert secret not in ring.file.read_text(encoding="utf-8")
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
    ring.file.write_text("{}", encoding="utf-8")
    with pytest.raises(SystemExit, match=wrong):
        keys_command([*options, f"--file={ring.file}"])


@pytest.mark.parametrize("command", [["-m", "services.gateway"], ["-m", "tandem", "up"]])
def test_nothing_listens_beyond_loopback_without_keys(command: list[str]) -> None:
    ended = subprocess.run(
        [sys.executable, *command, "--host=0.0.0.0"], capture_output=True, encoding="utf-8", timeout=60
    )
    assert ended.returncode in (1, 2)
    assert "0.0.0.0 can be reached by others: give --api-keys, or --insecure" in ended.stderr


def tiered(ring: KeyRing, **limits: float) -> None:
    """From now on these are the limits of the tier of every key."""
    keys = json.loads(ring.file.read_text(encoding="utf-8"))
    ring.file.write_text(json.dumps({**keys, "tiers": {"default": limits}}), encoding="utf-8")


@pytest.fixture
async def limited(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing
) -> Callable[..., Awaitable[dict[str, str]]]:
    """Makes a key whose tier has these limits, and waits until it counts."""

    async def make(**limits: float) -> dict[str, str]:
        key = ring.add("acme")
        tiered(ring, **limits)
        await guarded[0].shared.access._follow(ring.file)
        return key

    return make


async def test_requests_of_a_minute_are_counted_and_told(
    guarded: tuple[Gateway, httpx.AsyncClient], limited: Callable[..., Awaitable[dict[str, str]]]
) -> None:
    gateway, http = guarded
    key = await limited(requests_per_minute=3, tokens_per_minute=10_000)
    answers = [await complete(http, key, max_tokens=8) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["2", "1", "0", "0"]
    refused = answers[-1]
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 15 <= int(refused.headers["retry-after"]) <= 20
    assert refused.headers["x-ratelimit-limit-tokens"] == "10000"
    async with aio.insecure_channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        asked = llm_pb2.GenerateUnaryRequest(generate=llm_pb2.GenerateRequest(model=MODEL, prompt="x"))
        with pytest.raises(aio.AioRpcError) as error:
            await llm_pb2_grpc.LLMServiceStub(channel).GenerateUnary(asked, metadata=tuple(key.items()))
    assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.value.trailing_metadata())["x-ratelimit-remaining-requests"] == "0"


async def test_messages_are_told_of_keys_and_limits_in_anthropics_words(
    guarded: tuple[Gateway, httpx.AsyncClient], limited: Callable[..., Awaitable[dict[str, str]]]
) -> None:
    _, http = guarded
    body = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "x"}]}
    bearer = await limited(requests_per_minute=3, tokens_per_minute=10_000)
    key = {"x-api-key": bearer["authorization"].removeprefix("Bearer ")}
    for wrong in ({}, {"x-api-key": "tk-no"}, {"authorization": "Bearer tk-no"}):
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await http.post(path, json=body, headers=wrong)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
    answers = [await http.post("/v1/messages?beta=true", json=body, headers=one) for one in (key, bearer, key, key)]
    assert [answer.status_code for answer in answers] == [200, 200, 200, 429]
    assert [answer.headers["anthropic-ratelimit-requests-remaining"] for answer in answers] == ["2", "1", "0", "0"]
    assert answers[-1].json()["error"]["type"] == "rate_limit_error"
    assert 15 <= int(answers[-1].headers["retry-after"]) <= 20
    full = datetime.fromisoformat(answers[-1].headers["anthropic-ratelimit-requests-reset"])
    assert 50 <= (full - datetime.now(UTC)).total_seconds() <= 61
    assert "x-ratelimit-limit-tokens" not in answers[-1].headers


async def test_texts_to_be_read_count_as_requests(
    guarded: tuple[Gateway, httpx.AsyncClient], limited: Callable[..., Awaitable[dict[str, str]]]
) -> None:
    _, http = guarded
    key = await limited(requests_per_minute=2)
    asked = [("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [5]}), ("/tokenize", {"prompt": "x"})]
    answers = [await http.post(path, json=body, headers=key) for path, body in asked]
    assert [answer.status_code for answer in answers] == [200, 200, 429]
    assert [answer.headers["x-ratelimit-remaining-requests"] for answer in answers] == ["1", "0", "0"]


async def test_tokens_not_written_are_the_tenants_again(
    guarded: tuple[Gateway, httpx.AsyncClient], limited: Callable[..., Awaitable[dict[str, str]]]
) -> None:
    gateway, http = guarded
    prices = {"prompt_price": 1e6, "cached_prompt_price": 0.5e6, "completion_price": 2e6}
    key = await limited(tokens_per_minute=250, daily_budget=1000, **prices)
    for _ in range(2):  # each may come to nearly all of the minute, and writes little
        answer = await complete(http, key, prompt=[5] * 10, max_tokens=200)
        assert answer.status_code == 200
        written = answer.json()["usage"]["completion_tokens"]
        await eventually(lambda: not len(gateway._background))
    usage = await gateway._ports.registry.limits.usage("acme")
    cached = 3  # by each prompt, the peers say
    assert (usage.requests, usage.prompt_tokens, usage.completion_tokens) == (2, 20, 2 * written)
    assert usage.cached_tokens == 2 * cached
    assert usage.cost == pytest.approx(2 * (10 - cached / 2 + 2 * written))
    where = f"--redis-url={gateway.settings.redis_url}", f"--namespace={gateway.settings.namespace}"
    ended = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-m", "tandem", "keys", "usage", f"--file={gateway.settings.api_keys}", *where],
        capture_output=True, encoding="utf-8", timeout=60,
    )  # fmt: skip
    assert ended.stdout.splitlines()[1].split() == ["acme", "2", "20", "6", str(2 * written), f"{usage.cost:.4f}"]
    too_large = await complete(http, key, prompt=[5] * 10, max_tokens=245)
    assert (too_large.status_code, too_large.json()["error"]["code"]) == (400, "request_too_large")


async def test_places_budgets_and_lengths_of_a_tier(
    guarded: tuple[Gateway, httpx.AsyncClient], limited: Callable[..., Awaitable[dict[str, str]]], peers: Peers
) -> None:
    _, http = guarded
    key = await limited(
        concurrent_requests=1, max_prompt_tokens=20, max_new_tokens=30, prompt_price=1e6, daily_budget=35
    )
    for wrong, param in (({"prompt": [5] * 21}, "prompt"), ({"prompt": [5], "max_tokens": 31}, "max_tokens")):
        refused = await complete(http, key, **wrong)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
    peers.decode.step_s = 0.02
    first = asyncio.create_task(complete(http, key, prompt=[5] * 15, ignore_eos=True, max_tokens=30))
    await eventually(lambda: bool(peers.decode.held))
    second = await complete(http, key, prompt=[5])
    assert (second.status_code, "requests at once" in second.json()["error"]["message"]) == (429, True)
    assert (await first).json()["usage"]["completion_tokens"] == 30

    async def settled() -> bool:
        return (await complete(http, key, prompt=[5] * 15)).status_code == 200

    await eventually(settled)
    peers.decode.step_s = 0.001

    async def spent() -> bool:
        answer = await complete(http, key, prompt=[5] * 15)
        return answer.status_code == 429 and answer.json()["error"]["code"] == "insufficient_quota"

    await eventually(spent)


async def test_without_redis_nobody_is_refused(
    guarded: tuple[Gateway, httpx.AsyncClient],
    limited: Callable[..., Awaitable[dict[str, str]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gateway, http = guarded
    key = await limited(requests_per_minute=1)
    nowhere = Registry.connect("redis://127.0.0.1:1", timeout=0.2)
    monkeypatch.setattr(gateway.shared.allowances, "_limits", nowhere.limits)
    for _ in range(3):
        assert (await complete(http, key)).status_code == 200
    await nowhere.close()


async def test_a_key_names_the_models_and_adapters_it_may_use(
    guarded: tuple[Gateway, httpx.AsyncClient], ring: KeyRing, settings: GatewaySettings
) -> None:
    """Others are as if they were not there; loading and unloading takes a permission of its own."""
    gateway, http = guarded
    keys = {
        "sql": ring.add("sql", "--model=sql"), "plain": ring.add("plain", f"--model={MODEL}", "--model=none"),
        "any": ring.add("any", "--manages-models"),
    }  # fmt: skip
    assert ring.listed() == {"sql": "sql", "plain": f"none, {MODEL}", "any": "all"}
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    for name in ("sql", "law"):
        await registry.adapters.put(name, AdapterRef(name, name, "r" + name))
    await registry.close()
    await gateway.directory.adapters.refresh()

    async def listed(name: str) -> list[str]:
        found = await http.get("/v1/models", headers=keys[name])
        return [card["id"] for card in found.json().get("data", ())]

    async def followed() -> bool:
        return await listed("sql") == ["sql"]

    await eventually(followed)
    assert await listed("plain") == [MODEL]
    assert await listed("any") == [MODEL, "law", "sql"]
    for name, allowed in (("sql", {"sql"}), ("plain", {MODEL}), ("any", {MODEL, "sql", "law"})):
        for model in (MODEL, "sql", "law"):
            found = await complete(http, keys[name], model=model)
            assert (found.status_code == 404) == (model not in allowed), (name, model, found.text)
    for path, body in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x"}),
        ("/v1/unload_lora_adapter", {"lora_name": "law"}),
    ):
        refused = await http.post(path, json=body, headers=keys["plain"])
        assert (refused.status_code, "manages_models" in refused.text) == (403, True)
    assert (await http.post(path, json=body, headers=keys["any"])).status_code == 200
    assert await listed("any") == [MODEL, "sql"]
