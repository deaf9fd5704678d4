"""Gateways with a lease: this client, if it is a gateway, and the others.

announce ── hold … ── end          what this gateway reserves is released when its lease ends
live                               where clients and Prometheus reach them
other_demands                      the other gateways' demand, as of the last renewal
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict

from tandem.liveness import stretched
from tandem.registry.answers import Demand, Demands, GatewayAddress, demands_of
from tandem.registry.errors import RegistryUnavailable
from tandem.registry.wire import RegistryConnection, UnreadableRows, milliseconds
from tandem.registry.worker import ModelKey


class Gateways:
    """The leases of gateways, and of other clients that make reservations."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows, lease_s: float | None) -> None:
        """`lease_s`: the duration of this client's own lease; None: it has no lease."""
        self._connection, self._unreadable, self._lease_s = connection, unreadable, lease_s
        self._starvation: Callable[[], float] = lambda: 0.0
        self._announced: Callable[[], tuple[GatewayAddress, Demands]] | None = None
        self._others: list[Demands] = []

    def ttl(self) -> int:
        """Returns the milliseconds that this client's lease lasts from now on; 0 if it has no lease."""
        return 0 if self._lease_s is None else milliseconds(stretched(self._lease_s, self._starvation()))

    async def hold(self, starvation: Callable[[], float] = lambda: 0.0) -> None:
        """Renews this client's own lease until cancelled.

        `starvation`: returns how starved this process is; a starved client's lease lasts longer.
        """
        self._starvation = starvation
        while True:
            with suppress(RegistryUnavailable):
                await self._renew(self.ttl())
            await asyncio.sleep((self._lease_s or 0.0) / 4)

    def announce(self, gateway: Callable[[], tuple[GatewayAddress, Demands]]) -> None:
        """Publishes this client as a gateway, from its lease's next renewal until the lease ends."""
        self._announced = gateway

    def other_demands(self, model: ModelKey) -> Sequence[Demand]:
        """Returns the demand for a model at other gateways, as of this client's last renewal."""
        return [demands[model.text] for demands in self._others if model.text in demands]

    async def live(self) -> list[GatewayAddress]:
        """Returns the gateways that have a lease."""
        return (await self.measured())[0]

    async def measured(self) -> tuple[list[GatewayAddress], str]:
        """Returns the gateways that have a lease, and the kvstore's address for Prometheus; empty if there is no
        kvstore.
        """
        gateways, keeper = await self._connection.call("gateways")
        return sorted(self._unreadable.read_texts("gateway", gateways, GatewayAddress.of)), keeper

    async def end(self) -> None:
        """Ends this client's lease."""
        if self.ttl():
            with suppress(RegistryUnavailable):
                await self._renew(0)

    async def _renew(self, ttl: int) -> None:
        client = self._connection.client_id
        if self._announced is None:
            await self._connection.call("renew", client, ttl)
            return
        address, demands = self._announced()
        said = json.dumps(asdict(address)), json.dumps(demands)
        others = await self._connection.call("renew", client, ttl, *said)
        self._others = self._unreadable.read_texts("demands", others, demands_of)
