"""One outbox per gateway: what an engine step made for it leaves as one message.

A gateway that is slow to read gets its steps merged, so an outbox never holds more than the tokens of its sequences.
A gateway whose stream breaks has GRACE_S to come back; then whatever it had running is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tandem.clock import Clock
from tandem.v1 import decode_pb2, worker_pb2

GRACE_S = 1.0


class Outbox:
    def __init__(self) -> None:
        self.outputs: list[worker_pb2.SequenceOutput] = []
        self.news = asyncio.Event()
        self.stream = 0


class Streams:
    """The outboxes of every gateway. `on_lost(gateway_id)` is called when one is gone for good."""

    def __init__(self, incarnation: str, clock: Clock, on_lost: Callable[[str], None]) -> None:
        self._incarnation = incarnation
        self._clock = clock
        self._on_lost = on_lost
        self._outboxes: dict[str, Outbox] = {}
        self._graces: set[asyncio.Task[None]] = set()

    def connected(self, gateway_id: str) -> bool:
        return gateway_id in self._outboxes

    def send(self, gateway_id: str, output: worker_pb2.SequenceOutput) -> None:
        """Put an output into a gateway's outbox; one for a gateway that is gone is dropped."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is not None:
            outbox.outputs.append(output)
            outbox.news.set()

    async def stream(self, gateway_id: str) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """What goes to a gateway, until it hangs up or a newer stream of the same gateway takes over."""
        outbox = self._outboxes.setdefault(gateway_id, Outbox())
        outbox.stream += 1
        mine = outbox.stream
        outbox.news.set()
        try:
            yield decode_pb2.StreamTokensResponse(incarnation=self._incarnation)
            while outbox.stream == mine:
                await outbox.news.wait()
                outbox.news.clear()
                outputs, outbox.outputs = outbox.outputs, []
                if outputs:
                    yield decode_pb2.StreamTokensResponse(outputs=outputs)
        finally:
            if outbox.stream == mine:
                self._start_grace(gateway_id, outbox, mine)

    def close(self) -> None:
        for task in self._graces:
            task.cancel()

    def _start_grace(self, gateway_id: str, outbox: Outbox, stream: int) -> None:
        task = asyncio.create_task(self._grace(gateway_id, outbox, stream))
        self._graces.add(task)
        task.add_done_callback(self._graces.discard)

    async def _grace(self, gateway_id: str, outbox: Outbox, stream: int) -> None:
        await self._clock.sleep(GRACE_S)
        if outbox.stream == stream:
            del self._outboxes[gateway_id]
            self._on_lost(gateway_id)
