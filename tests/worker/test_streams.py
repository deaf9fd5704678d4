from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import uvloop

from services.gateway.errors import GatewayError
from services.gateway.workers import Mailbox
from tandem.engine import FinishReason, SampledToken, SequenceOutput
from tandem.v1 import llm_pb2, worker_pb2
from tandem.worker import Streams
from tandem.worker.serving.streams import MOST_AHEAD, MOST_S


def output(
    name: str, *tokens: int, at: int = 0, end: FinishReason | None = None, error: str | None = None
) -> SequenceOutput:
    sampled = [SampledToken(token) for token in tokens]
    return SequenceOutput(name, at, sampled, end, error=error, finished=bool(end or error))


def said(message: worker_pb2.WorkResponse) -> list[tuple[str, int, list[int]]]:
    return [(o.request_id, o.first_index, list(o.token_ids)) for o in message.outputs]


async def opened(streams: Streams) -> AsyncIterator[worker_pb2.WorkResponse]:
    """The stream of gateway "g", its greeting read."""
    stream = streams.stream("g")
    await anext(stream)
    return stream


MANY = [f"s{i}" for i in range(64)]


async def held_up() -> tuple[Streams, AsyncIterator[worker_pb2.WorkResponse]]:
    """Holds the next tokens of sequences while the gateway has not passed their last ones on."""
    streams = Streams("inc", lambda gateway: None)
    stream = await opened(streams)
    for name in MANY:
        streams.send("g", output(name, 1, at=1))
    assert said(await anext(stream)) == [(name, 1, [1]) for name in MANY]
    return streams, stream


async def test_tokens_of_many_sequences_leave_a_few_steps_at_a_time_and_none_is_left_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams, stream = await held_up()
    for step in (2, 3):
        for name in MANY:
            streams.send("g", output(name, step, at=step))
        await asyncio.sleep(0.01)  # where nothing is held, the step leaves meanwhile
    streams.passed_on("g", len(MANY))
    assert said(await anext(stream)) == [(name, 2, [2, 3]) for name in MANY]
    streams.close()


async def test_tokens_leave_at_once_where_the_gateway_has_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams, stream = await held_up()
    for step in range(2, 6):
        streams.passed_on("g", (step - 1) * len(MANY))
        for name in MANY:
            streams.send("g", output(name, step, at=step))
        message = await anext(stream)
        assert said(message) == [(name, step, [step]) for name in MANY]
        assert message.num_sent == step * len(MANY)
    streams.close()


