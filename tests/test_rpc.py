"""A peer that stands still is noticed, by either side; one that stops says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import pytest

from tandem import rpc
from tandem.liveness import INTERVAL_S, Liveness
from tandem.v1 import llm_pb2, llm_pb2_grpc, worker_pb2_grpc
from tests.stalls import running_time

DETECT_S = 2.0
BOUND_S = 30.0  # by far longer than it takes; the server's only call lasts longer than that

# A server whose only stream says one word and then nothing; it prints when that stream is cancelled under it.
SERVER = """
import asyncio, time
from tandem import rpc
from tandem.v1 import worker_pb2, worker_pb2_grpc

class Silent(worker_pb2_grpc.WorkerServiceServicer):
    async def Work(self, requests, context):
        yield worker_pb2.WorkResponse(incarnation="only")
        try:
            await asyncio.sleep(600)
        finally:
            print("lost", flush=True)

async def main():
    add = worker_pb2_grpc.add_WorkerServiceServicer_to_server
    server = await rpc.serve([rpc.Servicer("tandem.v1.WorkerService", Silent(), add)], "127.0.0.1", 0)
    print(server.port, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from tandem import rpc
from tandem.v1 import worker_pb2, worker_pb2_grpc

async def main():
    channel = rpc.channel("127.0.0.1:" + sys.argv[1])
    async for _ in worker_pb2_grpc.WorkerServiceStub(channel).Work():
        print("open", flush=True)

asyncio.run(main())
"""


@contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        yield child
    finally:
        child.kill()
        child.wait()
        assert child.stdout
        child.stdout.close()


def line(child: subprocess.Popen[str]) -> str:
    assert child.stdout
    return child.stdout.readline().strip()


def test_silence_is_noticed_in_under_two_seconds() -> None:
    """On gRPC's connections and on KV links, by what they are set to; how real ones do it is tested below."""
    options = dict(rpc.KEEPALIVE)
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] < 1000 * DETECT_S
    liveness = Liveness(0.0)
    assert any(liveness.lost(look * INTERVAL_S) for look in range(1, int(DETECT_S / INTERVAL_S)))
    assert set(rpc.KEEPALIVE) <= {*rpc.SERVER_OPTIONS} & {*rpc.CHANNEL_OPTIONS}


async def test_a_stopped_server_is_noticed_by_its_client() -> None:
    with python(SERVER) as server:
        channel = rpc.channel(f"127.0.0.1:{line(server)}")
        stream: Any = worker_pb2_grpc.WorkerServiceStub(channel).Work()  # type: ignore[call-arg]
        first = await asyncio.wait_for(anext(aiter(stream)), BOUND_S)
        assert first.incarnation == "only"
        os.kill(server.pid, signal.SIGSTOP)
        with running_time() as clock:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await asyncio.wait_for(anext(aiter(stream)), BOUND_S)
            assert clock.ran_s < DETECT_S
        assert error.value.code() is grpc.StatusCode.UNAVAILABLE
        await channel.close(None)


def test_a_stopped_client_is_noticed_by_its_server() -> None:
    with python(SERVER) as server, python(CLIENT, line(server)) as client:
        assert line(client) == "open"
        os.kill(client.pid, signal.SIGSTOP)
        assert line(server) == "lost"


class Models(llm_pb2_grpc.LLMServiceServicer):
    async def ListModels(self, request: Any, context: Any) -> llm_pb2.ListModelsResponse:
        await asyncio.sleep(0.005)
        return llm_pb2.ListModelsResponse()


async def test_calls_that_come_as_a_server_stops_are_unavailable() -> None:
    """All of them, those included that gRPC has received and would end as CANCELLED."""
    servicer = rpc.Servicer("tandem.v1.LLMService", Models(), llm_pb2_grpc.add_LLMServiceServicer_to_server)
    server = await rpc.serve([servicer], "127.0.0.1", 0)
    ends, answered = list[grpc.StatusCode](), 0

    async def call(stub: Any) -> None:
        nonlocal answered
        try:
            while True:
                await stub.ListModels(llm_pb2.ListModelsRequest(), timeout=60)
                answered += 1
        except grpc.aio.AioRpcError as error:
            ends.append(error.code())

    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        callers = [asyncio.create_task(call(stub)) for _ in range(40)]
        while answered < 100:
            await asyncio.sleep(0.01)
        await server.stop(2.0)
        await asyncio.gather(*callers)
    assert set(ends) == {grpc.StatusCode.UNAVAILABLE}
