"""Gateways with a lease: this client where it is one, and the others.

announce ── hold … ── end          what this gateway reserves is released when its lease ends
live                               where clients and Prometheus reach them
other_demands                      how much the others have to do, as of the last renewal
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
    """Leases of gateways, and of other clients that reserve."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows, lease_s: float | None) -> None:
        """`lease_s`: what this client's own lease lasts; without, it has none."""
        self._connection, self._unreadable, self._lease_s = connection, unreadable, lease_s
        self._starvation: Callable[[], float] = lambda: 0.0
        self._announced: Callable[[], tuple[GatewayAddress, Demands]] | None = None
        self._others: list[Demands] = []

    def ttl(self) -> int:
        """Returns the milliseconds that this client's lease lasts from now on, 0 where it has none."""
        return 0 if self._lease_s is None else milliseconds(stretched(self._lease_s, self._starvation()))

    async def hold(self, starvation: Callable[[], float] = lambda: 0.0) -> None:
        """Renews this client's own lease until cancelled; that of a starved client lasts longer."""
        self._starvation = starvation
        while True:
            with suppress(RegistryUnavailable):
                await self._renew(self.ttl())
            await asyncio.sleep((self._lease_s or 0.0) / 4)

    def announce(self, gateway: Callable[[], tuple[GatewayAddress, Demands]]) -> None:
        """Makes this client that gateway, from the next renewal of its lease on until the lease ends."""
        self._announced = gateway

    def other_demands(self, model: ModelKey) -> Sequence[Demand]:
        """Returns the demand for a model at other gateways, as of this client's last renewal."""
        return [demands[model.text] for demands in self._others if model.text in demands]

    async def live(self) -> list[GatewayAddress]:
        """Returns the gateways that have a lease."""
        return (await self.measured())[0]

    async def measured(self) -> tuple[list[GatewayAddress], str]:
        """Returns the gateways that have a lease, and the address at which Prometheus reads the kvstore, empty if
        there is none."""
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
