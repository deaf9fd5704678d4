from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from tandem.engine import Engine, SequenceOutput
from tandem.worker import EngineThread
from tests.worker.conftest import request


class EventListener:
    def __init__(self) -> None:
        self.outputs: list[SequenceOutput] = []
        self.deaths: list[BaseException] = []

    async def finished(self, count: int) -> None:
        async with asyncio.timeout(60):
            while sum(o.finished for o in self.outputs) < count:
                await asyncio.sleep(0.01)


async def test_outputs_come_to_the_loop_and_errors_to_the_caller(engine_of: Callable[[int], Engine]) -> None:
    listener = EventListener()
    thread = EngineThread(engine_of(16))
    thread.start(listener.outputs.extend, listener.deaths.append)
    try:
        await thread.call(lambda engine: engine.add(request("a")))
        await thread.call(lambda engine: engine.add(request("b")))
        with pytest.raises(ValueError, match="token_ids"):
            await thread.call(lambda engine: engine.add(request("c", prompt=1000, max_tokens=1000)))
        await listener.finished(2)
        assert await thread.call(lambda engine: engine.stats().free_blocks) == 16
        await thread.call(lambda engine: engine.check_integrity())
    finally:
        thread.close()
    assert not listener.deaths


async def test_the_death_of_the_engine_is_noticed(engine_of: Callable[[int], Engine]) -> None:
    listener = EventListener()
    engine = engine_of(16)
    del engine._runner
    thread = EngineThread(engine)
    thread.start(listener.outputs.extend, listener.deaths.append)
    await thread.call(lambda engine: engine.add(request("a")))
    async with asyncio.timeout(30):
        while not listener.deaths:
            await asyncio.sleep(0.01)
    thread.close()
