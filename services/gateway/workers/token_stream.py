"""The one long-lived StreamTokens call to one incarnation of a decode worker.

    connecting ── first message, right incarnation ──> open ── break ──> connecting, after a pause

A break fails every sequence that had its mailbox here at once, for the worker frees them too. Another incarnation at
the same address ends the stream for good.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import structlog
from grpc import aio

from services.gateway.errors import GatewayError, TimedOut, WorkerLost
from services.gateway.workers.mailbox import Mailbox
from tandem.registry import WorkerInfo
from tandem.v1 import decode_pb2

log = structlog.get_logger(__name__)
RECONNECT_S = 0.1
CONNECT_WAIT_S = 1.5


class TokenStream:
    """`run` is a task of the pool that made this."""

    def __init__(self, worker: WorkerInfo, stub: Any, new_id: Callable[[], str]) -> None:
        self.open = asyncio.Event()
        self.stream_id = ""
        self._worker = worker
        self._stub = stub
        self._new_id = new_id
        self._mailboxes: dict[str, Mailbox] = {}
        self._closed_because = ""
        self._stopped: GatewayError | None = None

    def __len__(self) -> int:
        return len(self._mailboxes)

    def attach(self, request_id: str, num_prior_tokens: int = 0) -> Mailbox:
        """For the tokens behind `num_prior_tokens`.

        Raises:
            WorkerLost: the stream is not open.
            GatewayError: it was stopped.
        """
        if self._stopped:
            raise self._stopped
        if self._closed_because or not self.open.is_set():
            raise WorkerLost(self._worker.worker_id, self._closed_because or "its token stream is not open")
        mailbox = self._mailboxes[request_id] = Mailbox(request_id, self._worker.worker_id, num_prior_tokens)
        return mailbox

    def detach(self, mailbox: Mailbox) -> None:
        self._mailboxes.pop(mailbox.request_id, None)

    async def wait_open(self, deadline: float) -> None:
        """Until the stream is open.

        Raises:
            WorkerLost: not within CONNECT_WAIT_S.
            TimedOut: the deadline came first.
        """
        if self.open.is_set() or self._closed_because or self._stopped:
            return
        patience = asyncio.get_running_loop().time() + CONNECT_WAIT_S
        try:
            async with asyncio.timeout_at(min(patience, deadline)):
                await self.open.wait()
        except TimeoutError:
            if deadline <= patience:
                raise TimedOut("the request's deadline passed while connecting to a decode worker") from None
            raise WorkerLost(self._worker.worker_id, "no token stream could be opened") from None

    async def run(self) -> None:
        """Keep the stream open until cancelled, or until another incarnation answers."""
        try:
            while not self._closed_because:
                reason = await self._read()
                self.fail(reason)
                await asyncio.sleep(RECONNECT_S)
        finally:
            self.fail(self._closed_because or "the gateway is stopping")

    def fail(self, reason: str) -> None:
        """End every sequence of this stream with an error."""
        was_open = self.open.is_set()
        self.open.clear()
        lost, self._mailboxes = self._mailboxes, {}
        for mailbox in lost.values():
            mailbox.fail(WorkerLost(self._worker.worker_id, reason))
        if was_open:
            log.warning("token stream ended", worker=self._worker.worker_id, reason=reason, failed=len(lost))

    def close(self, reason: str) -> None:
        """This incarnation is dead: nothing more may be sent to it."""
        self._closed_because = reason
        self.fail(reason)

    def stop(self, error: GatewayError) -> None:
        """No more sequences; those that run end with this error. The stream itself stays."""
        self._stopped = error
        for mailbox in self._mailboxes.values():
            mailbox.fail(error)

    async def _read(self) -> str:
        """One call, until it breaks; returns why."""
        self.stream_id = self._new_id()
        call = self._stub.StreamTokens(decode_pb2.StreamTokensRequest(stream_id=self.stream_id))
        try:
            async for message in call:
                if message.incarnation:
                    self._greet(message.incarnation)
                self._deliver(message)
                if self._closed_because:
                    return self._closed_because
        except aio.AioRpcError as error:
            return f"its token stream broke: {error.code().name}: {error.details()}"
        finally:
            call.cancel()
        return "its token stream ended"

    def _greet(self, incarnation: str) -> None:
        if incarnation == self._worker.incarnation:
            self.open.set()
        else:
            self._closed_because = f"it was restarted: incarnation {incarnation} answers"

    def _deliver(self, message: decode_pb2.StreamTokensResponse) -> None:
        for output in message.outputs:
            mailbox = self._mailboxes.get(output.request_id)
            if mailbox is not None:
                mailbox.put(output)
