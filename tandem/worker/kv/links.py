"""A worker's KV links, both ways, and the fetches between caches that use them."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from tandem import rpc
from tandem.engine import Engine, KVLayout
from tandem.liveness import Vitals
from tandem.process import IntegrityReport
from tandem.registry import ClusterView, Role
from tandem.transfer import ALL_FAR, LinkPeer, LocalPeer, NearLayers, Receiver, Sender
from tandem.worker.context import WorkerContext
from tandem.worker.kv.fetching import KVFetcher, KVLender
from tandem.worker.kv.link_keeper import LinkKeeper

RECEIVER_CHECK_S = 0.5
MIN_ARENA_BYTES, MAX_ARENA_BYTES = 1 << 20, 8 << 20


class KVLinks:
    """Keeps links to every worker of the other role, and accepts theirs.

    `changed`: called when the linked peers change.
    """

    def __init__(self, context: WorkerContext, role: Role, changed: Callable[[], None]) -> None:
        settings, ports, engine = context.settings, context.ports, context.engine
        self.peer = LinkPeer(context.worker_id, context.incarnation, engine.layout.hash)
        near = near_layers(engine.layout)
        vitals = Vitals(context.starvation, lambda: self.keeper.is_sole, lambda: self.keeper.has_sole_peer)
        self.sender = Sender(
            LocalPeer(self.peer, ports.secret, vitals, near), transports=settings.kv_transports, runtime=ports.links,
            arena_bytes=_arena_bytes(engine),
        )  # fmt: skip
        self.receiver = Receiver(
            LocalPeer(self.peer, ports.secret, Vitals(context.starvation), near), engine.kv_cache,
            host=settings.host, port=settings.transfer_port, transports=settings.kv_transports, runtime=ports.links,
        )  # fmt: skip
        port = self.receiver.address.rpartition(":")[2]
        self.address = rpc.address(settings.reachable_host(ports.hostname), int(port))
        self._view = ClusterView(ports.registry)
        others = Role.DECODE if role is Role.PREFILL else Role.PREFILL
        self.keeper = LinkKeeper(self.sender, self._view, context.location, engine.layout.hash, others, changed)
        ports.engine.rates.distance_to = self.keeper.distance_to
        self.fetcher = KVFetcher(
            ports.engine, self.receiver, self.keeper.link_to, address=self.address, new_id=ports.new_id,
            tiers=ports.tiers,
        )  # fmt: skip
        self.lender = KVLender(
            ports.engine, self.keeper.link_to, new_id=ports.new_id, now=ports.links.driver.now,
            concurrent=ports.links.driver.concurrent, tiers=ports.tiers,
        )  # fmt: skip
        self.receiver.on_fetch = self.lender.asked
        self._disk = ports.tiers

    def tasks(self) -> list[Coroutine[Any, Any, None]]:
        disk = [self._disk.run()] if self._disk else []
        return [self._view.run(), self.keeper.keep(), self._watch(), *disk]

    def check_integrity(self, pushed: set[str], expected: set[str]) -> IntegrityReport:
        """Checks the links. `pushed` and `expected`: ids of the sequences' transfers."""
        lent, fetched = self.lender.transfer_ids(), self.fetcher.transfer_ids()
        sent = self.sender.check_integrity(pushed | lent)
        received = self.receiver.check_integrity(expected | fetched)
        held = Counter(sent.held)
        held.update(received.held)
        return IntegrityReport(held, sent.violations + received.violations)

    async def close(self) -> None:
        await self.lender.close()
        if self._disk:
            self._disk.close()
        self.sender.close()
        self.receiver.close()

    async def _watch(self) -> None:
        """Ends the worker, which is then started again, when KV can no longer reach it, or its blocks stay taken."""
        while self.receiver.healthy and not self.fetcher.stuck:
            await asyncio.sleep(RECEIVER_CHECK_S)
        raise RuntimeError(self.fetcher.stuck or "the KV receiver ended")


def near_layers(layout: KVLayout) -> NearLayers:
    return NearLayers(layout.windows.layers, layout.windows.moved) if layout.windows else ALL_FAR


def _arena_bytes(engine: Engine) -> int:
    """Returns the most bytes of KV that a link may have in flight: at most the size of the cache."""
    cache = sum(layer.nbytes for layer in engine.kv_cache)
    return min(max(cache, MIN_ARENA_BYTES), MAX_ARENA_BYTES)
