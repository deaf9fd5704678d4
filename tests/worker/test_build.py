"""A worker built inside this process, on a thread that is not the main one: real Redis, gRPC and KV sockets."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from services.decode.server import DecodeWorker
from services.decode.settings import DecodeSettings
from services.prefill.server import PrefillWorker
from services.prefill.settings import PrefillSettings
from tandem.checkpoints import text_fingerprint
from tandem.commands.doctor import DoctorSettings, examine
from tandem.engine import Engine, Request, SamplingParams, StepTime
from tandem.local import RedisServer
from tandem.process.telemetry import RecentSpans
from tandem.registry import Registry
from tandem.v1 import process_pb2, process_pb2_grpc
from tandem.worker import EngineStuck, Worker, WorkerContext, WorkerService, WorkerSettings, process_ports
from tandem.worker.life.build import LINK_CHECK_S
from tests.registry.cluster import eventually

Build = Callable[[WorkerContext], WorkerService]


@asynccontextmanager
async def running(settings: WorkerSettings, build: Build, **others: Any) -> AsyncIterator[Worker]:
    """Runs it on a loop of its own, on a thread of its own; stops it in the end and raises what it ended with."""
    made = asyncio.get_running_loop().create_future()
    here = asyncio.get_running_loop()

    async def live() -> None:
        ports = replace(process_ports(settings, Engine(settings.engine_config()), RecentSpans(), print), **others)
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
        try:
            yield worker
        finally:
            with suppress(RuntimeError):  # it has ended
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
            known = [(worker.info.worker_id, worker.info.fingerprint) for worker in await ours.workers()]
            return known == [("w0", text_fingerprint(demo_model))]

        async with running(chosen, build):
            await eventually(registered, "it is in its namespace")
            assert not await others.workers()
        assert not await ours.workers()
        await ours.close()
        await others.close()


async def test_a_worker_registers_with_the_number_of_its_ranks(demo_model: Path) -> None:
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        settings = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", tensor_parallel=2, num_blocks=16
        )

        async def registered() -> bool:
            return [worker.info.title for worker in await registry.workers()] == ["w0 (TP 2)"]

        async with running(settings, DecodeWorker):
            await eventually(registered, "it says how many ranks it has")
        await registry.close()


async def test_a_worker_follows_the_log_level_of_its_file_and_what_is_set_over_it(
    demo_model: Path, tmp_path: Path
) -> None:
    file, levels = tmp_path / "settings.json", list[str]()
    file.write_text(
        '{"max_queued": 64, "log_level": "warning"}', encoding="utf-8"
    )  # gateways' file: the first is none of a worker's

    def level_is(level: str) -> Callable[[], Awaitable[bool]]:
        async def check() -> bool:
            return levels[-1:] == [level]

        return check

    with RedisServer.start() as redis, capture_logs() as logs:
        chosen = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16, followed=file
        )
        async with running(chosen, DecodeWorker, set_log_level=levels.append) as worker:
            await eventually(level_is("warning"), "the file's")
            file.write_text('{"log_level": "error"}', encoding="utf-8")
            await eventually(level_is("error"), "the file's next")
            async with grpc.aio.insecure_channel(worker.address) as channel:
                stub: Any = process_pb2_grpc.SettingsServiceStub(channel)
                for wrong in ('{"log_level": "loud"}', '{"max_queued": 1}', "[]", "{", "[" * 9000, " " * 70_000):
                    with pytest.raises(grpc.aio.AioRpcError) as refused:
                        await stub.Override(process_pb2.OverrideRequest(settings=wrong, ttl_s=1.0), timeout=30)
                    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
                asked = process_pb2.OverrideRequest(settings='{"log_level": "debug"}', ttl_s=1.0, by="an operator")
                told = json.loads((await stub.Override(asked, timeout=30)).in_force)
            assert (told["settings"], list(told["ttl_s"])) == ({"log_level": "debug"}, ["log_level"])
            await eventually(level_is("error"), "its time is over")
    assert levels == ["warning", "error", "debug", "error"]
    changed = [(line["by"], line["changes"]["log_level"]) for line in logs if line["event"] == "settings changed"]
    by_file, by_hand, over = changed
    assert (by_file, over) == ((str(file), ["warning", "error"]), ("time is over", ["debug", "error"]))
    assert (by_hand[0].startswith("an operator, from ipv4:127.0.0.1"), by_hand[1]) == (True, ["error", "debug"])


async def test_a_stuck_step_ends_the_worker_with_its_reason(demo_model: Path) -> None:
    """Its lease is released and its sequence handed over at once, though the engine answers nothing any more."""
    slow = {"null_step": StepTime(decode_step_s=4, prefill_tokens_per_s=1e6), "max_step_s": 0.3}

    async def stick(worker: Worker) -> None:
        request = Request("stuck", [1, 2, 3], SamplingParams(max_tokens=4))
        await worker.context.ports.engine.call(lambda engine: engine.add(request))

    with pytest.raises(EngineStuck, match="max_step_s"):
        await lease_released(demo_model, stick, **slow)


@pytest.mark.parametrize("pressure", [0.0, 20.0], ids=["quiet", "starved"])
async def test_a_worker_says_when_it_is_stuck_and_when_no_longer(demo_model: Path, pressure: float) -> None:
    """A step of 3 s after ones of a few milliseconds; on a machine that starves everyone that may be what it takes."""
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        chosen = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16,
            null_step=StepTime(decode_step_s=3, prefill_tokens_per_s=1e6), max_step_s=1 if pressure else 60,
        )  # fmt: skip

        async def stuck() -> bool:
            return [worker.load.stuck for worker in await registry.workers()] == [True]

        async def well() -> bool:
            return [worker.load.stuck for worker in await registry.workers()] == [False]

        async with running(chosen, DecodeWorker, pressure=lambda seconds: pressure) as worker:
            await eventually(well, "it is registered")
            await asyncio.sleep(0.5)  # it knows its pressure
            request = Request("slow", [1, 2, 3], SamplingParams(max_tokens=2))
            await worker.context.ports.engine.call(lambda engine: engine.add(request))
            if pressure:
                while worker.context.ports.engine.stats.num_written_tokens == 0:
                    assert await well()
                    await asyncio.sleep(0.1)
            else:
                await eventually(stuck, "it is stuck")
                assert worker.context.ports.engine.stats.num_written_tokens == 0
            await eventually(well, "its step has ended")
        await registry.close()


async def test_a_stuck_transfer_ends_the_worker_with_its_reason(demo_model: Path) -> None:
    async def stick(worker: Worker) -> None:
        service = worker._service
        assert isinstance(service, DecodeWorker)
        sequences = service._sequences
        sequences._loop.call_soon_threadsafe(sequences.stuck.set_result, "transfer t1 is still being written")

    with pytest.raises(RuntimeError, match="transfer t1 is still being written"):
        await lease_released(demo_model, stick)


async def lease_released(demo_model: Path, stick: Callable[[Worker], Awaitable[None]], **settings: Any) -> None:
    """Until a decode worker that was ready and is made to stick is out of the registry; raises what it ended with."""
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        chosen = DecodeSettings(
            model_path=demo_model, redis_url=redis.url, worker_id="w0", engine="null", num_blocks=16, **settings
        )

        async def gone() -> bool:
            return not await registry.workers()

        try:
            async with running(chosen, DecodeWorker) as worker:
                while not worker.ready.is_set():
                    await asyncio.sleep(0.01)
                await stick(worker)
                await eventually(gone, "its lease is released")
        finally:
            await registry.close()


async def test_where_links_are_asked_for_a_worker_is_healthy_once_a_block_has_moved_and_no_earlier(
    demo_model: Path,
) -> None:
    with RedisServer.start() as redis:
        registry = Registry.connect(redis.url, timeout=30.0)
        chosen = {
            "model_path": demo_model, "redis_url": redis.url, "engine": "null", "num_blocks": 16, "ready_when": "linked"
        }  # fmt: skip

        async def registered() -> bool:
            return len(await registry.workers()) == 1

        async with running(DecodeSettings(worker_id="d", **chosen), DecodeWorker) as decode:
            await eventually(registered, "it has its lease")
            await asyncio.sleep(3 * LINK_CHECK_S)
            assert not await healthy(decode)
            async with running(PrefillSettings(worker_id="p", **chosen), PrefillWorker) as prefill:
                for worker in (decode, prefill):
                    await eventually(partial(healthy, worker), "it is linked")
        await registry.close()


async def healthy(worker: Worker) -> bool:
    async with grpc.aio.insecure_channel(worker.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


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
            assert await findings() == [(True, "0 blocks, 0 kv_links, 0 sequences, 0 slots, 0 transfers")]
            request, engine = Request("lost", [1] * 20, SamplingParams(max_tokens=4)), worker.context.ports.engine
            await engine.call(lambda engine: engine.reserve(request))
            held = "2 blocks, 0 kv_links, 1 sequences, 0 slots, 0 transfers"
            assert await findings() == [(False, f"{held}; lost: in the engine, but no request's")]
