"""How often and how long a call may be tried."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

import grpc

from tandem_client.errors import retry_after_s

UNAVAILABLE, FULL = grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED


@dataclass(frozen=True)
class Retries:
    """`most` calls beyond the first one, after pauses that double from `first_pause_s` up to `longest_pause_s`."""

    most: int = 4
    first_pause_s: float = 0.1
    longest_pause_s: float = 1.0


class Attempts:
    """One call's deadline, and its retries: only where nothing of an answer has come, so that no token comes twice."""

    def __init__(self, timeout_s: float, retries: Retries) -> None:
        if timeout_s <= 0:
            raise ValueError(f"timeout_s is {timeout_s}, and has to be above 0")
        self._ends = time.monotonic() + timeout_s
        self._retries = retries
        self._made = 0

    def left_s(self) -> float:
        return max(self._ends - time.monotonic(), 0.001)

    def pause_s(self, error: grpc.RpcError) -> float | None:
        """How long to wait before the next attempt; None where there is none. A full cluster says it by itself."""
        code = error.code() if isinstance(error, grpc.Call | grpc.aio.AioRpcError) else None
        said = retry_after_s(error)
        if code is not UNAVAILABLE and (code is not FULL or said is None):
            return None
        doubled = self._retries.first_pause_s * 2.0**self._made
        own = min(doubled, self._retries.longest_pause_s) * random.uniform(0.8, 1.2)
        pause = own if said is None else max(said, own)
        self._made += 1
        return pause if self._made <= self._retries.most and pause < self._ends - time.monotonic() else None
