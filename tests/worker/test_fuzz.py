"""Anything at all at the gRPC ports of workers and kvstore: refusals that say why, and nothing is held afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from grpc import aio
from hypothesis import strategies as st

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.local import RedisServer
from tandem.registry import Registry, WorkerInfo
from tandem.v1 import prefill_pb2, process_pb2, worker_pb2
from tests.fuzzing import collected
from tests.registry.cluster import eventually
from tests.worker.test_build import running

EXAMPLES = 30  # of each method
# What the client did wrong, or its own deadline. A ticket may name an address where nobody is: UNAVAILABLE.
ITS_FAULT = {
    grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.ALREADY_EXISTS, grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.ABORTED, grpc.StatusCode.CANCELLED,
}  # fmt: skip
SCALARS: dict[int, st.SearchStrategy[Any]] = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: st.sampled_from(["", "x", "127.0.0.1:1", "a" * 5000]) | st.text(max_size=8),
    FieldDescriptor.TYPE_BYTES: st.binary(max_size=40),
    FieldDescriptor.TYPE_FLOAT: st.floats(width=32),
    FieldDescriptor.TYPE_DOUBLE: st.floats(),
    FieldDescriptor.TYPE_ENUM: st.integers(-2, 5),
    FieldDescriptor.TYPE_INT32: st.sampled_from([0, 1, -1, 7, 2**31 - 1, -(2**31)]),
    FieldDescriptor.TYPE_INT64: st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63)]),
    FieldDescriptor.TYPE_UINT32: st.sampled_from([0, 1, 2, 16, 17, 100, 500, 2**31, 2**32 - 1]),
    FieldDescriptor.TYPE_UINT64: st.sampled_from([0, 1, 2**64 - 1]),
}
METHODS: Sequence[MethodDescriptor] = [
    method
    for service in (
        worker_pb2.DESCRIPTOR.services_by_name["WorkerService"],
        prefill_pb2.DESCRIPTOR.services_by_name["PrefillService"],
        process_pb2.DESCRIPTOR.services_by_name["IntegrityService"],
        worker_pb2.DESCRIPTOR.services_by_name["AdapterService"],
        worker_pb2.DESCRIPTOR.services_by_name["CacheService"],
    )
    for method in service.methods
]
Known = Mapping[str, Sequence[Any]]


@st.composite
def messages(draw: st.DrawFn, kind: Descriptor, known: Known) -> Any:
    """Any message of a kind; fields that `known` names are often one of those values, so that some get further."""
    made = message_factory.GetMessageClass(kind)()
    for found in kind.fields:
        if found.name in known and draw(st.integers(0, 9)) < 9:
            _put(made, found, draw(st.sampled_from(known[found.name])))
        elif draw(st.integers(0, 24)) < (20 if found.message_type else 1):
            _put(made, found, draw(_values(found, known)))
    return made


def _values(found: FieldDescriptor, known: Known) -> st.SearchStrategy[Any]:
    kind = found.message_type
    if kind is not None and kind.GetOptions().map_entry:
        key, value = (SCALARS[kind.fields_by_name[name].type] for name in ("key", "value"))
        return st.dictionaries(key, value, max_size=3)
    if kind is None:
        return st.lists(SCALARS[found.type], max_size=40) if found.is_repeated else SCALARS[found.type]
    return st.lists(messages(kind, known), max_size=4) if found.is_repeated else messages(kind, known)


def _put(made: Any, found: FieldDescriptor, value: Any) -> None:
    if isinstance(value, dict):
        getattr(made, found.name).update(value)
    elif found.is_repeated:
        getattr(made, found.name).extend(value)
    elif found.message_type is not None:
        getattr(made, found.name).CopyFrom(value)
    else:
        setattr(made, found.name, value)


@st.composite
def bytes_for(draw: st.DrawFn, method: MethodDescriptor, known: Known) -> bytes:
    """A message, perhaps with some bytes that are others; or no message at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=60))
    data = bytearray(draw(messages(method.input_type, known)).SerializeToString())
    for _ in range(draw(st.integers(0, 2)) if data else 0):
        data[draw(st.integers(0, len(data) - 1))] = draw(st.integers(0, 255))
    return bytes(data)


def known(d0: WorkerInfo, p0: WorkerInfo, model: Path) -> dict[str, list[Any]]:
    """Values of fields with which a message gets further."""
    return {
        "decode_incarnation": [d0.incarnation],
        "prefill_incarnation": ["", p0.incarnation],
        "decode_worker": ["d0"],
        "transfer_address": [d0.transfer_address, "127.0.0.1:1"],
        "kv_layout_hash": [d0.layout_hash],
        "request_id": [f"r{i}" for i in range(50)],
        "aborts": [[], [f"r{i}" for i in range(50)]],
        "token_ids": [[5] * 20, [5] * 500, [7]],
        "num_prompt_blocks": [2, 1, 32],
        "num_cached_blocks": [0, 1],
        "max_tokens": [4, 400, 1],
        "timeout_ms": [300, 1000],
        "seed": [1],
        "path": [str(model), "/", "/proc/self/mem"],
    }


