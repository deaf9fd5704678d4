"""Open-loop load over gRPC: each request at its own time, its tokens stamped as they come.

request -> its gateway's Generate stream -> Replayed: when each token came, what was cached, which way it went
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle

from grpc import aio

from benchmarks.results import Arrival, TimedAnswer
from benchmarks.traffic.mooncake import TraceRequest
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc

TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Replayed:
    """One request's end: its answer, or the error it ended with."""

    request: TraceRequest
    answer: TimedAnswer | None
    cached_tokens: int = 0
    remote: bool = False
    error: str = ""


async def replay(
    requests: Sequence[TraceRequest], addresses: Sequence[str], model: str, salt: str = ""
) -> list[Replayed]:
    """Sends each request at its time, gateways taking turns; returns them in order when the last has ended.

    What was cached under another `salt` is not found.
    """
    channels = [aio.insecure_channel(address, rpc.CHANNEL_OPTIONS) for address in addresses]
    stubs = [llm_pb2_grpc.LLMServiceStub(channel) for channel in channels]
    try:
        return await replay_through(requests, stubs, model, salt)
    finally:
        for channel in channels:
            await channel.close(None)


async def replay_through(
    requests: Sequence[TraceRequest], stubs: Sequence[llm_pb2_grpc.LLMServiceAsyncStub], model: str, salt: str,
    now: Callable[[], float] = time.perf_counter,
) -> list[Replayed]:  # fmt: skip
    """As `replay`; `now` is the clock that the event loop sleeps by."""
    start, turns, tasks = now(), cycle(stubs), list[asyncio.Task[Replayed]]()
    for request in requests:
        await asyncio.sleep(max(0.0, start + request.at - now()))
        tasks.append(asyncio.create_task(_send(request, next(turns), model, salt, now)))
    return await asyncio.gather(*tasks)


async def _send(
    request: TraceRequest, stub: llm_pb2_grpc.LLMServiceAsyncStub, model: str, salt: str, now: Callable[[], float]
) -> Replayed:
    message = llm_pb2.GenerateRequest(
        model=model,
        token_ids=llm_pb2.TokenIds(ids=request.prompt()),
        sampling=llm_pb2.SamplingParams(max_tokens=request.max_tokens, temperature=0, ignore_eos=True),
        cache_salt=salt,
    )
    sent, arrivals, response = now(), list[Arrival](), llm_pb2.GenerateResponse()
    try:
        async for response in stub.Generate(message, timeout=TIMEOUT_S):
            if response.token_ids:
                arrivals.append(Arrival(now(), len(response.token_ids)))
    except aio.AioRpcError as error:
        return Replayed(request, None, error=f"{error.code().name}: {error.details()}")
    answer = TimedAnswer(sent, tuple(arrivals), request.prompt_tokens)
    remote = response.path.kind == llm_pb2.Path.KIND_REMOTE_PREFILL
    return Replayed(request, answer, response.usage.cached_tokens, remote)
