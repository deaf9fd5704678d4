"""Long texts are tokenized on one thread beside the event loop; texts that arrive meanwhile are the next batch.

    encode(text) ──> waiting ──> a batch of up to BATCH characters ──> the thread ──> token ids
         └─────────> BATCH or more: other threads, for others would wait for it

More threads would take more of the core that the loop needs than it has left for tokens.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence, Sized
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from services.gateway.text.checked_ids import CheckedIds
from tandem.process import WorkThreads

BATCH = 2**16
LONG_AT_ONCE = 2


class UnreadText(ValueError):
    """The model's tokenizer cannot read the text, or not in time."""


Outcome: TypeAlias = "CheckedIds | Exception"
Text = TypeVar("Text", bound=Sized)  # sizes in characters
Waiting = tuple[Text, "asyncio.Future[Outcome]"]


class Batches(Generic[Text]):
    """The batches of one event loop."""

    def __init__(self, encode: Callable[[Sequence[Text]], Sequence[Outcome]]) -> None:
        """`encode` must release the interpreter's lock."""
        self._encode = encode
        self._thread = WorkThreads("tokenize", 1)
        self._threads = WorkThreads("tokenize-long", LONG_AT_ONCE)
        self._waiting = deque[Waiting[Text]]()
        self._running = False

    async def encode(self, text: Text) -> CheckedIds:
        if len(text) >= BATCH:
            return result((await self._threads.run(self._read, [text]))[0])
        found: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((text, found))
        if not self._running:
            self._begin()
        return result(await found)

    def _begin(self) -> None:
        batch = self._next()
        self._running = bool(batch)
        if batch:
            texts = [text for text, _ in batch]
            encoding = self._thread.run(self._read, texts)
            encoding.add_done_callback(partial(self._end, batch))

    def _next(self) -> list[Waiting[Text]]:
        batch = list[Waiting[Text]]()
        room = BATCH
        while self._waiting and len(self._waiting[0][0]) <= room:
            text, found = self._waiting.popleft()
            if not found.done():  # its request may have ended
                batch.append((text, found))
                room -= len(text)
        return batch

    def _end(self, batch: Sequence[Waiting[Text]], encoding: asyncio.Future[list[Outcome]]) -> None:
        for (_, found), outcome in zip(batch, encoding.result(), strict=True):
            if not found.done():
                found.set_result(outcome)
        self._begin()

    def _read(self, texts: Sequence[Text]) -> list[Outcome]:
        """Returns a batch's outcomes. Runs on the thread; a text that cannot be encoded fails alone."""
        try:
            return list(self._encode(texts))
        except BaseException as error:  # a panic of the library is no Exception
            if len(texts) > 1:
                return [self._read([text])[0] for text in texts]
            return [error if isinstance(error, Exception) else UnreadText(f"the model's tokenizer fails: {error}")]


def result(outcome: Outcome) -> CheckedIds:
    if isinstance(outcome, Exception):
        raise outcome
    return outcome
