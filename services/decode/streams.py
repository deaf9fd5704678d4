"""One outbox per gateway: what engine steps made for it leaves in one message.

first tokens, ends, errors      at once
other tokens                    when EACH_S for every sequence, or MOST_S, have passed since the last ones

Handing a piece out costs the gateway and its client as much with three tokens as with one, and where they share a
machine with the engine, it waits for them. The tokens of a few sequences are never held for long.

A gateway that is slow to read gets its messages merged, so an outbox never holds more than the tokens of its sequences.
A gateway whose stream breaks has GRACE_S to come back; then whatever it had running is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tandem.engine import SequenceOutput
from tandem.v1 import decode_pb2, worker_pb2
from tandem.worker import wire

GRACE_S = 1.0
EACH_S, MOST_S = 0.00075, 0.05


class Outbox:
    """What a gateway is told next."""

    def __init__(self) -> None:
        self.news = asyncio.Event()
        self.stream = 0
        self._ready: list[worker_pb2.SequenceOutput] = []
        self._held: dict[str, SequenceOutput] = {}
        self._loop = asyncio.get_running_loop()
        self._due = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def put(self, output: SequenceOutput) -> None:
        held = self._held.setdefault(output.request_id, output)
        if held is not output:
            held.tokens += output.tokens
            held.finish_reason, held.error = output.finish_reason, output.error
        if output.first_index == 0 or output.finished:
            self._tell(output.request_id)
            self.news.set()
        elif self._timer is None:
            self._timer = self._loop.call_at(self._due, self._release)

    def fail(self, request_id: str, code: str, message: str) -> None:
        if request_id in self._held:
            self._tell(request_id)
        self._ready.append(wire.failed(request_id, code, message))
        self.news.set()

    def take(self) -> list[worker_pb2.SequenceOutput]:
        self.news.clear()
        ready, self._ready = self._ready, []
        return ready

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _release(self) -> None:
        self._timer = None
        self._due = self._loop.time() + min(MOST_S, EACH_S * len(self._held))
        self._ready += map(wire.output_to_proto, self._held.values())
        self._held.clear()
        self.news.set()

    def _tell(self, request_id: str) -> None:
        self._ready.append(wire.output_to_proto(self._held.pop(request_id)))


class Streams:
    """The outboxes of every gateway. `on_lost(gateway_id)` is called when one is gone for good."""

    def __init__(self, incarnation: str, on_lost: Callable[[str], None]) -> None:
        self._incarnation = incarnation
        self._on_lost = on_lost
        self._outboxes: dict[str, Outbox] = {}
        self._graces: set[asyncio.Task[None]] = set()

    def connected(self, gateway_id: str) -> bool:
        return gateway_id in self._outboxes

    def send(self, gateway_id: str, output: SequenceOutput) -> None:
        """Put an output, which grows by those that follow, into a gateway's outbox; for one that is gone, drop it."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is not None:
            outbox.put(output)

    def fail(self, gateway_id: str, request_id: str, code: str, message: str) -> None:
        """Tell a gateway, if it is there, that a sequence has ended in an error."""
        outbox = self._outboxes.get(gateway_id)
        if outbox is not None:
            outbox.fail(request_id, code, message)

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
                if outputs := outbox.take():
                    yield decode_pb2.StreamTokensResponse(outputs=outputs)
        finally:
            if outbox.stream == mine:
                self._start_grace(gateway_id, outbox, mine)

    def close(self) -> None:
        for task in self._graces:
            task.cancel()
        for outbox in self._outboxes.values():
            outbox.close()

    def _start_grace(self, gateway_id: str, outbox: Outbox, stream: int) -> None:
        task = asyncio.create_task(self._grace(gateway_id, outbox, stream))
        self._graces.add(task)
        task.add_done_callback(self._graces.discard)

    async def _grace(self, gateway_id: str, outbox: Outbox, stream: int) -> None:
        await asyncio.sleep(GRACE_S)
        if outbox.stream == stream:
            self._outboxes.pop(gateway_id).close()
            self._on_lost(gateway_id)
