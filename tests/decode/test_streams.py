from __future__ import annotations

import asyncio

from services.decode.streams import Streams
from tandem.v1 import worker_pb2


class ManualClock:
    """Time that moves when told to."""

    def __init__(self) -> None:
        self.asleep: list[asyncio.Future[None]] = []

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        self.asleep.append(asyncio.get_running_loop().create_future())
        await self.asleep[-1]

    async def pass_by(self) -> None:
        await asyncio.sleep(0)
        for future in self.asleep:
            future.set_result(None)
        self.asleep.clear()
        await asyncio.sleep(0)


def output(name: str, *tokens: int) -> worker_pb2.SequenceOutput:
    return worker_pb2.SequenceOutput(request_id=name, token_ids=tokens)


async def test_steps_leave_in_order_and_merge_for_a_slow_reader() -> None:
    streams = Streams("inc", ManualClock(), lambda gateway: None)
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


async def test_a_gateway_that_stays_away_is_lost_once() -> None:
    lost: list[str] = []
    clock = ManualClock()
    streams = Streams("inc", clock, lost.append)
    stream = streams.stream("g")
    await anext(stream)
    await stream.aclose()
    assert streams.connected("g")
    await clock.pass_by()
    assert lost == ["g"]
    assert not streams.connected("g")


async def test_a_gateway_that_comes_back_in_time_is_not_lost_and_misses_nothing() -> None:
    lost: list[str] = []
    clock = ManualClock()
    streams = Streams("inc", clock, lost.append)
    first = streams.stream("g")
    await anext(first)
    await first.aclose()
    streams.send("g", output("a", 7))
    second = streams.stream("g")
    await anext(second)
    await clock.pass_by()
    assert lost == []
    assert list((await anext(second)).outputs[0].token_ids) == [7]
    await second.aclose()
    streams.close()
