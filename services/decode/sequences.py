"""The sequences of a decode worker. The life of a sequence:

1 enter     `add`: its prompt is prefilled here;   `reserve`: it waits for blocks, then for its KV
2 land      frames arrive, verified, in blocks that no step reads yet
3 join      the commit frame brings the first token; the sequence enters the running batch
4 end       by a finish, an abort, a failed transfer, its deadline, or the loss of its stream
5 release   the transfer is fenced, then the engine's blocks are released: a late frame could land in another sequence's

The engine reports on a sequence by events, in order. One deadline, set when the sequence enters, bounds its whole life.
A sequence ends once, in `_end`, or with its last token in `_wrote`; later events change nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from services.decode.block_queue import BlockQueue
from tandem.catalogue.spans import STEP, TRUNCATED
from tandem.engine import Engine, FinishReason, Request, SampledToken, SequenceOutput
from tandem.transfer import TransferError
from tandem.worker import BUG, Added, Ended, EnginePort, Event, SequenceFailed, Streams, failure_of

# A transfer that cannot be fenced within this time keeps its blocks: the worker then ends, and is started again.
FENCE_WAIT_S = 10.0
HAND_OVER_S = 2.0
log = structlog.get_logger(__name__)
tracer = trace.get_tracer("tandem.decode")


class KVReceiver(Protocol):
    """The part of a Receiver that sequences use. Callbacks may run on any thread."""

    def expect(
        self, transfer_id: str, *, block_ids: Sequence[int], first_block: int, timeout_s: float,
        on_commit: Callable[[bytes, int], None], on_abort: Callable[[str, str], None], sender: str = "",
        places: Sequence[int] = (),
    ) -> None: ...  # fmt: skip

    def cancel(self, transfer_id: str) -> Future[None]:
        """Cancels a transfer. The future resolves once no byte of it will be written any more."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that wait for a prompt's KV."""

    transfer_id: str
    num_cached_tokens: int
    num_prompt_blocks: int


@dataclass(slots=True)
class Held:
    """A sequence that this worker holds something for. `released`: set once the sequence has ended, and resolved when
    nothing is held any more.
    """

    request_id: str
    stream_id: str
    deadline: float  # by the loop's clock
    span: Span
    itl_target_s: float
    sender: str
    enters_as_suspect: bool
    num_fetched_tokens: int = 0
    timer: asyncio.Handle | None = None
    transfer_id: str = ""
    num_tokens: int = 0
    num_outputs: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    released: asyncio.Future[None] | None = None