@pytest.fixture
async def ports(demo_model: Path) -> AsyncIterator[dict[str, Any]]:
    """Address by service name; and, as "known", values with which a message gets further."""
    async with AsyncExitStack() as stack:
        redis = stack.enter_context(RedisServer.start())
        shared = {"model_path": demo_model, "redis_url": redis.url, "engine": "null", "num_blocks": 256}
        decode = await stack.enter_async_context(running(DecodeSettings(worker_id="d0", **shared), DecodeWorker))
        prefill = await stack.enter_async_context(running(PrefillSettings(worker_id="p0", **shared), PrefillWorker))
        registry = Registry.connect(redis.url, timeout=30.0)
        stack.push_async_callback(registry.close)

        async def linked() -> bool:
            return decode.ready.is_set() and any(w.load.linked for w in await registry.workers())

        await eventually(linked, "a link is open")
        infos = {worker.info.worker_id: worker.info for worker in await registry.workers()}
        yield {
            "tandem.v1.WorkerService": [decode.address, prefill.address],
            "tandem.v1.PrefillService": [prefill.address],
            "tandem.v1.IntegrityService": [decode.address, prefill.address],
            "tandem.v1.AdapterService": [decode.address, prefill.address],
            "tandem.v1.CacheService": [decode.address, prefill.address],
            "known": known(infos["d0"], infos["p0"], demo_model),
        }


async def answered(
    channel: aio.Channel, method: MethodDescriptor, data: bytes, within_s: float = 0.5
) -> grpc.StatusCode:  # fmt: skip
    """Returns the status of a call; OK of a stream that has not ended within this time."""
    name = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.client_streaming:
            await heard(channel, name, data, within_s)
        else:
            await channel.unary_unary(name, None, None)(data, timeout=30.0)
    except aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def heard(channel: aio.Channel, name: str, data: bytes, within_s: float = 0.5) -> list[worker_pb2.WorkResponse]:
    """A worker's answers to one message, in this time or until the answer to one entry."""
    begin: Any = channel.stream_stream(name, None, None)
    call = begin()
    said: list[worker_pb2.WorkResponse] = []
    try:
        async with asyncio.timeout(within_s):
            await call.write(data)
            while len(said) < 2 and (message := await call.read()) is not aio.EOF:
                said.append(worker_pb2.WorkResponse.FromString(message))
    except TimeoutError:
        pass
    finally:
        call.cancel()
    return said


async def test_messages_at_the_workers_ports(ports: dict[str, Any]) -> None:
    async def linked_both_ways() -> bool:
        return all(worker["kv_links"] == 2 for worker in await held(ports))

    await eventually(linked_both_ways, "each worker has its link to the other")
    before = await held(ports)
    for method in METHODS:
        examples = collected(bytes_for(method, ports["known"]), EXAMPLES)
        for address in ports[method.containing_service.full_name]:
            async with aio.insecure_channel(address) as channel:
                codes = await asyncio.gather(*(answered(channel, method, data) for data in examples))
                malformed = await answered(channel, method, b"\xff", within_s=30.0)
                assert malformed is grpc.StatusCode.INVALID_ARGUMENT
            assert [(data, code) for data, code in zip(examples, codes, strict=True) if code not in ITS_FAULT] == []
    sequence = worker_pb2.SequenceSpec(request_id="good", timeout_ms=60_000, token_ids=[5] * 20)
    sequence.sampling.max_tokens = 4
    good = worker_pb2.WorkRequest(reservations=[worker_pb2.Reservation(sequence=sequence)])
    decode, _ = ports["tandem.v1.WorkerService"]
    async with aio.insecure_channel(decode) as channel:
        _, answer = await heard(channel, "/tandem.v1.WorkerService/Work", good.SerializeToString(), 60.0)
        assert [reserved.request_id for reserved in answer.reserved] == ["good"]

    async def as_before() -> bool:
        return await held(ports) == before

    try:
        await eventually(as_before, "all that was held is released")
    except AssertionError as error:
        raise AssertionError(f"{error}: {await held(ports)} where there was {before}") from None


async def held(ports: dict[str, Any]) -> list[dict[str, int]]:
    """By both workers; nothing that no request accounts for."""
    found = []
    for address in ports["tandem.v1.WorkerService"]:
        async with aio.insecure_channel(address) as channel:
            call: Any = channel.unary_unary("/tandem.v1.IntegrityService/CheckIntegrity", None, None)
            said = process_pb2.CheckIntegrityResponse.FromString(await call(b"", timeout=30.0))
        assert not said.violations
        found.append(dict(said.held))
    return found
