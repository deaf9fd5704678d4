"""An engine on the loop answers as one on a thread does, and its steps take the loop's time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest

from tandem.engine import Engine, EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.worker import Added, Ended, EngineDied, EnginePort, EngineThread, Event, InlineEngine

STEPS = StepTime(prefill_tokens_per_s=8000, decode_step_s=0.01, decode_sequence_s=0)


def config(model: Path, null: StepTime | None) -> EngineConfig:
    return EngineConfig(model, "demo", num_blocks=16, num_threads=1, null=null)


def sequence() -> Request:
    return Request("r", list(range(1, 41)), SamplingParams(max_tokens=8, seed=3))


async def answer(port: EnginePort) -> tuple[list[int], float]:
    """The tokens, and the loop's seconds that they took."""
    ended, tokens = asyncio.Event(), list[int]()

    def on_events(events: Sequence[Event]) -> None:
        outputs = [event for event in events if isinstance(event, SequenceOutput)]
        tokens.extend(token.token_id for output in outputs for token in output.tokens)
        if any(output.finished for output in outputs):
            ended.set()

    loop = asyncio.get_running_loop()
    port.start(on_events, lambda error: None)
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


async def test_what_one_turn_submits_runs_together_and_its_events_come_in_order(demo_model: Path) -> None:
    port, heard = InlineEngine(config(demo_model, STEPS)), list[Event]()
    port.start(heard.extend, lambda error: None)
    in_step, step = list[int](), port.engine.step

    def noted(*computing: AbstractContextManager[None]) -> list[SequenceOutput]:
        in_step.append(len(port.engine.request_ids()))
        return step(*computing)

    port.engine.step = noted  # type: ignore[method-assign]

    def add(request: Request) -> Callable[[Engine], Sequence[Event]]:
        def run(engine: Engine) -> Sequence[Event]:
            engine.add(request)
            return [Added(request.request_id)]

        return run

    for name in ("a", "a", "b"):
        port.submit_with_turn(name, add(replace(sequence(), request_id=name)))
    async with asyncio.timeout(60):
        while sum(isinstance(event, SequenceOutput) and event.finished for event in heard) < 2:
            await asyncio.sleep(0.001)
    added, refused, also_added, *outputs = heard
    assert (added, also_added) == (Added("a"), Added("b"))
    assert isinstance(refused, Ended)
    assert "in the engine already" in str(refused.error)
    assert {type(output) for output in outputs} == {SequenceOutput}
    assert in_step[0] == 2
    port.close()
    port.submit("c", add(sequence()))
    await asyncio.sleep(0)
    assert isinstance(heard[-1], Ended)
    assert isinstance(heard[-1].error, EngineDied)


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
    assert sum(written for _, written in steps) == 7  # the first was drawn as the prompt had been prefilled
    port.close()
