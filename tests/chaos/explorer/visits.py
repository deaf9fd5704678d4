"""Workers of other models join a cluster and leave it: whose requests these are, and what that may cost them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial
from math import inf

from grpc import StatusCode

from tests.chaos.explorer.schedule import Visit
from tests.simulation.cluster import Guest, Reply, SimulatedCluster

# So soon a model that joins is served.
SERVED_S = 2.0
# How a request fails whose model has no workers, or had none for too long.
GONE = (StatusCode.UNAVAILABLE, StatusCode.NOT_FOUND, StatusCode.DEADLINE_EXCEEDED, StatusCode.RESOURCE_EXHAUSTED)


class Visits:
    def __init__(self, cluster: SimulatedCluster, is_disturbed: Callable[[], bool]) -> None:
        """`is_disturbed`: a fault has happened."""
        self.fired: Counter[str] = Counter()
        self.violations: list[str] = []
        self._cluster, self._is_disturbed = cluster, is_disturbed
        self._are_over = False

    async def begin(self, visits: tuple[Visit, ...]) -> None:
        """Returns when those are served that are there from the start."""
        for visit in visits:
            if visit.joins_s is None:
                self._cluster.join(visit.name, visit.model, SERVED_S)
        while not all(self._is_served(guest.model) for guest in self._cluster.guests.values()):
            await asyncio.sleep(0.05)
        for guest in self._cluster.guests.values():
            guest.served_at = self._cluster.world.now
        for visit in visits:
            for at_s, act in ((visit.joins_s, self._come), (visit.leaves_s, self._go)):
                if at_s is not None:
                    self._cluster.world.after(at_s, partial(act, visit))

    async def end(self) -> None:
        """All are told to leave, once those that have come were to be served, and none comes any more."""
        self._are_over = True
        served_at = [guest.served_at for guest in self._cluster.guests.values() if guest.left_at == inf]
        await asyncio.sleep(max(0.0, max(served_at, default=0.0) - self._cluster.world.now))
        for name in self._cluster.guests:
            self._cluster.leave(name, killed=False)

    def of_model(self, model: str) -> list[str]:
        """Names of workers."""
        return [name for name, guest in self._cluster.guests.items() if guest.model == model]

    def had_worker(self, model: str, reply: Reply) -> bool:
        """True if one was there all the time, and known to be."""
        return any(
            guest.model == model and guest.served_at <= reply.began_at and reply.ended_at < guest.left_at
            for guest in self._cluster.guests.values()
        )

    def _come(self, visit: Visit) -> None:
        if self._are_over:
            return
        self._cluster.join(visit.name, visit.model, SERVED_S)
        self.fired["model joins"] += 1
        self._cluster.world.after(SERVED_S, partial(self._check_served, self._cluster.guests[visit.name]))

    def _go(self, visit: Visit) -> None:
        if not self._are_over and self._cluster.processes[visit.name].alive:
            self._cluster.leave(visit.name, visit.killed)
            self.fired["model leaves"] += 1

    def _check_served(self, guest: Guest) -> None:
        if guest.left_at == inf and not self._is_disturbed() and not self._is_served(guest.model):
            self.violations.append(f"model {guest.model} is not served {SERVED_S} s after its worker came")

    def _is_served(self, model: str) -> bool:
        """By each gateway."""
        known = [gateway.directory.llms for gateway in self._cluster.gateways.values()]
        return all(any(key.name == model and llm.seats for key, llm in llms.items()) for llms in known)
