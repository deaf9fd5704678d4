"""A worker's lease: taken, renewed, lost, replaced, ended."""

from __future__ import annotations

import asyncio

import pytest
from redis.asyncio import Redis

from tandem.registry import (
    IncompatibleLayout,
    Registry,
    RegistryUnavailable,
    Role,
    StaleIncarnation,
    WorkerIdTaken,
)
from tandem.registry.wire.scripts import key_prefix
from tests.registry.cluster import TTL, eventually, register_pool, worker_info, worker_load
from tests.registry.conftest import Connect

OLD = worker_info("d0", Role.DECODE, "old")
NEW = worker_info("d0", Role.DECODE, "new")


async def reserve(registry: Registry) -> str:
    route = await registry.reservations.select_and_reserve(
        request_id="r", model="demo", prompt_tokens=40, max_new_tokens=8, prefill="prefer", ttl=TTL
    )
    return route.reservation_id


async def test_a_registered_worker_is_seen_whole_by_other_clients(registry: Registry, connect: Connect) -> None:
    load = worker_load(
        free_blocks=3, num_waiting=1, num_running=2, queued_tokens=77, draining=True, stuck=True, linked=("a", 'b",'),
        prefill_tokens_per_s=1234.5, transfer_tokens_per_s=1e7, step_s=1e-5, likely_tokens=5,
    )  # fmt: skip
    await registry.leases.register(OLD, load, TTL)
    (worker,) = await (await connect()).workers()
    assert worker.info == OLD
    assert worker.load == load
    assert worker.reserved_tokens == worker.reserved_blocks == 0


@pytest.mark.parametrize("rate", [-1.0, float("nan"), float("inf")])
def test_a_rate_that_nobody_can_have_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="step_s must be"):
        worker_load(step_s=rate)


