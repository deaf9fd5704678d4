"""One sequence's tokens between the stream of a decode worker and the request that waits for them.

    put(output) ... fail(error)     by the stream's reader
    get() -> new tokens             by the request: each index once, in order

A slow client costs memory bounded by its max_tokens: tokens wait here, never in the stream that others share.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from services.gateway.errors import GatewayError, Internal, from_failure
from tandem.v1 import llm_pb2, worker_pb2


@dataclass(slots=True)
class Tokens:
    """Consecutive tokens of one answer. There is one of `logprobs` for each, or none at all.

    `prompt_logprobs` of the prompt's tokens but the first come with the answer's first token, where asked for.
    """

    ids: list[int]
    logprobs: list[llm_pb2.TokenLogprobs]
    prompt_logprobs: list[llm_pb2.TokenLogprobs] = field(default_factory=list)

    def add(self, new: Tokens) -> None:
        self.ids += new.ids
        self.logprobs += new.logprobs
        self.prompt_logprobs += new.prompt_logprobs


class Mailbox:
    """Owned by one request, which is the only one to call `get`."""

    def __init__(self, request_id: str, worker_id: str, next_index: int = 0) -> None:
        self.request_id = request_id
        self.next_index = next_index
        self.num_cached_tokens = self.num_proposed_tokens = self.num_accepted_tokens = 0
        self.finish_reason: llm_pb2.FinishReason = llm_pb2.FINISH_REASON_UNSPECIFIED
        # Done, with the error, once the sequence has failed.
        self.failed: asyncio.Future[GatewayError] = asyncio.get_running_loop().create_future()
        self.reported = False  # the failure, by the worker itself, which is therefore alive
        self._worker_id = worker_id
        self._outputs: list[worker_pb2.SequenceOutput] = []
        self._news = asyncio.Event()

    def put(self, output: worker_pb2.SequenceOutput) -> None:
        self._outputs.append(output)
        self._news.set()
        if output.HasField("failure"):
            self.reported |= not self.failed.done()
            self.fail(from_failure(self._worker_id, output.failure.code, output.failure.message))

    def fail(self, error: GatewayError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)
        self._news.set()

    @property
    def ended(self) -> bool:
        """Whether the decode worker itself has reported the end."""
        return self.failed.done() or any(output.finish_reason for output in self._outputs)

    async def wait_ended(self) -> None:
        while not self.ended:
            self._news.clear()
            await self._news.wait()

    async def get(self) -> Tokens:
        """Tokens that are new since the last call; perhaps none once `finish_reason` is set.

        Raises:
            GatewayError: the sequence failed, or the stream skipped a token.
        """
        while True:
            tokens = self._take()
            if tokens.ids or self.finish_reason:
                return tokens
            if self.failed.done():
                raise self.failed.result()
            self._news.clear()
            await self._news.wait()

    def accept(self, output: worker_pb2.SequenceOutput) -> Tokens:
        """The tokens of `output` that were not seen before.

        Raises:
            Internal: tokens before them are missing.
        """
        if output.first_index > self.next_index:
            raise Internal(
                f"worker {self._worker_id} sent token {output.first_index} of an answer before token {self.next_index}"
            )
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.num_proposed_tokens = max(self.num_proposed_tokens, output.num_proposed_tokens)
        self.num_accepted_tokens = max(self.num_accepted_tokens, output.num_accepted_tokens)
        self.finish_reason = output.finish_reason or self.finish_reason
        seen = self.next_index - output.first_index
        prompt = [] if seen else list(output.prompt_logprobs)
        new = Tokens(list(output.token_ids[seen:]), list(output.logprobs[seen:]), prompt)
        self.next_index += len(new.ids)
        return new

    def _take(self) -> Tokens:
        outputs, self._outputs = self._outputs, []
        taken = Tokens([], [])
        for output in outputs:
            taken.add(self.accept(output))
        return taken
