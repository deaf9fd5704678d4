"""An engine on the loop answers as one on a thread does, and its steps take the loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tandem.engine import Engine, EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.worker import EngineDied, EnginePort, EngineThread, InlineEngine

STEPS = StepTime(prefill_tokens_per_s=8000, decode_step_s=0.01, decode_sequence_s=0)


def config(model: Path, null: StepTime | None) -> EngineConfig:
    return EngineConfig(model, "demo", num_blocks=16, num_threads=1, null=null)


def sequence() -> Request:
    return Request("r", list(range(1, 41)), SamplingParams(max_tokens=8, seed=3))


async def answer(port: EnginePort) -> tuple[list[int], float]:
    """The tokens, and the loop's seconds that they took."""
    ended, tokens = asyncio.Event(), list[int]()

    def on_outputs(outputs: list[SequenceOutput]) -> None:
        tokens.extend(token.token_id for output in outputs for token in output.tokens)
        if any(output.finished for output in outputs):
            ended.set()

    loop = asyncio.get_running_loop()
    port.start(on_outputs, lambda error: None)
    start = loop.time()
    await port.call(lambda engine: engine.add(sequence()))
    async with asyncio.timeout(60):
        await ended.wait()
    seconds = loop.time() - start
    assert await port.call(lambda engine: engine.stats().free_blocks) == 16
    port.close()
    with pytest.raises(EngineDied):
        await port.call(lambda engine: None)
    return tokens, seconds


@pytest.mark.parametrize("null", [None, STEPS])
async def test_the_same_tokens_as_on_a_thread(demo_model: Path, null: StepTime | None) -> None:
    threaded, _ = await answer(EngineThread(Engine(config(demo_model, null))))
    inline, seconds = await answer(InlineEngine(config(demo_model, null)))
    assert len(inline) == 8
    assert inline == threaded
    if null:
        assert seconds >= 40 / 8000 + 7 * 0.01


async def test_a_death_is_reported_once(demo_model: Path) -> None:
    port, deaths = InlineEngine(config(demo_model, STEPS)), list[BaseException]()
    del port.engine._runner
    port.start(lambda outputs: None, deaths.append)
    await port.call(lambda engine: engine.add(sequence()))
    async with asyncio.timeout(30):
        while not deaths:
            await asyncio.sleep(0.01)
    assert [type(death) for death in deaths] == [AttributeError]
    with pytest.raises(EngineDied):
        await port.call(lambda engine: None)


async def test_calls_of_one_turn_reach_the_engine_together(demo_model: Path) -> None:
    port, at = InlineEngine(config(demo_model, STEPS)), list[float]()
    submitted = list[object]()

    def counted(fn: Callable[[Engine], Any]) -> Future[Any]:
        submitted.append(fn)
        return InlineEngine.submit(port, fn)

    port.submit = counted  # type: ignore[method-assign, assignment]
    port.start(lambda outputs: None, lambda error: None)
    loop = asyncio.get_running_loop()

    def fails(engine: Engine) -> None:
        raise ValueError("wrong")

    calls = [asyncio.ensure_future(port.call(fn)) for fn in (lambda _: at.append(loop.time()), fails, lambda _: 3)]
    left = asyncio.ensure_future(port.call(lambda _: at.append(0.0)))
    await asyncio.sleep(0)
    left.cancel()
    assert [str(value) for value in await asyncio.gather(*calls, return_exceptions=True)] == ["None", "wrong", "3"]
    assert len(submitted) == len(at) == 1
    port.close()


async def test_what_is_done_beside_a_step_does_not_hide_it_from_the_rates(demo_model: Path) -> None:
    ended, steps = asyncio.Event(), list[tuple[int, int]]()
    port = InlineEngine(config(demo_model, STEPS))
    port.rates.step = lambda read, written, seconds: steps.append((read, written))  # type: ignore[method-assign]
    port.start(lambda outputs: ended.set() if outputs[-1].finished else None, lambda error: None)
    await port.call(lambda engine: engine.add(sequence()))
    async with asyncio.timeout(60):
        while not ended.is_set():
            port.beside_step(lambda engine: engine.has_work())
            await asyncio.sleep(0.001)
    assert sum(read for read, _ in steps) == 40
    assert sum(written for _, written in steps) == 7  # the first was drawn as the prompt had been read
    port.close()
