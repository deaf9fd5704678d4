"""A gateway with few files to open: idle connections make room, and health answers beside any number of them."""

from __future__ import annotations

import asyncio
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import httpx
import psutil
import pytest

from tandem import rpc
from tandem.local import RedisServer, free_ports
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.conftest import eventually

OPEN_FILES, IDLE = 256, 300
# Longer than anything of a gateway waits before it opens a file again.
SPELL_S = 6.0
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@asynccontextmanager
async def gateway_process(
    redis: RedisServer, port: int, grpc_port: int = 0, open_files: int = OPEN_FILES
) -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """As a machine runs it that allows no more files."""
    arguments = [
        "-m", "services.gateway", "--redis-url", redis.url, "--http-port", str(port),
        "--grpc-port", str(grpc_port), "--namespace", f"files{port}", "--drain-s", "0.2",
    ]  # fmt: skip
    limited = "sh", "-c", f'ulimit -n {open_files} && exec "$0" "$@"'  # a preexec_fn would fork beside gRPC's threads
    process = await asyncio.create_subprocess_exec(
        *limited, sys.executable, *arguments, env={**os.environ, "TANDEM_LOG_LEVEL": "warning"}
    )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), 30)


@pytest.fixture
async def url(model_folder: Path, redis: RedisServer) -> AsyncIterator[str]:
    async with gateway_process(redis, free_ports(1)[0]) as (url, _):
        await eventually(lambda: answers(url))
        yield url


async def answers(url: str, seconds: float = 30.0) -> bool:
    """On a connection of its own."""
    try:
        async with httpx.AsyncClient(timeout=seconds) as client:
            return (await client.get(f"{url}/health")).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.mark.parametrize("used", [False, True], ids=["never-used", "kept-alive"])
async def test_health_answers_beside_more_idle_connections_than_files(url: str, used: bool) -> None:
    port = int(url.rpartition(":")[2])
    connections = [await connected(port, used and i < 100) for i in range(IDLE)]
    try:
        assert await answers(url)
        # They are closed one after another, and each that is lets one in that has waited.
        await eventually(lambda: sum(reader.at_eof() for reader, _ in connections) > IDLE - OPEN_FILES)
        assert await answers(url)
    finally:
        for _, writer in connections:
            writer.close()


async def connected(port: int, used: bool) -> Streams:
    """`used`: a request was answered there."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    if used:
        writer.write(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"true}"), 20)
    return reader, writer


async def test_a_connection_on_which_a_request_runs_is_not_closed(url: str) -> None:
    """Its body is on the way, however slowly."""
    port = int(url.rpartition(":")[2])
    reader, writer = await connected(port, used=False)
    writer.write(b"POST /tokenize HTTP/1.1\r\nhost: x\r\ncontent-length: 14\r\n\r\n{")
    await writer.drain()
    others = [await connected(port, used=False) for _ in range(IDLE)]
    await eventually(lambda: sum(reader.at_eof() for reader, _ in others) > IDLE - OPEN_FILES)
    writer.write(b'"prompt":"x"}')
    assert (await asyncio.wait_for(reader.readline(), 20)).startswith(b"HTTP/1.1 503")  # there is no worker
    for _, other in [*others, (reader, writer)]:
        other.close()


async def test_grpc_takes_no_more_connections_than_leave_room_for_others(
    model_folder: Path, redis: RedisServer
) -> None:
    port, grpc_port = free_ports(2)
    async with gateway_process(redis, port, grpc_port) as (url, _):
        await eventually(lambda: answers(url))
        connections = [await connected(grpc_port, used=False) for _ in range(IDLE)]
        assert await answers(url)
        # Those refused are closed unheard.
        await eventually(lambda: sum(reader.at_eof() for reader, _ in connections) > IDLE - OPEN_FILES // 4)
        for _, writer in connections:
            writer.close()
        await eventually(lambda: lists_models(grpc_port))


async def lists_models(grpc_port: int) -> bool:
    async with rpc.channel(f"127.0.0.1:{grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        try:
            return await stub.ListModels(llm_pb2.ListModelsRequest(), timeout=2.0) is not None
        except grpc.aio.AioRpcError:
            return False


async def test_a_gateway_lives_on_when_its_files_are_used_up(redis: RedisServer) -> None:
    """Whatever else has taken them: what it cannot open now it opens later, and nothing of it ends for good."""
    port, grpc_port = free_ports(2)
    async with gateway_process(redis, port, grpc_port, 1024) as (url, process):
        await eventually(lambda: answers(url))
        gateway = psutil.Process(process.pid)
        await eventually(lambda: bool(gateway.children(recursive=True)))  # the helper processes
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (gateway.num_fds() + 2, 1024))
        connections = await asyncio.gather(*(connected(port, used=False) for _ in range(IDLE)))
        connections += await asyncio.gather(*(connected(grpc_port, used=False) for _ in range(20)))
        await eventually(lambda: gateway.num_fds() >= gateway.rlimit(resource.RLIMIT_NOFILE)[0])
        for helper in gateway.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                helper.kill()
        _, registry = await asyncio.open_connection("127.0.0.1", int(redis.url.rpartition(":")[2].partition("/")[0]))
        registry.write(b"CLIENT KILL TYPE normal SKIPME yes\r\n")
        await asyncio.sleep(SPELL_S)
        registry.close()
        assert process.returncode is None
        for _, writer in connections:
            writer.close()
        await eventually(lambda: answers(url, 5.0))
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
        await eventually(lambda: bool(gateway.children(recursive=True)))
        assert await answers(url)
        assert process.returncode is None
