"""Wrong values in a registry's Redis: every key and field that a cluster writes, overwritten by what it never would."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis

from tandem.adapters import AdapterRef
from tandem.aliases import Alias
from tandem.containment.crash_page import Death
from tandem.registry import (
    BlockReplica,
    ClusterView,
    GatewayAddress,
    Limits,
    ModelStatus,
    ModelUse,
    NoWorkers,
    PromptPrefix,
    Registry,
    Role,
    StaleIncarnation,
    Wakefulness,
    WorkerInfo,
    WorkerLoad,
)
from tests.registry.cluster import BLOCK_SIZE, MODEL, REVISION, worker_info, worker_load

TTL = 3600.0
HASHES = [bytes([i]) * 16 for i in range(4)]
LIMITS = Limits(1000, 1_000_000, 100, 1000.0)
LINKED = ("d0-first", "d1-first")
VALUES: tuple[bytes | None, ...] = (
    None, b"", b"\xff\xfe\x00\x80", b"9" * 400, b"-1", b"nan", b"1e999", b'{"another": ["shape"]}', b"[[1, 2], null]",
    b"\xff" * 384, bytes(range(192)) * 2, b"0.5",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class WrittenPlace:
    """A key, or one field of it."""

    key: bytes
    kind: bytes
    field: bytes | None = None

    def __str__(self) -> str:
        name = self.key.decode(errors="replace").split("}:", 1)[1]
        return name if self.field is None else f"{name} {self.field!r}"


def workers() -> Iterator[tuple[WorkerInfo, WorkerLoad]]:
    for name in ("d0", "d1"):
        yield worker_info(name, Role.DECODE, fingerprint="f" * 64), worker_load()
    for name in ("p0", "p1"):
        yield worker_info(name, Role.PREFILL, fingerprint="f" * 64), worker_load(linked=LINKED)


def worker(name: str) -> tuple[WorkerInfo, WorkerLoad]:
    return next(one for one in workers() if one[0].worker_id == name)


def select(registry: Registry, request: str) -> Awaitable[Any]:
    prefix = PromptPrefix.of(REVISION, BLOCK_SIZE, HASHES)
    return registry.reservations.select_and_reserve(
        request_id=request, model=MODEL, prompt_tokens=64, max_new_tokens=8, prefill="auto", prefix=prefix, ttl=TTL
    )


def take(registry: Registry, request: str) -> Awaitable[Any]:
    return registry.limits.take("tenant", LIMITS, request_id=request, tokens=10, cost=1.0, ttl=TTL)


async def fill(registry: Registry) -> None:
    """Write all that workers, gateways, launchers and operators do."""
    for info, load in workers():
        await registry.leases.register(info, load, TTL)
    for info, _ in workers():
        await registry.leases.publish_blocks(info.worker_id, info.incarnation, HASHES, [])
    registry.gateways.announce(lambda: (GatewayAddress(MODEL, "g:1", "g:2"), {f"{MODEL}@": [(0, "tenant", 0.5)]}))
    await registry.gateways._renew(int(1000 * TTL))
    await registry.sweep("k:1")
    await select(registry, "first")
    await registry.limits.settle(await take(registry, "first"), 1, 1, 1.0)
    await take(registry, "second")
    await registry.report_death(Death("gone", "SIGSEGV", {"a-0": 7}))
    await fill_names(registry)


async def fill_names(registry: Registry) -> None:
    """Write what operators and launchers do."""
    await registry.adapters.put("adapter", AdapterRef("adapter", "/a", "r", MODEL))
    await registry.aliases.put("alias", Alias("alias", {MODEL: 1.0}))
    await registry.on_demand.tell([ModelStatus("sleeper", Wakefulness.ASLEEP)], TTL)
    await registry.on_demand.ask({"sleeper": ModelUse(1.0, 1.0)})


async def places(redis: Redis, namespace: str) -> list[WrittenPlace]:
    """Keys, and fields of hashes, as there are."""
    found = []
    for key in sorted(await redis.keys(f"{{{namespace}}}:*")):
        kind = await redis.type(key)
        found.append(WrittenPlace(key, kind))
        if kind == b"hash":
            found += [WrittenPlace(key, kind, field) for field in await redis.hkeys(key)]
    return found


async def spoil(redis: Redis, place: WrittenPlace, value: bytes | None) -> None:
    """Overwrite it; without a value, delete it. A field of what is no hash any more goes with that."""
    if place.field is not None and await redis.type(place.key) != place.kind:
        await redis.delete(place.key)
    for command in spoiling(place, value):
        await redis.execute_command(*command)


def spoiling(place: WrittenPlace, value: bytes | None) -> Iterator[tuple[bytes | str | float, ...]]:
    """Yields the commands that do it."""
    if place.field is not None:
        yield ("HDEL", place.key, place.field) if value is None else ("HSET", place.key, place.field, value)
        return
    yield "DEL", place.key
    if value is not None and (command := _replacing(place, value)):
        yield command


def _replacing(place: WrittenPlace, value: bytes) -> tuple[bytes | str | float, ...]:
    """Returns the command that makes a key of another type there, or one with other members."""
    if place.kind == b"string" and value.startswith(b"["):
        return "RPUSH", place.key, value
    if place.kind == b"string" or value:
        return "SET", place.key, value
    return {
        b"zset": ("ZADD", place.key, 2e15, b"\xff", 2e15, b""),
        b"set": ("SADD", place.key, b"\xff", b""),
        b"hash": ("HSET", place.key, b"\xff", b"\xff", b"", b""),
        b"list": ("RPUSH", place.key, b"\xff", b""),
        b"stream": ("XADD", place.key, "*", b"\xff", b"\xff"),
    }.get(place.kind, ())


def beats(registry: Registry) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Returns the calls of workers, by name."""
    return {
        f"heartbeat {info.worker_id}": lambda info=info, load=load: registry.leases.heartbeat(info, load, TTL)
        for info, load in workers()
    }  # type: ignore[misc]


def readers(registry: Registry, view: ClusterView, replica: BlockReplica) -> dict[str, Callable[[], Awaitable[Any]]]:
    """Returns the calls of gateways, the kvstore, launchers and commands, by name."""
    return {
        "view": view.refresh,
        "replica": replica.refresh,
        "follow": lambda: replica._read(0),
        "measured": registry.gateways.measured,
        "select": lambda: select(registry, "again"),
        "publish": lambda: registry.leases.publish_blocks("d0", "d0-first", HASHES[:1], HASHES[1:2]),
        "locate": lambda: registry.locate(HASHES),
        "sweep": lambda: registry.sweep("k:1"),
        "check": registry.check_integrity,
        "renew": lambda: registry.gateways._renew(int(1000 * TTL)),
        "take": lambda: take(registry, "again"),
        "usage": lambda: registry.limits.usage("tenant"),
        "adapters": registry.adapters.all,
        "aliases": registry.aliases.all,
        "ask": lambda: registry.on_demand.ask({"sleeper": ModelUse(1.0, 1.0)}),
        "tell": lambda: registry.on_demand.tell([ModelStatus("sleeper", Wakefulness.ASLEEP)], TTL),
        "death": lambda: registry.death("gone"),
        "report": lambda: registry.report_death(Death("another", "SIGSEGV", {"a-0": 7})),
        "releases": registry.releases.others,
    }


async def outcome(name: str, call: Callable[[], Awaitable[Any]]) -> str:
    """Returns the error that ends a process; empty where there is none."""
    try:
        await call()
    except (NoWorkers, StaleIncarnation) as error:
        return "" if name in ("select", "publish") else repr(error)
    except Exception as error:
        return repr(error)[:200]
    return ""
