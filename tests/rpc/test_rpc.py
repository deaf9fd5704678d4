"""A peer that stands still is noticed, by either side; one that stops says so."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import grpc
import pytest

from services.gateway.errors import GatewayError
from services.gateway.workers import Judge, WorkerConnection
from tandem import rpc
from tandem.liveness import same_host
from tandem.liveness.silence import INTERVAL_S, MOST_S, Liveness
from tandem.registry import Role, WorkerInfo
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.stalls import running_time

DETECT_S = 2.0
BOUND_S = 30.0  # by far longer than it takes; the server's only call lasts longer than that

# A worker whose streams say nothing but that they live, or write all they can; it prints when one has ended under it.
SERVER = """
import asyncio, sys
from tandem import rpc
from tandem.liveness.same_host import this_process
from tandem.v1 import worker_pb2
from tandem.worker import Streams, SuspectTurns, WorkService

async def nothing(*_): ...

async def write(streams):
    while True:
        if streams.is_open("stream") and not streams._outboxes["stream"].prefilled:
            streams.prefilled("stream", worker_pb2.Prefilled(transport="x" * 2**17))
        await asyncio.sleep(0.001)

async def main():
    streams = Streams("only", lambda stream_id: print("lost", flush=True))
    service = WorkService(streams, lambda: "stream", nothing, nothing, SuspectTurns(lambda: 0))
    server = await rpc.serve([service.servicer], "127.0.0.1", 0)
    print(server.port, this_process(), flush=True)
    await (write(streams) if sys.argv[1:] else asyncio.sleep(600))

asyncio.run(main())
"""
CLIENT = """
import asyncio, sys
from tests.rpc.test_rpc import connected

async def main():
    stream = connected(sys.argv[1], "", sole=True).stream
    while True:
        await stream.open.wait()
        print("open", flush=True)
        while stream.open.is_set():
            await asyncio.sleep(0.005)
        print("closed", flush=True)

asyncio.run(main())
"""


def connected(
    port: str, process: str, dead_here: Callable[[str], str] = lambda process: "", sole: bool = False
) -> WorkerConnection:
    info = WorkerInfo(
        worker_id="w", role=Role.DECODE, incarnation="only", grpc_address=f"127.0.0.1:{port}", transfer_address="",
        model="m", revision="r", layout_hash="l", block_size=4, num_blocks=8, max_num_seqs=4, max_model_len=64,
        transports=(), host="here", process=process,
    )  # fmt: skip
    return WorkerConnection(info, rpc.channel, Judge(lambda: 0.0, lambda info: sole, dead_here))


@asynccontextmanager
async def opened(server: subprocess.Popen[str], **judged: Any) -> AsyncIterator[WorkerConnection]:
    port, _, process = line(server).partition(" ")
    connection = connected(port, process, **judged)
    try:
        await asyncio.wait_for(connection.stream.open.wait(), BOUND_S)
        await asyncio.sleep(2 * INTERVAL_S)  # pings have gone both ways
        yield connection
    finally:
        await connection.close("the test is over")


async def lost(connection: WorkerConnection) -> GatewayError:
    """The error that a request on it gets once it is given up."""
    mailbox = connection.stream.attach("r")
    with pytest.raises(GatewayError) as told:
        await asyncio.wait_for(mailbox.get(), BOUND_S)
    return told.value


@contextmanager
def python(program: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, encoding="utf-8")
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


def test_silence_is_noticed_in_under_two_seconds_and_by_grpc_only_in_the_end() -> None:
    """By what they are set to; how real ones do it is tested below."""
    liveness = Liveness(0.0)
    assert any(liveness.lost(look * INTERVAL_S) for look in range(1, int(DETECT_S / INTERVAL_S)))
    options = dict(rpc.KEEPALIVE)
    assert options["grpc.keepalive_time_ms"] + options["grpc.http2.ping_timeout_ms"] == 1000 * MOST_S
    assert set(rpc.KEEPALIVE) <= {*rpc.SERVER_OPTIONS} & {*rpc.CHANNEL_OPTIONS}


@pytest.mark.parametrize(
    ("dead_here", "why"),
    [
        (lambda _: "", "it is silent"),
        pytest.param(same_host.dead_here, "it is stopped", marks=pytest.mark.long),
    ],
)
async def test_a_stopped_worker_is_noticed_and_found_again(dead_here: Callable[[str], str], why: str) -> None:
    with python(SERVER) as server:
        async with opened(server, dead_here=dead_here) as connection:
            os.kill(server.pid, signal.SIGSTOP)
            with running_time() as clock:
                assert why in (await lost(connection)).message
                assert clock.ran_s < DETECT_S
            assert not connection.connected
            os.kill(server.pid, signal.SIGCONT)
            await asyncio.wait_for(connection.stream.open.wait(), BOUND_S)


async def test_a_stopped_worker_that_nobody_could_replace_is_waited_for() -> None:
    with python(SERVER) as server:
        async with opened(server, dead_here=same_host.dead_here, sole=True) as connection:
            mailbox = connection.stream.attach("r")
            os.kill(server.pid, signal.SIGSTOP)
            await asyncio.sleep(2 * DETECT_S)
            os.kill(server.pid, signal.SIGCONT)
            await asyncio.sleep(1.0)
            assert connection.connected
            assert mailbox.error is None
            server.kill()
            assert "its stream broke" in (await lost(connection)).message


def test_a_stopped_gateway_is_noticed_by_its_worker() -> None:
    with python(SERVER) as server, python(CLIENT, line(server).split()[0]) as client:
        assert line(client) == "open"
        time.sleep(2 * INTERVAL_S)
        os.kill(client.pid, signal.SIGSTOP)
        with running_time() as clock:
            assert "a gateway is silent" in line(server)
            assert line(server) == "lost"
            assert clock.ran_s < DETECT_S + INTERVAL_S


@pytest.mark.parametrize("writes", [False, True])
def test_a_gateway_that_stood_still_goes_on_at_once(writes: bool) -> None:
    """It hears that its stream was ended; else it would wait, for its worker lives."""
    with python(SERVER, *["writes"] * writes) as server, python(CLIENT, line(server).split()[0]) as client:
        assert line(client) == "open"
        time.sleep(2 * INTERVAL_S)
        os.kill(client.pid, signal.SIGSTOP)
        assert "a gateway is silent" in line(server)
        assert line(server) == "lost"
        os.kill(client.pid, signal.SIGCONT)
        with running_time() as clock:
            while (said := line(client)) != "closed":
                assert "silent for" in said, "logged"
            assert clock.ran_s < DETECT_S
            assert line(client) == "open"


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
