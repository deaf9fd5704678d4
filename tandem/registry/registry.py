"""The cluster's shared state in Redis: live workers, their load, reservations, and the holders of KV blocks.

    workers     `leases`                               their leases, load and KV blocks
    gateways    `reservations` `limits` `gateways` `block_feed`    room for requests, tenants' limits, other gateways
    operators   `adapters` `aliases` `on_demand` `releases`        names that a cluster serves; other releases
    observers   the methods of Registry itself

Each call is one Lua script, hence atomic, and one round trip. Time is Redis's own, so skewed clocks do no harm. When a
lease ends, everything under it ends too: a dead incarnation has no reservations and no blocks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from tandem.containment import Death
from tandem.process import IntegrityReport
from tandem.registry import named
from tandem.registry.answers import Snapshot, Swept, death_in
from tandem.registry.blocks import BlockFeed
from tandem.registry.gateways import Gateways
from tandem.registry.limits import TenantLimits
from tandem.registry.on_demand import OnDemandModels
from tandem.registry.releases import Releases
from tandem.registry.reservations import Reservations
from tandem.registry.wire import (
    Changes,
    LateReleases,
    RedisConnection,
    RedisMemory,
    RegistryConnection,
    UnreadableRows,
)
from tandem.registry.worker import LiveWorker
from tandem.registry.worker_leases import WorkerLeases


class Registry:
    """A client of the registry. Safe for concurrent use within one event loop.

    Every call may raise RegistryUnavailable, within `timeout` seconds; whether it took effect is then unknown. A
    release that failed so, or was cancelled, is repeated in the background until Redis answers.
    """

    def __init__(self, connection: RegistryConnection, client_lease_s: float | None = None) -> None:
        """`client_lease_s`: this client's reservations are released this long after its last call or renewal by
        `gateways.hold`; None: each reservation ends only by its own `ttl`.
        """
        self._connection, self._late = connection, LateReleases(connection)
        memory = RedisMemory(connection)
        self.unreadable = unreadable = UnreadableRows(connection)
        self.leases = WorkerLeases(connection)
        self.gateways = Gateways(connection, unreadable, client_lease_s)
        self.reservations = Reservations(connection, memory, self._late, self.gateways.ttl, self.workers)
        self.limits = TenantLimits(connection, memory, self._late, unreadable)
        self.block_feed, self.releases = BlockFeed(connection, unreadable), Releases(connection)
        self.adapters, self.aliases = named.adapters(connection, unreadable), named.aliases(connection, unreadable)
        self.on_demand = OnDemandModels(connection, unreadable)

    @classmethod
    def connect(
        cls, url: str, *, namespace: str = "tandem", timeout: float = 2.0, client_lease_s: float | None = None
    ) -> Registry:
        """Returns a client of the Redis at `url`, which need not be up yet. Raises ValueError if `url` or the namespace
        is malformed.
        """
        return cls(RedisConnection(url, namespace, timeout), client_lease_s)

    async def ping(self) -> None:
        """Returns once Redis has answered."""
        await self._connection.ping()

    async def workers(self) -> list[LiveWorker]:
        """Returns the workers with a live lease, sorted by id."""
        return (await self.snapshot()).workers

    async def snapshot(self) -> Snapshot:
        return Snapshot.of(await self._connection.call("workers"), self.unreadable)

    async def report_death(self, death: Death) -> None:
        """Reports the death of a worker's process. An earlier report on the same incarnation stays."""
        await self._connection.call("death", death.incarnation, json.dumps([death.cause, dict(death.named)]))

    async def death(self, incarnation: str) -> Death | None:
        """Returns the reported death of an incarnation; None without a report."""
        said = await self._connection.call("death", incarnation)
        return self.unreadable.read("death", incarnation, partial(death_in, incarnation, said), None)

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """Subscribes to workers that come, go, drain or have new links."""
        return self._connection.changes()

    async def locate(self, hashes: Sequence[bytes]) -> list[list[str]]:
        """Returns for each hash the ids of the live workers that hold the block."""
        return list(await self._connection.call("locate", *hashes))

    async def sweep(self, keeper: str = "") -> Swept:
        """Deletes what has expired; any number of processes may sweep.

        `keeper`: this process's address for Prometheus.
        """
        total = Swept(0, 0, 0)
        while True:
            found = Swept(*await self._connection.call("sweep", keeper))
            total = total.then(found)
            if not found.reservations:
                return total

    async def check_integrity(self) -> IntegrityReport:
        """Compares the workers' counters with the reservations."""
        leases, reservations, clients, wrong = await self._connection.call("check")
        return IntegrityReport({"leases": leases, "reservations": reservations, "clients": clients}, tuple(wrong))

    async def close(self) -> None:
        """Tries pending releases once more, then ends the client's lease and all connections."""
        await self._late.close()
        await self.reservations.close()
        await self.gateways.end()
        await self._connection.close()
