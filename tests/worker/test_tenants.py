"""Tenants and their KV: nobody finds or loses another's blocks, and what is dropped stays so, whatever is under way."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from torch import Tensor

from tandem import rpc
from tandem.engine import Engine, LentBlocks
from tandem.security import Security
from tandem.tiers import owner_of
from tandem.v1 import worker_pb2, worker_pb2_grpc
from tandem.worker.engine import block_chain
from tandem.worker.kv import tiers as tiers_module
from tandem.worker.kv.cache_service import CacheService
from tests.worker.test_fetching import WHOLE as FETCHED
from tests.worker.test_fetching import Two, patient, two
from tests.worker.test_fetching import request as asked
from tests.worker.test_kv_tiers import BLOCKS, BOUND_S, OTHER, PROMPT, WHOLE, Opened, TieredWorker, a_worker, eventually

__all__ = ["a_worker", "patient", "two"]  # fixtures
ANN, BOB = "ann", "bob"


def service_of(worker: TieredWorker) -> CacheService:
    return CacheService(worker.engine, worker.tiers)


async def cached_of(worker: TieredWorker) -> Mapping[str | None, int]:
    return await worker.engine.call(lambda engine: engine.moving.counts())


async def known_to_both(worker: TieredWorker) -> list[int]:
    """Both tenants ask the same, and all of it is written. Returns the answer."""
    _, tokens = await worker.answer(PROMPT, salt=ANN)
    await worker.answer(PROMPT, salt=BOB)
    await worker.written(12)
    return tokens


def counting_reads(worker: TieredWorker) -> list[bytes]:
    """Counts what is read of disk from now on."""
    real, reads = worker.files.read, []

    def read(name: bytes, block: memoryview) -> bool:
        reads.append(name)
        return real(name, block)

    worker.files.read = read
    return reads


@pytest.mark.parametrize("on_host", [0, 50])
async def test_one_tenants_prompt_is_no_hit_of_anothers(a_worker: Opened, on_host: int) -> None:
    async with a_worker(on_host=on_host) as worker:
        reads = counting_reads(worker)
        assert (await worker.answer(PROMPT, salt=ANN))[0] == 0
        await worker.written(6)
        assert (await worker.answer(PROMPT, salt=BOB))[0] == 0
        await worker.answer(OTHER, salt=BOB)
        assert (await worker.answer(PROMPT, salt="eve"))[0] == 0
        assert reads == []
    async with a_worker(on_host=on_host) as worker:
        reads = counting_reads(worker)
        assert (await worker.answer(PROMPT, salt="mallory"))[0] == 0
        assert reads == [], "also after a restart"
        assert (await worker.answer(PROMPT, salt=ANN))[0] == WHOLE
        assert len(reads) == 6


async def test_a_holder_lends_another_tenant_nothing(two: Two, patient: None) -> None:
    prompt = asked(PROMPT, salt=ANN)
    prompt.tenant = ANN
    await two.holder.engine.prepare(prompt, BOUND_S)
    await two.holder.engine.call(lambda engine: engine.add(prompt))
    await eventually(lambda: bool(two.holder.outputs.get("r") and two.holder.outputs["r"][-1].finished))
    assert await two.fetch(PROMPT, salt=BOB) == 0
    assert await two.holder.engine.call(lambda engine: engine.moving.counts()) == {ANN: 6}
    owners = two.asker.engine.engine.moving.owners
    owners.hold_off(ANN)
    assert await two.fetch(PROMPT, salt=ANN) == 0, "while a drop goes round"
    owners.let_in(ANN)
    await two.asker.engine.prepare(prompt, BOUND_S)
    assert await two.fetch(PROMPT, salt=ANN) == FETCHED
    assert await two.asker.engine.call(lambda engine: engine.moving.counts()) == {ANN: 6}


async def test_what_one_tenant_drops_another_keeps(a_worker: Opened, tmp_path: Path) -> None:
    async with a_worker(on_host=50) as worker:
        tokens = await known_to_both(worker)
        dropped = await service_of(worker).drop(ANN)
        assert dropped == {"device": 6, "host": 6, "disk": 6}
        assert await cached_of(worker) == {BOB: 6}
        assert (await worker.answer(PROMPT, salt=BOB))[0] == WHOLE
        assert await worker.answer(PROMPT, salt=ANN) == (0, tokens)
    async with a_worker() as worker:
        assert (await worker.answer(PROMPT, salt=BOB))[0] == WHOLE
        await service_of(worker).drop(None)
        assert (worker.disk.held, await cached_of(worker)) == (0, {})
    assert not any(owner_of(BOB).hex() in folders for _, folders, _ in os.walk(tmp_path))


@pytest.fixture
def hung(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[threading.Event, threading.Event]]:
    """Has copies out of or into the cache hang: returns when they have begun, and when they may go on."""

    def hang(name: str) -> tuple[threading.Event, threading.Event]:
        began, go = threading.Event(), threading.Event()
        real: Any = getattr(tiers_module, name)

        def copy(engine: Engine, one: Tensor | LentBlocks, other: Tensor | LentBlocks) -> None:
            began.set()
            go.wait(BOUND_S)
            real(engine, one, other)

        monkeypatch.setattr(tiers_module, name, copy)
        return began, go

    return hang


Hung = Callable[[str], tuple[threading.Event, threading.Event]]


async def test_what_is_being_copied_to_be_written_does_not_come_back(a_worker: Opened, hung: Hung) -> None:
    began, go = hung("_copy_out")
    async with a_worker(on_host=50) as worker:
        await worker.answer(PROMPT, salt=BOB)
        await worker.answer(PROMPT, salt=ANN)
        await worker.noted()
        await eventually(began.is_set)
        assert (await service_of(worker).drop(ANN))["device"] == 6
        go.set()
        await eventually(lambda: worker.disk.held == 6)
        await worker.written(6)
        assert {tier: holds.counts for tier, holds in worker.tiers.holds.items()} == {
            tier: {owner_of(BOB): 6} for tier in ("host", "disk")
        }


async def test_what_a_tier_is_writing_goes_too(a_worker: Opened) -> None:
    began, go = threading.Event(), threading.Event()
    async with a_worker() as worker:
        real = worker.files.write

        def write(*block: Any) -> None:
            began.set()
            go.wait(BOUND_S)
            real(*block)

        worker.files.write = write
        await worker.answer(PROMPT, salt=ANN)
        await worker.noted()
        await eventually(began.is_set)
        dropping = asyncio.create_task(service_of(worker).drop(ANN))
        await asyncio.sleep(0.05)
        assert not dropping.done(), "it answers only when nothing can be found"
        go.set()
        assert await dropping == {"device": 6, "disk": 6}
        assert worker.disk.held == 0


@pytest.mark.parametrize("when", ["is read", "is copied"])
async def test_what_is_being_restored_does_not_land(a_worker: Opened, hung: Hung, when: str) -> None:
    async with a_worker() as worker:
        await known_to_both(worker)
        await worker.answer(OTHER)
        assert await cached_of(worker) == {"": BLOCKS - 1}
        began, go = hung("_copy_in") if when == "is copied" else hanging_reads(worker)
        restoring = asyncio.create_task(worker.tiers.restore(worker.request(PROMPT, ANN), BOUND_S))
        await eventually(began.is_set)
        dropping = asyncio.create_task(service_of(worker).drop(ANN))
        await asyncio.sleep(0.05)
        go.set()
        await asyncio.gather(restoring, dropping)
        await worker.idle()
        assert ANN not in await cached_of(worker)
        assert worker.tiers.holds["disk"].counts[owner_of(BOB)] == 6
        assert (await worker.answer(PROMPT, salt=ANN))[0] == 0
        assert (await worker.answer(PROMPT, salt=BOB))[0] == WHOLE


def hanging_reads(worker: TieredWorker) -> tuple[threading.Event, threading.Event]:
    began, go, real = threading.Event(), threading.Event(), worker.files.read

    def read(name: bytes, block: memoryview) -> bool:
        began.set()
        go.wait(BOUND_S)
        return real(name, block)

    worker.files.read = read
    return began, go


async def test_blocks_that_a_sequence_uses_lose_their_names(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await worker.answer(PROMPT, salt=ANN)
        names = block_chain(worker.engine.engine.layout, worker.request(PROMPT, ANN))[1:]
        lent = await worker.engine.call(lambda engine: engine.moving.lend("1", names))
        await service_of(worker).drop(ANN)
        assert await worker.engine.call(lambda engine: engine.moving.num_cached(names)) == 0
        await worker.engine.call(lambda engine: engine.moving.release("1"))
        assert len(lent.blocks) == 6


@asynccontextmanager
async def asking(worker: TieredWorker) -> AsyncIterator[Any]:
    server = await rpc.serve([service_of(worker).servicer], "127.0.0.1", 0, security=Security(), known_as="worker")
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}", Security()) as channel:
            yield worker_pb2_grpc.CacheServiceStub(channel)
    finally:
        await server.stop(0)


async def test_the_service_lists_drops_and_pins(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await known_to_both(worker)
    async with a_worker(on_host=8) as worker, asking(worker) as stub:
        await worker.answer(PROMPT, salt=BOB)
        await worker.noted()
        await eventually(lambda: worker.tiers.stats["host"].held == 6)
        listed = (await stub.ListCache(worker_pb2.ListCacheRequest())).tiers
        found = {(tier.name, one.tenant, one.owner): one.num_blocks for tier in listed for one in tier.tenants}
        bob, ann = owner_of(BOB), owner_of(ANN)
        assert found == {
            ("device", BOB, bob): 6, ("host", BOB, bob): 6, ("disk", BOB, bob): 6, ("disk", "", ann): 6,
        }  # fmt: skip
        most = {tier.name: tier.max_blocks for tier in listed}
        assert most == {"device": BLOCKS, "host": 8, "disk": worker.files.size}
        assert list((await stub.PinCache(worker_pb2.PinCacheRequest(tenant=BOB))).tiers) == ["host", "disk"]
        with pytest.raises(grpc.aio.AioRpcError, match=r"seconds: -1\.0 is not at least 0"):
            await stub.PinCache(worker_pb2.PinCacheRequest(tenant=BOB, seconds=-1))
        dropped = await stub.DropCache(worker_pb2.DropCacheRequest(tenant=ANN))
        assert dict(dropped.num_blocks) == {"device": 0, "host": 0, "disk": 6}

        def failing(owner: bytes | None) -> int:
            raise OSError(5, "Input/output error")

        worker.files.drop = failing
        with pytest.raises(grpc.aio.AioRpcError, match="Input/output error"):
            await stub.DropCache(worker_pb2.DropCacheRequest())
