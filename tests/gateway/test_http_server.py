"""The HTTP server listens where it is told to, by either family of addresses."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from services.gateway.http import HttpServer
from tandem.local import free_ports


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
