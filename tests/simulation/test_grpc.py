"""Callers and handlers can rely on the same on real gRPC and on the simulated one, which must not be kinder."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import grpc
import pytest
from grpc import ChannelConnectivity, aio

from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc, worker_pb2, worker_pb2_grpc
from tests.simulation.grpc_client import Channel
from tests.simulation.grpc_server import SimulatedServer
from tests.simulation.network import NOTICE_S, SimulatedNetwork
from tests.simulation.world import Process, World

MANY = 5
Serve = Callable[[Sequence[rpc.Servicer]], Awaitable[rpc.Server]]


class AnswersById(llm_pb2_grpc.LLMServiceServicer):
    """Answers as the request_id says, and notes how its calls ended."""

    def __init__(self) -> None:
        self.endings: list[str] = []
        self.began = asyncio.Event()
        self.metadata: dict[str, str] = {}

    async def GenerateUnary(self, request: llm_pb2.GenerateUnaryRequest, context: Any) -> llm_pb2.GenerateUnaryResponse:
        self.metadata = dict(context.invocation_metadata())
        match request.generate.request_id:
            case "refuse":
                context.set_trailing_metadata((("retry-after", "3"),))
                raise rpc.Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
            case "break":
                raise KeyError("a bug")
            case "wait":
                await self._wait()
        return llm_pb2.GenerateUnaryResponse(request_id=request.generate.request_id)

    async def Generate(self, request: llm_pb2.GenerateRequest, context: Any) -> AsyncIterator[llm_pb2.GenerateResponse]:
        for i in range(MANY):
            yield llm_pb2.GenerateResponse(text=str(i))
        if request.request_id == "wait":
            await self._wait()
        if request.request_id == "refuse":
            raise rpc.Refused(grpc.StatusCode.ABORTED, "enough")

    async def _wait(self) -> None:
        self.began.set()
        try:
            await asyncio.sleep(30)
            self.endings.append("done")
        except asyncio.CancelledError:
            self.endings.append("cancelled")
            raise


class Works(worker_pb2_grpc.WorkerServiceServicer):
    """Releases at once what is to be aborted."""

    async def Work(
        self, requests: AsyncIterator[worker_pb2.WorkRequest], context: Any
    ) -> AsyncIterator[worker_pb2.WorkResponse]:
        async for request in requests:
            yield worker_pb2.WorkResponse(released=request.aborts)


async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for request in requests:
        yield request * 2


def add_echo(implementation: Any, server: Any) -> None:
    handlers = {"Echo": grpc.stream_stream_rpc_method_handler(implementation)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))


class GrpcPeers:
    """A decode service and channels to it."""

    answers: AnswersById
    stub: Any

    def __init__(self, serve: Serve, connect: Callable[[str], Any]) -> None:
        self._serve = serve
        self._connect = connect

    async def __aenter__(self) -> GrpcPeers:
        await self.start_server()
        self.connect()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()
        await self.nowhere.close()
        await self.server.stop(0.0)

    async def start_server(self, serve: Serve | None = None) -> None:
        self.answers = AnswersById()
        llm = rpc.Servicer("tandem.v1.LLMService", self.answers, llm_pb2_grpc.add_LLMServiceServicer_to_server)
        work = rpc.Servicer("tandem.v1.WorkerService", Works(), worker_pb2_grpc.add_WorkerServiceServicer_to_server)
        self.server = await (serve or self._serve)([llm, work, rpc.Servicer("test.Echo", echo, add_echo)])

    def connect(self) -> None:
        self.channel = self._connect(f"127.0.0.1:{self.server.port}")
        self.nowhere = self._connect("127.0.0.1:1")
        self.stub = llm_pb2_grpc.LLMServiceStub(self.channel)

    def ask(self, request_id: str, **options: Any) -> Any:
        asked = llm_pb2.GenerateRequest(request_id=request_id)
        return self.stub.GenerateUnary(llm_pb2.GenerateUnaryRequest(generate=asked), **options)

    def stream(self, request_id: str) -> Any:
        return self.stub.Generate(llm_pb2.GenerateRequest(request_id=request_id))

    async def cancelled(self) -> None:
        async with asyncio.timeout(5):
            while not self.answers.endings:
                await asyncio.sleep(0.01)
        assert self.answers.endings == ["cancelled"]


Scenario = Callable[[GrpcPeers], Awaitable[None]]
SCENARIOS: list[Scenario] = []


def scenario(function: Scenario) -> Scenario:
    SCENARIOS.append(function)
    return function


@scenario
async def unary(peers: GrpcPeers) -> None:
    call = peers.ask("a", timeout=5, metadata=(("traceparent", "x"),))
    assert (await call).request_id == "a"
    assert peers.answers.metadata["traceparent"] == "x"
    assert await call.code() is grpc.StatusCode.OK


@scenario
async def refusal_with_trailers(peers: GrpcPeers) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await peers.ask("refuse", timeout=5)
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    assert dict(caught.value.trailing_metadata() or ())["retry-after"] == "3"


@scenario
async def a_bug_is_internal(peers: GrpcPeers) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await peers.ask("break", timeout=5)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


@scenario
async def deadline(peers: GrpcPeers) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await peers.ask("wait", timeout=0.3)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await peers.cancelled()


@scenario
async def cancelled_caller(peers: GrpcPeers) -> None:
    async def call() -> None:
        await peers.ask("wait", timeout=10)

    task = asyncio.create_task(call())
    await peers.answers.began.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await peers.cancelled()


@scenario
async def cancelled_call(peers: GrpcPeers) -> None:
    call = peers.ask("wait", timeout=10)
    await peers.answers.began.wait()
    assert call.cancel()
    assert not call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    await peers.cancelled()


@scenario
async def stream(peers: GrpcPeers) -> None:
    assert [message.text async for message in peers.stream("all")] == [str(i) for i in range(MANY)]


@scenario
async def stream_that_is_refused(peers: GrpcPeers) -> None:
    call = peers.stream("refuse")
    for _ in range(MANY):
        await call.read()
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.ABORTED, "enough")


@scenario
async def stream_that_is_cancelled(peers: GrpcPeers) -> None:
    call = peers.stream("wait")

    async def read_all() -> None:
        async for _ in call:
            pass

    reader = asyncio.create_task(read_all())
    await peers.answers.began.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await peers.cancelled()


@scenario
async def read_one_by_one(peers: GrpcPeers) -> None:
    call = peers.stream("all")
    for i in range(MANY):
        assert (await call.read()).text == str(i)
    assert await call.read() is aio.EOF


@scenario
async def both_ways(peers: GrpcPeers) -> None:
    call = peers.channel.stream_stream("/test.Echo/Echo")()
    for request in (b"a", b"b" * 100_000):  # the second is larger than a stream's window
        await call.write(request)
        assert await call.read() == request * 2
    await call.done_writing()
    assert await call.read() is aio.EOF
    assert await call.code() is grpc.StatusCode.OK


@scenario
async def both_ways_within_the_cluster(peers: GrpcPeers) -> None:
    stub: Any = worker_pb2_grpc.WorkerServiceStub(peers.channel)
    call = stub.Work()
    for request_id in ("a", "b"):
        await call.write(worker_pb2.WorkRequest(aborts=[request_id]))
        assert (await call.read()).released == [request_id]
    await call.done_writing()
    assert await call.read() is aio.EOF


@scenario
async def what_is_no_message_ends_the_stream(peers: GrpcPeers) -> None:
    call = peers.channel.stream_stream("/tandem.v1.WorkerService/Work")()
    await call.write(b"\xff")
    with pytest.raises(aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@scenario
async def iterated_requests(peers: GrpcPeers) -> None:
    async def requests() -> AsyncIterator[bytes]:
        for request in (b"a", b"b"):
            yield request

    call = peers.channel.stream_stream("/test.Echo/Echo")(requests())
    assert [response async for response in call] == [b"aa", b"bb"]


@scenario
async def nobody_there(peers: GrpcPeers) -> None:
    stub: Any = llm_pb2_grpc.LLMServiceStub(peers.nowhere)
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.ListModels(llm_pb2.ListModelsRequest(), timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    with pytest.raises(aio.AioRpcError) as caught:
        await stub.ListModels(llm_pb2.ListModelsRequest(), timeout=0.5, wait_for_ready=True)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


@scenario
async def unknown_method(peers: GrpcPeers) -> None:
    with pytest.raises(aio.AioRpcError) as caught:
        await peers.stub.ListModels(llm_pb2.ListModelsRequest(), timeout=5)  # the generated base class refuses it
    assert caught.value.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INTERNAL)


@scenario
async def states(peers: GrpcPeers) -> None:
    assert peers.channel.get_state() is ChannelConnectivity.IDLE
    state = peers.channel.get_state(try_to_connect=True)
    while state is not ChannelConnectivity.READY:
        await peers.channel.wait_for_state_change(state)
        state = peers.channel.get_state(try_to_connect=True)
    await peers.server.stop(0.0)
    await peers.channel.wait_for_state_change(ChannelConnectivity.READY)
    assert peers.channel.get_state() is not ChannelConnectivity.READY


@scenario
async def server_that_stops(peers: GrpcPeers) -> None:
    call = peers.ask("wait", timeout=10)
    await peers.answers.began.wait()
    await peers.server.stop(0.1)
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
    await peers.cancelled()


@scenario
async def closed_channel(peers: GrpcPeers) -> None:
    call = peers.ask("wait", timeout=10)
    await peers.answers.began.wait()
    await peers.channel.close()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(aio.UsageError):
        await peers.ask("a", timeout=1)
    await peers.cancelled()


@pytest.mark.parametrize("played", SCENARIOS, ids=lambda s: s.__name__)
async def test_real(played: Scenario) -> None:
    async with GrpcPeers(lambda servicers: rpc.serve(servicers, "127.0.0.1", 0), rpc.channel) as peers:
        await played(peers)


@pytest.mark.parametrize("played", SCENARIOS, ids=lambda s: s.__name__)
def test_simulated(played: Scenario) -> None:
    with World(1) as world:
        network, process = SimulatedNetwork(world), world.process("both")

        async def play() -> None:
            serve, connect = simulated(network, process), partial(Channel, network, process)
            async with GrpcPeers(serve, connect) as peers:
                await played(peers)

        world.run(process, play())
        assert world.errors == []


def simulated(network: SimulatedNetwork, process: Process) -> Serve:
    def make_server(options: object, interceptors: list[Any]) -> Any:
        return SimulatedServer(network, process, interceptors)

    return lambda servicers: rpc.serve(servicers, "127.0.0.1", 7000, make_server=make_server)


# --- what only a simulated network can be asked to do ---

Fault = Callable[[SimulatedNetwork, Process, Process], None]
FAULTS: dict[str, Fault] = {
    "kill": lambda network, client, server: server.kill(),
    "pause": lambda network, client, server: server.pause(),
    "cut": lambda network, client, server: network.cut(client, server),
    "half-open": lambda network, client, server: network.between(client, server)[0].blackhole(client),
    "reset": lambda network, client, server: network.between(client, server)[0].reset("connection reset by peer"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_both_sides_notice_a_fault_and_calls_reach_the_next_server(fault: str) -> None:
    with World(1) as world:
        network, first, second, client = (
            SimulatedNetwork(world),
            *(world.process(name) for name in ("first", "second", "client")),
        )
        peers = GrpcPeers(simulated(network, first), partial(Channel, network, client))
        world.run(first, peers.start_server())

        async def play() -> None:
            peers.connect()
            call = peers.ask("wait", timeout=20)
            await asyncio.sleep(0.5)
            FAULTS[fault](network, client, first)
            began = client.time()
            with pytest.raises(aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
            assert client.time() - began < NOTICE_S[1] + 0.1
            await asyncio.sleep(NOTICE_S[1])
            first.resume()
            await asyncio.sleep(0.1)
            assert peers.answers.endings == ([] if fault == "kill" else ["cancelled"])
            first.kill()
            second.spawn(peers.start_server(simulated(network, second)))
            network.mend(client, first)
            assert (await peers.ask("a", timeout=5, wait_for_ready=True)).request_id == "a"

        world.run(client, play())
        assert world.errors == []


def test_messages_arrive_late_and_in_order() -> None:
    with World(1) as world:
        network, server, client = SimulatedNetwork(world), world.process("server"), world.process("client")
        peers = GrpcPeers(simulated(network, server), partial(Channel, network, client))
        world.run(server, peers.start_server())

        async def play() -> None:
            peers.connect()
            await peers.ask("a", timeout=5)
            network.between(client, server)[0].hold(3.0)
            began = client.time()
            got = [message.text async for message in peers.stream("all")]
            assert got == [str(i) for i in range(MANY)]
            assert client.time() - began > 3.0

        world.run(client, play())
