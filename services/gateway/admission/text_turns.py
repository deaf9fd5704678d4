"""Turns of requests that only the gateway works for: tokenize and detokenize.

As in the cluster, tenants share by weight, excess is refused, and nothing waits past its deadline.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway.admission.admission import Admission
from services.gateway.admission.capacity import Capacity
from services.gateway.admission.fair_queue import FairQueue, Weights, Work
from services.gateway.admission.priority import PriorityClass

AT_ONCE = 4
# The most bytes at a time; a single request of any size gets its turn.
MOST_BYTES = 2**20


class TextTurns:
    def __init__(self, weights: Weights, max_queued: int) -> None:
        self.admission = Admission(FairQueue(weights), max_queued)
        self.admission.resize(Capacity(MOST_BYTES, AT_ONCE, prompt_tokens=MOST_BYTES, prompts=AT_ONCE))

    @asynccontextmanager
    async def turn(self, tenant: str, num_bytes: int, deadline: float) -> AsyncIterator[None]:
        """Raises GatewayError: as Admission.enter."""
        work = Work(PriorityClass.INTERACTIVE, tenant, deadline, num_bytes, 1)
        try:
            await self.admission.enter(work)
            yield
        finally:
            self.admission.leave(work)