class DecodeSequences:
    """The sequences of this worker.

    `reserved(stream_id, request_id, reservation, num_fetched_tokens)` is called when a sequence has entered; the
    reservation is None if its prompt is prefilled here. `first_token` parses a commit's payload. `stuck` gets the
    reason when a transfer cannot be fenced.
    """

    def __init__(
        self,
        engine: EnginePort,
        receiver: KVReceiver,
        streams: Streams,
        *,
        reserved: Callable[[str, str, Reservation | None, int], None],
        first_token: Callable[[bytes], SampledToken],
        new_id: Callable[[], str],
        worker_id: str,
    ) -> None:
        self._engine, self._receiver, self._streams = engine, receiver, streams
        self._reserved, self._first_token = reserved, first_token
        self._new_id, self._worker_id = new_id, worker_id
        self._block_queue = BlockQueue(engine)
        self._held: dict[str, Held] = {}
        self._fencing: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self.stuck: asyncio.Future[str] = self._loop.create_future()

    def __len__(self) -> int:
        return len(self._held)

    def request_ids(self) -> set[str]:
        """Returns the ids of all requests, those that are being released included."""
        return set(self._held)

    def transfer_ids(self) -> set[str]:
        """Returns the ids of the transfers that are expected now."""
        return {held.transfer_id for held in self._held.values()}

    def num_entering_suspects(self) -> int:
        """Returns the number of running suspects that the engine has not added yet."""
        return sum(held.enters_as_suspect for held in self._running())

    # --- entering ---

    def add(self, request: Request, stream_id: str, timeout_s: float, num_fetched_tokens: int = 0) -> None:
        """Adds a sequence whose prompt is prefilled here, once `num_fetched_tokens` of it were fetched.

        Raises:
            SequenceFailed: it cannot enter. A refusal by the engine is reported on its stream instead.
        """

        def add(engine: Engine) -> Sequence[Event]:
            engine.add(request)
            return [Added(request.request_id)]

        self._enter(request, stream_id, timeout_s).num_fetched_tokens = num_fetched_tokens
        self._engine.submit_with_turn(request.request_id, add)

    def reserve(self, request: Request, stream_id: str, timeout_s: float, sender: str) -> None:
        """Reserves blocks for the prompt and a likely answer, where KV of the prefill incarnation `sender` may land.

        Raises:
            SequenceFailed: like `add`.
        """
        held = self._enter(request, stream_id, timeout_s, sender)
        added = self._block_queue.enter(request)
        if added is not None:
            self._added(held, added)

    def _enter(self, request: Request, stream_id: str, timeout_s: float, sender: str = "") -> Held:
        request_id = request.request_id
        if not self._streams.is_open(stream_id):
            raise SequenceFailed("FAILED_PRECONDITION", "the gateway's stream has ended")
        if request_id in self._held:
            raise SequenceFailed("ALREADY_EXISTS", f"request_id: {request_id!r} is running here")
        span = tracer.start_span("decode", attributes={"tandem.worker": self._worker_id})
        deadline = self._loop.time() + timeout_s
        held = self._held[request_id] = Held(
            request_id, stream_id, deadline, span, request.itl_target_s, sender, request.alone_until > 0
        )
        late = "the request's deadline passed in decode"
        held.timer = self._loop.call_at(deadline, self._fail, held, "DEADLINE_EXCEEDED", late)
        return held

    # --- the engine's events ---

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            held = self._held.get(event.request_id)
            if held is None:
                continue
            if isinstance(event, Ended):
                self._engine_ended(held, event.error)
            elif held.released is None:
                self._wrote(held, event) if isinstance(event, SequenceOutput) else self._added(held, event)
        self._block_queue.look_again()

    def _added(self, held: Held, added: Added) -> None:
        held.enters_as_suspect = False
        self._block_queue.leave(held.request_id)
        if added.block_ids is None:
            self._reserved(held.stream_id, held.request_id, None, held.num_fetched_tokens)
            return
        held.span.set_attribute("decode.cached_tokens", added.num_cached_tokens)
        held.transfer_id = self._new_id()
        try:
            self._expect(held, added.num_cached_tokens, added.block_ids, added.places)
        except TransferError as error:
            self._fail(held, error.code, error.message)
            return
        reservation = Reservation(held.transfer_id, added.num_cached_tokens, len(added.block_ids))
        self._reserved(held.stream_id, held.request_id, reservation, 0)

    def _expect(self, held: Held, num_cached_tokens: int, block_ids: Sequence[int], places: Sequence[int]) -> None:
        self._receiver.expect(
            held.transfer_id,
            block_ids=block_ids,
            first_block=num_cached_tokens // self._engine.engine.layout.block_size,
            timeout_s=max(0.0, held.deadline - self._loop.time()),
            on_commit=lambda payload, num_bytes: self._join(held, payload, num_bytes),
            on_abort=lambda code, reason: self._call_soon(self._fail, held, code, f"KV transfer: {reason}"),
            sender=held.sender,
            places=places,
        )

    def _join(self, held: Held, payload: bytes, num_bytes: int) -> None:
        """Joins a sequence to the batch, once its whole prompt has landed."""
        token = self._first_token(payload)
        if held.released is None:
            held.span.add_event("landed", {"kv.transfer.bytes": num_bytes})

        def join(engine: Engine) -> Sequence[Event]:
            try:
                output = engine.join(held.request_id, token)
            except ValueError as error:
                raise SequenceFailed("INTERNAL", f"its first token does not fit: {error}") from None
            return [output] if output else ()

        self._engine.submit(held.request_id, join)

    def _wrote(self, held: Held, output: SequenceOutput) -> None:
        held.num_tokens += len(output.tokens)
        held.num_outputs += 1
        if held.num_outputs == 1:
            # At least this sequence and a block of it, as a short answer may have left already.
            stats = self._engine.stats
            output.batch_size = max(1, stats.num_running)
            output.kv_usage = max(1 / stats.num_blocks, stats.kv_usage)
        if held.span.is_recording() and not held.num_outputs & (held.num_outputs - 1):
            self._note_step(held)
        held.num_proposed_tokens, held.num_accepted_tokens = output.num_proposed_tokens, output.num_accepted_tokens
        self._streams.send(held.stream_id, output, held.itl_target_s)
        if output.finished:
            del self._held[held.request_id]
            self._end_span(held, output.finish_reason, output.error or "")

    def _note_step(self, held: Held) -> None:
        """Records a span event at the 1st, 2nd, 4th, 8th … step, so that a long answer has few events, too."""
        stats = self._engine.stats
        said = (held.num_tokens, stats.num_running, stats.num_waiting, stats.kv_usage)
        held.span.add_event("step", dict(zip(("decode.tokens", *STEP), said, strict=True)))

    def _engine_ended(self, held: Held, error: Exception | None) -> None:
        """Handles that the engine has aborted a sequence, or refused something of it."""
        if held.released is None:
            self._fail(held, *_failure(held.request_id, error))
        # Else an earlier refusal: the abort's event is still to come.
        elif not isinstance(error, ValueError | SequenceFailed):
            if error is not None:
                log.error("a sequence could not be released", request_id=held.request_id, exc_info=error)
            del self._held[held.request_id]
            held.released.set_result(None)

    # --- ending ---

    async def abort(self, request_id: str) -> None:
        """Ends a sequence in any state; returns when all it held is released. Unknown ids are no error."""
        held = self._held.get(request_id)
        if held is not None:
            await asyncio.shield(held.released or self._end(held, FinishReason.ABORT, ""))

    def stream_ended(self, stream_id: str) -> None:
        """Ends a broken stream's sequences, as no gateway reads their tokens any more."""
        lost = [held for held in self._running() if held.stream_id == stream_id]
        if lost:
            log.warning("a gateway's stream ended", stream_id=stream_id, aborted=len(lost))
        for held in lost:
            self._fail(held, "UNAVAILABLE", "the gateway's stream broke")

    async def hand_over(self) -> None:
        """Ends all sequences, which their gateways resume on other workers.

        Returns when they are released, within a bound.
        """
        for held in self._running():
            self._fail(held, "UNAVAILABLE", "the worker is stopping")
        releasing = [held.released for held in self._held.values() if held.released]
        if releasing:
            await asyncio.wait(releasing, timeout=HAND_OVER_S)  # a release takes longer only if the engine is stuck

    async def close(self) -> None:
        """Ends all sequences, without waiting for their release."""
        for held in self._running():
            self._end_span(held, None, "the worker is stopping")
        self._held.clear()
        for task in self._fencing:
            task.cancel()
        await asyncio.gather(*self._fencing, return_exceptions=True)

    def _running(self) -> list[Held]:
        return [held for held in self._held.values() if held.released is None]

    def _fail(self, held: Held, code: str, message: str) -> None:
        """Ends a sequence, unless it has ended, with an error that is sent to its gateway."""
        if held.released is None and self._held.get(held.request_id) is held:
            self._streams.fail(held.stream_id, held.request_id, code, message)
            self._end(held, None, message)

    def _end(self, held: Held, reason: FinishReason | None, error: str) -> asyncio.Future[None]:
        """Ends a sequence before its last token. Returns the future that resolves when nothing is held any more."""
        released = held.released = self._loop.create_future()
        self._end_span(held, reason, error)
        self._block_queue.leave(held.request_id)
        if held.transfer_id:
            task = asyncio.create_task(self._fence(held))
            self._fencing.add(task)
            task.add_done_callback(self._fenced)
        else:
            self._leave_engine(held)
        return released

    def _end_span(self, held: Held, reason: FinishReason | None, error: str) -> None:
        if held.timer:
            held.timer.cancel()
        held.span.set_attribute("decode.tokens", held.num_tokens)
        held.span.set_attribute("decode.proposed_tokens", held.num_proposed_tokens)
        held.span.set_attribute("decode.accepted_tokens", held.num_accepted_tokens)
        if reason in (None, FinishReason.ABORT):
            held.span.set_attribute(TRUNCATED, True)
        if reason is not None:
            held.span.set_attribute("decode.finish_reason", reason.value)
        if error:
            held.span.set_status(Status(StatusCode.ERROR, error))
        held.span.end()

    async def _fence(self, held: Held) -> None:
        fence = asyncio.wrap_future(self._receiver.cancel(held.transfer_id))
        _, unfenced = await asyncio.wait([fence], timeout=FENCE_WAIT_S)
        if unfenced and not self.stuck.done():
            self.stuck.set_result(f"transfer {held.transfer_id} is still being written after {FENCE_WAIT_S} s")
        await fence
        self._leave_engine(held)

    def _fenced(self, task: asyncio.Task[None]) -> None:
        self._fencing.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.stuck.done():
            self.stuck.set_result(f"a transfer cannot be fenced: {error}")

    def _leave_engine(self, held: Held) -> None:
        def abort(engine: Engine) -> Sequence[Event]:
            engine.abort(held.request_id)
            return [Ended(held.request_id)]

        self._engine.submit_with_turn(held.request_id, abort)

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)


def _failure(request_id: str, error: Exception | None) -> tuple[str, str]:
    """Returns the code and message for an engine's error."""
    if isinstance(error, ValueError):
        return "INVALID_ARGUMENT", str(error)
    failure = failure_of(error)
    if failure == BUG:
        log.error("the engine failed for a sequence", request_id=request_id, exc_info=error)
    return failure
