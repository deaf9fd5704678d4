"""Requests that come at once begin a few at a time, through both doors."""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import Any

import grpc
import httpx
import pytest

from services.gateway import Gateway
from services.gateway.admission.intake import LONG, MOST, REST_TURNS, Intake, SequenceTurns
from tandem import rpc
from tandem.v1 import llm_pb2, llm_pb2_grpc
from tests.gateway.peers import MODEL, Peers

TURNS = 5  # of a request, from its beginning to its end


async def test_those_that_come_first_are_over_before_the_last_begin() -> None:
    intake, over, over_before = Intake(), list[int](), list[int]()

    async def request(number: int) -> None:
        await intake.begin()
        over_before.append(len(over))
        for _ in range(TURNS):
            await asyncio.sleep(0)
        over.append(number)

    await asyncio.gather(*(request(number) for number in range(20 * MOST)))
    assert over == sorted(over)
    assert over_before[:MOST] == [0] * MOST
    assert over_before[-1] >= (20 - TURNS - 3) * MOST


async def test_a_few_do_not_wait() -> None:
    intake = Intake()
    for _ in range(3):
        for _ in range(MOST):
            with pytest.raises(StopIteration):
                intake.begin().send(None)
        await asyncio.sleep(0)
    for _ in range(MOST):
        with pytest.raises(StopIteration):
            intake.begin().send(None)
    one_more = intake.begin()
    assert asyncio.isfuture(one_more.send(None))
    one_more.close()


async def test_what_is_cancelled_takes_nobodys_turn() -> None:
    intake = Intake()
    begun = [asyncio.create_task(intake.begin()) for _ in range(4 * MOST)]
    await asyncio.sleep(0)
    for task in begun[MOST : 2 * MOST]:
        task.cancel()
    async with asyncio.timeout(5.0):
        await asyncio.wait(begun)
    assert [task.cancelled() for task in begun] == [MOST <= number < 2 * MOST for number in range(4 * MOST)]


@pytest.mark.parametrize(("num_tokens", "at_once"), [(LONG - 1, MOST), (LONG, 1)])
async def test_sequences_of_one_request_begin_in_turns_too(num_tokens: int, at_once: int) -> None:
    """Long prompts one by one; however little time a busy machine leaves between them, others have turns there."""
    turns, turn, begun = SequenceTurns(), 0, list[int]()

    async def begin() -> None:
        await turns.begin(num_tokens)
        begun.append(turn)

    tasks = [asyncio.create_task(begin()) for _ in range(4 * MOST)]
    while len(begun) < len(tasks):
        await asyncio.sleep(0)
        time.sleep(0.002)  # noqa: ASYNC251  (as on a busy machine)
        turn += 1
    assert max(begun.count(one) for one in begun) == at_once
    if at_once == 1:
        assert min(after - before for before, after in itertools.pairwise(begun)) >= REST_TURNS


async def test_a_request_whose_turn_does_not_come_ends_by_its_deadline(
    gateway: Gateway, http: httpx.AsyncClient, peers: Peers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.shared.intake, "begin", never)
    answer = await http.post(
        "/v1/completions", json={"model": MODEL, "prompt": "x"}, headers={"x-request-timeout-ms": "200"}
    )
    assert answer.status_code == 504
    async with rpc.channel(f"127.0.0.1:{gateway.grpc_port}") as channel:
        stub: Any = llm_pb2_grpc.LLMServiceStub(channel)
        request = llm_pb2.GenerateUnaryRequest(generate=llm_pb2.GenerateRequest(model=MODEL, prompt="x"))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.GenerateUnary(request, timeout=0.2)
    assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert peers.decode.seen == []
