"""The adapters that a cluster serves: one list for all gateways, restored to an emptied Redis; holders preferred."""

from __future__ import annotations

from tandem.adapters import AdapterRef
from tandem.registry import Named, Registry, Role
from tests.registry.cluster import BLOCK_SIZE, MODEL, TTL, register_pool, worker_info, worker_load


def ref(name: str, revision: str = "r1") -> AdapterRef:
    return AdapterRef(name, f"folder/{name}", revision)


async def test_one_list_for_all(registry: Registry) -> None:
    assert await registry.adapters.all() == Named("", {})
    await registry.adapters.put("a", ref("a"))
    await registry.adapters.put("b", ref("b"))
    found = await registry.adapters.put("a", ref("a", "r2"))
    assert found.by_name == {"a": ref("a", "r2"), "b": ref("b")}
    assert await registry.adapters.drop("b") == await registry.adapters.all()
    restored = await registry.adapters.restore({"a": ref("a", "old"), **{f"n{i}": ref(f"n{i}") for i in range(5000)}})
    assert len(restored.by_name) == 5001
    assert restored.by_name["a"] == ref("a", "r2")


async def test_workers_that_hold_the_adapter_are_preferred(registry: Registry) -> None:
    """Among equals, time after time; one that is much more loaded is not."""
    await register_pool(registry, prefill=3, decode=3)
    generations = {worker.info.worker_id: worker.generation for worker in await registry.workers()}
    adapted = [generations["p1"], generations["d2"]]

    async def choose(name: str) -> tuple[str, str]:
        route = await registry.reservations.select_and_reserve(
            request_id=name, model=MODEL, prompt_tokens=BLOCK_SIZE, max_new_tokens=1, prefill="require",
            adapted=adapted, ttl=TTL,
        )  # fmt: skip
        await registry.reservations.release(route.reservation_id)
        assert route.prefill is not None
        return route.prefill.info.worker_id, route.decode.info.worker_id

    assert {await choose(f"r{i}") for i in range(6)} == {("p1", "d2")}
    busy = worker_load(queued_tokens=100_000, linked=tuple(f"d{i}-first" for i in range(3)))
    await registry.leases.heartbeat(worker_info("p1", Role.PREFILL), busy, TTL)
    assert (await choose("later"))[0] != "p1"
