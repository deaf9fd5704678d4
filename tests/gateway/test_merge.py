"""Several choices in one stream, where the client reads slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from services.gateway.generation.answer import merge
from services.gateway.generation.choice_text import Delta
from services.gateway.workers import Tokens
from tandem.v1 import llm_pb2

CHOICES, LENGTH = 3, 1000


class Choices:
    """Runs that write as fast as they are let."""

    def __init__(self) -> None:
        self.written = self.ended = 0

    async def run(self, choice: int) -> AsyncGenerator[Delta, None]:
        try:
            for token in range(LENGTH):
                await asyncio.sleep(0)
                self.written += 1
                yield Delta(choice, "", Tokens([token], []), (), llm_pb2.FINISH_REASON_UNSPECIFIED)
        finally:
            self.ended += 1

    async def broken(self, choice: int) -> AsyncGenerator[Delta, None]:
        async for delta in self.run(choice):
            if delta.tokens.ids == [5]:
                raise ConnectionError("gone")
            yield delta


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_makes_nothing_wait_in_memory() -> None:
    choices = Choices()
    async with aclosing(merge([choices.run(choice) for choice in range(CHOICES)])) as deltas:
        read = 0
        async for _ in deltas:
            read += 1
            await turns(300)
            assert choices.written <= read + 2 * CHOICES
            if read == 20:
                break
    assert choices.ended == CHOICES


async def test_every_piece_comes_once_and_in_its_choices_order() -> None:
    choices, read = Choices(), [list[int]() for _ in range(CHOICES)]
    async for delta in merge([choices.run(choice) for choice in range(CHOICES)]):
        read[delta.choice] += delta.tokens.ids
        await turns(len(read[0]) % 3)
    assert read == [list(range(LENGTH))] * CHOICES


async def test_a_failure_ends_those_that_wait_for_the_client() -> None:
    choices = Choices()

    async def read_slowly() -> None:
        async for _ in merge([choices.run(0), choices.broken(1), choices.run(2)]):
            await turns(10)

    with pytest.raises(ConnectionError):
        await read_slowly()
    assert choices.ended == CHOICES
