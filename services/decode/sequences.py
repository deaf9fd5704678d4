"""The sequences of a decode worker. One of them:

1 reserve   waits its turn for blocks, then the KV receiver expects its prompt      (`add`: the prompt is read here)
2 land      frames arrive, verified, into blocks that nobody reads yet
3 join      the commit frame brings the first token; the sequence enters the running batch
4 end       by a finish, an abort, a failed transfer, its deadline, or the loss of its stream

One deadline, armed when the sequence enters, bounds all of it. Whatever the end, the transfer is fenced before the
blocks are released, or a late frame could land in another sequence's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import structlog
from opentelemetry import trace
from opentelemetry.trace import Span, Status, StatusCode

from services.decode.block_queue import BlockQueue
from tandem.engine import Engine, FinishReason, Request, SampledToken, SequenceOutput
from tandem.transfer import TransferError
from tandem.worker import EnginePort, SequenceFailed, Streams

T = TypeVar("T")
# A transfer that cannot be fenced keeps its blocks: the worker then ends, and is started again.
FENCE_WAIT_S = 10.0
HAND_OVER_S = 2.0
log = structlog.get_logger(__name__)
tracer = trace.get_tracer("tandem.decode")


class KVReceiver(Protocol):
    """Where KV frames land. Callbacks may come on any thread."""

    def expect(
        self, transfer_id: str, *, block_ids: Sequence[int], first_block: int, timeout_s: float,
        on_commit: Callable[[bytes, int], None], on_abort: Callable[[str, str], None], sender: str = "",
    ) -> None: ...  # fmt: skip

    def cancel(self, transfer_id: str) -> Future[None]:
        """Resolves once no byte of the transfer will be written any more."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """Blocks that wait for a prompt's KV."""

    transfer_id: str
    num_cached_tokens: int
    num_prompt_blocks: int


@dataclass(slots=True)
class Held:
    """A sequence this worker holds something for. `ended` once it no longer does: why."""

    stream_id: str
    deadline: float  # on the loop's clock
    timer: asyncio.Handle
    span: Span
    transfer_id: str = ""
    num_tokens: int = 0
    num_proposed_tokens: int = 0
    num_accepted_tokens: int = 0
    entering: asyncio.Task[Any] | None = None
    ended: SequenceFailed | None = field(default=None)
    itl_target_s: float = 0.0


