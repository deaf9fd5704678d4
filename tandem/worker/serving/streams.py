"""An outbox per gateway's stream: all outputs of one loop iteration, or engine step, are sent in one message.

answers, first tokens, ends, errors      immediately
other tokens                             immediately if the gateway keeps up: fewer than MOST_AHEAD of the outputs sent
                                         are not passed on yet; else once it does, or MOST_S after the last message

An output costs the gateway as much with three tokens as with one. So while its core has time, no token waits, and when
the core is full, outputs grow until the gateway keeps up. The gateway reports what it has passed on only when asked: a
report costs both sides as much as an output.

Messages to a slow reader are merged, so an outbox never holds more than the tokens of its sequences. A sequence belongs
to one stream for its whole life: a gateway that comes back opens a new stream, and the sequences of the broken stream
are aborted immediately.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, cast

from tandem.engine import SequenceOutput
from tandem.v1 import worker_pb2
from tandem.worker.serving import conversion

MOST_S = 0.05
# The most outputs not passed on yet, of a gateway that keeps up; it passes so many on within 2 ms.
MOST_AHEAD = 32


class Outbox:
    """The next message to a gateway, as it grows."""

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.reserved: list[worker_pb2.Reserved] = []
        self.prefilled: list[worker_pb2.Prefilled] = []
        self.released: list[str] = []
        self.pulse: worker_pb2.Pulse | None = None
        self._ready: list[worker_pb2.SequenceOutput] = []
        self._held: dict[str, SequenceOutput] = {}
        self._loop = asyncio.get_running_loop()
        self._num_sent = self._num_asked_for = self._num_passed_on = 0  # numbers of outputs
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
        """Records that the gateway has passed on `num_outputs` outputs so far."""
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
    """The outboxes of all streams. Messages to a stream that is not open are dropped.

    `on_ended(stream_id)` is called once when a stream has ended, for any reason.
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
        """Puts an output into a stream's outbox, where later outputs may be appended to it.

        `itl_target_s`: 0: no target.
        """
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
        """Reports that an aborted sequence holds nothing any more."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.released.append(request_id)
            outbox.changed.set()

    def passed_on(self, stream_id: str, num_outputs: int) -> None:
        """Records that the stream's gateway has passed on `num_outputs` outputs so far."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.passed_on(num_outputs)

    def ping(self, stream_id: str) -> None:
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.pulse = self._pulse()
            outbox.changed.set()

    def fail(self, stream_id: str, request_id: str, code: str, message: str) -> None:
        """Reports that a sequence has ended in an error."""
        outbox = self._outboxes.get(stream_id)
        if outbox is not None:
            outbox.fail(request_id, code, message)

    async def stream(self, stream_id: str) -> AsyncIterator[worker_pb2.WorkResponse]:
        """Yields the messages of a new stream, until its reader hangs up or `end`."""
        outbox = self._outboxes[stream_id] = Outbox()
        # If a call is cancelled while it writes, only the end of its task is sure to be noticed.
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
