"""Calls in batches: each is answered with its own, whatever shares its batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from tandem.registry import RegistryUnavailable
from tandem.registry.wire.batching import CALLS_AT_ONCE, CallBatcher
from tests.simulation.world import World

pytestmark = pytest.mark.fast

MOST = 4


async def test_every_call_is_answered_and_no_line_carries_too_many() -> None:
    under_way, carried = 0, list[int]()

    async def double(numbers: Sequence[int]) -> list[int]:
        nonlocal under_way
        under_way += 1
        carried.append(len(numbers))
        assert under_way <= CALLS_AT_ONCE
        await asyncio.sleep(0)
        under_way -= 1
        return [2 * number for number in numbers]

    batcher = CallBatcher[int](double, MOST)

    async def caller(number: int) -> None:
        for _ in range(5):  # the next one comes in the moment when a line ends
            assert await batcher.call(number) == 2 * number

    async with asyncio.timeout(30):
        await asyncio.gather(*(caller(number) for number in range(30)))
        for number in range(5):
            assert await batcher.call(number) == 2 * number
    assert sum(carried) == 155
    assert max(carried) == MOST
    await batcher.close()


async def test_a_call_that_fails_is_no_error_of_those_that_wait_for_the_next() -> None:
    failed = list[int]()

    async def fail_first(numbers: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0)
        if not failed:
            failed.extend(numbers)
            raise RegistryUnavailable("gone for a moment")
        return numbers

    batcher = CallBatcher[int](fail_first, MOST)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(batcher.call(number) for number in range(30)), return_exceptions=True)
    assert len(failed) == MOST
    for number, answer in enumerate(answers):
        assert isinstance(answer, RegistryUnavailable) if number in failed else answer == number
    await batcher.close()


async def test_a_wrong_argument_is_its_own_callers_error() -> None:
    async def refuse_odd(numbers: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0)
        if odd := [number for number in numbers if number % 2]:
            raise ValueError(f"odd: {odd[0]}")
        return numbers

    batcher = CallBatcher[int](refuse_odd, MOST)
    async with asyncio.timeout(30):
        answers = await asyncio.gather(*(batcher.call(number) for number in range(30)), return_exceptions=True)
    for number, answer in enumerate(answers):
        assert str(answer) == f"odd: {number}" if number % 2 else answer == number
    await batcher.close()


def test_silence_is_met_twice_at_most() -> None:
    async def wait_in_vain(numbers: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(2.0)
        raise RegistryUnavailable("no answer in 2.0 s")

    async def main() -> None:
        batcher = CallBatcher[int](wait_in_vain, MOST)
        loop, waited = asyncio.get_running_loop(), list[float]()

        async def caller(number: int) -> None:
            await asyncio.sleep(0.02 * number)
            start = loop.time()
            with pytest.raises(RegistryUnavailable):
                await batcher.call(number)
            waited.append(loop.time() - start)

        await asyncio.gather(*(caller(number) for number in range(200)))
        assert max(waited) < 4.0
        await batcher.close()

    with World(1) as world:
        world.run(world.process("gateway"), main())


async def test_an_error_is_told_to_all_and_ends_nothing_else() -> None:
    broken = True

    async def fail_once(numbers: Sequence[int]) -> Sequence[int]:
        await asyncio.sleep(0)
        if broken:
            raise ConnectionError("gone")
        return numbers

    batcher = CallBatcher[int](fail_once, MOST)
    async with asyncio.timeout(30):
        errors = await asyncio.gather(*(batcher.call(number) for number in range(30)), return_exceptions=True)
        assert {type(error) for error in errors} == {ConnectionError}
        broken = False
        assert await batcher.call(7) == 7
    waiting = batcher.call(8)
    await asyncio.sleep(0)
    await batcher.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_a_patient_call_goes_with_the_next_one_or_after_a_moment_alone() -> None:
    carried = list[Sequence[int]]()

    async def note(numbers: Sequence[int]) -> Sequence[int]:
        carried.append(numbers)
        await asyncio.sleep(0)
        return numbers

    batcher = CallBatcher[int](note, MOST, patience_s=60.0)
    async with asyncio.timeout(30):
        assert await batcher.call(1) == 1
        patient = [batcher.call(number, patient=True) for number in (2, 3)]
        for _ in range(10):
            await asyncio.sleep(0)
        assert carried == [[1]]
        assert await batcher.call(4) == 4
        assert await asyncio.gather(*patient) == [2, 3]
    await batcher.close()
    alone = CallBatcher[int](note, MOST, patience_s=0.001)
    async with asyncio.timeout(30):
        assert await alone.call(5, patient=True) == 5
    await alone.close()
    assert carried == [[1], [2, 3, 4], [5]]