class Sequences:
    """`first_token` reads a commit's payload. `stuck` is set, with the reason, when a transfer cannot be fenced."""

    def __init__(
        self,
        engine: EnginePort,
        receiver: KVReceiver,
        streams: Streams,
        *,
        first_token: Callable[[bytes], SampledToken],
        new_id: Callable[[], str],
        worker_id: str,
    ) -> None:
        self._engine, self._receiver, self._streams = engine, receiver, streams
        self._first_token, self._new_id, self._worker_id = first_token, new_id, worker_id
        self._block_queue = BlockQueue(engine)
        self._held: dict[str, Held] = {}
        self._releasing: dict[asyncio.Task[None], str] = {}
        self._fencing: dict[asyncio.Task[None], str] = {}
        self._loop = asyncio.get_running_loop()
        self.stuck: asyncio.Future[str] = self._loop.create_future()

    def __len__(self) -> int:
        return len(self._held) + len(self._releasing)

    def request_ids(self) -> set[str]:
        """Those that are being released included."""
        return self._held.keys() | set(self._releasing.values())

    def transfer_ids(self) -> set[str]:
        """Of those, once their prompt's KV is expected."""
        return {held.transfer_id for held in self._held.values()} | set(self._fencing.values())

    # --- in ---

    async def add(self, request: Request, stream_id: str, timeout_s: float) -> None:
        """The prompt is read here.

        Raises:
            SequenceFailed
        """
        held = self._enter(request, stream_id, timeout_s)
        await self._entered(request.request_id, held, self._engine.call(lambda engine: engine.add(request)))

    async def reserve(self, request: Request, stream_id: str, timeout_s: float, sender: str) -> Reservation:
        """Blocks for the prompt and a likely answer, where KV of the prefill incarnation `sender` may land.

        Raises:
            SequenceFailed
        """
        request_id = request.request_id
        held = self._enter(request, stream_id, timeout_s)
        cached, block_ids = await self._entered(request_id, held, self._block_queue.reserve(request))
        held.span.set_attribute("decode.cached_tokens", cached)
        held.transfer_id = self._new_id()
        try:
            self._receiver.expect(
                held.transfer_id,
                block_ids=block_ids,
                first_block=cached // self._engine.engine.layout.block_size,
                timeout_s=max(0.0, held.deadline - self._loop.time()),
                on_commit=lambda payload, num_bytes: self._join(request_id, held, payload, num_bytes),
                on_abort=lambda code, reason: self._call_soon(self._fail, request_id, code, f"KV transfer: {reason}"),
                sender=sender,
            )
        except TransferError as error:
            self._fail(request_id, error.code, error.message)
            raise SequenceFailed(error.code, error.message) from None
        return Reservation(held.transfer_id, cached, len(block_ids))

    def _enter(self, request: Request, stream_id: str, timeout_s: float) -> Held:
        request_id = request.request_id
        if not self._streams.is_open(stream_id):
            raise SequenceFailed("FAILED_PRECONDITION", "the gateway's stream has ended")
        if request_id in self._held:
            raise SequenceFailed("ALREADY_EXISTS", f"request_id: {request_id!r} is running here")
        span = tracer.start_span("decode", attributes={"tandem.worker": self._worker_id})
        late = "the request's deadline passed in decode"
        deadline = self._loop.time() + timeout_s
        timer = self._loop.call_at(deadline, self._fail, request_id, "DEADLINE_EXCEEDED", late)
        held = self._held[request_id] = Held(stream_id, deadline, timer, span, itl_target_s=request.itl_target_s)
        return held

    async def _entered(self, request_id: str, held: Held, entering: Coroutine[Any, Any, T]) -> T:
        """What `entering` brings, unless the sequence ends first."""
        task = asyncio.ensure_future(entering)
        held.entering = task
        try:
            result = await task
        except ValueError as error:
            if held.ended is not None:  # in the same turn
                raise held.ended from None
            self._leave(request_id, None, str(error))
            raise SequenceFailed("INVALID_ARGUMENT", str(error)) from None
        except BaseException:
            if held.ended is not None:
                raise held.ended from None
            await self.abort(request_id)
            raise
        finally:
            held.entering = None
        if held.ended is not None:
            raise held.ended
        return result

    # --- its tokens ---

    def _join(self, request_id: str, held: Held, payload: bytes, num_bytes: int) -> None:
        """The whole prompt has landed."""
        token = self._first_token(payload)
        if held.ended is None:
            held.span.add_event("landed", {"kv.transfer.bytes": num_bytes})
        self._engine.submit(lambda engine: self._joined(engine, request_id, token))

    def _joined(self, engine: Engine, request_id: str, token: SampledToken) -> None:
        """On the engine's thread."""
        try:
            engine.join(request_id, token)
        except Exception as error:
            self._call_soon(self._fail, request_id, "INTERNAL", f"its first token does not fit: {error}")

    def on_outputs(self, outputs: list[SequenceOutput]) -> None:
        for output in outputs:
            held = self._held.get(output.request_id)
            if held is None:
                continue
            held.num_tokens += len(output.tokens)
            held.num_proposed_tokens, held.num_accepted_tokens = output.num_proposed_tokens, output.num_accepted_tokens
            self._streams.send(held.stream_id, output, held.itl_target_s)
            if output.finished:
                self._leave(output.request_id, output.finish_reason, output.error or "")
        self._block_queue.look_again()

    # --- its end ---

    async def abort(self, request_id: str) -> None:
        """End a sequence in any state; returns when all it held is released. Unknown ids are no error."""
        if request_id in self._held:
            freed = self._release(request_id, self._leave(request_id, FinishReason.ABORT, ""))
            await asyncio.shield(freed)

    def stream_ended(self, stream_id: str) -> None:
        """Nobody reads these sequences' tokens any more."""
        lost = [request_id for request_id, held in self._held.items() if held.stream_id == stream_id]
        if lost:
            log.warning("a gateway's stream ended", stream_id=stream_id, aborted=len(lost))
        for request_id in lost:
            self._fail(request_id, "UNAVAILABLE", "the gateway's stream broke")

    async def hand_over(self) -> None:
        """End all that runs: its gateways have it go on elsewhere. Returns when it is released, within a bound."""
        for request_id in list(self._held):
            self._fail(request_id, "UNAVAILABLE", "the worker is stopping")
        if self._releasing:
            await asyncio.wait(self._releasing, timeout=HAND_OVER_S)  # longer only where the engine is stuck

    async def close(self) -> None:
        """End all that runs, without waiting for it."""
        for request_id in list(self._held):
            self._leave(request_id, None, "the worker is stopping")
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)

    def _fail(self, request_id: str, code: str, message: str) -> None:
        """End a sequence with an error that its gateway hears of."""
        held = self._held.get(request_id)
        if held is None:
            return
        self._streams.fail(held.stream_id, request_id, code, message)
        self._leave(request_id, None, message)
        held.ended = SequenceFailed(code, message)
        self._release(request_id, held)

    def _leave(self, request_id: str, reason: FinishReason | None, error: str) -> Held:
        held = self._held.pop(request_id)
        held.timer.cancel()
        held.ended = SequenceFailed("ABORTED", error or "the sequence was aborted")
        held.span.set_attribute("decode.tokens", held.num_tokens)
        held.span.set_attribute("decode.proposed_tokens", held.num_proposed_tokens)
        held.span.set_attribute("decode.accepted_tokens", held.num_accepted_tokens)
        if reason is not None:
            held.span.set_attribute("decode.finish_reason", reason.value)
        if error:
            held.span.set_status(Status(StatusCode.ERROR, error))
        held.span.end()
        return held

    def _release(self, request_id: str, held: Held) -> asyncio.Task[None]:
        if held.entering is not None:
            held.entering.cancel()
        task = asyncio.create_task(self._fence_and_abort(request_id, held.transfer_id))
        self._releasing[task], self._fencing[task] = request_id, held.transfer_id
        task.add_done_callback(self._released)
        return task

    async def _fence_and_abort(self, request_id: str, transfer_id: str) -> None:
        if transfer_id:
            fence = asyncio.wrap_future(self._receiver.cancel(transfer_id))
            _, unfenced = await asyncio.wait([fence], timeout=FENCE_WAIT_S)
            if unfenced and not self.stuck.done():
                self.stuck.set_result(f"transfer {transfer_id} is still being written after {FENCE_WAIT_S} s")
            await fence
        await self._engine.call(lambda engine: engine.abort(request_id))

    def _released(self, task: asyncio.Task[None]) -> None:
        del self._releasing[task], self._fencing[task]
        if not task.cancelled() and task.exception() is not None:
            log.error("a sequence could not be released", exc_info=task.exception())
        self._block_queue.look_again()

    def _call_soon(self, callback: Callable[..., None], *arguments: object) -> None:
        self._loop.call_soon_threadsafe(callback, *arguments)
