from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from services.decode.block_queue import BlockQueue
from tandem.engine import Engine, EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.worker import Added, Ended, EngineThread, Event

BLOCKS = 4


class WaitingLine:
    """A block queue, and those that wait in it."""

    def __init__(self, thread: EngineThread) -> None:
        self.queue = BlockQueue(thread)
        self.ended = asyncio.Event()  # a sequence, by its last token
        self._thread = thread
        self._answers: dict[str, asyncio.Future[Added]] = {}
        thread.start(self._on_events, lambda error: None)

    def __len__(self) -> int:
        return len(self.queue)

    async def reserve(self, request: Request) -> Added:
        """A sequence that is cancelled wants no blocks any more."""
        name = request.request_id
        answer = self._answers[name] = asyncio.get_running_loop().create_future()
        if added := self.queue.enter(request):
            return added
        try:
            return await answer
        except asyncio.CancelledError:
            self.queue.leave(name)
            self._thread.submit_with_turn(name, lambda engine: [Ended(name)] if engine.abort(name) else [])
            raise

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceOutput):
                self.ended.set() if event.finished else None
                continue
            answer = self._answers[event.request_id]
            self.queue.leave(event.request_id)
            if not answer.done() and isinstance(event, Added):
                answer.set_result(event)
            elif not answer.done() and isinstance(event, Ended):
                answer.set_exception(event.error or RuntimeError("aborted"))


def engine_of(demo_model: Path) -> Engine:
    return Engine(EngineConfig(model_path=demo_model, model_name="demo", num_blocks=BLOCKS, num_threads=1))


@pytest.fixture
async def thread(demo_model: Path) -> AsyncIterator[EngineThread]:
    thread = EngineThread(engine_of(demo_model))
    yield thread
    await thread.call(lambda engine: engine.check_integrity())
    thread.close()


@pytest.fixture
async def queue(thread: EngineThread) -> WaitingLine:
    return WaitingLine(thread)


def request(name: str, blocks: int, priority: int = 0) -> Request:
    prompt = [1 + len(name)] * (16 * blocks - 8)
    return Request(name, prompt, SamplingParams(max_tokens=8, temperature=0), priority)


async def free(thread: EngineThread, line: WaitingLine, name: str) -> None:
    assert await thread.call(lambda engine: engine.abort(name))
    line.queue.look_again()


async def still_waits(task: asyncio.Task[object]) -> bool:
    await asyncio.wait([task], timeout=0.2)
    return not task.done()


async def in_line(queue: WaitingLine, count: int) -> None:
    async with asyncio.timeout(60):
        while len(queue) < count:
            await asyncio.sleep(0.001)


async def admitted(task: asyncio.Task[object]) -> None:
    await asyncio.wait_for(task, 60)


async def go_one_after_the_other(thread: EngineThread, queue: WaitingLine, **waiting: asyncio.Task[Added]) -> None:
    """Once "a" is freed they are admitted in this order, each when the one before it is freed."""
    before = "a"
    for name, task in waiting.items():
        assert not task.done()
        await free(thread, queue, before)
        await admitted(task)
        before = name
    await free(thread, queue, before)


async def test_first_come_first_served_and_big_ones_are_not_passed_by(thread: EngineThread, queue: WaitingLine) -> None:
    await queue.reserve(request("a", 3))
    big = asyncio.create_task(queue.reserve(request("big", 4)))
    await in_line(queue, 1)
    small = asyncio.create_task(queue.reserve(request("small", 1)))
    assert await still_waits(big)
    assert await still_waits(small)
    await go_one_after_the_other(thread, queue, big=big, small=small)
    assert len(queue) == 0


async def test_priority_goes_before_arrival(thread: EngineThread, queue: WaitingLine) -> None:
    await queue.reserve(request("a", 4))
    late = asyncio.create_task(queue.reserve(request("late", 4, priority=1)))
    await in_line(queue, 1)
    urgent = asyncio.create_task(queue.reserve(request("urgent", 4, priority=0)))
    await in_line(queue, 2)
    await go_one_after_the_other(thread, queue, urgent=urgent, late=late)


async def test_giving_up_leaves_nothing_behind(thread: EngineThread, queue: WaitingLine) -> None:
    await queue.reserve(request("a", 4))
    waiting = asyncio.create_task(queue.reserve(request("b", 1)))
    await in_line(queue, 1)
    waiting.cancel()
    await asyncio.wait([waiting])
    await free(thread, queue, "a")
    assert len(queue) == 0
    assert await thread.call(lambda engine: engine.stats().free_blocks) == BLOCKS


async def test_what_never_fits_is_refused_at_once(queue: WaitingLine) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        await queue.reserve(request("huge", BLOCKS + 1))


async def test_all_that_fit_are_reserved_between_two_steps(thread: EngineThread, queue: WaitingLine) -> None:
    """Each in a step of its own would make a burst wait for as many steps as it has requests."""
    began, busy = threading.Event(), threading.Event()

    def compute(engine: Engine) -> None:
        began.set()
        assert busy.wait(60)

    step = asyncio.create_task(thread.call(compute))
    await asyncio.to_thread(began.wait, 60)
    burst = [asyncio.create_task(queue.reserve(request(name, 1))) for name in ("a", "bb", "ccc", "dddd", "eeeee")]
    await in_line(queue, 5)
    after = asyncio.create_task(thread.call(lambda engine: engine.stats().free_blocks))
    await asyncio.sleep(0)
    busy.set()
    await step
    assert await after == 0
    await asyncio.wait_for(asyncio.gather(*burst[:4]), 60)
    assert await still_waits(burst[4])
    for name in ("a", "bb", "ccc", "dddd"):
        await free(thread, queue, name)
    await admitted(burst[4])
    await free(thread, queue, "eeeee")


async def test_cancelled_just_as_it_is_reserved_leaves_nothing_behind(thread: EngineThread, queue: WaitingLine) -> None:
    for turns in range(12):
        task = asyncio.create_task(queue.reserve(request("a", 2)))
        for _ in range(turns):
            await asyncio.sleep(0.001)
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            await free(thread, queue, "a")
        assert await thread.call(lambda engine: engine.stats().free_blocks) == BLOCKS
        assert len(queue) == 0


async def test_what_is_free_is_reserved_while_a_step_computes(demo_model: Path) -> None:
    computing, go_on = threading.Event(), threading.Event()

    def compute(seconds: float) -> None:
        computing.set()
        assert go_on.wait(60)

    config = EngineConfig(model_path=demo_model, model_name="demo", null=StepTime(), num_blocks=BLOCKS)
    thread = EngineThread(Engine(config, sleep=compute))
    queue = WaitingLine(thread)
    try:
        await thread.call(lambda engine: engine.add(request("running", 2)))
        await asyncio.to_thread(computing.wait, 60)
        added = await asyncio.wait_for(queue.reserve(request("a", 1)), 30)
        assert (added.num_cached_tokens, len(added.block_ids or ())) == (0, 1)
        for too_many in (queue.reserve(request("bb", 2)), queue.reserve(request("urgent", 2, priority=-1))):
            waiting = asyncio.create_task(too_many)
            assert await still_waits(waiting)  # whose blocks are wanted is computed with
            waiting.cancel()
            await asyncio.wait([waiting])
        go_on.set()
        await asyncio.wait_for(queue.ended.wait(), 60)
        await free(thread, queue, "a")
        assert await thread.call(lambda engine: engine.stats().free_blocks) == BLOCKS
        await thread.call(lambda engine: engine.check_integrity())
    finally:
        go_on.set()
        thread.close()
