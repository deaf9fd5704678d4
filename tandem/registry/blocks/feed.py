"""The feed of prefix caches in Redis: a stream of numbered batches, and pages of the blocks that each worker holds.

heads   the last event, and each live worker's last batch      where an up-to-date reader is
read    the events after a cursor                              what changed
page    some blocks of one worker                              for a reader that has missed events
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tandem.block_hash import HASH_BYTES
from tandem.registry.wire import Entry, RegistryConnection, UnreadableRows

STREAM = "events"
# The most events in one read: applying them must not block the event loop for long.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Head:
    """The generation of a worker's lease (each new lease has a higher one), and the number of batches published under
    it.
    """

    generation: str
    number: int


@dataclass(frozen=True, slots=True)
class Heads:
    last_event: str
    workers: dict[str, Head]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Batch `number` of a generation; number 0 means that the generation has ended.

    `stored`, `removed`: joined hashes.
    """

    event_id: str
    worker_id: str
    generation: str
    number: int
    medium: str  # "device": the GPU memory, in which the engine computes
    stored: bytes
    removed: bytes

    @classmethod
    def unread(cls, event_id: str) -> BlockEvent:
        """Makes the event that stands for an unreadable one: batches may be missing."""
        return cls(event_id, "", "0", -1, "", b"", b"")

    @property
    def is_unread(self) -> bool:
        return self.number < 0


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    cursor: str  # where the next page begins; "0": there is none
    hashes: bytes


class BlockFeed:
    """A reader of block events. Every call may raise RegistryUnavailable."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows) -> None:
        self._connection, self._unreadable = connection, unreadable

    async def heads(self) -> Heads:
        last, *heads = await self._connection.call("heads")
        workers = zip(heads[::3], heads[1::3], heads[2::3], strict=True)
        return Heads(last, {worker_id: Head(generation, int(number)) for worker_id, generation, number in workers})

    async def read(self, cursor: str, wait: float) -> list[BlockEvent]:
        """Returns the events after `cursor`, oldest first; waits at most `wait` seconds for the first.

        `BlockEvent.unread` stands for an event that cannot be read.
        """
        entries = await self._connection.read(STREAM, cursor, AT_ONCE, wait)
        return [
            self._unreadable.read("event", entry[0], partial(_event, entry), BlockEvent.unread(entry[0]))
            for entry in entries
        ]

    async def page(self, worker_id: str, generation: str, cursor: str) -> Page | None:
        """Returns a page of a worker's blocks; None if this generation has ended."""
        page = await self._connection.call("page", worker_id, generation, cursor, binary=True)
        return Page(int(page[0]), page[1].decode(), page[2]) if page else None


def event_order(event_id: str) -> tuple[int, int]:
    """Returns the sort key of an event's id in Redis."""
    time, _, number = event_id.partition("-")
    return int(time), int(number)


def _event(entry: Entry) -> BlockEvent:
    event_id, fields = entry
    if len(fields[b"stored"]) % HASH_BYTES or len(fields[b"removed"]) % HASH_BYTES:
        raise ValueError(f"hashes have {HASH_BYTES} bytes each")
    return BlockEvent(
        event_id=event_id,
        worker_id=fields[b"worker"].decode(),
        generation=str(int(fields[b"generation"])),
        number=max(0, int(fields[b"number"])),
        medium=fields[b"medium"].decode(),
        stored=fields[b"stored"],
        removed=fields[b"removed"],
    )
