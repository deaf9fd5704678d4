"""Selection of a request's pair of workers, and the reasons for which it gets none."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from redis.asyncio import Redis

from tandem.registry import Fallback, NoWorkers, PromptPrefix, Registry, RequestTooLarge, Role, Route
from tandem.registry.wire.scripts import key_prefix
from tests.registry.cluster import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    REVISION,
    TTL,
    known_prefix,
    register_pool,
    worker_info,
    worker_load,
)

HASHES = [bytes([i]) * 16 for i in range(1, 5)]
PREFIX = PromptPrefix.of(REVISION, BLOCK_SIZE, HASHES)
FAST, SLOW = {"prefill_tokens_per_s": 10_000.0}, {"prefill_tokens_per_s": 250.0}


async def select(registry: Registry, **changed: Any) -> Route:
    arguments = {
        "request_id": "r", "model": "demo", "prompt_tokens": 64, "max_new_tokens": 16, "prefill": "require", "ttl": TTL,
    }  # fmt: skip
    return await registry.reservations.select_and_reserve(**{**arguments, **changed})


def names(route: Route) -> tuple[str | None, str]:
    return route.prefill.info.worker_id if route.prefill else None, route.decode.info.worker_id


async def reserved(registry: Registry) -> dict[str, tuple[int, int]]:
    return {w.info.worker_id: (w.reserved_tokens, w.reserved_blocks) for w in await registry.workers()}


async def test_a_pair_is_chosen_and_room_held_on_both(registry: Registry) -> None:
    await register_pool(registry)
    route = await select(registry)
    assert names(route) == ("p0", "d0")
    assert route.reason == "remote prefill: 0 prompt tokens cached there, 0 at decode; required"
    assert await reserved(registry) == {"p0": (64, 0), "d0": (0, 5)}


async def test_prefill_may_be_released_first_and_each_part_once(registry: Registry) -> None:
    await register_pool(registry)
    reservation = (await select(registry)).reservation_id
    assert await registry.reservations.release(reservation, prefill_done_only=True)
    assert await reserved(registry) == {"p0": (0, 0), "d0": (0, 5)}
    assert not await registry.reservations.release(reservation, prefill_done_only=True)
    assert await registry.reservations.release(reservation)
    assert await reserved(registry) == {"p0": (0, 0), "d0": (0, 0)}
    assert not await registry.reservations.release(reservation)
    assert not await registry.reservations.release("never made")
    assert not await registry.reservations.release("")


async def test_requests_spread_evenly_over_equal_workers(registry: Registry) -> None:
    await register_pool(registry, prefill=3, decode=4)
    routes = [names(await select(registry)) for _ in range(24)]
    assert Counter(p for p, _ in routes) == {"p0": 8, "p1": 8, "p2": 8}
    assert Counter(d for _, d in routes) == {"d0": 6, "d1": 6, "d2": 6, "d3": 6}


async def test_a_slower_reader_gets_its_share(registry: Registry) -> None:
    await register_pool(registry, prefill=2)
    for name, rate in (("p0", 10_000.0), ("p1", 5000.0)):
        load = worker_load(prefill_tokens_per_s=rate, linked=("d0-first",))
        await registry.leases.heartbeat(worker_info(name, Role.PREFILL), load, TTL)
    assert Counter([names(await select(registry))[0] for _ in range(12)]) == {"p0": 8, "p1": 4}


async def test_idle_equals_take_turns(registry: Registry) -> None:
    await register_pool(registry, decode=3)
    seen = []
    for _ in range(6):
        route = await select(registry)
        seen.append(route.decode.info.worker_id)
        await registry.reservations.release(route.reservation_id)
    assert sorted(seen[:3]) == ["d0", "d1", "d2"]
    assert seen[3:] == seen[:3]


async def test_reported_load_counts_as_much_as_reserved(registry: Registry) -> None:
    await register_pool(registry, prefill=2, decode=2)
    links = ("d0-first", "d1-first")
    await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), worker_load(queued_tokens=500, linked=links), TTL)
    await registry.leases.heartbeat(worker_info("d1", Role.DECODE), worker_load(free_blocks=10), TTL)
    assert names(await select(registry)) == ("p1", "d0")


async def test_a_worker_with_room_now_comes_before_one_without(registry: Registry) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE, num_blocks=1000), worker_load(free_blocks=4), TTL)
    await registry.leases.register(worker_info("d1", Role.DECODE), worker_load(num_running=8), TTL)
    assert names(await select(registry, prefill="never"))[1] == "d1"


async def test_a_full_cluster_still_routes(registry: Registry) -> None:
    await register_pool(registry)
    for _ in range(NUM_BLOCKS):
        await select(registry)
    assert (await reserved(registry))["d0"] == (0, 5 * NUM_BLOCKS)


async def test_cached_prefixes_draw_requests_and_shrink_the_work(registry: Registry) -> None:
    await register_pool(registry, prefill=2, decode=2)
    await registry.leases.publish_blocks("p1", "p1-first", HASHES[:3], [])
    await registry.leases.publish_blocks("d1", "d1-first", HASHES[:2], [])
    route = await select(registry, prompt_tokens=70, prefix=await known_prefix(registry, HASHES))
    assert names(route) == ("p1", "d1")
    assert (await reserved(registry))["p1"] == (70 - 3 * BLOCK_SIZE, 0)
    assert "48 prompt tokens cached there, 32 at decode" in route.reason


async def test_a_prefix_counts_only_from_its_start(registry: Registry) -> None:
    await register_pool(registry)
    await registry.leases.publish_blocks("p0", "p0-first", HASHES[1:], [])
    route = await select(registry, prefix=await known_prefix(registry, HASHES))
    assert route.reason.startswith("remote prefill: 0 prompt tokens")


async def test_a_fully_cached_prompt_still_computes_a_token(registry: Registry) -> None:
    await register_pool(registry)
    await registry.leases.publish_blocks("p0", "p0-first", HASHES, [])
    await select(registry, prefix=await known_prefix(registry, HASHES))
    assert (await reserved(registry))["p0"] == (1, 0)


async def test_a_prompt_of_thousands_of_blocks_is_found_whole(registry: Registry) -> None:
    hashes = [i.to_bytes(16, "little") for i in range(5000)]
    info = worker_info("d0", Role.DECODE, num_blocks=6000, max_model_len=100_000)
    await registry.leases.register(info, worker_load(free_blocks=6000), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", hashes, [])
    route = await select(
        registry, prompt_tokens=5000 * 16 + 3, prefill="never", prefix=await known_prefix(registry, hashes)
    )
    assert route.decode.cached_tokens == 5000 * 16
    assert (await reserved(registry))["d0"][0] == 3


async def test_the_next_request_with_a_prefix_follows_the_first_at_once(registry: Registry) -> None:
    """Before any worker has reported blocks, and although the first request still waits there."""
    await register_pool(registry, prefill=3, decode=3)
    first, second = [await select(registry, prefix=PREFIX) for _ in range(2)]
    assert first.reason.startswith("remote prefill: 0 prompt tokens cached there, 0 at decode")
    assert names(second)[0] == names(first)[0]
    assert second.reason.startswith("remote prefill: 64 prompt tokens cached there")
    other = PromptPrefix.of(REVISION, BLOCK_SIZE, [b"o" * 16])
    assert names(await select(registry, prefix=other))[0] != names(first)[0]
    for route in (first, second):
        await registry.reservations.release(route.reservation_id)
    third = await select(registry, prefix=PREFIX)
    assert names(third)[0] == names(first)[0]
    assert third.reason == "remote prefill: 64 prompt tokens cached there, 64 at decode; required"


async def test_expected_blocks_are_believed_for_a_while(registry: Registry, redis: Redis, namespace: str) -> None:
    await register_pool(registry)
    await select(registry, prefix=PREFIX)
    (expected,) = [key async for key in redis.scan_iter(f"{key_prefix(namespace)}expected:*")]
    assert 0 < await redis.pttl(expected) <= 20_000
    await redis.delete(expected)
    assert (await select(registry, prefix=PREFIX)).reason.startswith("remote prefill: 0 prompt tokens")


async def test_what_is_no_longer_expected_is_freed_before_it_expires(
    registry: Registry, redis: Redis, namespace: str
) -> None:
    """Redis would stop for as long as that takes."""

    async def period() -> int:
        return (await redis.time())[0] // 10

    await register_pool(registry)
    begun = await period()
    for old in (begun - 2, begun - 1):
        await redis.hset(f"{key_prefix(namespace)}expected:{old}", "block", "1 2")
    await select(registry, prefix=PREFIX)
    assert not await redis.exists(f"{key_prefix(namespace)}expected:{await period() - 2}")


async def test_a_restarted_worker_is_expected_to_hold_nothing(registry: Registry) -> None:
    await register_pool(registry)
    await select(registry, prefix=PREFIX)
    await registry.leases.register(worker_info("p0", Role.PREFILL, "second"), worker_load(linked=("d0-first",)), TTL)
    route = await select(registry, prefix=PREFIX)
    assert route.reason == "remote prefill: 0 prompt tokens cached there, 64 at decode; required"


@pytest.mark.parametrize(("elsewhere", "stays", "leaves"), [(10, 900, 1100), (0, 290, 320)], ids=["busy", "idle"])
async def test_a_hit_yields_to_load(registry: Registry, elsewhere: int, stays: int, leaves: int) -> None:
    """Sooner to an idle prefill worker than to one that prefills as well; KV moves too slowly to be fetched."""
    await register_pool(registry, prefill=2)
    await registry.leases.publish_blocks("p0", "p0-first", HASHES, [])
    for queued, chosen in ((stays, "p0"), (leaves, "p1")):
        for worker, tokens in (("p0", queued), ("p1", elsewhere)):
            load = worker_load(queued_tokens=tokens, linked=("d0-first",), transfer_tokens_per_s=1000.0)
            await registry.leases.heartbeat(worker_info(worker, Role.PREFILL), load, TTL)
        route = await select(registry, prefix=await known_prefix(registry, HASHES))
        assert names(route)[0] == chosen
        await registry.reservations.release(route.reservation_id)


@pytest.mark.parametrize("other", [{"revision": "r2"}, {"block_size": 32}])
async def test_workers_of_another_revision_hold_nothing_of_it(registry: Registry, other: dict[str, Any]) -> None:
    await register_pool(registry)
    info = worker_info("p1", Role.PREFILL, **other)
    await registry.leases.register(info, worker_load(linked=("d0-first",)), TTL)
    for worker in ("p0", "p1"):
        await registry.leases.publish_blocks(worker, f"{worker}-first", HASHES, [])
    for _ in range(3):
        route = await select(registry, prefix=await known_prefix(registry, HASHES))
        assert names(route)[0] == "p0"
        await registry.reservations.release(route.reservation_id)
    route = await select(registry, prefix=await known_prefix(registry, HASHES), exclude=["p0"])
    assert route.reason.startswith("remote prefill: 0 prompt tokens")


@pytest.mark.parametrize("held", [0, 1, 63, 64, 65, 5000])
async def test_hits_of_long_prompts_are_exact(registry: Registry, held: int) -> None:
    hashes = [i.to_bytes(16, "little") for i in range(5000)]
    info = worker_info("d0", Role.DECODE, num_blocks=6000, max_model_len=100_000)
    await registry.leases.register(info, worker_load(free_blocks=6000), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", hashes[:held], [])
    prefix = await known_prefix(registry, hashes)
    route = await select(registry, prompt_tokens=5000 * 16 + 3, prefill="never", prefix=prefix)
    assert route.decode.cached_tokens == held * 16


@pytest.mark.parametrize("shared", [1, 15, 16, 17, 33, 64, 70, 131, 1000, 4999])
async def test_expected_hits_of_long_prompts_are_found_within_an_8th(registry: Registry, shared: int) -> None:
    hashes = [i.to_bytes(16, "little") for i in range(5000)]
    info = worker_info("d0", Role.DECODE, num_blocks=6000, max_model_len=100_000)
    await registry.leases.register(info, worker_load(free_blocks=6000), TTL)
    other = [*hashes[:shared], *(bytes([255]) * 8 + i.to_bytes(8, "little") for i in range(shared, 5000))]
    for names in (hashes, other):
        prefix = PromptPrefix.of(REVISION, BLOCK_SIZE, names)
        assert len(prefix.marks) < 100 * 12
        route = await select(registry, prompt_tokens=5000 * 16 + 3, prefill="never", prefix=prefix)
    found = route.decode.cached_tokens // 16
    assert shared - shared // 8 <= found <= shared


async def test_never_reserves_both_parts_on_the_decode_worker(registry: Registry) -> None:
    await register_pool(registry)
    route = await select(registry, prefill="never")
    assert names(route) == (None, "d0")
    assert await reserved(registry) == {"p0": (0, 0), "d0": (64, 5)}
    assert route.reason == "local prefill: asked for; 0 prompt tokens cached at decode"


async def test_prefer_falls_back_and_says_why(registry: Registry) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), TTL)
    route = await select(registry, prefill="prefer")
    assert names(route) == (None, "d0")
    assert route.reason == "local prefill: no live prefill worker of model demo; 0 prompt tokens cached at decode"
    assert route.fallback is Fallback.NO_LIVE_WORKER


@pytest.mark.parametrize(
    ("prefill", "load", "exclude", "fallback"),
    [
        ({}, {"linked": ("d0-first",)}, [], None),
        ({}, {"linked": ("d0-first",)}, ["p0"], Fallback.EXCLUDED),
        ({}, {"linked": ("d0-first",), "draining": True}, [], Fallback.DRAINING),
        ({}, {}, [], Fallback.NO_PROVEN_LINK),
        ({"max_model_len": 32}, {"linked": ("d0-first",)}, [], Fallback.TOO_LARGE),
        ({"layout_hash": "other"}, {"linked": ("d0-first",)}, [], Fallback.KV_LAYOUT),
    ],
)
async def test_a_fallback_says_which(
    registry: Registry, prefill: dict[str, Any], load: dict[str, Any], exclude: list[str], fallback: Fallback | None
) -> None:
    await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), TTL)
    await registry.leases.heartbeat(worker_info("p0", Role.PREFILL, **prefill), worker_load(**load), TTL)
    route = await select(registry, prefill="prefer", exclude=exclude)
    assert route.fallback is fallback
    assert (route.prefill is None) == (fallback is not None)
    assert (await select(registry, prefill="never")).fallback is None


async def missing(registry: Registry, **changed: Any) -> str:
    with pytest.raises(NoWorkers) as raised:
        await select(registry, **changed)
    assert all(amounts == (0, 0) for amounts in (await reserved(registry)).values())
    return str(raised.value)


async def test_a_model_nobody_serves(registry: Registry) -> None:
    assert await missing(registry) == "no live worker serves model demo"
    await register_pool(registry)
    assert await missing(registry, model="other") == "no live worker serves model other"


async def test_one_role_missing(registry: Registry) -> None:
    await registry.leases.register(worker_info("p0", Role.PREFILL), worker_load(), TTL)
    assert await missing(registry) == "no live decode worker of model demo"
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), TTL)
    await registry.leases.deregister("p0", "p0-first")
    assert await missing(registry) == "no live prefill worker of model demo"


async def test_only_workers_of_one_kv_layout_pair(registry: Registry) -> None:
    """The last ones take their leases by heartbeats, as after Redis lost its memory: nobody who serves is refused."""
    info = worker_info("p0", Role.PREFILL, layout_hash="old layout")
    await registry.leases.register(info, worker_load(linked=("d0-first",)), TTL)
    await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(), TTL)
    assert "has the KV layout of a decode worker" in await missing(registry)
    await registry.leases.register(worker_info("d1", Role.DECODE, layout_hash="old layout"), worker_load(), TTL)
    assert "proven link" in await missing(registry)
    await registry.leases.heartbeat(info, worker_load(linked=("d0-first", "d1-first")), TTL)
    assert names(await select(registry)) == ("p0", "d1")


async def test_a_link_is_to_one_incarnation(registry: Registry) -> None:
    await register_pool(registry)
    await registry.leases.register(worker_info("d0", Role.DECODE, "second"), worker_load(), TTL)
    assert "proven link" in await missing(registry)
    await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), worker_load(linked=("second",)), TTL)
    assert names(await select(registry)) == ("p0", "d0")


async def test_a_stuck_worker_is_chosen_only_where_all_are_stuck(registry: Registry) -> None:
    await register_pool(registry, prefill=2, decode=2)
    links = ("d0-first", "d1-first")

    async def beats(*stuck: str) -> None:
        for name, role, linked in (("p0", Role.PREFILL, links), ("p1", Role.PREFILL, links), ("d0", Role.DECODE, ())):
            load = worker_load(stuck=name in stuck, linked=linked)
            await registry.leases.heartbeat(worker_info(name, role), load, TTL)

    async def chosen(count: int, policy: str) -> set[tuple[str | None, str]]:
        return {names(await select(registry, prefill=policy)) for _ in range(count)}

    await beats("p0", "d0")
    assert await chosen(12, "require") == {("p1", "d1")}
    await beats("p0", "p1", "d0")
    assert {d for _, d in await chosen(6, "require")} == {"d1"}, "any of those that prefill, for there is no other"
    assert await chosen(6, "prefer") == {(None, "d1")}
    assert await chosen(6, "auto") == {(None, "d1")}
    route = await select(registry, prefill="prefer")
    assert (route.fallback, "is stuck in a step" in route.reason) == (Fallback.STUCK, True)
    await registry.leases.heartbeat(worker_info("d1", Role.DECODE), worker_load(stuck=True), TTL)
    assert {p is not None for p, _ in await chosen(6, "prefer")} == {True}
    await registry.leases.heartbeat(worker_info("d1", Role.DECODE), worker_load(), TTL)
    await beats()
    assert {p for p, _ in await chosen(12, "require")} == {"p0", "p1"}


async def test_draining_workers_take_nothing_new(registry: Registry) -> None:
    await register_pool(registry, decode=2)
    await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(draining=True), TTL)
    assert {names(await select(registry))[1] for _ in range(4)} == {"d1"}
    await registry.leases.heartbeat(
        worker_info("p0", Role.PREFILL), worker_load(draining=True, linked=("d1-first",)), TTL
    )
    with pytest.raises(NoWorkers, match="every prefill worker of model demo that could take the request is draining"):
        await select(registry)


@pytest.mark.parametrize("name", ["d0", "d0-first"])
async def test_workers_and_incarnations_can_be_excluded(registry: Registry, name: str) -> None:
    await register_pool(registry, decode=2)
    assert {names(await select(registry, exclude={name}))[1] for _ in range(4)} == {"d1"}
    with pytest.raises(NoWorkers, match="every decode worker of model demo that could take the request is excluded"):
        await select(registry, exclude=[name, "d1"])


async def test_the_last_of_many_hundred_workers_is_found_and_counted(registry: Registry) -> None:
    await register_pool(registry, decode=600)
    taken = {f"d{i}" for i in range(600)} - {"d255", "d256", "d599"}
    routes = [await select(registry, exclude=taken) for _ in range(3)]
    assert {names(route)[1] for route in routes} == {"d255", "d256", "d599"}
    held = await reserved(registry)
    assert {name for name, (_, blocks) in held.items() if blocks} == {"d255", "d256", "d599"}


async def test_a_request_too_large_for_anyone_is_told_apart(registry: Registry) -> None:
    await register_pool(registry)
    with pytest.raises(RequestTooLarge, match=r"no decode worker .* large enough for 500 prompt and 13 new tokens"):
        await select(registry, prompt_tokens=500, max_new_tokens=13)
    await select(registry, prompt_tokens=500, max_new_tokens=12)
    small = worker_info("d0", Role.DECODE, "small", num_blocks=2)
    await registry.leases.register(small, worker_load(free_blocks=2), TTL)
    with pytest.raises(RequestTooLarge):
        await select(registry, prompt_tokens=32, max_new_tokens=1, prefill="never")
    await select(registry, prompt_tokens=31, max_new_tokens=1, prefill="never")


async def test_an_empty_prompt_is_refused(registry: Registry) -> None:
    with pytest.raises(ValueError, match="prompt_tokens"):
        await select(registry, prompt_tokens=0)


async def test_what_one_worker_has_told_and_the_other_not_yet_is_found_on_both(registry: Registry) -> None:
    await register_pool(registry, prefill=2, decode=2)
    first = await select(registry, prefix=PREFIX)
    await registry.reservations.release(first.reservation_id)
    prefill, decode = names(first)
    await registry.leases.publish_blocks(str(prefill), f"{prefill}-first", HASHES, [])
    route = await select(registry, prompt_tokens=80, prefix=await known_prefix(registry, [*HASHES, b"x" * 16]))
    assert names(route) == (prefill, decode)
    assert "64 prompt tokens cached there, 64 at decode" in route.reason


async def test_a_prefix_that_is_only_expected_to_have_been_fetched_may_be_fetched_still(registry: Registry) -> None:
    """The request that it was to be fetched for may come later than the next one."""
    await register_pool(registry)
    await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), worker_load(linked=("d0-first",), **FAST), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES, [])
    for cached in (0, 64):
        route = await select(registry, prompt_tokens=80, prefix=await known_prefix(registry, HASHES))
        assert f"{cached} prompt tokens cached there, 64 at decode, 64 to be had from d0;" in route.reason
    await registry.leases.publish_blocks("p0", "p0-first", HASHES, [])
    route = await select(registry, prompt_tokens=80, prefix=await known_prefix(registry, HASHES))
    assert "64 prompt tokens cached there, 64 at decode;" in route.reason


@pytest.mark.parametrize(
    ("held", "changed", "holder"),
    [
        ({"p1": 4}, {}, "p1"),
        ({"p1": 4, "d0": 3}, {}, "p1"),
        ({"p1": 3, "d0": 4}, {}, "d0"),
        ({"p1": 4, "d0": 4}, {"p1": {"node": "there"}}, "d0"),
        ({"p1": 4, "d0": 4}, {"d0": {"node": "there"}}, "p1"),
        ({"p1": 3, "d0": 4}, {"d0": {"node": "there", "zone": "far"}}, "p1"),
        ({"p1": 4}, {"p1": {"layout_hash": "other"}}, None),
        ({"p0": 4, "p1": 4}, {}, None),
        ({}, {}, None),
    ],
    ids=["prefill", "more at prefill", "more at decode", "decode nearer", "prefill nearer", "far and slow",
         "another layout", "itself", "nowhere"],
)  # fmt: skip
async def test_a_prefill_worker_fetches_from_the_best_holder_of_either_role(
    registry: Registry, held: dict[str, int], changed: dict[str, dict[str, Any]], holder: str | None
) -> None:
    rates = {**FAST, "transfer_tokens_per_s": 1e5, "far_transfer_tokens_per_s": 2e4}
    for name, role in (("d0", Role.DECODE), ("p0", Role.PREFILL), ("p1", Role.PREFILL)):
        load = worker_load(linked=("d0-first",), draining=name == "p1", **rates)
        await registry.leases.heartbeat(worker_info(name, role, **changed.get(name, {})), load, TTL)
    for name, count in held.items():
        await registry.leases.publish_blocks(name, f"{name}-first", HASHES[:count], [])
    route = await select(registry, prompt_tokens=80, prefix=await known_prefix(registry, HASHES))
    assert names(route) == ("p0", "d0")
    assert (route.holder and route.holder.info.worker_id) == holder
    if route.holder:
        assert (await reserved(registry))["p0"] == (80 - route.holder.cached_tokens, 0)


@pytest.mark.parametrize(("held", "holder"), [({"d1": 4}, "d1"), ({"p0": 4}, "p0"), ({"d0": 4, "d1": 4}, None)])
async def test_a_decode_worker_that_prefills_fetches_from_either_role(
    registry: Registry, held: dict[str, int], holder: str | None
) -> None:
    """Also where no prefill worker is live; others than d0 drain."""
    for name, role in (("d0", Role.DECODE), ("d1", Role.DECODE), ("p0", Role.PREFILL)):
        if name in held or name == "d0":
            load = worker_load(draining=name != "d0", transfer_tokens_per_s=1e5, **FAST)
            await registry.leases.heartbeat(worker_info(name, role), load, TTL)
    for name, count in held.items():
        await registry.leases.publish_blocks(name, f"{name}-first", HASHES[:count], [])
    route = await select(registry, prefill="never", prompt_tokens=80, prefix=await known_prefix(registry, HASHES))
    assert names(route) == (None, "d0")
    assert (route.holder and route.holder.info.worker_id) == holder
    assert (", 64 to be had from " in route.reason) == (holder is not None)
    assert (await reserved(registry))["d0"] == (16, 6)


async def auto(registry: Registry, held: dict[str, int], prefill: dict[str, Any], decode: dict[str, Any]) -> str:
    """The reason of a route for 64 tokens; p0 and d0 hold so many blocks of them and say so of themselves."""
    await register_pool(registry)
    load = worker_load(linked=("d0-first",), transfer_tokens_per_s=100_000.0, **prefill)
    await registry.leases.heartbeat(worker_info("p0", Role.PREFILL), load, TTL)
    await registry.leases.heartbeat(worker_info("d0", Role.DECODE), worker_load(**decode), TTL)
    for name, count in held.items():
        await registry.leases.publish_blocks(name, f"{name}-first", HASHES[:count], [])
    return (await select(registry, prefill="auto", prefix=await known_prefix(registry, HASHES))).reason


@pytest.mark.parametrize(
    ("held", "prefill", "decode", "path"),
    [
        ({}, FAST, {**FAST, "step_s": 0.004}, "remote prefill: 0 prompt tokens cached there, 0 at decode; cheapest: "),
        ({}, FAST, {**FAST, "step_s": 0.05}, "local"),
        ({}, FAST, {**FAST, "num_running": 4}, "remote"),
        ({}, FAST, SLOW, "remote"),
        ({}, SLOW, FAST, "local prefill: cheapest: "),
        ({}, {**FAST, "queued_tokens": 5000}, FAST, "local"),
        ({"d0": 4}, FAST, FAST, "local"),
        ({"d0": 4}, FAST, {"prefill_tokens_per_s": 25.0, "num_running": 4}, "remote"),
        ({"p0": 4}, FAST, FAST, "remote"),
        ({"p0": 4, "d0": 4}, FAST, {**FAST, "num_running": 7}, "local"),
        ({}, SLOW, {}, "remote"),
        ({}, {"queued_tokens": 5000}, {"prefill_tokens_per_s": 100.0, "step_s": 1.0}, "local"),
    ],
    ids=[
        "a cold prompt that pauses", "a cold prompt shorter than a step", "sequences run at decode",
        "decode reads slowly", "prefill reads slowly",
        "a queue at prefill", "decode holds it", "decode holds it and is slow and busy", "prefill holds it",
        "both hold it", "decode has measured nothing", "prefill has measured nothing",
    ],
)  # fmt: skip
async def test_auto_takes_what_costs_less(
    registry: Registry, held: dict[str, int], prefill: dict[str, Any], decode: dict[str, Any], path: str
) -> None:
    assert (await auto(registry, held, prefill, decode)).startswith(path)


@pytest.mark.parametrize(
    ("held", "prefill", "decode", "path"),
    [
        (3, {}, {}, "local"),
        (1, {}, {}, "remote"),
        (0, {}, {}, "remote"),
        (3, {}, {"queued_tokens": 100}, "remote"),
        (3, {}, {"queued_tokens": 100, "num_running": 4}, "remote"),
        (3, {}, {"queued_tokens": 300}, "remote"),
        (3, {"queued_tokens": 6000}, {"queued_tokens": 300}, "local"),
        (3, {}, {"prefill_tokens_per_s": 5000.0}, "remote"),
        (3, {}, {"prefill_tokens_per_s": 2500.0}, "remote"),
        (3, {"prefill_tokens_per_s": 4000.0}, {"prefill_tokens_per_s": 2500.0}, "remote"),
    ],
    ids=[
        "3 of 4 blocks", "1 of 4", "none", "and prefills another prompt", "which pauses others too", "and a long one",
        "as does prefill", "and prefills half as fast", "a quarter", "and so does prefill, nearly",
    ],
)  # fmt: skip
async def test_a_prefix_at_decode_is_weighed_against_having_it_sent_to_prefill(
    registry: Registry, held: int, prefill: dict[str, Any], decode: dict[str, Any], path: str
) -> None:
    reason = await auto(registry, {"d0": held}, {**FAST, **prefill}, {**FAST, "step_s": 0.004, **decode})
    assert reason.startswith(f"{path} prefill: ")
    assert f"{16 * held} prompt tokens cached at decode" in reason or f"{16 * held} at decode" in reason


@pytest.mark.parametrize(
    ("target_s", "queued", "path"),
    [
        (0.0, 4096, "remote"),  # a pause of 64 ms for ten sequences
        (0.100, 4096, "local"),  # in the room below the target nobody pauses
        (0.100, 0, "remote"),  # which takes longer than a prefill worker that has time
        (0.020, 4096, "remote"),  # no room
    ],
)
async def test_auto_prefills_beside_decodes_within_their_target(
    registry: Registry, target_s: float, queued: int, path: str
) -> None:
    """The prefill worker is so many tokens behind, and steps of the decode worker take 20 ms."""
    busy = worker_load(num_running=10, step_s=0.020, prefill_tokens_per_s=8192.0)
    large = {"num_blocks": 200, "max_model_len": 2048}
    await registry.leases.register(worker_info("d0", Role.DECODE, **large), busy, TTL)
    behind = worker_load(linked=("d0-first",), queued_tokens=queued, prefill_tokens_per_s=8192.0)
    await registry.leases.register(worker_info("p0", Role.PREFILL, **large), behind, TTL)
    route = await select(registry, prefill="auto", prompt_tokens=500, itl_target_s=target_s)
    assert route.reason.startswith(path), route.reason


@pytest.mark.parametrize(("target_s", "prefill"), [(0.0, "p0"), (10.0, "p0"), (1.0, "p1")])
async def test_what_would_be_late_goes_where_it_is_not(registry: Registry, target_s: float, prefill: str) -> None:
    """The one that has the prompt in its cache is a second behind; the other one is not, and is busy, too. To fetch
    takes as long as to compute."""
    large = {"num_blocks": 200, "max_model_len": 2048}
    await registry.leases.register(worker_info("d0", Role.DECODE, **large), worker_load(), TTL)
    for name, queued in (("p0", 1000), ("p1", 100)):
        busy = worker_load(
            linked=("d0-first",), queued_tokens=queued, prefill_tokens_per_s=1000.0, transfer_tokens_per_s=1000.0
        )
        await registry.leases.register(worker_info(name, Role.PREFILL, **large), busy, TTL)
    await registry.leases.publish_blocks("p0", "p0-first", HASHES, [])
    prefix = await known_prefix(registry, HASHES)
    route = await select(registry, prompt_tokens=600, prefix=prefix, ttft_target_s=target_s)
    assert names(route) == (prefill, "d0")


async def test_a_burst_to_an_idle_pair_is_prefilled_by_both(registry: Registry) -> None:
    idle, large = worker_load(step_s=0.020, prefill_tokens_per_s=512.0), {"num_blocks": 2000, "max_model_len": 2048}
    await registry.leases.register(worker_info("d0", Role.DECODE, **large), idle, TTL)
    await registry.leases.register(worker_info("p0", Role.PREFILL, **large), replace(idle, linked=("d0-first",)), TTL)
    burst = [await select(registry, prefill="auto", prompt_tokens=256, itl_target_s=0.1) for _ in range(16)]
    assert burst[0].prefill is not None
    assert 6 <= sum(route.prefill is None for route in burst) <= 8


async def test_a_step_that_seemed_slow_does_not_outweigh_a_hit(registry: Registry) -> None:
    """Steps of an idle worker are few, and on a busy machine some of them take several times as long as others."""
    moving = worker_load(linked=("d0-first", "d1-first"), transfer_tokens_per_s=1e6)
    await registry.leases.register(worker_info("p0", Role.PREFILL), moving, TTL)
    for name, step_s in (("d0", 0.0055), ("d1", 0.002)):
        await registry.leases.register(worker_info(name, Role.DECODE), worker_load(step_s=step_s), TTL)
    await registry.leases.publish_blocks("d0", "d0-first", HASHES, [])
    route = await select(registry, prefix=await known_prefix(registry, HASHES))
    assert names(route) == ("p0", "d0")


async def test_auto_says_what_both_ways_cost(registry: Registry) -> None:
    reason = await auto(registry, {"d0": 4}, SLOW, {**FAST, "num_running": 1})
    assert reason == "local prefill: cheapest: 205 ms, remote 1231; 64 prompt tokens cached at decode"


async def test_workers_that_differ_by_noise_alone_take_turns_when_nothing_waits(registry: Registry) -> None:
    """Else the one that once measured a hair faster would prefill every prompt, and its cache overflow."""
    incarnations = tuple(f"d{i}-first" for i in range(4))
    for i in range(4):
        load = worker_load(step_s=0.020 + 0.001 * i)
        await registry.leases.register(worker_info(f"d{i}", Role.DECODE), load, TTL)
    for i in range(4):
        rates = {"prefill_tokens_per_s": 8000.0 + 300 * i, "transfer_tokens_per_s": 30000.0 - 500 * i}
        await registry.leases.register(
            worker_info(f"p{i}", Role.PREFILL), worker_load(linked=incarnations, **rates), TTL
        )
    prefills, decodes = Counter[str | None](), Counter[str]()
    for i in range(40):
        route = await select(registry, request_id=f"r{i}")
        await registry.reservations.release(route.reservation_id)
        prefill, decode = names(route)
        prefills[prefill] += 1
        decodes[decode] += 1
    assert set(prefills.values()) == set(decodes.values()) == {10}


async def test_a_worker_that_is_really_faster_reads_more(registry: Registry) -> None:
    await registry.leases.register(worker_info("d0", Role.DECODE), worker_load(), TTL)
    for name, rate in (("p0", 8000.0), ("p1", 2000.0)):
        load = worker_load(linked=("d0-first",), prefill_tokens_per_s=rate)
        await registry.leases.register(worker_info(name, Role.PREFILL), load, TTL)
    for i in range(4):
        route = await select(registry, request_id=f"r{i}")
        assert names(route) == ("p0", "d0")
        await registry.reservations.release(route.reservation_id)


async def placed(registry: Registry, prefill: dict[str, str], *decodes: dict[str, str], **rates: float) -> None:
    """p0 there, and d0, d1 … there, all linked."""
    for i, where in enumerate(decodes):
        await registry.leases.register(worker_info(f"d{i}", Role.DECODE, **where), worker_load(), TTL)
    load = worker_load(linked=tuple(f"d{i}-first" for i in range(len(decodes))), **rates)
    await registry.leases.register(worker_info("p0", Role.PREFILL, **prefill), load, TTL)


async def chosen_decodes(registry: Registry) -> set[str]:
    """The decode workers of requests one at a time."""
    found = set()
    for i in range(4):
        route = await select(registry, request_id=f"r{i}")
        await registry.reservations.release(route.reservation_id)
        found.add(names(route)[1])
    return found


@pytest.mark.parametrize(
    ("here", "near", "farther"),
    [
        ({"node": "a"}, {"node": "a"}, {"node": "b"}),
        ({"node": "a", "zone": "z"}, {"node": "b", "zone": "z"}, {"node": "c", "zone": "y"}),
        ({"node": "a", "zone": "z"}, {"node": "b", "zone": "z"}, {"node": "c"}),
        ({"node": "a", "nvlink_domain": "n"}, {"node": "b", "nvlink_domain": "n"}, {"node": "c", "nvlink_domain": "m"}),
        ({"node": "a"}, {"node": "a", "zone": "z"}, {"node": "b"}),
    ],
)
async def test_of_equals_the_nearer_one_is_chosen(
    registry: Registry, here: dict[str, str], near: dict[str, str], farther: dict[str, str]
) -> None:
    await placed(registry, here, farther, near)
    assert await chosen_decodes(registry) == {"d1"}


async def test_what_was_measured_outweighs_names(registry: Registry) -> None:
    """As where zones share a fabric and a machine's own way is slow."""
    rates = {"transfer_tokens_per_s": 1000.0, "far_transfer_tokens_per_s": 100_000.0}
    await placed(registry, {"node": "a", "zone": "z"}, {"node": "a", "zone": "z"}, {"node": "b", "zone": "y"}, **rates)
    assert await chosen_decodes(registry) == {"d1"}


async def test_where_all_are_as_far_they_take_turns(registry: Registry) -> None:
    await placed(registry, {"node": "a", "zone": "z"}, {"node": "b", "zone": "z"}, {"node": "c", "zone": "z"})
    assert await chosen_decodes(registry) == {"d0", "d1"}


async def test_a_nearer_one_that_is_full_is_not_chosen(registry: Registry) -> None:
    await placed(registry, {"node": "a"}, {"node": "a"}, {"node": "b"})
    await registry.leases.heartbeat(
        worker_info("d0", Role.DECODE, node="a"), worker_load(free_blocks=2, num_running=8), TTL
    )
    assert await chosen_decodes(registry) == {"d1"}
