"""Prefix caches as Redis knows them: a stream of numbered batches, and pages of what each worker holds.

heads   the last event, and each live worker's last batch      what a reader that has all of it must have come to
read    the events behind a cursor                             what changed
page    some of what one worker holds                          for a reader that has missed something
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from tandem.block_hash import HASH_BYTES
from tandem.registry.wire import Entry, RegistryConnection, UnreadableRows

STREAM = "events"
# At most so many events at once: applying them must not stop the process for long.
AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Head:
    """A lease's generation (each lease taken has a higher one), and how many batches it has published."""

    generation: str
    number: int


@dataclass(frozen=True, slots=True)
class Heads:
    last_event: str
    workers: dict[str, Head]


@dataclass(frozen=True, slots=True)
class BlockEvent:
    """Batch `number` of a generation; number 0 says that the generation has ended. Hashes are one string each."""

    event_id: str
    worker_id: str
    generation: str
    number: int
    medium: str  # "device": the memory that the engine computes in
    stored: bytes
    removed: bytes

    @classmethod
    def unread(cls, event_id: str) -> BlockEvent:
        """Something has happened, and it is not known what: batches may be missed."""
        return cls(event_id, "", "0", -1, "", b"", b"")

    @property
    def is_unread(self) -> bool:
        return self.number < 0


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    cursor: str  # "0" at the end
    hashes: bytes


class BlockFeed:
    """Every call may raise RegistryUnavailable."""

    def __init__(self, connection: RegistryConnection, unreadable: UnreadableRows) -> None:
        self._connection, self._unreadable = connection, unreadable

    async def heads(self) -> Heads:
        last, *heads = await self._connection.call("heads")
        workers = zip(heads[::3], heads[1::3], heads[2::3], strict=True)
        return Heads(last, {worker_id: Head(generation, int(number)) for worker_id, generation, number in workers})

    async def read(self, cursor: str, wait: float) -> list[BlockEvent]:
        """Events behind `cursor`, oldest first, waiting at most `wait` seconds for one. In place of one that cannot be
        read there is one that says nothing."""
        entries = await self._connection.read(STREAM, cursor, AT_ONCE, wait)
        return [
            self._unreadable.read("event", entry[0], partial(_event, entry), BlockEvent.unread(entry[0]))
            for entry in entries
        ]

    async def page(self, worker_id: str, generation: str, cursor: str) -> Page | None:
        """None if this generation has ended."""
        page = await self._connection.call("page", worker_id, generation, cursor, binary=True)
        return Page(int(page[0]), page[1].decode(), page[2]) if page else None


def event_order(event_id: str) -> tuple[int, int]:
    """Redis's ids, made comparable."""
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