async def test_a_heartbeat_changes_the_load_and_keeps_reservations(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await reserve(registry)
    assert not await registry.leases.heartbeat(OLD, worker_load(num_running=5), TTL)
    (worker,) = await registry.workers()
    assert worker.load.num_running == 5
    assert (worker.reserved_tokens, worker.reserved_blocks) == (40, 3)


async def test_a_silent_worker_is_gone_after_its_ttl_and_comes_back_clean(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "old", [b"a" * 16], [])
    reservation = await reserve(registry)
    await registry.leases.heartbeat(OLD, worker_load(), 0.2)

    async def gone() -> bool:
        return await registry.workers() == []

    await eventually(gone, "lease expired")
    assert not await registry.reservations.release(reservation)
    assert await registry.leases.heartbeat(OLD, worker_load(), TTL)
    (worker,) = await registry.workers()
    assert (worker.reserved_tokens, worker.reserved_blocks) == (0, 0)
    assert await registry.locate([b"a" * 16]) == [[]]


async def test_heartbeats_keep_a_lease_beyond_its_ttl(registry: Registry, redis: Redis, namespace: str) -> None:
    await registry.leases.register(OLD, worker_load(), 1.0)
    first = await redis.zscore(f"{key_prefix(namespace)}leases", "d0")
    await registry.leases.heartbeat(OLD, worker_load(), 5.0)
    second = await redis.zscore(f"{key_prefix(namespace)}leases", "d0")
    assert first is not None
    assert second is not None
    assert second - first >= 4000


async def test_a_new_incarnation_replaces_the_old_at_once(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await registry.leases.publish_blocks("d0", "old", [b"a" * 16], [])
    reservation = await reserve(registry)
    await registry.leases.register(NEW, worker_load(), TTL)
    (worker,) = await registry.workers()
    assert worker.info.incarnation == "new"
    assert (worker.reserved_tokens, worker.reserved_blocks) == (0, 0)
    assert await registry.locate([b"a" * 16]) == [[]]
    assert not await registry.reservations.release(reservation)
    (worker,) = await registry.workers()
    assert (worker.reserved_tokens, worker.reserved_blocks) == (0, 0)


@pytest.mark.parametrize("elsewhere", [{"grpc_address": "d0:2"}, {"host": "there"}])
async def test_a_live_worker_elsewhere_is_not_replaced(registry: Registry, elsewhere: dict[str, str]) -> None:
    """Two clusters on one Redis, as they are when nobody has told them of each other."""
    await registry.leases.register(OLD, worker_load(), TTL)
    other = worker_info("d0", Role.DECODE, "new", model="other", layout_hash="other", **elsewhere)
    with pytest.raises(WorkerIdTaken, match=r"worker_id: d0 at .*model other.* d0:1 on host here.*model demo") as no:
        await registry.leases.register(other, worker_load(), TTL)
    assert 0 < no.value.ends_in_s <= TTL
    assert not await registry.leases.heartbeat(OLD, worker_load(), 0.05)
    await asyncio.sleep(0.06)
    await registry.leases.register(other, worker_load(), TTL)
    (worker,) = await registry.workers()
    assert worker.info == other


async def test_the_replaced_incarnation_is_refused_everything(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await registry.leases.register(NEW, worker_load(), TTL)
    with pytest.raises(StaleIncarnation, match="old of worker d0"):
        await registry.leases.register(OLD, worker_load(), TTL)
    with pytest.raises(StaleIncarnation):
        await registry.leases.heartbeat(OLD, worker_load(), TTL)
    with pytest.raises(StaleIncarnation):
        await registry.leases.publish_blocks("d0", "old", [b"a" * 16], [])
    await registry.leases.deregister("d0", "old")
    assert [w.info.incarnation for w in await registry.workers()] == ["new"]


async def test_a_replaced_incarnation_stays_out_when_its_successor_is_gone(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await registry.leases.register(NEW, worker_load(), TTL)
    await registry.leases.deregister("d0", "new")
    with pytest.raises(StaleIncarnation):
        await registry.leases.heartbeat(OLD, worker_load(), TTL)
    assert await registry.workers() == []


async def test_a_heartbeat_never_replaces_another_incarnation(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    with pytest.raises(StaleIncarnation):
        await registry.leases.heartbeat(NEW, worker_load(), TTL)


async def test_a_late_heartbeat_does_not_undo_deregistering(registry: Registry) -> None:
    await registry.leases.register(OLD, worker_load(), TTL)
    await registry.leases.deregister("d0", "old")
    with pytest.raises(StaleIncarnation):
        await registry.leases.heartbeat(OLD, worker_load(), TTL)
    await registry.leases.deregister("d0", "old")
    assert await registry.workers() == []


async def test_one_half_of_a_reservation_survives_the_death_of_the_other(registry: Registry) -> None:
    await register_pool(registry)
    reservation = await reserve(registry)
    await registry.leases.deregister("p0", "p0-first")
    (decode,) = await registry.workers()
    assert decode.reserved_blocks == 3
    assert not await registry.reservations.release(reservation, prefill_done_only=True)
    assert await registry.reservations.release(reservation)
    (decode,) = await registry.workers()
    assert decode.reserved_blocks == 0


async def test_nothing_is_left_when_every_worker_is_gone(registry: Registry, redis: Redis, namespace: str) -> None:
    await register_pool(registry, prefill=2, decode=2)
    for _ in range(8):
        await reserve(registry)
    await registry.leases.publish_blocks("p1", "p1-first", [bytes([i]) * 16 for i in range(9)], [])
    for worker in await registry.workers():
        await registry.leases.deregister(worker.info.worker_id, worker.info.incarnation)
    kinds = {key.split(":", 3)[2] async for key in redis.scan_iter(f"{key_prefix(namespace)}*")}
    assert kinds == {"epoch", "turn", "fenced", "generation", "events"}


@pytest.mark.parametrize("role", list(Role))
async def test_a_worker_that_could_pair_with_nobody_is_refused_with_the_reason(registry: Registry, role: Role) -> None:
    await register_pool(registry, prefill=2, decode=2)
    new = worker_info("new", role, layout_hash="other layout")
    with pytest.raises(IncompatibleLayout, match=rf"other layout is the KV layout of {role} worker new.* is l") as no:
        await registry.leases.register(new, worker_load(), TTL)
    assert "block size" in str(no.value)
    assert len(await registry.workers()) == 4
    for welcome in (
        worker_info("new", role, "as the others"),
        worker_info("new", role, "other weights", layout_hash="other layout", revision="r2"),
        worker_info("new", role, "other model", layout_hash="other layout", model="m2"),
    ):
        await registry.leases.register(welcome, worker_load(), TTL)


async def test_a_refused_registration_changes_nothing(registry: Registry) -> None:
    await register_pool(registry)
    with pytest.raises(IncompatibleLayout):
        await registry.leases.register(
            worker_info("d0", Role.DECODE, "second", layout_hash="other"), worker_load(), TTL
        )
    assert {w.info.incarnation for w in await registry.workers()} == {"p0-first", "d0-first"}
    assert not await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), TTL)


async def test_a_cluster_in_service_changes_its_layout(registry: Registry) -> None:
    """The first of the new workers is refused until one of the other role has come."""
    await register_pool(registry)
    prefill, decode = (worker_info(f"{role}-new", role, layout_hash="new layout") for role in Role)
    with pytest.raises(IncompatibleLayout):
        await registry.leases.register(prefill, worker_load(), TTL)
    await registry.leases.register(decode, worker_load(), TTL)
    await registry.leases.register(prefill, worker_load(linked=(decode.incarnation,)), TTL)
    assert len(await registry.workers()) == 4


async def test_workers_that_drain_refuse_nobody(registry: Registry) -> None:
    await register_pool(registry)
    await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(draining=True), TTL)
    await registry.leases.register(worker_info("p1", Role.PREFILL, layout_hash="new layout"), worker_load(), TTL)


async def test_bad_input_names_the_field(registry: Registry) -> None:
    with pytest.raises(ValueError, match="ttl must be above 0"):
        await registry.leases.register(OLD, worker_load(), 0)
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        worker_info("d0", Role.DECODE, block_size=0)
    with pytest.raises(ValueError, match="model must not be empty"):
        worker_info("d0", Role.DECODE, model="")
    with pytest.raises(ValueError, match="namespace"):
        Registry.connect("redis://127.0.0.1:1", namespace="{x}")


async def test_without_redis_every_call_says_where_it_was_expected(registry: Registry) -> None:
    nowhere = Registry.connect("redis://user:secret@127.0.0.1:1", timeout=1.0)
    with pytest.raises(RegistryUnavailable, match=r"127\.0\.0\.1:1") as raised:
        await nowhere.ping()
    assert "secret" not in str(raised.value)
    await nowhere.close()
