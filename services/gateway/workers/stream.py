"""The one long-lived Work call to one incarnation of a worker: all that this gateway asks of it, and hears from it.

    connecting ── first message, right incarnation ──> open ── break ──> connecting, after a pause

What a turn of the loop has gathered leaves as one message. A break fails every sequence and every question here at
once, for the worker frees them too; so does the silence of a worker that another could take the place of. Another
incarnation at the same address ends the stream for good.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import structlog
from grpc import StatusCode, aio

from services.gateway.errors import GatewayError, InvalidRequest, TimedOut, WorkerLost, from_failure
from services.gateway.workers.mailbox import Mailbox
from tandem.liveness import Liveness, stretched
from tandem.registry import WorkerInfo
from tandem.rpc import MAX_REQUEST_BYTES
from tandem.v1 import worker_pb2

log = structlog.get_logger(__name__)
RECONNECT_S = 0.1
# gRPC's text for an address where no process listens: the incarnation is dead.
REFUSED = "connection refused"
CONNECT_WAIT_S = 1.5
# Statuses of an ended stream over a connection that stands: a worker sends the first one to a gateway that was silent,
# and gRPC reports a cancelled handler as either of the others.
SENT_BY_A_PEER = {StatusCode.ABORTED, StatusCode.CANCELLED, StatusCode.INTERNAL}
# A worker that is silent for this long, in which three pings were due, may be dead.
SUSPECT_S = 0.9
# A message of this size is sent without waiting for more, so that long prompts share no size limit with others.
FULL_BYTES = 2**20
Reply: TypeAlias = "asyncio.Future[Any]"


@dataclass(frozen=True, slots=True)
class Judge:
    """Readings that decide when a silent worker counts as dead.

    is_sole: True if no other worker could take its place. dead_here: how its process died, if this host's kernel knows.
    """

    starvation: Callable[[], float]
    is_sole: Callable[[WorkerInfo], bool]
    dead_here: Callable[[str], str]


class WorkerStream:
    """The stream to one incarnation; its connection runs `run` as a task. A reply is a result or a GatewayError."""

    def __init__(self, worker: WorkerInfo, call: Callable[[bool], Any], judge: Judge) -> None:
        """`call(anew)`: makes a Work call, on a new channel if the last one's went silent."""
        self.open = asyncio.Event()
        self._worker = worker
        self._call, self._judge = call, judge
        self._liveness = Liveness(asyncio.get_running_loop().time())
        self._silent = ""  # why the last call was ended
        self._ended_by_worker = False  # the worker is alive: it took this gateway for dead
        self._mailboxes: dict[str, Mailbox] = {}
        self._asked: dict[str, Reply] = {}
        self._aborting: dict[str, Reply] = {}
        self._unsent: deque[worker_pb2.WorkRequest] = deque()
        self._unsent_bytes = 0  # size of the last unsent message
        self._to_send = asyncio.Event()
        self._waiting: set[Reply] = set()  # replies to set once the stream is open
        self._closed_because = ""
        self._stopped: Callable[[], GatewayError] | None = None

    def __len__(self) -> int:
        """Returns the number of sequences on this stream."""
        return len(self._mailboxes.keys() | self._asked.keys())

    # --- out ---

    def attach(self, request_id: str, num_prior_tokens: int = 0) -> Mailbox:
        """Returns a mailbox for the tokens after the first `num_prior_tokens`.

        Raises:
            WorkerLost: the stream is not open.
            GatewayError: the stream was stopped.
        """
        self._check_open()
        mailbox = self._mailboxes[request_id] = Mailbox(request_id, self._worker.worker_id, num_prior_tokens)
        return mailbox

    def detach(self, mailbox: Mailbox) -> None:
        self._mailboxes.pop(mailbox.request_id, None)

    def reserve(self, reservation: worker_pb2.Reservation) -> Reply:
        """Send a reservation. Returns the future Reserved; `abort` ends it.

        Raises:
            GatewayError: as `attach`, or the request is too large for a message.
        """
        reply, message = self._ask(reservation.sequence.request_id, reservation.ByteSize())
        message.reservations.append(reservation)
        return reply

    def prefill(self, prefill: worker_pb2.Prefill) -> Reply:
        """Send a prefill. Returns the future Prefilled; `abort` ends it.

        Raises:
            GatewayError: as `reserve`.
        """
        reply, message = self._ask(prefill.sequence.request_id, prefill.ByteSize())
        message.prefills.append(prefill)
        return reply

    def abort(self, request_id: str) -> Reply:
        """Abort a sequence. Returns a future that is done once the worker holds nothing for it, or the stream ended."""
        self._asked.pop(request_id, None)
        reply = asyncio.get_running_loop().create_future()
        if self.open.is_set():
            self._aborting[request_id] = reply
            self._message(len(request_id)).aborts.append(request_id)
        else:
            reply.set_result(None)
        return reply

    async def wait_open(self, deadline: float) -> None:
        """Wait until the stream is open, or cannot be opened: then sending fails.

        Raises:
            WorkerLost: not within CONNECT_WAIT_S, longer where this gateway is starved.
            TimedOut: the deadline came first.
        """
        if self.open.is_set() or self._closed_because or self._stopped:
            return
        loop = asyncio.get_running_loop()
        patience = loop.time() + stretched(CONNECT_WAIT_S, self._judge.starvation())
        waiting = loop.create_future()
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout_at(min(patience, deadline)):
                await waiting
        except TimeoutError:
            if deadline <= patience:
                raise TimedOut("the request's deadline passed while connecting to a worker") from None
            raise WorkerLost(self._worker.worker_id, "no stream could be opened") from None
        finally:
            self._waiting.discard(waiting)

    def _ask(self, request_id: str, size: int) -> tuple[Reply, worker_pb2.WorkRequest]:
        self._check_open()
        if size > MAX_REQUEST_BYTES - FULL_BYTES:
            raise InvalidRequest(f"the request is too large for a worker: {size} bytes")
        reply = self._asked[request_id] = asyncio.get_running_loop().create_future()
        return reply, self._message(size)

    def _check_open(self) -> None:
        if self._stopped:
            raise self._stopped()
        if self._closed_because or not self.open.is_set():
            raise WorkerLost(self._worker.worker_id, self._closed_because or "its stream is not open")

    def _message(self, size: int) -> worker_pb2.WorkRequest:
        """Returns the message to add an entry of `size` bytes to: the last one until it has FULL_BYTES."""
        if not self._unsent or self._unsent_bytes >= FULL_BYTES:
            self._unsent.append(worker_pb2.WorkRequest())
            self._unsent_bytes = 0
        self._unsent_bytes += size
        self._to_send.set()
        return self._unsent[-1]

    # --- its life ---

    async def run(self) -> None:
        """Keep the stream open until cancelled, or until another incarnation answers."""
        try:
            while not self._closed_because:
                reason = await self._talk()
                self.fail(reason, ended=not (self._silent or self._ended_by_worker))
                if REFUSED in reason.lower() or self._judge.dead_here(self._worker.process):
                    self._decided()
                await asyncio.sleep(RECONNECT_S)
        finally:
            self.fail(self._closed_because or "the gateway is stopping")

    def fail(self, reason: str, *, ended: bool = True) -> None:
        """End every sequence of this stream by an error. `ended`: the worker's process may have died."""
        was_open = self.open.is_set()
        self.open.clear()
        self._unsent.clear()
        lost = partial(WorkerLost, self._worker.worker_id, reason, ended=ended)
        mailboxes, self._mailboxes = self._mailboxes, {}
        for mailbox in mailboxes.values():
            mailbox.fail(lost())
        asked, self._asked = self._asked, {}
        for reply in asked.values():
            _answer(reply, lost())
        aborting, self._aborting = self._aborting, {}
        for reply in aborting.values():
            _answer(reply, None)
        if was_open:
            failed = len(mailboxes.keys() | asked.keys())
            log.warning("stream ended", worker=self._worker.worker_id, reason=reason, failed=failed)

    def close(self, reason: str) -> None:
        """Send nothing more, as this incarnation is dead."""
        self._closed_because = reason
        self.fail(reason)
        self._decided()

    def stop(self, error: Callable[[], GatewayError]) -> None:
        """Accept no more sequences and end running ones by an error each. The stream stays open."""
        self._stopped = error
        for mailbox in self._mailboxes.values():
            mailbox.fail(error())

    async def _talk(self) -> str:
        """Run one call until it breaks. Returns why."""
        try:
            call = self._call(bool(self._silent))
        except OSError as error:
            return f"this gateway's certificate cannot be read: {error}"
        self._ended_by_worker = False
        self._silent, self._liveness = "", Liveness(asyncio.get_running_loop().time(), self._judge.starvation)
        watching = asyncio.create_task(self._watch(call))
        writing = asyncio.create_task(self._write(call))
        writing.add_done_callback(lambda done: done.cancelled() or (done.exception() and call.cancel()))
        try:
            async for message in call:
                self._heard(message)
                if message.incarnation:
                    self._greet(message.incarnation)
                self._deliver(message)
                if self._closed_because:
                    return self._closed_because
        except aio.AioRpcError as error:
            self._ended_by_worker = error.code() in SENT_BY_A_PEER
            return f"its stream broke: {error.code().name}: {error.details()}"
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if own is not None and own.cancelling():
                raise
            if self._silent:
                return self._silent
            if writing.done() and not writing.cancelled() and (failed := writing.exception()):
                return f"its stream could not be written: {failed!r}"
            raise
        finally:
            watching.cancel()
            writing.cancel()
            call.cancel()
        return "its stream ended"

    async def _watch(self, call: Any) -> None:
        """Send pings, and end the call once its worker counts as dead."""
        now = asyncio.get_running_loop().time
        while not (dead := self._dead(now())):
            if self.open.is_set() and self._liveness.ping_due(now()):
                self._message(0).pulse.starvation = self._judge.starvation()
            await asyncio.sleep(self._liveness.due_s(now()))
        self._silent = f"{dead}: nothing heard for {self._liveness.silent_s(now()):.1f} s"
        call.cancel()

    def _dead(self, now: float) -> str:
        """Returns why the worker counts as dead, or ""."""
        liveness, is_open = self._liveness, self.open.is_set()
        if liveness.silent_s(now) < SUSPECT_S or (is_open and not liveness.pings):
            return ""
        liveness.sole = is_open and self._judge.is_sole(self._worker)
        if not liveness.sole and (dead := self._judge.dead_here(self._worker.process)):
            return dead
        return "it is silent" if liveness.lost(now) else ""

    async def _write(self, call: Any) -> None:
        """Send the entries gathered since the last message, up to FULL_BYTES and one entry more."""
        try:
            while True:
                await self._to_send.wait()
                self._to_send.clear()
                while self._unsent:
                    await call.write(self._unsent.popleft())
        except (aio.AioRpcError, asyncio.InvalidStateError):
            return  # the reader raises the error

    # --- in ---

    @property
    def answers(self) -> bool:
        """True while the stream is open and its worker not silent."""
        now = asyncio.get_running_loop().time()
        return self.open.is_set() and now - self._liveness.heard_at < SUSPECT_S

    @property
    def doubtful(self) -> bool:
        """True while only the starvation that the worker reported speaks for its being alive."""
        liveness = self._liveness
        return self.open.is_set() and liveness.pings and liveness.doubtful(asyncio.get_running_loop().time())

    def _heard(self, message: worker_pb2.WorkResponse) -> None:
        now = asyncio.get_running_loop().time()
        self._liveness.heard_at = now
        if message.HasField("pulse"):
            self._liveness.heard(message.pulse.starvation, now)

    def _greet(self, incarnation: str) -> None:
        if incarnation == self._worker.incarnation:
            self.open.set()
            self._decided()
        else:
            self._closed_because = f"it was restarted: incarnation {incarnation} answers"

    def _decided(self) -> None:
        """Wake tasks that wait for the stream: it is open, or cannot be opened."""
        for waiting in self._waiting:
            _answer(waiting, None)

    def _deliver(self, message: worker_pb2.WorkResponse) -> None:
        for reserved in message.reserved:
            _answer(self._asked.pop(reserved.request_id, None), reserved)
        for prefilled in message.prefilled:
            _answer(self._asked.pop(prefilled.output.request_id, None), prefilled)
        for output in message.outputs:
            request_id = output.request_id
            if request_id in self._asked and output.HasField("failure"):
                failure = from_failure(self._worker.worker_id, output.failure.code, output.failure.message)
                _answer(self._asked.pop(request_id), failure)
            mailbox = self._mailboxes.get(request_id)
            if mailbox is not None:
                mailbox.put(output)
        for request_id in message.released:
            _answer(self._aborting.pop(request_id, None), None)
        if message.num_sent:
            # In its turn, after the requests that now have tokens to pass on.
            asyncio.get_running_loop().call_soon(self._report_passed_on, message.num_sent)

    def _report_passed_on(self, num_outputs: int) -> None:
        if self.open.is_set():
            self._message(0).num_passed_on = num_outputs


def _answer(reply: Reply | None, with_this: Any) -> None:
    if reply is not None and not reply.done():
        reply.set_result(with_this)