async def test_a_few_tokens_leave_at_once_and_are_seldom_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams = Streams("inc", lambda gateway: None)
    stream = await opened(streams)
    asked = []
    for step in range(1, 3 * MOST_AHEAD):
        streams.send("g", output("s", step, at=step))
        message = await anext(stream)
        assert said(message) == [("s", step, [step])]
        if message.num_sent:
            asked.append(message.num_sent)
            streams.passed_on("g", message.num_sent)
    assert asked == [MOST_AHEAD // 2 * n for n in range(1, 6)]
    streams.close()


async def test_a_gateway_that_does_not_pass_on_the_tokens_of_one_sequence_gets_them_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams = Streams("inc", lambda gateway: None)
    stream = await opened(streams)
    for step in range(1, MOST_AHEAD + 1):
        streams.send("g", output("s", step, at=step))
        assert said(await anext(stream)) == [("s", step, [step])]
    for step in (98, 99):
        streams.send("g", output("s", step, at=step))
        await asyncio.sleep(0.01)
    streams.passed_on("g", MOST_AHEAD // 2)
    assert said(await anext(stream)) == [("s", 98, [98, 99])]
    streams.close()


async def test_no_token_is_held_beyond_its_sequences_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams, stream = await held_up()
    streams.send("g", output("s0", 2, at=2))
    streams.send("g", output("s1", 2, at=2), 0.02)
    async with asyncio.timeout(30):
        assert said(await anext(stream)) == [("s0", 2, [2]), ("s1", 2, [2])]
    streams.close()


def test_a_wait_that_is_over_at_once_is_one_under_uvloop_too() -> None:
    """Whose timers of no time at all are no timers."""

    async def held_twice() -> None:
        streams, stream = await held_up()
        await asyncio.sleep(2 * MOST_S)
        for step in (2, 3):
            streams.send("g", output("s0", step, at=step), 0.02)
        assert said(await anext(stream)) == [("s0", 2, [2, 3])]
        streams.close()

    uvloop.run(held_twice())


async def test_a_gateway_that_reports_nothing_gets_its_tokens_late() -> None:
    started = asyncio.get_running_loop().time()
    streams, stream = await held_up()
    streams.passed_on("g", 0)
    streams.passed_on("elsewhere", 7)
    streams.send("g", output("s0", 2, at=2))
    assert said(await anext(stream)) == [("s0", 2, [2])]
    assert asyncio.get_running_loop().time() - started > MOST_S / 2
    streams.close()


async def test_first_tokens_and_ends_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 60.0)
    streams, stream = await held_up()
    for name in MANY[:3]:
        streams.send("g", output(name, 2, at=2))
    streams.send("g", output("s1", 3, at=3, end=FinishReason.LENGTH))
    streams.send("g", output("new", 9))
    message = await anext(stream)
    assert said(message) == [("s1", 2, [2, 3]), ("new", 0, [9])]
    assert message.outputs[0].finish_reason == llm_pb2.FINISH_REASON_LENGTH
    streams.passed_on("g", len(MANY) + 2)
    assert said(await anext(stream)) == [("s0", 2, [2]), ("s2", 2, [2])]
    streams.close()


@pytest.mark.parametrize("by", ["engine", "worker"])
async def test_a_failure_does_not_swallow_the_tokens_before_it(by: str) -> None:
    streams, stream = await held_up()
    streams.send("g", output("s1", 2, at=2))
    if by == "engine":
        streams.send("g", output("s1", at=3, error="broken"))
    else:
        streams.fail("g", "s1", "INTERNAL", "broken")
    sent = list((await anext(stream)).outputs)
    mailbox = Mailbox("s1", "decode-0")
    mailbox.next_index = 2
    for one in sent:
        mailbox.put(one)
    assert (await mailbox.get()).ids == [2]
    with pytest.raises(GatewayError, match="broken"):
        await mailbox.get()
    streams.close()


async def test_steps_leave_in_order_and_merge_for_a_slow_reader() -> None:
    streams = Streams("inc", lambda gateway: None)
    stream = streams.stream("g")
    assert (await anext(stream)).incarnation == "inc"
    streams.send("g", output("a", 1))
    streams.send("g", output("b", 2))
    both = await anext(stream)
    assert [o.request_id for o in both.outputs] == ["a", "b"]
    streams.send("g", output("a", 3))
    assert [list(o.token_ids) for o in (await anext(stream)).outputs] == [[3]]
    await stream.aclose()
    streams.close()


async def test_the_end_of_a_stream_is_reported_once_and_at_once() -> None:
    ended: list[str] = []
    streams = Streams("inc", ended.append)
    first, second = streams.stream("first"), streams.stream("second")
    await anext(first)
    await anext(second)
    await first.aclose()
    assert ended == ["first"]
    assert not streams.is_open("first")
    assert streams.is_open("second")
    streams.close()


async def test_a_call_cancelled_while_it_writes_has_ended_too() -> None:
    """Nobody closes its generator then."""
    ended: list[str] = []
    streams = Streams("inc", ended.append)
    kept = []

    async def call() -> None:
        kept.append(stream := streams.stream("g"))
        async for _ in stream:
            await asyncio.Event().wait()

    task = asyncio.create_task(call())
    await asyncio.sleep(0)
    assert streams.is_open("g")
    task.cancel()
    await asyncio.wait([task])
    assert ended == ["g"]


async def test_a_wait_that_ended_with_nothing_held_leaves_the_next_tokens_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.worker.serving.streams.MOST_S", 0.01)
    streams, stream = await held_up()
    streams.send("g", output("s0", 2, at=2))
    streams.send("g", output("s0", 3, at=3, end=FinishReason.LENGTH))
    assert said(await anext(stream)) == [("s0", 2, [2, 3])]

    async def next_tokens() -> list[tuple[str, int, list[int]]]:
        while not (found := said(await anext(stream))):
            pass
        return found

    reading = asyncio.create_task(next_tokens())
    await asyncio.sleep(0.05)
    streams.send("g", output("s1", 2, at=2))
    async with asyncio.timeout(10):
        assert await reading == [("s1", 2, [2])]
    streams.close()
