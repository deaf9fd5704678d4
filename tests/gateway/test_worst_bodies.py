"""No body holds up another's tokens: a bystander streams while the worst of each door is sent.

What is measured is what this process, which is gateway, workers and bystander, computes between two of the
bystander's tokens. Work of another process is not in it, nor what a busy machine lets it wait.
"""

from __future__ import annotations

import asyncio
import gc
import socket
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

import grpc
import httpx
import pytest
from grpc import aio

from services.gateway import Gateway, GatewaySettings
from tandem.local import RedisServer
from tandem.registry import Registry
from tests.gateway.conftest import eventually, make_settings
from tests.gateway.peers import MODEL, Peers, folder_of, peers_on
from tests.gateway.worst_bodies import GRPC, PATHS, message, within

CONTEXT = 131_072
MOST_S = 0.05
T = TypeVar("T")


@pytest.fixture
async def settings(redis: RedisServer, monkeypatch: pytest.MonkeyPatch) -> GatewaySettings:
    monkeypatch.setattr("services.gateway.server.PREFILL_QUEUE_TOKENS", 2**24)
    return make_settings(redis)


@pytest.fixture
async def peers(settings: GatewaySettings) -> AsyncIterator[Peers]:
    registry = Registry.connect(settings.redis_url, namespace=settings.namespace, timeout=30.0)
    async with peers_on(registry, lambda spec: [5] * 5_000) as peers:
        peers.max_model_len, peers.folder = CONTEXT, folder_of(CONTEXT)
        await peers.add_decode(num_blocks=2**20)
        await peers.add_prefill()
        yield peers


class Bystander:
    """Streams an answer; `late_s` is the most that was computed between two of its tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.late_s = 0.0
        self._last = 0.0

    async def stream(self, http: httpx.AsyncClient) -> None:
        asked = {"model": MODEL, "prompt": [5, 6], "max_tokens": 90_000, "ignore_eos": True, "stream": True}
        while True:
            self._last = 0.0
            async with http.stream("POST", "/v1/completions", json=asked, timeout=600) as answer:
                async for _ in answer.aiter_raw():
                    self._see()

    def _see(self) -> None:
        now = time.process_time()
        if self._last:
            self.late_s = max(self.late_s, now - self._last)
        self._last = now
        self.num_tokens += 1

    async def goes_on(self) -> None:
        seen = self.num_tokens
        await eventually(lambda: self.num_tokens > seen + 20)

    async def beside(self, work: Awaitable[T]) -> T:
        await self.goes_on()
        self.late_s = 0.0
        found = await work
        await self.goes_on()
        return found


@pytest.fixture
async def bystander(http: httpx.AsyncClient) -> AsyncIterator[Bystander]:
    bystander = Bystander()
    streaming = asyncio.create_task(bystander.stream(http))
    await eventually(lambda: bystander.num_tokens > 5)
    gc.collect()
    gc.freeze()
    yield bystander
    gc.unfreeze()
    streaming.cancel()
    await asyncio.gather(streaming, return_exceptions=True)


def posted(port: int, path: str, body: bytes) -> bytes:
    """The head of the answer, nothing where it was refused unread. On a thread, in system calls that let others run."""
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120) as connection:
        try:
            connection.sendall(head.encode())
            connection.sendall(body)
            begin = connection.recv(2000)
            while connection.recv(2**16):
                pass
        except (BrokenPipeError, ConnectionResetError):
            return b"HTTP/1.1 413 "
    return begin


@pytest.mark.alone
@pytest.mark.parametrize("path", PATHS)
async def test_of_http(gateway: Gateway, bystander: Bystander, path: str) -> None:
    late = {}
    for name, make in PATHS[path].items():
        body = make()
        answer = await bystander.beside(asyncio.to_thread(posted, gateway.settings.http_port, path, body))
        assert answer[:9] == b"HTTP/1.1 ", name
        assert answer[9:12] in (b"200", b"400", b"404", b"413", b"429"), (name, answer)
        late[name] = round(bystander.late_s, 3)
    print(path, late)
    assert {name: seconds for name, seconds in late.items() if seconds > MOST_S} == {}


@pytest.mark.alone
@pytest.mark.parametrize("method", ["Generate", "GenerateUnary"])
async def test_of_grpc(gateway: Gateway, bystander: Bystander, method: str) -> None:
    late = {}
    for name in GRPC if method == "Generate" else ("tools", "calls", "fitting-token-ids"):
        data = message(name) if method == "Generate" else within(1, message(name))
        code = await bystander.beside(called(gateway.grpc_port, method, data))
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED), name
        late[name] = round(bystander.late_s, 3)
    print(method, late)
    assert {name: seconds for name, seconds in late.items() if seconds > MOST_S} == {}


async def called(port: int, method: str, data: bytes) -> grpc.StatusCode:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        kind: Any = channel.unary_unary if method == "GenerateUnary" else channel.unary_stream
        call = kind(f"/tandem.v1.LLMService/{method}", None, None)(data, timeout=120)
        try:
            await (call if method == "GenerateUnary" else call.read())
        except aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK
