"""A tier on a thread of its own. A tier that fails or does not answer is not used for PAUSE_S."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import structlog

from tandem.process import WorkThreads

# The longest wait for work of at most 8 MiB; after it the tier counts as not answering.
ANSWER_S, PAUSE_S = 1.0, 30.0
# The most expired blocks that go at a time.
EXPIRED_AT_ONCE = 256
T = TypeVar("T")
log = structlog.get_logger(__name__)


class BlockStore(Protocol):
    """A store of up to `size` blocks by name and owner, used by one thread; `in`, `len` and `counts` by any.

    `block_bytes`: what one of them takes. `gone`: names of blocks that it no longer keeps, until its reader takes them.
    """

    num_damaged: int
    size: int
    block_bytes: int
    gone: deque[bytes]

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def __contains__(self, name: bytes) -> bool: ...
    @property
    def counts(self) -> Mapping[bytes, int]: ...
    def write(self, name: bytes, owner: bytes, block: memoryview) -> None: ...
    def read(self, name: bytes, block: memoryview) -> bool: ...
    def touch(self, names: Iterable[bytes]) -> None: ...
    def expire(self, most: int) -> int: ...
    def drop(self, owner: bytes | None) -> int: ...
    def pin(self, owner: bytes, seconds: float) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class TierStats:
    """Blocks held now; blocks written, restored and found damaged so far; 1 if the tier is used, 0 while it is not."""

    held: int = 0
    written: int = 0
    restored: int = 0
    damaged: int = 0
    up: int = 0


class OwnedBlock(NamedTuple):
    """A block to write."""

    name: bytes
    owner: bytes
    row: memoryview


@dataclass(frozen=True, slots=True)
class TierHolds:
    """A tier's blocks by owner, the size of one, and how many there may be."""

    counts: Mapping[bytes, int]
    block_bytes: int
    most: int


class KVTier:
    """A tier. Rows are the bytes of one block each; `name` is for logs and metrics."""

    def __init__(self, name: str, store: BlockStore) -> None:
        self.name = name
        self.num_restored = 0  # counted by KVTiers, which restores
        self._store = store
        self._thread = WorkThreads(f"kv-{name}", 1)
        self._num_written = 0
        self._is_up = True

    def __contains__(self, block: bytes) -> bool:
        return self._is_up and block in self._store

    @property
    def stats(self) -> TierStats:
        store = self._store
        return TierStats(len(store), self._num_written, self.num_restored, store.num_damaged, int(self._is_up))

    @property
    def size(self) -> int:
        return self._store.size

    def names(self) -> Iterator[bytes]:
        """Returns the names of its blocks."""
        return iter(self._store)

    def take_gone(self) -> Iterator[bytes]:
        """Yields the names of the blocks that went since the last call."""
        gone = self._store.gone
        while gone:
            yield gone.popleft()

    @property
    def holds(self) -> TierHolds:
        return TierHolds(self._store.counts, self._store.block_bytes, self._store.size)

    def lacks(self, block: bytes) -> bool:
        """True if the block should be written to the tier."""
        return self._is_up and block not in self._store

    async def write(self, blocks: Sequence[OwnedBlock]) -> None:
        """Writes blocks in reverse order, so that a full tier drops the end of a chain before its beginning."""
        self._num_written += await self._ask(lambda: self._write(blocks)) or 0

    async def read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        """Fills rows with their blocks up to the first block that is missing. Returns the number of filled rows."""
        return await self._ask(lambda: self._read(blocks)) or 0

    async def touch(self, names: Iterable[bytes]) -> None:
        """Marks blocks as used, the last one most recently."""
        await self._ask(lambda: self._store.touch(names))

    async def expire(self) -> bool:
        """Drops some of the blocks that nobody has used for long. Returns True if there may be more."""
        return await self._ask(lambda: self._store.expire(EXPIRED_AT_ONCE)) == EXPIRED_AT_ONCE

    def drop(self, owner: bytes | None) -> asyncio.Future[int]:
        """Drops an owner's blocks; None: all; behind what was asked before, also while the tier is not used.

        Returns how many there were, or OSError: some may be left.
        """
        return self._thread.run(self._store.drop, owner)

    async def pin(self, owner: bytes, seconds: float) -> None:
        """Has an owner's blocks go by nobody else's pressure for so long; 0: no longer."""
        await self._thread.run(self._store.pin, owner, seconds)

    def close(self) -> None:
        self._thread.close()
        self._store.close()

    def _write(self, blocks: Sequence[OwnedBlock]) -> int:
        for block in reversed(blocks):
            self._store.write(*block)
        return len(blocks)

    def _read(self, blocks: Sequence[tuple[bytes, memoryview]]) -> int:
        return next((i for i, (name, row) in enumerate(blocks) if not self._store.read(name, row)), len(blocks))

    async def _ask(self, fn: Callable[[], T]) -> T | None:
        """Returns the result of `fn` on the tier's thread; None if it fails or does not answer: the tier is then
        paused.
        """
        if not self._is_up:
            return None
        done = self._thread.run(fn)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await asyncio.shield(done)
        except TimeoutError:
            done.add_done_callback(lambda late: late.cancelled() or late.exception())
            self._pause(f"it has not answered in {ANSWER_S} s")
        except (OSError, MemoryError) as error:
            self._pause(str(error))
        return None

    def _pause(self, reason: str) -> None:
        if self._is_up:
            log.warning("KV blocks of a tier are not used for a while", tier=self.name, seconds=PAUSE_S, reason=reason)
            asyncio.get_running_loop().call_later(PAUSE_S, self._resume)
        self._is_up = False

    def _resume(self) -> None:
        self._is_up = True
