"""Entries of one stream know nothing of each other: each is answered, refused, aborted by itself."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem.v1 import worker_pb2
from tandem.worker import EngineDied, Entry, SequenceFailed, Streams, SuspectTurns, WorkService

LACKS = {
    "memory": MemoryError(),
    "threads": RuntimeError("can't start new thread"),
    "descriptors": OSError(errno.EMFILE, "Too many open files"),
    "engine": EngineDied("the engine has ended"),
}


class NamedWorker:
    """Begins what its name says: `waits` for ever, `refused`, `broken` or what it lacks, else at once."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[worker_pb2.WorkRequest | None] = asyncio.Queue()
        self.streams = Streams("inc", lambda stream_id: self.events.append("stream ended"))
        self.events: list[str] = []
        service = WorkService(self.streams, lambda: "stream", self._begin, self._abort, SuspectTurns(lambda: 0))
        context: Any = None
        self._responses = service.Work(self._sent(), context)
        self.heard: list[worker_pb2.WorkResponse] = []
        self.call = asyncio.create_task(self._hear())

    def send(self, *begin: str, abort: str = "") -> None:
        reservations = [worker_pb2.Reservation(sequence=worker_pb2.SequenceSpec(request_id=name)) for name in begin]
        self.requests.put_nowait(worker_pb2.WorkRequest(reservations=reservations, aborts=[abort] if abort else []))

    async def until(self, *events: str) -> None:
        async with asyncio.timeout(30):
            while not set(events) <= set(self.events) | self.said():
                await asyncio.sleep(0.001)

    def said(self) -> set[str]:
        said = {f"reserved {r.request_id}" for message in self.heard for r in message.reserved}
        said |= {f"released {name}" for message in self.heard for name in message.released}
        return said | {f"{o.request_id} {o.failure.code}" for message in self.heard for o in message.outputs}

    async def _begin(self, stream_id: str, entry: Entry) -> None:
        name = entry.sequence.request_id
        self.events.append(f"begin {name}")
        if name == "refused":
            raise SequenceFailed("RESOURCE_EXHAUSTED", "no room")
        if name == "broken":
            raise KeyError("a bug")
        if name in LACKS:
            raise LACKS[name]
        if name == "waits":
            try:
                await asyncio.Event().wait()
            finally:
                self.events.append(f"cancelled {name}")
        self.streams.reserved(stream_id, worker_pb2.Reserved(request_id=name))

    async def _abort(self, request_id: str) -> None:
        self.events.append(f"abort {request_id}")

    async def _sent(self) -> AsyncIterator[worker_pb2.WorkRequest]:
        while (request := await self.requests.get()) is not None:
            yield request

    async def _hear(self) -> None:
        async for response in self._responses:
            self.heard.append(response)


@pytest.fixture
async def worker() -> AsyncIterator[NamedWorker]:
    worker = NamedWorker()
    yield worker
    worker.call.cancel()
    await asyncio.wait([worker.call])


async def test_each_entry_of_a_message_has_an_answer_of_its_own(worker: NamedWorker) -> None:
    worker.send("waits", "refused", "broken", "a")
    await worker.until("reserved a", "refused RESOURCE_EXHAUSTED", "broken INTERNAL", "begin waits")
    assert "cancelled waits" not in worker.events


@pytest.mark.parametrize("name", LACKS)
async def test_what_a_worker_lacks_is_no_fault_of_the_request(worker: NamedWorker, name: str) -> None:
    """Its gateway tries another worker after UNAVAILABLE, and none after INTERNAL."""
    worker.send(name)
    await worker.until(f"{name} UNAVAILABLE")


async def test_a_failure_that_cannot_be_reported_ends_the_stream(
    worker: NamedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where there is no memory for the report."""

    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker.streams, "fail", no_memory)
    worker.send("waits", "memory")
    await worker.until("stream ended", "cancelled waits")
    await asyncio.wait_for(worker.call, 30)  # its gateway hears of it


async def test_an_abort_cancels_what_begins_and_is_answered_once_all_is_released(worker: NamedWorker) -> None:
    worker.send("waits")
    await worker.until("begin waits")
    worker.send(abort="waits")
    worker.send(abort="unknown")
    await worker.until("released waits", "released unknown")
    assert worker.events.index("cancelled waits") < worker.events.index("abort waits")


async def test_a_request_id_begins_once_at_a_time(worker: NamedWorker) -> None:
    worker.send("waits", "waits")
    await worker.until("waits ALREADY_EXISTS")
    assert worker.events.count("begin waits") == 1


@pytest.mark.parametrize("how", ["hangs up", "is cancelled"])
async def test_the_end_of_a_stream_cancels_what_still_begins(worker: NamedWorker, how: str) -> None:
    worker.send("waits")
    await worker.until("begin waits")
    if how == "hangs up":
        worker.requests.put_nowait(None)
    else:
        worker.call.cancel()
    await worker.until("cancelled waits", "stream ended")
    await asyncio.wait([worker.call], timeout=30)
    assert worker.call.done()
