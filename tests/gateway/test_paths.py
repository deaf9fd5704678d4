"""Paths and methods as clients, proxies and monitors say them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from services.gateway import Gateway
from tests.gateway.peers import MODEL

CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "tell me"}], "seed": 0}


async def raw(gateway: Gateway, method: str, path: str, body: bytes = b"") -> bytes:
    """Sends the path as it is written, which httpx does not; returns all that is answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.settings.http_port)
    head = f"{method} {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        async with asyncio.timeout(20.0):
            return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "//v1/chat/completions", "/v1//chat/completions//", "/v1/messages/"]
)
async def test_a_post_with_a_slash_too_many_is_answered(gateway: Gateway, path: str) -> None:
    answer = await raw(gateway, "POST", path, json.dumps({**CHAT, "max_tokens": 9}).encode())
    assert answer.startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("path", ["/v1/models/", "//v1/models", f"//v1/models/{MODEL}/", "//health", "/health/ready/"])
async def test_a_get_with_a_slash_too_many_is_answered(gateway: Gateway, path: str) -> None:
    assert (await raw(gateway, "GET", path)).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("page", ["docs", "console"])
async def test_a_pages_relative_links_hold(gateway: Gateway, http: httpx.AsyncClient, page: str) -> None:
    """A browser is led to it by a way that names no scheme and no host."""
    answer = await http.get(f"/{page}/")
    assert (answer.status_code, answer.headers["location"]) == (307, f"../{page}")
    assert (await http.get(f"/{page}/", follow_redirects=True)).status_code == 200


async def test_ids_of_traces_keep_their_slashes(gateway: Gateway) -> None:
    answer = await raw(gateway, "GET", "//debug/traces/a//b/")
    assert b"a//b/" in answer


@pytest.mark.parametrize(
    "path",
    [
        "/health", "/health/ready", "/v1/models", f"/v1/models/{MODEL}", "/version", "/metrics", "/docs", "/console",
        "/openapi.json", "/ping", "/load", "/debug/integrity", "/docs/files/swagger-ui.css",
    ],
)  # fmt: skip
async def test_head_is_get_without_its_body(gateway: Gateway, http: httpx.AsyncClient, path: str) -> None:
    head, get = await http.head(path), await http.get(path)
    assert (head.status_code, head.content) == (get.status_code, b"") == (200, b"")
    same = ("content-type", "cache-control", "etag")
    assert [head.headers.get(name) for name in same] == [get.headers.get(name) for name in same]
    if path in ("/health", "/version", "/docs"):
        assert head.headers["content-length"] == get.headers["content-length"]
    again = await http.get("/health")
    assert again.json() == {"alive": True}, "its connection is of use"


async def test_head_fails_as_get_does(http: httpx.AsyncClient) -> None:
    for path, status in (("/nothing", 404), ("/v1/chat/completions", 405), ("/v1/models/other", 404)):
        assert (await http.head(path)).status_code == status


async def test_a_route_that_is_missing_is_not_found(http: httpx.AsyncClient) -> None:
    """Even where it looks like the name of something that is kept."""
    for path in ("/v1/nope", "/v1/responses/compact", "/v1/responses/x/y", "/nope"):
        answer = await http.post(path, json={})
        assert answer.status_code == 404, path
        assert answer.json()["error"]["message"] == f"POST {path}: Not Found"
    for method, path, allowed in (
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET"}),
        ("TRACE", "/v1/responses/input_tokens", {"POST"}),
        ("GET", "/v1/responses/input_tokens", {"POST"}),
        ("POST", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
        ("PUT", "/v1/conversations/conv_1", {"GET", "HEAD", "POST", "DELETE"}),
    ):
        answer = await http.request(method, path)
        assert answer.status_code == 405, path
        assert set(answer.headers["allow"].split(", ")) == allowed
