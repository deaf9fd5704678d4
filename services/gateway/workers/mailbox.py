"""The tokens of one sequence, from a decode worker's stream to the request that waits for them.

    put(output) ... fail(error)     by the stream's reader
    get(taker) -> new tokens        by the request: each index once, in order
    taker(new tokens)               within `put`, while `get` waits: waking a task for each token would cost more

A slow client costs memory bounded by its max_tokens: tokens wait here, never in the stream that others share.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from services.gateway.errors import GatewayError, Internal, from_failure
from tandem.v1 import llm_pb2, worker_pb2


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens of one answer. There is one of `logprobs` for each, or none at all.

    `prompt_logprobs` of the prompt's tokens but the first come with the answer's first token, where asked for.
    """

    ids: list[int]
    logprobs: list[llm_pb2.TokenLogprobs]
    prompt_logprobs: Sequence[llm_pb2.TokenLogprobs] = ()
    embedding: Sequence[float] = ()  # the prompt's vector, instead of tokens

    def add(self, new: Tokens) -> None:
        self.ids += new.ids
        self.logprobs += new.logprobs
        self.prompt_logprobs = self.prompt_logprobs or new.prompt_logprobs


# Takes tokens on delivery. Returns False when full; put() then queues until get() is called again.
Taker: TypeAlias = Callable[[Tokens], bool]


class Mailbox:
    """The tokens of one attempt, which alone calls `get`."""

    __slots__ = (
        "_outputs", "_taker", "_taker_error", "_taker_stopped", "_waiting", "_worker_id", "batch_size", "ended",
        "error", "finish_reason", "kv_usage", "next_index", "num_accepted_tokens", "num_cached_tokens",
        "num_proposed_tokens", "request_id",
    )  # fmt: skip

    def __init__(self, request_id: str, worker_id: str, next_index: int = 0) -> None:
        self.request_id = request_id
        self.next_index = next_index
        self.num_cached_tokens: int | None = None
        self.num_proposed_tokens = self.num_accepted_tokens = 0
        self.batch_size, self.kv_usage = 0, 0.0  # the decode worker's, when the answer began
        self.finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED
        self.error: GatewayError | None = None  # why the sequence failed
        self.ended = False  # the decode worker reported the end, or a failure, itself: it is alive
        self._worker_id = worker_id
        self._outputs: list[worker_pb2.SequenceOutput] = []
        self._waiting: asyncio.Future[None] | None = None
        self._taker: Taker | None = None  # set while `get` waits and was not woken
        self._taker_stopped = False
        self._taker_error: Exception | None = None

    def put(self, output: worker_pb2.SequenceOutput) -> None:
        """Hand output to the taker if nothing is queued and the answer does not end; otherwise queue it for `get`."""
        taker, waiting = self._taker, self._waiting
        if (
            taker is not None and waiting is not None and not waiting.done()
            and output.first_index == self.next_index
            and not output.finish_reason and not output.HasField("failure")
        ):  # fmt: skip
            self._hand_over(taker, self._new(output, 0))
            return
        self._outputs.append(output)
        failed = output.HasField("failure")
        self.ended = failed or bool(output.finish_reason) or self.ended
        if failed:
            self.fail(from_failure(self._worker_id, output.failure.code, output.failure.message))
        else:
            self._wake()

    def _hand_over(self, taker: Taker, new: Tokens) -> None:
        try:
            if taker(new):
                return
            self._taker_stopped = True
        except Exception as error:  # an error of this request, not of others on the stream
            self._taker_error = error
        self._wake()

    def fail(self, error: GatewayError) -> None:
        self.error = self.error or error
        self._wake()

    async def wait_ended(self) -> None:
        """Wait until `ended`, or until a failure that the worker did not report."""
        while not self.ended and self.error is None:
            await self._news()

    async def answered(self, reply: asyncio.Future[Any]) -> Any:
        """Returns a worker's reply, unless the sequence fails first, by its deadline or the decode worker's death.

        Raises GatewayError.
        """
        reply.add_done_callback(self._wake)
        while not reply.done() and self.error is None:
            await self._news()
        answer = self.error or reply.result()
        if isinstance(answer, GatewayError):
            raise answer
        return answer

    async def get(self, taker: Taker | None = None) -> Tokens:
        """Returns tokens that neither an earlier call nor `taker` got; maybe none once the answer ended or `taker` is
        full.

        The answer's last tokens are never the taker's.

        Raises:
            GatewayError: the sequence failed, or the stream skipped a token.
            Exception: what `taker` raised.
        """
        while True:
            tokens, stopped = self._take(), self._taker_stopped
            self._taker_stopped = False
            if tokens.ids or self.finish_reason or stopped:
                return tokens
            if error := self._taker_error or self.error:
                raise error
            self._taker = taker
            try:
                await self._news()
            finally:
                self._taker = None

    def accept(self, output: worker_pb2.SequenceOutput) -> Tokens:
        """Returns the tokens of `output` that are new.

        Raises:
            Internal: tokens before them are missing.
        """
        first = output.first_index
        if first > self.next_index:
            raise Internal(f"worker {self._worker_id} sent token {first} of an answer before token {self.next_index}")
        self.finish_reason = output.finish_reason or self.finish_reason
        return self._new(output, self.next_index - first)

    def _new(self, output: worker_pb2.SequenceOutput, num_seen: int) -> Tokens:
        # Reading a protobuf field is costly, so each is read once, and only if it may be set.
        if self.num_cached_tokens is None:  # only the worker that computed the first token reports it
            self.num_cached_tokens = output.num_cached_tokens
        if num_proposed := output.num_proposed_tokens:
            self.num_proposed_tokens = max(self.num_proposed_tokens, num_proposed)
            self.num_accepted_tokens = max(self.num_accepted_tokens, output.num_accepted_tokens)
        if not self.batch_size and (batch_size := output.batch_size):
            self.batch_size, self.kv_usage = batch_size, output.kv_usage
        prompt = () if self.next_index else output.prompt_logprobs  # not copied, as there may be very many
        new = Tokens(output.token_ids[num_seen:], output.logprobs[num_seen:], prompt)
        self.next_index += len(new.ids)
        return new

    def _take(self) -> Tokens:
        outputs, self._outputs = self._outputs, []
        if len(outputs) == 1:
            return self.accept(outputs[0])
        taken = Tokens([], [])
        for output in outputs:
            taken.add(self.accept(output))
        return taken

    async def _news(self) -> None:
        """Wait for output or a failure."""
        self._waiting = asyncio.get_running_loop().create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def _wake(self, _: object = None) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)
