"""One outbox per gateway's stream: what a turn of the loop, or an engine step, made for it leaves in one message.

answers, first tokens, ends, errors      at once
other tokens                             at once where the gateway keeps up: fewer than MOST_AHEAD pieces of what it was
                                         sent are not passed on yet; else when it does, or MOST_S after the last message

Passing a piece on costs the gateway as much with three tokens as with one. So while its core has time no token waits,
and when it is full the pieces grow until it keeps up. It reports what it has passed on where it is asked to: a report
costs both sides as much as a piece.

A gateway that is slow to read gets its messages merged, so an outbox never holds more than the tokens of its sequences.
A sequence belongs to one stream for its whole life: a gateway that comes back opens another, and what ran on the broken
one is aborted at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from tandem.engine import SequenceOutput
from tandem.v1 import worker_pb2
from tandem.worker.work import conversion

MOST_S = 0.05
# Passed on within 2 ms.
MOST_AHEAD = 32


class Outbox:
    """Messages that go to a gateway next."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.reserved: list[worker_pb2.Reserved] = []
        self.prefilled: list[worker_pb2.Prefilled] = []
        self.released: list[str] = []
        self.pulse: worker_pb2.Pulse | None = None
        self._ready: list[worker_pb2.SequenceOutput] = []
        self._held: dict[str, SequenceOutput] = {}
        self._loop = asyncio.get_running_loop()
        self._num_sent = self._num_asked_for = self._num_passed_on = 0  # outputs
        self._sent_at = self._loop.time()
        self._overdue = False
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    def put(self, output: SequenceOutput, itl_target_s: float) -> None:
        held = self._held.setdefault(output.request_id, output)
        if held is not output:
            held.tokens += output.tokens
            held.finish_reason, held.error = output.finish_reason, output.error
            held.num_proposed_tokens, held.num_accepted_tokens = output.num_proposed_tokens, output.num_accepted_tokens
        if output.first_index == 0 or output.finished:
            self._send(output.request_id)
            self.changed.set()
        elif self._keeps_up:
            self.changed.set()
        else:
            self._wait_until(self._sent_at + min(MOST_S, itl_target_s or MOST_S))

    def fail(self, request_id: str, code: str, message: str) -> None:
        if request_id in self._held:
            self._send(request_id)
        self._ready.append(conversion.failed(request_id, code, message))
        self.changed.set()

    def passed_on(self, num_outputs: int) -> None:
        """The gateway has passed on so many of all outputs."""
        self._num_passed_on = min(max(num_outputs, self._num_passed_on), self._num_sent)
        if self._held and self._keeps_up:
            self.changed.set()

    def take(self) -> worker_pb2.WorkResponse:
        self.changed.clear()
        if self._overdue or (self._held and self._keeps_up):
            self.close()
            self._timer, self._overdue = None, False
            self._ready += map(conversion.output_to_proto, self._held.values())
            self._held.clear()
        message = worker_pb2.WorkResponse(
            reserved=self.reserved, prefilled=self.prefilled, outputs=self._ready, released=self.released,
            pulse=self.pulse,
        )  # fmt: skip
        if self._ready:
            self._num_sent += len(self._ready)
            self._sent_at = self._loop.time()
            if self._num_sent - self._num_asked_for >= MOST_AHEAD / 2:
                message.num_sent = self._num_asked_for = self._num_sent
        self.reserved, self.prefilled, self._ready, self.released, self.pulse = [], [], [], [], None
        return message

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    @property
    def _keeps_up(self) -> bool:
        return self._num_sent - self._num_passed_on < MOST_AHEAD

    def _wait_until(self, at: float) -> None:
        if self._timer is None or at < self._timer_at:
            self.close()
            self._timer, self._timer_at = self._loop.call_at(at, self._end_wait), at

    def _end_wait(self) -> None:
        self._overdue = True
        self.changed.set()

    def _send(self, request_id: str) -> None:
        self._ready.append(conversion.output_to_proto(self._held.pop(request_id)))


class Streams:
    """The outboxes of all streams. What is said to one that is not open is dropped.

    `on_ended(stream_id)` is called once when one has ended, however it did.
    """

    def __init__(
        self, incarnation: str, on_ended: Callable[[str], None], starvation: Callable[[], float] = lambda: 0.0
    ) -> None:
        self.starvation = starvation
        self._incarnation = incarnation
        self._on_ended = on_ended
        self._outboxes: dict[str, Outbox] = {}

    def is_open(self, stream_id: str) -> bool:
        return stream_id in self._outboxes

    def send(self, stream_id: str, output: SequenceOutput, itl_target_s: float = 0.0) -> None:
        """Put an output, which grows by those that follow, into a stream's outbox; no target between tokens if 0."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.put(output, itl_target_s)

    def reserved(self, stream_id: str, answer: worker_pb2.Reserved) -> None:
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.reserved.append(answer)
            outbox.changed.set()

    def prefilled(self, stream_id: str, answer: worker_pb2.Prefilled) -> None:
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.prefilled.append(answer)
            outbox.changed.set()

    def released(self, stream_id: str, request_id: str) -> None:
        """Report that nothing is held any more for a sequence that was to be aborted."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.released.append(request_id)
            outbox.changed.set()

    def passed_on(self, stream_id: str, num_outputs: int) -> None:
        """The stream's gateway has passed on so many of all outputs."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.passed_on(num_outputs)

    def ping(self, stream_id: str) -> None:
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.pulse = self._pulse()
            outbox.changed.set()

    def fail(self, stream_id: str, request_id: str, code: str, message: str) -> None:
        """Report that a sequence has ended in an error."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.fail(request_id, code, message)

    async def stream(self, stream_id: str) -> AsyncIterator[worker_pb2.WorkResponse]:
        """The messages of a new stream, until its reader hangs up or `end`."""
        outbox = self._outboxes[stream_id] = Outbox()
        # Of a call that is cancelled while it writes, only its task's end is certain to be seen here.
        cast("asyncio.Task[Any]", asyncio.current_task()).add_done_callback(lambda done: self.end(stream_id))
        try:
            yield worker_pb2.WorkResponse(incarnation=self._incarnation, pulse=self._pulse())
            while True:
                await outbox.changed.wait()
                message = outbox.take()
                if not self.is_open(stream_id):
                    return
                yield message
        finally:
            self.end(stream_id)

    def _pulse(self) -> worker_pb2.Pulse:
        return worker_pb2.Pulse(starvation=self.starvation())

    def end(self, stream_id: str) -> None:
        outbox = self._outboxes.pop(stream_id, None)
        if outbox is not None:
            outbox.close()
            outbox.changed.set()
            self._on_ended(stream_id)

    def end_all(self) -> None:
        for stream_id in list(self._outboxes):
            self.end(stream_id)

    def close(self) -> None:
        for outbox in self._outboxes.values():
            outbox.close()
