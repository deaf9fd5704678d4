"""A gateway whose queue is full, and which knows how long work takes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from services.gateway import Gateway
from services.gateway.admission import Admission, Work
from services.gateway.admission.priority import PriorityClass
from services.gateway.errors import Overloaded
from services.gateway.settings import CLASSES, ClassSettings

# Settings of a gateway where few wait, and where what comes later than in a second is refused.
SMALL = {"max_admitted_tokens": 200, "classes": CLASSES | {"interactive": ClassSettings(ttft_s=1.0)}}


async def _make_it_forecast(admission: Admission) -> None:
    """By work that has ended."""
    for _ in range(3):
        done = Work(PriorityClass.INTERACTIVE, "t", 1e9, 100, 100)
        await admission.enter(done)
        await asyncio.sleep(0.1)
        admission.wrote(done, 100)
        admission.leave(done)


@asynccontextmanager
async def full(gateway: Gateway) -> AsyncIterator[Admission]:
    """Others of tenant t wait, as many as it takes."""
    admission = gateway.directory.llm_of(None).admission
    await _make_it_forecast(admission)
    held, tasks, deadline = list[Work](), list[asyncio.Task[None]](), asyncio.get_running_loop().time() + 100
    while True:
        held.append(Work(PriorityClass.INTERACTIVE, "t", deadline, 100, 100))
        tasks.append(asyncio.create_task(admission.enter(held[-1])))
        await asyncio.wait(tasks[-1:], timeout=0.001)
        if tasks[-1].done() and isinstance(tasks[-1].exception(), Overloaded):
            break
    try:
        yield admission
    finally:
        for work, task in zip(held, tasks, strict=True):
            task.cancel()
            admission.leave(work)
        await asyncio.gather(*tasks, return_exceptions=True)
