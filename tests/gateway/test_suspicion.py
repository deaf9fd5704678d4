"""Who is suspected of a worker's death, for how long, and who is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from services.gateway.errors import Poison
from services.gateway.generation.suspicion import LATE_S, TOLD_S, UNHEARD_TOKENS, Deaths, Suspicion
from tandem.containment.crash_page import Death
from tandem.registry import RegistryUnavailable
from tests.virtual_time import in_virtual_time

PATIENCE_S = 5.0


class Told:
    """A registry that knows these deaths."""

    def __init__(self) -> None:
        self.deaths: dict[str, Death] = {}
        self.asked: Counter[str] = Counter()
        self.gone = self.silent = False
        self.of = Deaths(self._ask)

    def tell(self, incarnation: str, cause: str = "SIGSEGV", **named: int) -> None:
        self.deaths[incarnation] = Death(incarnation, cause, named)

    def suspicion(self, choice_id: str = "a") -> Suspicion:
        return Suspicion(choice_id, self.of, PATIENCE_S)

    async def _ask(self, incarnation: str) -> Death | None:
        self.asked[incarnation] += 1
        await (asyncio.Event().wait() if self.silent else asyncio.sleep(0.001))
        if self.gone:
            raise RegistryUnavailable("gone")
        return self.deaths.get(incarnation)


def later(seconds: float = 60.0) -> float:
    return asyncio.get_running_loop().time() + seconds


@in_virtual_time
async def test_who_is_not_named_is_no_suspect() -> None:
    told = Told()
    told.tell("killed", "SIGKILL")
    told.tell("crashed", b=3)
    one = told.suspicion()
    await one.lost(["killed"], 5, later())
    await one.lost(["crashed"], 5, later())
    await one.lost([], 5, later())
    assert one.alone_until == 0


@in_virtual_time
async def test_a_silent_registry_is_not_waited_for_beyond_the_deadline() -> None:
    told = Told()
    told.silent = True
    async with asyncio.timeout(TOLD_S):
        await told.suspicion().lost([f"crashed-{i}" for i in range(20)], 5, later(TOLD_S / 10))


@in_virtual_time
async def test_who_is_named_is_one_until_past_the_place() -> None:
    told = Told()
    told.tell("first", a=7)
    told.tell("second", a=12)
    one = told.suspicion()
    await one.lost(["first"], 5, later())
    assert one.alone_until == 9
    await one.lost(["second"], 9, later())
    assert one.alone_until == 14, "it has passed where the first died: acquitted of that"


@in_virtual_time
async def test_two_deaths_at_a_place_are_poison() -> None:
    told = Told()
    told.tell("first", a=7, b=2)
    told.tell("second", a=7)
    one, other = told.suspicion("a"), told.suspicion("b")
    await one.lost(["first"], 5, later())
    await other.lost(["first"], 1, later())
    with pytest.raises(Poison, match="first, second") as refused:
        await one.lost(["second"], 7, later())
    assert (refused.value.status, refused.value.code) == (422, "poison")
    await other.lost(["second"], 2, later())
    assert other.alone_until == 4


@in_virtual_time
async def test_only_the_first_goes_on_before_word_comes_late() -> None:
    """Two workers killed at once on a busy machine: hundreds of answers must not go on one by one for that."""
    told = Told()
    choices = [told.suspicion(str(number)) for number in range(20)]
    asyncio.get_running_loop().call_later(4 * TOLD_S, told.tell, "killed", "SIGKILL")
    started = later(0)
    await asyncio.gather(*(choice.lost(["killed"], 5, later()) for choice in choices))
    assert [choice.alone_until > 0 for choice in choices] == [True] + [False] * 19
    assert later(0) - started < LATE_S


@in_virtual_time
async def test_of_what_nobody_tells_it_is_a_suspect_for_a_while() -> None:
    told = Told()
    one = told.suspicion()
    started = later(0)
    await one.lost(["unknown"], 5, later())
    assert TOLD_S <= later(0) - started < PATIENCE_S
    assert one.alone_until == 5 + UNHEARD_TOKENS + 2
    told.gone = True
    await one.lost(["another"], 5 + UNHEARD_TOKENS + 1, later())
    assert one.alone_until == 5 + UNHEARD_TOKENS + 1 + UNHEARD_TOKENS + 2


@in_virtual_time
async def test_behind_two_deaths_it_waits_to_hear_of_them() -> None:
    told = Told()
    one = told.suspicion()
    await one.lost(["first"], 5, later())
    waiting = asyncio.create_task(one.lost(["second"], 5, later()))
    await asyncio.sleep(3 * TOLD_S)
    assert not waiting.done()
    told.tell("second", "SIGKILL")
    await waiting
    waiting = asyncio.create_task(one.lost(["third"], 5, later()))
    await asyncio.sleep(3 * TOLD_S)
    assert not waiting.done()
    told.tell("first", a=5)
    told.tell("third", a=5)
    with pytest.raises(Poison):
        await waiting


@in_virtual_time
async def test_it_does_not_wait_beyond_its_deadline() -> None:
    one = Told().suspicion()
    async with asyncio.timeout(10):
        await one.lost(["first", "second"], 5, later(0.1))


@in_virtual_time
async def test_all_who_wait_ask_once() -> None:
    told = Told()
    told.tell("one", **{f"c{i}": 1 for i in range(100)})
    await asyncio.gather(*(told.suspicion(f"c{i}").lost(["one"], 0, later()) for i in range(100)))
    assert told.asked == {"one": 1}
