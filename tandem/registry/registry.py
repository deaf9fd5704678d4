"""The cluster's shared truth, in Redis: who is alive, how loaded, what is reserved for whom, who holds which KV block.

    workers     `leases`                               alive, how loaded, which blocks they hold
    gateways    `reservations` `limits` `gateways` `block_feed`    room for requests, of tenants, of one another
    operators   `adapters` `aliases` `on_demand` `releases`        names that a cluster serves; who else is there
    observers   the methods of Registry itself

Each call is one Lua script, hence atomic, and one round trip. Time is Redis's own, so skewed clocks do no harm. What a
lease held for others goes with it: a dead incarnation's reservations and blocks are nowhere to be found.
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

    Every call may raise RegistryUnavailable, within `timeout` seconds; whether it took effect is then unknown. What
    such a call, or a cancelled one, should have released is released in the background once Redis answers.
    """

    def __init__(self, connection: RegistryConnection, client_lease_s: float | None = None) -> None:
        """`client_lease_s`: what this client reserves is released so long after it or `gateways.hold` last called;
        without, each reservation ends by its own `ttl` alone."""
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
        """A client of the Redis at `url`, which need not be up yet. Raises ValueError where it or the namespace is
        malformed.
        """
        return cls(RedisConnection(url, namespace, timeout), client_lease_s)

    async def ping(self) -> None:
        """Return if Redis answers."""
        await self._connection.ping()

    async def workers(self) -> list[LiveWorker]:
        """Workers with a live lease, by id."""
        return (await self.snapshot()).workers

    async def snapshot(self) -> Snapshot:
        return Snapshot.of(await self._connection.call("workers"), self.unreadable)

    async def report_death(self, death: Death) -> None:
        """Report the death of a worker's process. What was said of that incarnation before stays."""
        await self._connection.call("death", death.incarnation, json.dumps([death.cause, dict(death.named)]))

    async def death(self, incarnation: str) -> Death | None:
        """None while nothing is known."""
        said = await self._connection.call("death", incarnation)
        return self.unreadable.read("death", incarnation, partial(death_in, incarnation, said), None)

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """A subscription to workers coming, going, draining and linking."""
        return self._connection.changes()

    async def locate(self, hashes: Sequence[bytes]) -> list[list[str]]:
        """For each hash, the ids of the live workers that hold the block."""
        return list(await self._connection.call("locate", *hashes))

    async def sweep(self, keeper: str = "") -> Swept:
        """Forget what is past its time; any number of processes may. `keeper`: where Prometheus reads this one."""
        total = Swept(0, 0, 0)
        while True:
            found = Swept(*await self._connection.call("sweep", keeper))
            total = total.then(found)
            if not found.reservations:
                return total

    async def check_integrity(self) -> IntegrityReport:
        """Compare counters with reservations."""
        leases, reservations, clients, wrong = await self._connection.call("check")
        return IntegrityReport({"leases": leases, "reservations": reservations, "clients": clients}, tuple(wrong))

    async def close(self) -> None:
        """Tries the releases that are still due once more, ends the client's lease and all connections."""
        await self._late.close()
        await self.reservations.close()
        await self.gateways.end()
        await self._connection.close()
