"""Time that jumps, processes that die and pause, and runs that are a function of their seed."""

from __future__ import annotations

import asyncio

import pytest

from tests.simulation.network import SimulatedEnd, SimulatedNetwork
from tests.simulation.world import Process, Stuck, World

pytestmark = pytest.mark.fast


def test_time_jumps_to_the_next_timer() -> None:
    with World(1) as world:
        process = world.process("one")

        async def work() -> float:
            began = process.time()
            await asyncio.sleep(3600)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await asyncio.Event().wait()
            return process.time() - began

        assert world.run(process, work(), limit_s=4000) == pytest.approx(3605)


def test_clocks_of_processes_differ_and_run_alike() -> None:
    with World(1) as world:
        one, other = world.process("one"), world.process("other")
        before = one.time(), other.time()
        world.run(one, asyncio.sleep(2.5))
        assert (one.time() - before[0], other.time() - before[1]) == pytest.approx((2.5, 2.5))
        assert abs(one.time() - other.time()) > 100


def ticker(process: Process, ticks: list[str]) -> None:
    async def tick() -> None:
        try:
            while True:
                await asyncio.sleep(1)
                ticks.append(process.name)
        finally:
            ticks.append(f"{process.name} ended")

    process.spawn(tick())


def test_a_paused_process_goes_on_where_it_was() -> None:
    with World(1) as world:
        one, other = world.process("one"), world.process("other")
        ticks: list[str] = []
        ticker(other, ticks)
        world.run(one, asyncio.sleep(2.5))
        other.pause()
        world.run(one, asyncio.sleep(10))
        assert ticks == ["other"] * 2
        other.resume()
        world.run(one, asyncio.sleep(1.5))
        assert ticks == ["other"] * 4


def test_a_killed_process_runs_nothing_more() -> None:
    with World(1) as world:
        one, other = world.process("one"), world.process("other")
        ticks: list[str] = []
        ticker(other, ticks)
        world.run(one, asyncio.sleep(1.5))
        other.kill()
        world.run(one, asyncio.sleep(10))
        assert ticks == ["other"]
    assert ticks == ["other", "other ended"]  # only when the world ends


def order_of(seed: int) -> list[str]:
    with World(seed) as world:
        processes = [world.process(f"p{i}") for i in range(4)]
        ticks: list[str] = []
        for process in processes:
            ticker(process, ticks)
        world.run(processes[0], asyncio.sleep(20.5))
        return ticks


def test_the_seed_decides_the_order_among_processes() -> None:
    assert order_of(1) == order_of(1)
    assert order_of(1) != order_of(2)


def test_a_wait_without_end_is_found() -> None:
    with World(1) as world, pytest.raises(Stuck, match="no timer"):
        world.run(world.process("one"), asyncio.Event().wait())


def test_running_in_circles_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def circle() -> None:
        while True:
            await asyncio.sleep(0)

    monkeypatch.setattr("tests.simulation.world.MAX_TURNS_AT_ONCE", 1000)
    with World(1) as world, pytest.raises(Stuck, match="turns"):
        world.run(world.process("one"), circle())


def test_errors_that_nobody_handles_are_kept() -> None:
    with World(1) as world:
        process = world.process("one")
        process.deliver(lambda: 1 / 0)
        world.run(process, asyncio.sleep(1))
        assert len(world.errors) == 1
        assert "ZeroDivisionError" in world.errors[0]


def test_what_a_connection_holds_back_arrives_in_order() -> None:
    """All at one moment, which each message reaches from a time of its own."""
    with World(1) as world:
        network, sender, receiver = SimulatedNetwork(world), world.process("sender"), world.process("receiver")
        received: list[int] = []
        opened: list[SimulatedEnd] = []

        def accept(end: SimulatedEnd) -> None:
            end.received = received.append

        async def send() -> None:
            network.listen(receiver, "receiver:1", accept, pings=False)
            network.connect(sender, "receiver:1", opened.append, print)
            await asyncio.sleep(1)
            network.connections[0].hold(2.012)
            moment = 0.0
            for number in range(500):
                moment += world.random.random() / 500
                world.after(moment, opened[0].send, number)
            await asyncio.sleep(4)

        world.run(sender, send())
        assert received == list(range(500))
