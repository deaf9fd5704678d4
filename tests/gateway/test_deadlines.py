import asyncio
import gc
import weakref

import pytest

from services.gateway.deadlines import SLOT_S, Bound, Deadlines
from tests.virtual_time import in_virtual_time

pytestmark = pytest.mark.fast


@in_virtual_time
async def test_each_is_called_once_in_order_and_never_early() -> None:
    loop, deadlines = asyncio.get_running_loop(), Deadlines()
    start, called = loop.time(), list[tuple[str, float]]()
    for name, after in (("late", 0.15), ("soon", 0.03), ("soon too", 0.031), ("past", -1.0)):
        deadlines.add(start + after, lambda name: called.append((name, loop.time() - start)), name)
    deadlines.add(start + 0.05, called.append, ("cancelled", 0.0)).cancel()
    async with asyncio.timeout(5.0):
        while deadlines:
            await asyncio.sleep(SLOT_S)
    assert [name for name, _ in called] == ["past", "soon", "soon too", "late"]
    assert called[1][1] >= 0.029
    assert called[3][1] >= 0.149


@in_virtual_time
async def test_what_an_earlier_one_of_its_slot_cancels_is_not_called() -> None:
    deadlines, called = Deadlines(), list[str]()
    at = asyncio.get_running_loop().time() + 0.01
    deadlines.add(at, lambda: second.cancel())
    second = deadlines.add(at, called.append, "second")
    await asyncio.sleep(3 * SLOT_S)
    assert not called
    assert not deadlines


@in_virtual_time
async def test_a_call_that_raises_is_reported_and_holds_up_no_other() -> None:
    loop, deadlines, called, reported = asyncio.get_running_loop(), Deadlines(), list[str](), list[object]()
    loop.set_exception_handler(lambda _, context: reported.append(context["exception"]))
    error, at = KeyError("a bug"), loop.time() + 0.01

    def broken() -> None:
        raise error

    deadlines.add(at, broken)
    deadlines.add(at, called.append, "of its slot")
    deadlines.add(at + 2 * SLOT_S, called.append, "later")
    async with asyncio.timeout(5.0):
        while deadlines:
            await asyncio.sleep(SLOT_S)
    assert called == ["of its slot", "later"]
    assert reported == [error]


@in_virtual_time
async def test_a_bound_ends_its_block() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()
    bound = deadlines.until(now + 0.03)
    with pytest.raises(TimeoutError), bound:
        await asyncio.sleep(30)
    assert bound.expired
    assert not deadlines


@in_virtual_time
async def test_the_inner_of_two_bounds_ends_its_block_alone() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()
    with deadlines.until(now + 30):
        with pytest.raises(TimeoutError), deadlines.until(now + 0.01):
            await asyncio.sleep(30)
        await asyncio.sleep(0)
    assert not deadlines


@in_virtual_time
async def test_a_bound_can_be_ended_at_once() -> None:
    deadlines = Deadlines()
    bound = deadlines.until(asyncio.get_running_loop().time() + 30)
    asyncio.get_running_loop().call_later(0.01, bound.expire)
    with pytest.raises(TimeoutError), bound:
        await asyncio.sleep(30)


@in_virtual_time
async def test_a_cancellation_from_outside_stays_one() -> None:
    deadlines = Deadlines()

    async def waiting() -> None:
        with deadlines.until(asyncio.get_running_loop().time() + 30):
            await asyncio.sleep(30)

    task = asyncio.create_task(waiting())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not deadlines


@in_virtual_time
async def test_what_was_cancelled_is_not_kept_until_its_time() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()
    kept = deadlines.add(now + 600, print)
    for i in range(10_000):
        deadlines.add(now + 600 + i / 10, print).cancel()
    assert len(deadlines) == 1
    assert len(deadlines._order) < 200
    kept.cancel()


@in_virtual_time
async def test_a_bound_that_is_over_keeps_nothing_of_its_task() -> None:
    deadlines, now = Deadlines(), asyncio.get_running_loop().time()

    async def bounded() -> weakref.ref[Bound]:
        with deadlines.until(now + 30) as bound:
            await asyncio.sleep(0)
            return weakref.ref(bound)

    gc.disable()
    try:
        assert (await asyncio.create_task(bounded()))() is None
    finally:
        gc.enable()


@in_virtual_time
async def test_a_bound_may_be_ended_when_its_block_is_over() -> None:
    with Deadlines().until(asyncio.get_running_loop().time() + 30) as bound:
        pass
    bound.expire()
    await asyncio.sleep(0)
    assert not bound.expired
