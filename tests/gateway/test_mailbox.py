"""Tokens that a reader, while it waits, takes where they are delivered."""

from __future__ import annotations

import asyncio

import pytest

from services.gateway.errors import GatewayError, WorkerLost
from services.gateway.workers import Mailbox, Tokens
from tandem.v1 import llm_pb2, worker_pb2

pytestmark = pytest.mark.fast


def output(index: int, *tokens: int, end: bool = False) -> worker_pb2.SequenceOutput:
    reason = llm_pb2.FINISH_REASON_LENGTH if end else llm_pb2.FINISH_REASON_UNSPECIFIED
    return worker_pb2.SequenceOutput(first_index=index, token_ids=tokens, finish_reason=reason)


class RoomyReader:
    """Takes what it is given until it has `room` for no more."""

    def __init__(self, room: int = 100) -> None:
        self.mailbox = Mailbox("s", "decode-0")
        self.taken: list[int] = []
        self.room = room

    def take(self, new: Tokens) -> bool:
        self.taken += new.ids
        return len(self.taken) < self.room

    async def waiting(self) -> asyncio.Task[Tokens]:
        task = asyncio.create_task(self.mailbox.get(self.take))
        await asyncio.sleep(0)
        return task


async def test_what_comes_while_the_reader_waits_wakes_nobody_but_the_end_does() -> None:
    reader = RoomyReader()
    reader.mailbox.put(output(0, 1))
    waiting = await reader.waiting()
    assert (await waiting).ids == [1]  # was there before
    reader.mailbox.put(output(1, 2))
    assert (await (await reader.waiting())).ids == [2]  # came between two waits
    waiting = await reader.waiting()
    reader.mailbox.put(output(2, 3, 4))
    reader.mailbox.put(output(4, 5))
    assert reader.taken == [3, 4, 5]
    await asyncio.sleep(0)
    assert not waiting.done()
    reader.mailbox.put(output(5, 6, end=True))
    assert (await waiting).ids == [6]
    assert reader.mailbox.finish_reason == llm_pb2.FINISH_REASON_LENGTH
    assert reader.taken == [3, 4, 5]


async def test_what_comes_behind_a_taker_that_stops_waits_for_the_reader() -> None:
    reader = RoomyReader(room=1)
    waiting = await reader.waiting()
    for index in range(3):
        reader.mailbox.put(output(index, index))
    assert reader.taken == [0]
    assert (await waiting).ids == [1, 2]
    waiting = await reader.waiting()
    reader.mailbox.put(output(3, 3))
    assert (await waiting).ids == []  # had by the taker, which stops again
    assert reader.taken == [0, 3]


async def test_repeated_and_missing_tokens_are_told_apart() -> None:
    reader = RoomyReader()
    waiting = await reader.waiting()
    reader.mailbox.put(output(0, 1, 2))
    reader.mailbox.put(output(1, 2, 3))
    assert (await waiting).ids == [3]
    waiting = await reader.waiting()
    reader.mailbox.put(output(5, 6))
    with pytest.raises(GatewayError, match="token 5 of an answer before token 3"):
        await waiting
    assert reader.taken == [1, 2]


async def test_errors_are_the_readers_own() -> None:
    reader = RoomyReader()
    waiting = await reader.waiting()
    reader.mailbox.put(output(0, 1))
    reader.mailbox.fail(WorkerLost("decode-0", "gone"))
    reader.mailbox.put(output(1, 2))
    assert (await waiting).ids == [2]  # reported before the loss was seen
    with pytest.raises(WorkerLost):
        await reader.mailbox.get(reader.take)

    def broken(new: Tokens) -> bool:
        raise ZeroDivisionError

    mailbox = Mailbox("s", "decode-0")
    waiting = asyncio.create_task(mailbox.get(broken))
    await asyncio.sleep(0)
    mailbox.put(output(0, 1))
    with pytest.raises(ZeroDivisionError):
        await waiting


async def test_the_workers_end_stays_known_when_its_tokens_are_taken() -> None:
    mailbox = Mailbox("s", "decode-0")
    mailbox.put(output(0, 1))
    assert not mailbox.ended
    mailbox.put(output(1, 2, end=True))
    assert (await mailbox.get()).ids == [1, 2]
    assert mailbox.ended


async def test_a_prefill_workers_reply_or_a_lost_stream_is_not_the_decode_workers_end() -> None:
    mailbox = Mailbox("s", "decode-0")
    mailbox.accept(output(0, 1, end=True))
    assert mailbox.finish_reason
    assert not mailbox.ended
    mailbox.fail(WorkerLost("decode-0", "its stream broke"))
    await mailbox.wait_ended()
    assert not mailbox.ended
