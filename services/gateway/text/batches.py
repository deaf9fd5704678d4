"""Long texts are tokenized beside the event loop, on one thread: what comes while a batch is read is the next batch.

    encode(text) ──> waiting ──> a batch of up to BATCH characters ──> the thread ──> token ids
         └─────────> BATCH or more: a thread of its own, for others would wait for it

More threads would take more of the core that the loop needs than it has left for tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeAlias

BATCH = 2**16
Encode: TypeAlias = Callable[[Sequence[str]], list[list[int]]]
Waiting: TypeAlias = "tuple[str, asyncio.Future[list[int]]]"


class Batches:
    """Of one event loop."""

    def __init__(self, encode: Encode) -> None:
        """`encode` must let other threads run."""
        self._encode = encode
        self._waiting: deque[Waiting] = deque()
        self._running = False

    async def encode(self, text: str) -> list[int]:
        if len(text) >= BATCH:
            return (await asyncio.to_thread(self._encode, [text]))[0]
        found: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, found))
        if not self._running:
            self._begin()
        return await found

    def _begin(self) -> None:
        batch = self._next()
        self._running = bool(batch)
        if batch:
            texts = [text for text, _ in batch]
            encoding = asyncio.get_running_loop().run_in_executor(None, self._encode, texts)
            encoding.add_done_callback(partial(self._end, batch))

    def _next(self) -> list[Waiting]:
        batch: list[Waiting] = []
        room = BATCH
        while self._waiting and len(self._waiting[0][0]) <= room:
            text, found = self._waiting.popleft()
            if not found.done():  # or its request has ended
                batch.append((text, found))
                room -= len(text)
        return batch

    def _end(self, batch: Sequence[Waiting], encoding: asyncio.Future[list[list[int]]]) -> None:
        error = encoding.exception()
        for i, (_, found) in enumerate(batch):
            if found.done():
                continue
            if error is None:
                found.set_result(encoding.result()[i])
            else:
                found.set_exception(error)
        self._begin()
