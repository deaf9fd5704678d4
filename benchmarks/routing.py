"""`python -m benchmarks.routing --policy=random …`: a gateway that routes otherwise, for comparison.

Everything but the choice of workers is the gateway's own; it takes the gateway's options too.

tandem        the gateway's own router
local         the gateway's own router, decode workers prefill every prompt
random        any linked pair, all alike
round-robin   linked pairs, in turn
"""

from __future__ import annotations

import random
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection
from itertools import count
from typing import Any

import uvloop

from services.gateway.__main__ import serve
from services.gateway.errors import Unavailable
from services.gateway.routing import Router, RouteRequest
from services.gateway.settings import GatewaySettings
from tandem.process import telemetry
from tandem.registry import ClusterView, Registry, Role, Route
from tandem.settings import load

Pair = tuple[str, str]


class BlindRouter(Router, ABC):
    """Leaves the gateway's own router one pair, chosen by nothing that is known of prompts or load."""

    def __init__(self, registry: Registry, view: ClusterView, *others: Any) -> None:
        super().__init__(registry, view, *others)
        self._seen = view
        self._turn = count()
        self._dice = random.Random(1)

    async def choose(self, request: RouteRequest, exclude: Collection[str]) -> Route:
        workers = {w.info.worker_id: w for w in self._seen.workers if w.info.worker_id not in exclude}
        prefills = [w for w in workers.values() if w.info.role is Role.PREFILL]
        decodes = [w.info for w in workers.values() if w.info.role is Role.DECODE]
        pairs = [(p.info.worker_id, d.worker_id) for d in decodes for p in prefills if d.incarnation in p.load.linked]
        if not pairs:
            raise Unavailable("no linked pair", code="no_workers")
        return await super().choose(request, {*exclude, *workers} - {*self.pick(pairs)})

    @abstractmethod
    def pick(self, pairs: list[Pair]) -> Pair:
        """One of the linked (prefill worker, decode worker)."""


class RandomRouter(BlindRouter):
    def pick(self, pairs: list[Pair]) -> Pair:
        return self._dice.choice(pairs)


class RoundRobinRouter(BlindRouter):
    def pick(self, pairs: list[Pair]) -> Pair:
        return pairs[next(self._turn) % len(pairs)]


class LocalRouter(Router):
    """Never asks a prefill worker."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._policy = "never"


POLICIES: dict[str, type[Router]] = {
    "tandem": Router,
    "local": LocalRouter,
    "random": RandomRouter,
    "round-robin": RoundRobinRouter,
}


class RoutingSettings(GatewaySettings):
    policy: str


def main() -> None:
    settings = load(RoutingSettings, sys.argv[1:], "python -m benchmarks.routing")
    traces = telemetry.set_up(
        "tandem-gateway", f"gateway-{settings.policy}", settings.log_level, telemetry.Traces.BEGUN
    )
    try:
        uvloop.run(serve(settings, traces, make_router=POLICIES[settings.policy]))
    finally:
        traces.close()


if __name__ == "__main__":
    main()
