"""Who is suspected of a worker's death, for how long, and who is refused."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from services.gateway.errors import Poison
from services.gateway.generation.recovery.suspicion import TOLD_S, UNHEARD_TOKENS, Deaths, Suspicion
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
    assert other.alone_until == 0, "another was what both have died of"


@in_virtual_time
async def test_of_what_nobody_tells_all_go_on_at_once() -> None:
    """A host has vanished: hundreds of answers must not go on one by one for that."""
    told = Told()
    choices = [told.suspicion(str(number)) for number in range(20)]
    started = later(0)
    await asyncio.gather(*(choice.lost(["vanished"], 5, later()) for choice in choices))
    assert later(0) - started < 2 * TOLD_S
    assert {(choice.alone_until, choice.begins_apart) for choice in choices} == {(0, True)}


@in_virtual_time
async def test_behind_two_deaths_that_nobody_tells_it_goes_alone_in_the_end() -> None:
    told = Told()
    one = told.suspicion()
    await one.lost(["unknown"], 5, later())
    told.gone = True
    started = later(0)
    await one.lost(["another"], 5 + UNHEARD_TOKENS + 1, later())
    assert later(0) - started >= PATIENCE_S
    assert one.alone_until == 5 + UNHEARD_TOKENS + 1 + UNHEARD_TOKENS + 2
    await one.lost([], one.alone_until, later())
    assert (one.alone_until, one.begins_apart) == (0, False)


async def lost_twice(told: Told, choice_id: str, heard: int) -> Suspicion:
    """Returns its record where the first death was not known when it went on, and both were once the second came."""
    deaths, told.deaths, told.of = told.deaths, {}, Deaths(told._ask)
    one = told.suspicion(choice_id)
    await one.lost(["first"], heard, later())
    assert one.begins_apart
    told.deaths = deaths
    await one.lost(["second"], heard + 1, later())
    return one


@in_virtual_time
@pytest.mark.parametrize("place", [7, 8])
async def test_the_only_one_at_its_place_in_both_deaths_is_poison(place: int) -> None:
    told = Told()
    told.tell("first", poison=7, past=5, short_of=30, left=9)
    told.tell("second", poison=place, past=7, short_of=29, new=0)
    with pytest.raises(Poison, match="first, second"):
        await lost_twice(told, "poison", place - 1)
    past = await lost_twice(told, "past", 4)
    assert past.alone_until == 9, "a suspect of the second death alone"
    assert (await lost_twice(told, "left", 8)).alone_until == 11
    assert (await lost_twice(told, "short_of", 28)).alone_until == 32


@in_virtual_time
async def test_who_passed_its_place_by_what_was_heard_of_it_is_left_out() -> None:
    """The prompt of one that wrote more than was heard ends before its place: a token later it is past it."""
    told = Told()
    poison, other = told.suspicion("poison"), told.suspicion("other")
    await asyncio.gather(poison.lost(["first"], 0, later()), other.lost(["first"], 19, later()))
    told.tell("first", poison=0, other=20)
    told.tell("second", poison=0, other=21)
    lost = (poison.lost(["second"], 0, later()), other.lost(["second"], 20, later()))
    ended = await asyncio.gather(*lost, return_exceptions=True)
    assert isinstance(ended[0], Poison)
    assert ended[1] is None


@in_virtual_time
async def test_two_at_their_places_in_both_deaths_are_no_poison_yet() -> None:
    told = Told()
    told.tell("first", a=7, b=9)
    told.tell("second", a=7, b=9)
    one = await lost_twice(told, "a", 6)
    assert one.alone_until == 9
    told.tell("third", a=7)
    with pytest.raises(Poison):
        await one.lost(["third"], 6, later())


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
