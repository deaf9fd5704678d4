"""A worker built inside this process, on a thread that is not the main one: real Redis, gRPC and KV sockets."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.commands.doctor import DoctorSettings, examine
from tandem.engine import Engine, Request, SamplingParams
from tandem.local import RedisServer
from tandem.registry import Registry
from tandem.worker import EngineStuck, Worker, WorkerContext, WorkerService, WorkerSettings, process_ports
from tests.registry.cluster import eventually

Build = Callable[[WorkerContext], WorkerService]


@asynccontextmanager
async def running(settings: WorkerSettings, build: Build) -> AsyncIterator[Worker]:
    """Runs it on a loop of its own, on a thread of its own; stops it in the end and raises what it ended with."""
    made = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()

    async def live() -> None:
        ports = process_ports(settings, Engine(settings.engine_config()))
        worker = Worker(settings, settings.worker_id, build, ports)
        here.call_soon_threadsafe(made.set_result, (worker, asyncio.get_running_loop()))
        await worker.run()

    def run() -> None:
        assert threading.current_thread() is not threading.main_thread()
        asyncio.run(live())

    ended = asyncio.create_task(asyncio.to_thread(run))
    try:
        async with asyncio.timeout(60):
            await asyncio.wait({made, ended}, return_when=asyncio.FIRST_COMPLETED)
        worker, loop = made.result()
        yield worker
        loop.call_soon_threadsafe(worker.stop)
    finally:
        async with asyncio.timeout(60):
            await ended


@pytest.mark.parametrize(
    ("settings", "build"), [(DecodeSettings, DecodeWorker), (PrefillSettings, PrefillWorker)], ids=["decode", "prefill"]
)
async def test_a_worker_lives_in_any_thread_and_registers_in_its_namespace(
    demo_model: Path, settings: type[WorkerSettings], build: Build
) -> None:
    with RedisServer.start() as redis:
        ours, others = (
            Registry.connect(redis.url, namespace="ours", timeout=30.0),
            Registry.connect(redis.url, timeout=30.0),
        )
        chosen = settings(
            model_path=demo_model, redis_url=redis.url, namespace="ours", worker_id="w0", engine="null", num_blocks=16
        )

        async def registered() -> bool:
            return [worker.info.worker_id for worker in await ours.workers()] == ["w0"]

        async with running(chosen, build):
            await eventually(registered, "it is in its namespace")
            assert not await others.workers()
        assert not await ours.workers()
        await ours.close()
        await others.close()


async def test_a_stuck_step_ends_the_worker_with_its_reason(demo_model: Path) -> None:
    """Its lease is released and its sequence handed over at once, though the engine answers nothing any more."""
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        settings = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16,
            null_decode_step_s=4, null_prefill_tokens_per_s=1e6, max_step_s=0.3,
        )  # fmt: skip

        async def gone() -> bool:
            return not await registry.workers()

        async def live() -> None:
            async with running(settings, DecodeWorker) as worker:
                while not worker.ready.is_set():
                    await asyncio.sleep(0.01)
                request = Request("stuck", [1, 2, 3], SamplingParams(max_tokens=4))
                await asyncio.wrap_future(worker.context.ports.engine.submit(lambda engine: engine.add(request)))
                await eventually(gone, "its lease is released")

        with pytest.raises(EngineStuck, match="max_step_s"):
            await live()
        await registry.close()


async def test_a_stuck_transfer_ends_the_worker_with_its_reason(demo_model: Path) -> None:
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        settings = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16
        )

        async def gone() -> bool:
            return not await registry.workers()

        async def live() -> None:
            async with running(settings, DecodeWorker) as worker:
                while not worker.ready.is_set():
                    await asyncio.sleep(0.01)
                service = worker._service
                assert isinstance(service, DecodeWorker)
                sequences = service._sequences
                sequences._loop.call_soon_threadsafe(sequences.stuck.set_result, "transfer t1 is still being written")
                await eventually(gone, "its lease is released")

        with pytest.raises(RuntimeError, match="transfer t1 is still being written"):
            await live()
        await registry.close()


async def test_a_sequence_that_no_request_accounts_for_is_named(demo_model: Path) -> None:
    with RedisServer.start() as redis:
        settings = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16
        )
        doctor = DoctorSettings(redis_url=redis.url, integrity=True)

        async def findings() -> list[tuple[bool, str]]:
            found = [finding for finding in await examine(doctor) if finding.what == "w0, integrity"]
            return [(finding.good, finding.detail) for finding in found]

        async with running(settings, DecodeWorker) as worker:
            while not worker.ready.is_set():
                await asyncio.sleep(0.01)
            assert await findings() == [(True, "0 blocks, 0 kv_links, 0 sequences, 0 transfers")]
            request, engine = Request("lost", [1] * 20, SamplingParams(max_tokens=4)), worker.context.ports.engine
            await asyncio.wrap_future(engine.submit(lambda engine: engine.reserve(request)))
            held = "2 blocks, 0 kv_links, 1 sequences, 0 transfers"
            assert await findings() == [(False, f"{held}; lost: in the engine, but no request's")]
