"""The HTTP server listens where it is told to, by either family of addresses."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from starlette.types import Message, Scope

from services.gateway.errors import TimedOut
from services.gateway.http import HttpServer
from services.gateway.http.exchange import Exchange
from tandem.local import free_ports

pytestmark = pytest.mark.fast


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] == "http":
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
async def test_it_answers_where_it_listens(host: str, url: str) -> None:
    (port,) = free_ports(1)
    server = HttpServer(app, host, port, False, header_timeout_s=5.0)
    await server.start()
    try:
        async with httpx.AsyncClient() as client:
            assert (await client.get(f"http://{url}:{port}/")).status_code == 204
    finally:
        await server.stop()


async def test_an_end_that_the_client_did_not_read_is_not_followed_by_another() -> None:
    sent: list[bool] = []

    async def send(message: Message) -> None:
        if "more_body" in message:
            sent.append(message["more_body"])
        if sent:
            await asyncio.sleep(60)  # the client reads nothing

    scope: Scope = {"headers": [], "http_version": "1.1"}
    exchange = Exchange(scope, asyncio.Future, send, lambda: "id", lambda: False)
    await exchange.open({})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await exchange.close()
    await exchange.fail(TimedOut("the request's deadline passed"), {})
    assert sent == [False]
