"""A gateway's own copy of the KV blocks that workers hold, so that no request has to ask Redis.

    1 heads    the number of every live worker's last batch, and the stream's last event
    2 read     the stream up to there; batches come numbered, each changes one worker's slot of the index
    3 page     a worker that is not where its head is (new here, a batch missed, Redis emptied) is read again, whole
    4 follow   the stream as it grows, for `check_s`; then from 1 on again, immediately if a batch was missed

A worker that is read again gets a new slot, which replaces the old slot once it is complete: so an old snapshot deletes
nothing, and later batches are applied to the new slot in order. All steps run in one task, so no two overlap. An
incarnation that ends (lease lost, worker restarted) holds nothing from that event on. A missed event costs no more than
a cache miss: Redis counts no hit for a generation that has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import structlog

from tandem.registry.blocks.feed import BlockEvent, BlockFeed, Head, event_order
from tandem.registry.blocks.index import BlockIndex, names_of, slots_of
from tandem.registry.errors import RegistryUnavailable

log = structlog.get_logger(__name__)
DEFAULT_MAX_BLOCKS = 2_000_000
CLEAR_PAUSE_S = 0.005
MAX_NAMES = 4096


@dataclass(slots=True)
class Copy:
    """The known content of one worker's cache: everything up to batch `number` of this generation."""

    generation: str
    number: int
    slot: int


class BlockReplica:
    """The copy, which `run` keeps up to date. `max_blocks` bounds its memory, at about 90 bytes per block."""

    def __init__(
        self,
        feed: BlockFeed,
        *,
        max_blocks: int = DEFAULT_MAX_BLOCKS,
        check_s: float = 1.0,
        retry_s: float = 0.25,
    ) -> None:
        self.num_rereads = 0  # how often a worker was read whole
        self._feed = feed
        self._check_s = check_s
        self._retry_s = retry_s
        self._index = BlockIndex(max_blocks)
        self._copies: dict[str, Copy] = {}
        self._cursor: str | None = None
        self._missed = False
        self._names: dict[int, tuple[str, ...]] = {}  # mask: the generations of its slots

    def __len__(self) -> int:
        """Returns the number of known blocks."""
        return len(self._index)

    @property
    def num_dropped(self) -> int:
        """The number of blocks dropped so far because there were more than `max_blocks`."""
        return self._index.dropped

    def holders(self, hashes: Sequence[bytes]) -> list[tuple[int, tuple[str, ...]]]:
        """Returns the holders of a prompt's first blocks, as (number of blocks, generations that hold exactly that many
        of them from the first on), ascending.
        """
        return [(count, self._generations(mask)) for count, mask in self._index.holders(names_of(hashes))]

    async def run(self) -> None:
        """Keeps the copy up to date until cancelled. While Redis is gone, the last copy stays."""
        while True:
            try:
                await self.refresh()
                await self._follow()
            except RegistryUnavailable as error:
                log.warning("registry unavailable: prefix hits are from the last copy", error=str(error))
                await asyncio.sleep(self._retry_s)

    async def refresh(self) -> None:
        """Brings the copy to the state of every worker's cache at the time of the call. Raises RegistryUnavailable."""
        heads = await self._feed.heads()
        if self._cursor is None or event_order(heads.last_event) < event_order(self._cursor):
            self._cursor = heads.last_event
        while event_order(self._cursor) < event_order(heads.last_event) and await self._read(0):
            pass
        for worker_id in self._copies.keys() - heads.workers.keys():
            self._forget(worker_id)
        for worker_id, head in heads.workers.items():
            if not self._has_come_to(worker_id, head):
                await self._read_anew(worker_id, head.generation)
        self._missed = False

    async def _follow(self) -> None:
        now = asyncio.get_running_loop().time
        end = now() + self._check_s
        while not self._missed and (left := end - now()) > 0:
            await self._read(min(left, CLEAR_PAUSE_S) if self._index.clear_some() else left)

    async def _read(self, wait: float) -> int:
        """Applies the events that come within `wait` seconds. Returns their number."""
        assert self._cursor is not None
        events = await self._feed.read(self._cursor, wait)
        for event in events:
            self._apply(event)
            self._cursor = event.event_id
        return len(events)

    def _apply(self, event: BlockEvent) -> None:
        if event.is_unread:
            self._missed = True
            return
        copy = self._copies.get(event.worker_id)
        if copy and int(event.generation) < int(copy.generation):
            return
        if copy is None or copy.generation != event.generation:
            copy = self._begin(event.worker_id, event.generation)
        if event.number == 0:
            self._forget(event.worker_id)
        elif event.number == copy.number + 1:
            copy.number = event.number
            if event.medium == "device":
                self._index.remove(copy.slot, names_of(event.removed))
                self._index.add(copy.slot, names_of(event.stored))
        elif event.number > copy.number:
            self._missed = True

    async def _read_anew(self, worker_id: str, generation: str) -> None:
        copy, complete = Copy(generation, 0, self._index.open()), False
        try:
            complete = await self._fill(copy, worker_id)
        finally:
            if not complete:
                self._close(copy)
        if complete:
            self._put(worker_id, copy)
            self.num_rereads += 1

    async def _fill(self, copy: Copy, worker_id: str) -> bool:
        """Reads all pages of a worker into `copy`.

        Returns False if the generation ended meanwhile; the stream reports it.
        """
        page = await self._feed.page(worker_id, copy.generation, "0")
        copy.number = page.number if page else 0
        while page:
            self._index.add(copy.slot, names_of(page.hashes))
            if page.cursor == "0":
                return True
            page = await self._feed.page(worker_id, copy.generation, page.cursor)
        return False

    def _begin(self, worker_id: str, generation: str) -> Copy:
        copy = Copy(generation, 0, self._index.open())
        self._put(worker_id, copy)
        return copy

    def _put(self, worker_id: str, copy: Copy) -> None:
        self._forget(worker_id)
        self._copies[worker_id] = copy
        self._names.clear()

    def _forget(self, worker_id: str) -> None:
        if copy := self._copies.pop(worker_id, None):
            self._close(copy)

    def _close(self, copy: Copy) -> None:
        self._index.close(copy.slot)
        self._names.clear()

    def _has_come_to(self, worker_id: str, head: Head) -> bool:
        copy = self._copies.get(worker_id)
        return copy is not None and copy.generation == head.generation and copy.number >= head.number

    def _generations(self, mask: int) -> tuple[str, ...]:
        if mask not in self._names:
            if len(self._names) >= MAX_NAMES:
                self._names.clear()
            by_slot = {copy.slot: copy.generation for copy in self._copies.values()}
            self._names[mask] = tuple(by_slot[slot] for slot in slots_of(mask) if slot in by_slot)
        return self._names[mask]
