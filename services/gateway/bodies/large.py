"""Large bodies, which would block the event loop: read in a helper process.

Parsing holds the interpreter's lock, so a thread would not help.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from services.gateway.errors import InvalidRequest, Overloaded
from services.gateway.returns import Returns
from tandem.containment import Bounds, CallFailed, Sandbox, SandboxBusy

# Modules that a helper imports before its first body.
MODULES = (
    *(f"services.gateway.apis.{api}" for api in ("chat", "completions", "embeddings", "tokenize")),
    "services.gateway.apis.messages", "services.gateway.apis.responses", "services.gateway.grpc.reader",
)  # fmt: skip
LIMITS = Bounds(cpu_s=6.0, wall_s=20.0, memory_bytes=2**30)
# The most bytes of bodies that the helper reads or that wait for it.
MOST_WAITING_BYTES = 256 * 2**20
T = TypeVar("T")


class LargeBodies:
    """Reads large bodies in a sandbox, which its maker runs; without one, as in a simulation, in this process."""

    def __init__(self, sandbox: Sandbox | None) -> None:
        self._sandbox = sandbox
        self._returns = Returns()
        self._num_bytes = self._num_read = 0  # bytes waiting or being read; bytes read since the queue was last empty
        self._since = 0.0  # when the queue was last empty, on the event loop's clock

    async def read(self, function: Callable[..., T], body: bytes, *others: object, caller: str) -> T:
        """Returns `function(body, *others)`, called in the helper process. Callers take turns.

        Raises:
            GatewayError: the function's own; the body exceeds a bound; too many bodies wait.
        """
        if self._sandbox is None:
            return function(body, *others)
        if self._num_bytes + len(body) > MOST_WAITING_BYTES:
            raise self._busy("too many large bodies wait to be read", body)
        if not self._num_bytes:
            self._num_read, self._since = 0, asyncio.get_running_loop().time()
        self._num_bytes += len(body)
        try:
            return await self._sandbox.call(function, body, *others, caller=caller, bounds=LIMITS)
        except SandboxBusy as error:
            raise self._busy(f"the body could not be read now: {error}", body) from None
        except CallFailed as error:
            raise InvalidRequest(f"the body cannot be read: {error}", code="body_too_complex") from None
        finally:
            self._num_bytes -= len(body)
            self._num_read += len(body)

    def _busy(self, said: str, body: bytes) -> Overloaded:
        """Returns an error whose retry-after is the time that reading as many bytes has taken of late."""
        now = asyncio.get_running_loop().time()
        each_s = len(body) * (now - self._since) / self._num_read if self._num_read else 1.0
        return Overloaded(said, "too_many_bodies", self._returns.wait_s(each_s, each_s, now))
