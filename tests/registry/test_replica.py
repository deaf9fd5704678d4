"""A gateway's copy of the block locations: followed, mended after gaps, never older than what it had."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio import Redis

from tandem.local import RedisServer
from tandem.registry import BlockReplica, Registry, Role
from tandem.registry.blocks.feed import BlockEvent
from tandem.registry.wire.scripts import key_prefix
from tests.registry.cluster import TTL, eventually, register_pool, worker_info, worker_load
from tests.registry.conftest import Connect

HASHES = [random.Random(i).randbytes(16) for i in range(6000)]
LARGE = {"num_blocks": len(HASHES), "max_model_len": 16 * len(HASHES)}


async def held(registry: Registry, replica: BlockReplica, hashes: Sequence[bytes]) -> dict[str, int]:
    """How many of the blocks from the first on each live worker holds, as the replica knows it."""
    found = {generation: count for count, names in replica.holders(hashes) for generation in names}
    workers = await registry.workers()
    return {w.info.worker_id: found[w.generation] for w in workers if w.generation in found}


@asynccontextmanager
async def following(registry: Registry, **options: float) -> AsyncIterator[BlockReplica]:
    replica = BlockReplica(registry.block_feed, **options)  # type: ignore[arg-type]
    task = asyncio.create_task(replica.run())
    try:
        yield replica
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def comes_to(registry: Registry, replica: BlockReplica, hashes: Sequence[bytes], wanted: dict[str, int]) -> None:
    async def has() -> bool:
        return await held(registry, replica, hashes) == wanted

    await eventually(has, str(wanted))


async def test_a_late_replica_reads_everything_and_then_follows(registry: Registry, connect: Connect) -> None:
    for worker in ("d0", "d1"):
        await registry.leases.register(worker_info(worker, Role.DECODE, **LARGE), worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES, [])
    async with following(await connect(), check_s=60.0) as replica:
        await comes_to(registry, replica, HASHES, {"d0": 6000})
        await registry.leases.publish_blocks("d1", "d1-first", HASHES[:50], [])
        await comes_to(registry, replica, HASHES, {"d0": 6000, "d1": 50})
        await registry.leases.publish_blocks("d0", "d0-first", [], HASHES[40:])
        await comes_to(registry, replica, HASHES, {"d0": 40, "d1": 50})
        assert replica.num_rereads == 2
        assert replica.holders([]) == replica.holders(HASHES[100:]) == []


async def test_what_ends_holds_nothing_at_once(registry: Registry, connect: Connect) -> None:
    await register_pool(registry, decode=3)
    async with following(await connect(), check_s=60.0) as replica:
        for worker in ("d0", "d1", "d2"):
            await registry.leases.publish_blocks(worker, f"{worker}-first", HASHES[:4], [])
        await comes_to(registry, replica, HASHES[:4], dict.fromkeys(("d0", "d1", "d2"), 4))
        await registry.leases.deregister("d0", "d0-first")
        await registry.leases.register(worker_info("d1", Role.DECODE, "second"), worker_load(), TTL)

        async def only_one() -> bool:
            return [len(names) for _, names in replica.holders(HASHES[:4])] == [1]

        await eventually(only_one, "no trace of the two that ended")
        await registry.leases.publish_blocks("d1", "second", HASHES[:2], [])
        await comes_to(registry, replica, HASHES[:4], {"d1": 2, "d2": 4})


async def test_a_missed_batch_is_noticed_by_the_next_and_mended(
    registry: Registry, connect: Connect, redis: Redis, namespace: str
) -> None:
    await register_pool(registry, decode=2)
    async with following(await connect(), check_s=60.0) as replica:
        await registry.leases.publish_blocks("d0", "d0-first", HASHES[:4], [])
        await comes_to(registry, replica, HASHES[:4], {"d0": 4})

        async def all_read() -> bool:
            return replica.num_rereads == 3

        await eventually(all_read, "all workers read once")
        worker = f"{key_prefix(namespace)}worker:d0"
        await redis.srem(f"{key_prefix(namespace)}blocks:d0", HASHES[2])
        await redis.hincrby(worker, "block_batches", 1)  # a batch that never reached the stream
        await registry.leases.publish_blocks("d0", "d0-first", HASHES[10:11], [])
        await comes_to(registry, replica, HASHES[:4], {"d0": 2})
        assert replica.num_rereads == 4


async def test_a_missed_last_batch_is_found_by_the_check(
    registry: Registry, connect: Connect, redis: Redis, namespace: str
) -> None:
    """Nothing comes behind it, so its number is seen only in the heads."""
    await register_pool(registry)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES[:4], [])
    replica = BlockReplica((await connect()).block_feed)
    await replica.refresh()
    await registry.leases.publish_blocks("d0", "d0-first", HASHES[4:8], HASHES[2:4])
    await redis.xtrim(f"{key_prefix(namespace)}events", 0, approximate=False)
    await replica.refresh()
    assert await held(registry, replica, HASHES[:4]) == {"d0": 2}
    assert replica.num_rereads == 3


async def test_an_old_snapshot_deletes_nothing_newer(registry: Registry, connect: Connect) -> None:
    """Blocks come and go while a worker is read page by page; what came stays, what went is gone."""
    await registry.leases.register(worker_info("d0", Role.DECODE, **LARGE), worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES[:5000], [])
    client = await connect()
    page, changed = client.block_feed.page, 0

    async def page_and_change(worker_id: str, generation: str, cursor: str):  # type: ignore[no-untyped-def]
        nonlocal changed
        found = await page(worker_id, generation, cursor)
        stored, removed = HASHES[5000 + 10 * changed : 5010 + 10 * changed], HASHES[4990 - 10 * changed :][:10]
        await registry.leases.publish_blocks("d0", "d0-first", stored, removed)
        changed += 1
        return found

    client.block_feed.page = page_and_change  # type: ignore[method-assign]
    replica = BlockReplica(client.block_feed)
    await replica.refresh()
    assert changed >= 5
    await replica.refresh()
    assert replica.num_rereads == 1
    alive = await registry.locate(HASHES)
    known = [bool(replica.holders([name])) for name in HASHES]
    assert known == [bool(workers) for workers in alive]


async def test_a_generation_that_ends_while_it_is_read_leaves_nothing(registry: Registry, connect: Connect) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE, **LARGE), worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES[:5000], [])
    client = await connect()
    page = client.block_feed.page

    async def page_and_restart(worker_id: str, generation: str, cursor: str):  # type: ignore[no-untyped-def]
        found = await page(worker_id, generation, cursor)
        if cursor == "0":
            await registry.leases.register(worker_info("d0", Role.DECODE, "second", **LARGE), worker_load(), TTL)
            await registry.leases.publish_blocks("d0", "second", HASHES[5000:5010], [])
        return found

    client.block_feed.page = page_and_restart  # type: ignore[method-assign]
    replica = BlockReplica(client.block_feed)
    await replica.refresh()
    await replica.refresh()
    assert replica.holders(HASHES) == []
    assert await held(registry, replica, HASHES[5000:]) == {"d0": 10}


async def test_redis_comes_back_empty_and_the_same_workers_register_again(
    own_redis: RedisServer,
) -> None:
    registry = Registry.connect(own_redis.url, timeout=30.0)
    await register_pool(registry)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES[:8], [])
    async with following(registry, check_s=0.2, retry_s=0.05) as replica:
        await comes_to(registry, replica, HASHES[:8], {"d0": 8})
        own_redis.kill()
        assert replica.holders(HASHES[:8]), "served from while Redis is gone"
        with RedisServer.start(own_redis.port):
            assert await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), TTL)
            await registry.leases.publish_blocks("d0", "d0-first", HASHES[:3], [])
            await comes_to(registry, replica, HASHES[:8], {"d0": 3})
            assert [count for count, _ in replica.holders(HASHES[:8])] == [3]
    await registry.close()


async def test_a_cancelled_replica_ends_also_while_its_connections_break() -> None:
    """In whatever step of a call: the server answers now and then, and hangs up soon."""
    chance, served = random.Random(0), set[asyncio.Task[None] | None]()

    async def hang_up_soon(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.add(asyncio.current_task())
        with suppress(ConnectionError):
            await reader.read(10)
            if chance.random() < 0.5:
                writer.write(b"+OK\r\n")
            await asyncio.sleep(chance.uniform(0, 0.002))
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    server = await asyncio.start_server(hang_up_soon, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    registry = Registry.connect(f"redis://127.0.0.1:{port}", timeout=0.5)
    for _ in range(500):
        task = asyncio.create_task(BlockReplica(registry.block_feed, retry_s=0.001).run())
        await asyncio.sleep(chance.uniform(0, 0.005))
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=30.0)
        assert done
    await registry.close()
    # Connections are served in their order: when one more has been, those that nobody waited for are served, too.
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write_eof()
    await asyncio.wait_for(reader.read(), 30.0)
    writer.close()
    await writer.wait_closed()
    _, late = await asyncio.wait(filter(None, served), timeout=30.0)
    assert not late
    server.close()


async def test_many_changes_by_many_workers_end_in_the_same_picture(registry: Registry, connect: Connect) -> None:
    """Restarts, removals, lost leases and a stream far too short, with a replica that follows all along."""
    chance, starts = random.Random(3), dict.fromkeys(("d0", "d1", "d2"), 0)
    async with following(await connect(), check_s=0.05) as replica:
        for _ in range(200):
            worker = chance.choice(sorted(starts))
            if chance.random() < 0.1 or not starts[worker]:
                starts[worker] += 1
                info = worker_info(worker, Role.DECODE, f"{worker}-{starts[worker]}")
                await registry.leases.register(info, worker_load(), TTL)
            blocks = chance.sample(range(64), 12)
            stored, removed = ([HASHES[i] for i in part] for part in (blocks[:8], blocks[8:]))
            await registry.leases.publish_blocks(worker, f"{worker}-{starts[worker]}", stored, removed)

        async def same() -> bool:
            alive = [len(workers) for workers in await registry.locate(HASHES[:64])]
            return alive == [sum(len(names) for _, names in replica.holders([name])) for name in HASHES[:64]]

        await eventually(same, "the replica says what Redis says")


async def test_more_blocks_than_fit_are_forgotten_and_counted(registry: Registry, connect: Connect) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE, **LARGE), worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES, [])
    replica = BlockReplica((await connect()).block_feed, max_blocks=2048)
    await replica.refresh()
    assert len(replica) <= 2048
    assert replica.num_dropped == 6000 - len(replica)


def test_blocks_in_another_medium_are_no_prefix_hits(registry: Registry) -> None:
    replica = BlockReplica(registry.block_feed)
    for number, medium, name in ((1, "device", HASHES[0]), (2, "host", HASHES[1])):
        replica._apply(BlockEvent(f"{number}-0", "d0", "1", number, medium, name, b""))
    assert replica.holders(HASHES[:2]) == [(1, ("1",))]


@pytest.mark.parametrize("times", [1, 3])
async def test_a_batch_heard_again_changes_nothing(registry: Registry, times: int) -> None:
    replica = BlockReplica(registry.block_feed)
    first = BlockEvent("1-0", "d0", "7", 1, "device", HASHES[0], b"")
    for event in (first, BlockEvent("2-0", "d0", "7", 2, "device", b"", HASHES[0]), *[first] * times):
        replica._apply(event)
    replica._apply(BlockEvent("3-0", "d0", "6", 1, "device", HASHES[0], b""))
    assert replica.holders(HASHES[:1]) == []
