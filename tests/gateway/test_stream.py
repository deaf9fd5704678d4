"""A worker's stream that nobody is there to open."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from grpc import aio

from services.gateway.errors import WorkerLost
from services.gateway.workers.stream import Judge, WorkerStream
from tandem.liveness import MOST_S
from tandem.local import free_ports
from tandem.registry import Role, WorkerInfo
from tandem.v1 import worker_pb2_grpc


@pytest.mark.parametrize("gone", ["", "it is gone"], ids=["refused", "gone, says the kernel"])
async def test_who_waits_for_a_process_that_has_ended_is_told_however_starved_the_gateway(gone: str) -> None:
    port = free_ports(1)[0]
    address = f"127.0.0.1:{port}" if not gone else "192.0.2.1:9"  # where nothing answers at all
    info = WorkerInfo(
        worker_id="p1", role=Role.PREFILL, incarnation="i", grpc_address=address, transfer_address="", model="m",
        revision="r", layout_hash="l", block_size=16, num_blocks=8, max_num_seqs=8, max_model_len=128, transports=(),
        host="h",
    )  # fmt: skip
    judge = Judge(starvation=lambda: MOST_S, is_sole=lambda _: False, dead_here=lambda _: gone)
    async with aio.insecure_channel(address) as channel:
        service: Any = worker_pb2_grpc.WorkerServiceStub(channel)
        stream = WorkerStream(info, lambda anew: service.Work(), judge)
        running = asyncio.create_task(stream.run())
        now = asyncio.get_running_loop().time
        async with asyncio.timeout(10):
            await stream.wait_open(now() + 60)
        with pytest.raises(WorkerLost, match="not open"):
            stream.attach("r")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
