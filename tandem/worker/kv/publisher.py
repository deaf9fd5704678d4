"""Publishes to the registry, in batches, which blocks this worker has cached or in a tier below.

    engine's block events --> held (a set) --> stored / removed since the last batch --> registry, in numbered batches
    evicted, but in a tier --> below, and still held, until it is gone there, too

Changes that could not be published are published the next time. After the registry has lost its data (it restarted, or
was gone for longer than the lease), all blocks are published again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice

import structlog

from tandem.engine import BlockRemoved, BlockStored
from tandem.registry import RegistryUnavailable, StaleIncarnation, WorkerLeases
from tandem.worker.engine import EnginePort
from tandem.worker.kv.tiers import KVTiers

EVERY_S = 0.25
# The interval after an answer has ended: shorter, as the next turn of its conversation may come immediately.
SOON_S = 0.02
# The most blocks in one call: a call should not block Redis, or the gateways that read the feed, for long.
BATCH = 1024
log = structlog.get_logger(__name__)


class BlockPublisher:
    def __init__(
        self, engine: EnginePort, leases: WorkerLeases, worker_id: str, incarnation: str, tiers: KVTiers | None = None
    ) -> None:
        self._engine, self._leases, self._tiers = engine, leases, tiers
        self._owner = (worker_id, incarnation)
        self._ended = asyncio.Event()
        self.held: set[bytes] = set()  # what the registry knows, or is about to
        self._stored: set[bytes] = set()
        self._removed: set[bytes] = set()
        self._below: set[bytes] = set()  # of these, what tiers alone have

    def publish_all_again(self) -> None:
        """Publishes all blocks again, as the registry has lost this worker's."""
        self._stored, self._removed = set(self.held), set()

    async def run(self) -> None:
        """Follows the engine's cache until cancelled."""
        self.begin()
        while True:
            self.note_gone()
            self.note(await self._engine.call(lambda engine: engine.take_block_events()))
            await self.publish()
            await asyncio.sleep(SOON_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S - SOON_S):
                    await self._ended.wait()
            self._ended.clear()

    def begin(self) -> None:
        """Counts what the tiers have from an earlier process."""
        if self._tiers is not None:
            self._below = self._tiers.names()
            self._gained(self._below)

    def sequences_ended(self) -> None:
        """Publishes soon, as the next request may need the blocks that ended sequences leave in the cache."""
        self._ended.set()

    def note(self, events: Iterable[BlockStored | BlockRemoved]) -> None:
        tiers = self._tiers
        for event in events:
            if isinstance(event, BlockRemoved):
                below = [name for name in event.hashes if tiers is not None and tiers.has(name)]
                self._below.update(below)
                self._lost(set(event.hashes).difference(below))
                continue
            if tiers is not None:
                tiers.stored(event.hashes)
            self._below.difference_update(event.hashes)
            self._gained(event.hashes)

    def note_gone(self) -> None:
        """Counts no more what tiers alone had, and have no longer."""
        if self._tiers is not None:
            gone = self._below.intersection(self._tiers.take_gone())
            self._below -= gone
            self._lost(gone)

    def _gained(self, names: Iterable[bytes]) -> None:
        self.held.update(names)
        self._stored.update(names)
        self._removed.difference_update(names)

    def _lost(self, names: Iterable[bytes]) -> None:
        self.held.difference_update(names)
        self._removed.update(names)
        self._stored.difference_update(names)

    async def publish(self) -> None:
        try:
            while self._stored or self._removed:
                await self._publish_batch()
        except RegistryUnavailable as error:
            log.warning("block events not published yet", error=str(error))
        except StaleIncarnation as error:
            self._stored, self._removed = set(), set()
            log.warning("block events dropped: all blocks are published when the lease is back", error=str(error))

    async def _publish_batch(self) -> None:
        """Publishes one batch. Its changes count as published only once the registry has taken them."""
        stored, removed = set(islice(self._stored, BATCH)), set(islice(self._removed, BATCH))
        self._stored -= stored
        self._removed -= removed
        try:
            await self._leases.publish_blocks(*self._owner, sorted(stored), sorted(removed))
        except RegistryUnavailable:
            self._stored |= stored & self.held
            self._removed |= removed - self.held
            raise
