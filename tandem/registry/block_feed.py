"""Prefix caches as Redis knows them: a stream of numbered batches, and pages of what each worker holds.

heads   the last event, and each live worker's last batch      what a reader that has all of it must have come to
read    the events behind a cursor                             what changed
page    some of what one worker holds                          for a reader that has missed something
"""

from __future__ import annotations

from dataclasses import dataclass

from tandem.registry.connection import Entry, RegistryConnection

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


@dataclass(frozen=True, slots=True)
class Page:
    number: int
    cursor: str  # "0" at the end
    hashes: bytes


class BlockFeed:
    """Every call may raise RegistryUnavailable."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection

    async def heads(self) -> Heads:
        last, *heads = await self._connection.call("heads")
        workers = zip(heads[::3], heads[1::3], heads[2::3], strict=True)
        return Heads(last, {worker_id: Head(generation, int(number)) for worker_id, generation, number in workers})

    async def read(self, cursor: str, wait: float) -> list[BlockEvent]:
        """Events behind `cursor`, oldest first, waiting at most `wait` seconds for one."""
        return [_event(entry) for entry in await self._connection.read(STREAM, cursor, AT_ONCE, wait)]

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
    return BlockEvent(
        event_id=event_id,
        worker_id=fields[b"worker"].decode(),
        generation=fields[b"generation"].decode(),
        number=int(fields[b"number"]),
        medium=fields[b"medium"].decode(),
        stored=fields[b"stored"],
        removed=fields[b"removed"],
    )
