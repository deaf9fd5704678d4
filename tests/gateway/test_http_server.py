"""The HTTP server listens where it is told to, by either family of addresses."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from services.gateway.deadlines import Deadlines
from services.gateway.door import HttpServer
from services.gateway.door.connections import SINCE_S
from services.gateway.door.exchange import WATCH_S, Exchange
from services.gateway.door.slow_heads import SlowHeads
from services.gateway.errors import TimedOut

pytestmark = pytest.mark.fast


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


LISTENING = pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]"), ("::", "127.0.0.1"),
        ("localhost", "127.0.0.1"), ("", "127.0.0.1"),
    ],
)  # fmt: skip


@LISTENING
async def test_it_answers_where_it_listens(host: str, url: str) -> None:
    server = HttpServer(app, host, 0, False, header_timeout_s=5.0)
    await server.start()
    try:
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{url}:{server.port}/")).status_code == 204
    finally:
        await server.stop()


@LISTENING
async def test_a_request_with_a_deadline_is_as_old_as_its_bytes(host: str, url: str) -> None:
    """However late the process comes to look at it, on a connection that was used before, too."""
    ages: list[float] = []

    async def aged(scope: dict[str, Any], receive: Any, send: Any) -> None:
        ages.append(scope.get(SINCE_S, -1.0))
        await app(scope, receive, send)

    server = HttpServer(aged, host, 0, False, header_timeout_s=5.0)
    await server.start()
    request = b"GET / HTTP/1.1\r\nhost: x\r\nx-request-timeout-ms: 100\r\n\r\n"
    try:
        reader, writer = await asyncio.open_connection(url.strip("[]"), server.port)
        for pause_s in (0.3, 0.0, 0.3):
            writer.write(request)  # goes out at once
            time.sleep(pause_s)  # noqa: ASYNC251 - the loop is held up
            async with asyncio.timeout(5.0):
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()
        async with httpx.AsyncClient() as client:
            await client.get(f"http://{url}:{server.port}/")
    finally:
        await server.stop()
    assert min(ages[0], ages[2]) >= 0.28, ages
    assert ages[1] < 0.2, ages
    assert ages[3] == -1.0, "nobody asks the kernel where no deadline is said"


async def test_an_end_that_the_client_did_not_read_is_not_followed_by_another() -> None:
    sent: list[bool] = []

    async def send(message: Message) -> None:
        if "more_body" in message:
            sent.append(message["more_body"])
        if sent:
            await asyncio.sleep(60)  # the client reads nothing

    scope: Scope = {"headers": [], "http_version": "1.1"}
    exchange = Exchange(scope, asyncio.Future, send, lambda: "id", lambda: False)
    await exchange.open({}, lambda error: b"")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await exchange.close()
    await exchange.fail(TimedOut("the request's deadline passed"), {})
    assert sent == [False]


class Watching:
    """An app that reads a body and watches for its client, by an Exchange whose messages are counted."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.read, self.left = asyncio.Event(), asyncio.Event()
        self.waits_for_end = False

    async def __call__(self, scope: dict[str, Any], receive: Any, send: Any) -> None:
        async def counted() -> Any:
            self.asked.append(asyncio.get_running_loop().time())
            return await receive()

        exchange = Exchange(scope, counted, send, lambda: "id", lambda: False)
        assert await exchange.body(100, Deadlines()) == b"12345"
        exchange.watch_left(self.left.set)
        self.read.set()
        if self.waits_for_end:
            await self.left.wait()
        exchange.abandon()
        await app(scope, receive, send)


REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n12345"


async def test_a_short_request_takes_one_message_and_its_connection_the_next_one() -> None:
    watching = Watching()
    server = HttpServer(watching, "127.0.0.1", 0, False, header_timeout_s=5.0)
    await server.start()
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for number in range(3):
            writer.write(REQUEST)
            async with asyncio.timeout(5.0):
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            assert len(watching.asked) == number + 1
        writer.close()
    finally:
        await server.stop()


async def test_a_client_that_leaves_at_once_is_missed_a_moment_later() -> None:
    watching = Watching()
    watching.waits_for_end = True
    server = HttpServer(watching, "127.0.0.1", 0, False, header_timeout_s=5.0)
    await server.start()
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(REQUEST)
        async with asyncio.timeout(5.0):
            await watching.read.wait()
            writer.close()
            await watching.left.wait()
        assert watching.asked[1] >= watching.asked[0] + WATCH_S * 0.9
    finally:
        await server.stop()


async def test_a_connection_is_kept_between_two_requests_for_longer_than_a_head_may_take() -> None:
    server = HttpServer(app, "127.0.0.1", 0, False, header_timeout_s=0.4)
    await server.start()
    running = asyncio.create_task(server.run())
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        for begun in (b"", b"GET / HTT"):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            async with asyncio.timeout(5.0):
                assert b" 204 " in await reader.readuntil(b"\r\n\r\n")
            await never_asked(server.port)  # is closed by then
            await asyncio.sleep(0.2)
            assert not reader.at_eof(), "nothing of its next request has come"
            writer.write(begun)
        async with asyncio.timeout(5.0):
            assert await reader.read() == b"", "it is slow with the next one"
        writer.close()
    finally:
        running.cancel()
        await server.stop()


async def never_asked(port: int) -> None:
    """Returns once a new connection on which no request comes was closed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(5.0):
        assert await reader.read() == b""
    writer.close()


def test_a_head_is_late_by_its_own_time() -> None:
    heads = SlowHeads(10.0)
    assert [heads.is_late("new", now, now) for now in (100.0, 109.9, 110.0)] == [False, False, True]
    heads.answered("kept", 100.0)
    assert not heads.is_late("kept", came=99.9, now=170.0), "it waits between two requests"
    assert [heads.is_late("kept", now - 1, now) for now in (171.0, 180.9, 181.0)] == [False, False, True]
    heads.answered("kept", 181.5)
    assert not heads.is_late("kept", came=181.4, now=182.0)
    assert not heads.is_late("kept", came=183.0, now=184.0), "its next head has a time of its own"
    heads.forget_others(["new"], since=190.0)
    assert not heads.is_late("kept", came=180.0, now=200.0), "a new one has its address"
    assert heads.is_late("new", came=200.0, now=200.0)
