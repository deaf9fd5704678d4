"""When backends write tokens, and what was written when: all live answers step together.

a first token   at once
the others      every `step_s`; with 0 as soon as clients have got all but the last AHEAD steps' tokens
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import defaultdict
from typing import Protocol

AHEAD = 2
TEXT = re.compile(rb'"text":"([a-z]*)')
MAX_WAIT_S = 0.1
SEEDS = 1_000_000  # for each length of a step, in milliseconds


class PacedAnswer(Protocol):
    """One that a backend writes."""

    def write(self, index: int) -> None:
        """Token number `index`."""


class BackendPace:
    """`written`: for each answer, by its seed, when each of its tokens left the backend."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.written: defaultdict[int, list[float]] = defaultdict(list)
        self._num_received = 0
        self._num_written = 0
        self._live: dict[PacedAnswer, tuple[int, int]] = {}
        self._arrived = asyncio.Event()

    def begin(self, answer: PacedAnswer, seed: int, num_tokens: int) -> None:
        self._live[answer] = seed, num_tokens
        self._write(answer, seed, num_tokens)

    def end(self, answer: PacedAnswer) -> None:
        self._live.pop(answer, None)

    def received(self, data: bytes) -> None:
        """By a client."""
        self._num_received += sum(map(len, TEXT.findall(data)))
        self._arrived.set()

    def seeds(self, count: int) -> range:
        """Seeds of the requests that a load begins with; a backend in another process reads its step's length there."""
        first = round(1000 * self.step_s) * SEEDS
        return range(first, first + count)

    def reset(self) -> None:
        self.written.clear()
        self._num_written = self._num_received = 0

    async def run(self) -> None:
        """Step until cancelled."""
        while True:
            await self._wait()
            for answer, (seed, num_tokens) in list(self._live.items()):
                self._write(answer, seed, num_tokens)

    async def _wait(self) -> None:
        if self.step_s:
            now = time.perf_counter()
            await asyncio.sleep(self.step_s - now % self.step_s)
            return
        while not self._live or self._num_written - self._num_received > (AHEAD - 1) * len(self._live):
            self._arrived.clear()
            try:
                async with asyncio.timeout(MAX_WAIT_S):
                    await self._arrived.wait()
            except TimeoutError:  # a token that came in two parts was not counted
                self._num_received = self._num_written

    def _write(self, answer: PacedAnswer, seed: int, num_tokens: int) -> None:
        stamps = self.written[seed]
        stamps.append(time.perf_counter())
        self._num_written += 1
        if len(stamps) == num_tokens:
            del self._live[answer]
        answer.write(len(stamps) - 1)
