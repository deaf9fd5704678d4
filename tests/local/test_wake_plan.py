"""Decides which of the models that start on demand have workers: a state machine without processes."""

from __future__ import annotations

import random
from collections import Counter
from itertools import pairwise

import pytest

from tandem.local import wake_plan
from tandem.local.wake_plan import OnDemandModel, WakeBudget, WakePlan
from tandem.registry import ModelUse, Wakefulness

IDLE_S, START_S = 60.0, 5.0
NOW = ModelUse(wanted_s=0.0)
RUNS = ModelUse(ran_s=0.0)
ANY = WakeBudget()


def model(name: str, memory: int = 4) -> OnDemandModel:
    return OnDemandModel(name, (), IDLE_S, memory, START_S)


class PlannedModels:
    """A plan and a launcher that takes no time."""

    def __init__(self, names: str, room: WakeBudget = ANY, **memory: int) -> None:
        self.now = 1000.0
        self.plan = WakePlan([model(name, memory.get(name, 4)) for name in names], room, self.now)

    def after(self, seconds: float, starts: bool = True, **uses: ModelUse) -> tuple[str, str]:
        """Names of those that start and those that stop then. `starts`: at once."""
        self.now += seconds
        self.plan.hear(uses, self.now)
        starting, stopping = self.plan.decide(self.now)
        for one in starting if starts else ():
            self.plan.awake(one.name, self.now)
        for one in stopping:
            self.plan.asleep(one.name, self.now)
        return "".join(one.name for one in starting), "".join(one.name for one in stopping)

    def sleeps_after(self, seconds: float, **uses: ModelUse) -> str:
        """Let it settle, what is said of the others being said all the while."""
        found = self.after(seconds, **uses)[1]
        for _ in range(4):
            found += self.after(1.0, **uses)[1]
        return found

    def states(self) -> dict[str, str]:
        return {status.name: status.state.value for status in self.plan.statuses(self.now)}

    def reason(self, name: str) -> str:
        return next(status.reason for status in self.plan.statuses(self.now) if status.name == name)


def test_nothing_has_workers_until_it_is_wanted() -> None:
    world = PlannedModels("ab")
    assert [world.after(10.0) for _ in range(20)] == 20 * [("", "")]
    assert world.after(0.2, a=NOW) == ("a", "")
    assert world.states() == {"a": "awake", "b": "asleep"}


def test_a_wish_that_is_over_starts_nothing() -> None:
    assert PlannedModels("a").after(0.0, a=ModelUse(wanted_s=wake_plan.WISH_S + 1)) == ("", "")


def test_one_that_nobody_uses_for_its_time_stops_and_may_be_woken_again() -> None:
    world = PlannedModels("a")
    world.after(0.0, a=NOW)
    for _ in range(10):
        assert world.after(IDLE_S / 2, a=RUNS) == ("", "")
    assert world.after(IDLE_S / 2, a=ModelUse(ran_s=IDLE_S / 2)) == ("", "")
    assert world.sleeps_after(IDLE_S) == "a"
    assert world.after(1.0, a=NOW) == ("a", "")


@pytest.mark.parametrize("use", [NOW, RUNS])
def test_one_that_is_used_while_it_is_about_to_stop_stays(use: ModelUse) -> None:
    """By a gateway that has not heard of it yet, or one that has."""
    world = PlannedModels("a")
    world.after(0.0, a=NOW)
    world.after(IDLE_S + 10.0)
    assert world.states() == {"a": "stopping"}
    assert world.after(0.5, a=use) == ("", "")
    assert world.states() == {"a": "awake"}
    assert world.after(wake_plan.SETTLE_S + 1) == ("", "")


def test_the_least_recently_used_makes_room() -> None:
    world = PlannedModels("abcd", WakeBudget(models=3))
    for name in "abc":
        world.after(1.0, **{name: NOW})
    world.after(5.0, a=RUNS)
    world.after(5.0)
    assert world.after(1.0, d=NOW) == ("", "")
    assert world.states() == {"a": "awake", "b": "stopping", "c": "awake", "d": "asleep"}
    assert world.reason("d") == "waits for b to stop"
    assert world.after(1.0, d=NOW) == ("", "")
    assert world.after(1.0, d=NOW) == ("", "b")
    assert world.after(0.2, d=NOW) == ("d", "")
    assert world.states() == {"a": "awake", "b": "asleep", "c": "awake", "d": "awake"}


def test_who_was_told_when_to_come_back_need_not_wait_for_room_to_be_made() -> None:
    world = PlannedModels("ab", WakeBudget(models=1))
    world.after(0.0, a=NOW)
    world.after(1.0, a=RUNS, b=NOW)
    assert world.reason("b") == "waits for a, in use now"
    status = world.plan.statuses(world.now)[1]
    assert status.left_s == START_S + wake_plan.SETTLE_S + wake_plan.TURN_S - 1.0
    assert "".join(world.after(1.0)[1] for _ in range(8)) == "a"
    assert world.states() == {"a": "asleep", "b": "awake"}
    assert [world.after(1.0, b=RUNS) for _ in range(80)] == 80 * [("", "")], "a's wish was fulfilled long ago"


def test_room_is_made_for_all_the_memory_that_is_needed_and_no_more() -> None:
    world = PlannedModels("abcd", WakeBudget(memory=12), a=3, b=3, c=6, d=5)
    for name in "abc":
        world.after(20.0, **{name: NOW})
    world.after(20.0, d=NOW)
    assert world.states() == {"a": "stopping", "b": "stopping", "c": "awake", "d": "asleep"}


def test_what_runs_keeps_its_place_for_its_turn_and_is_drained_then() -> None:
    world = PlannedModels("ab", WakeBudget(models=1))
    world.after(0.0, a=NOW)
    began = world.now
    while world.now < began + wake_plan.TURN_S - 1:
        assert world.after(1.0, a=RUNS, b=NOW) == ("", "")
        assert world.reason("b") in ("", "waits for a, in use now")
        assert world.states()["a"] == "awake"
    world.after(1.0, a=RUNS, b=NOW)
    assert world.states() == {"a": "stopping", "b": "asleep"}
    began = world.now
    while world.now < began + wake_plan.DRAIN_S - 1:
        assert world.after(1.0, a=RUNS, b=NOW) == ("", ""), "what it runs may end"
    assert world.after(1.0, a=RUNS, b=NOW) == ("", "a")
    assert world.after(1.0, b=NOW) == ("b", "")


def test_two_that_are_both_wanted_all_the_time_take_turns() -> None:
    world, turns = PlannedModels("ab", WakeBudget(models=1)), Counter[str]()
    for _ in range(1000):
        states = world.states()
        uses = {name: RUNS if states[name] == "awake" else NOW for name in "ab"}
        turns.update(world.after(1.0, **uses)[0])
    assert min(turns["a"], turns["b"]) >= 10
    assert abs(turns["a"] - turns["b"]) <= 1


def test_who_has_waited_longest_comes_first_and_none_overtakes() -> None:
    world = PlannedModels("abc", WakeBudget(memory=8), a=4, b=8, c=4)
    world.after(0.0, a=NOW)
    for _ in range(5):
        assert world.after(1.0, a=RUNS, b=NOW) == ("", "")
    for _ in range(5):
        assert world.after(1.0, a=RUNS, b=NOW, c=NOW) == ("", ""), "c would fit, and b would never"


def test_what_never_fits_is_refused_and_not_tried_hotly() -> None:
    world = PlannedModels("a", WakeBudget(memory=3))
    assert [world.after(1.0, a=NOW)[0] for _ in range(30)] == 30 * [""]
    assert world.states() == {"a": "failed"}
    assert "more than all may have" in world.reason("a")


def test_starts_that_fail_are_tried_later_each_time() -> None:
    world, tried = PlannedModels("a"), list[float]()
    for _ in range(4000):
        if world.after(1.0, starts=False, a=NOW)[0]:
            tried.append(world.now)
            world.plan.failed("a", world.now, "boom")
            assert world.reason("a") == "boom"
    gaps = [later - earlier for earlier, later in pairwise(tried)]
    assert gaps[:6] == [10.0, 20.0, 40.0, 80.0, 160.0, 300.0]
    assert max(gaps) == wake_plan.MAX_PAUSE_S


def test_how_long_it_will_take_is_told_by_the_last_start() -> None:
    world = PlannedModels("a")

    def left() -> float:
        return world.plan.statuses(world.now)[0].left_s

    assert left() == START_S
    world.after(0.0, starts=False, a=NOW)
    world.after(2.0, starts=False)
    assert left() == START_S - 2.0
    world.after(10.0, starts=False)
    assert left() == 0.0
    world.plan.awake("a", world.now)
    assert world.sleeps_after(IDLE_S + 1) == "a"
    assert left() == 12.0
    assert world.plan.statuses(world.now)[0].start_s == 12.0


@pytest.mark.long
def test_whatever_happens_room_is_kept_and_what_is_wanted_comes() -> None:
    """Random uses, slow starts that fail now and then."""
    for seed in range(40):
        dice, names = random.Random(seed), "abcdef"
        world = PlannedModels(names, WakeBudget(models=3, memory=10), **{name: dice.randint(1, 6) for name in names})
        memory = {one.name: one.memory for one in (life.model for life in world.plan._lives.values())}
        waiting = dict.fromkeys(names, 0.0)
        for _ in range(600):
            for name, state in world.states().items():
                if state == "starting" and dice.random() < 0.2:
                    if dice.random() < 0.1:
                        world.plan.failed(name, world.now, "boom")
                    else:
                        world.plan.awake(name, world.now)
            states = world.states()
            uses = {name: RUNS if states[name] == "awake" else NOW for name in names if dice.random() < 0.6}
            world.after(1.0, starts=False, **uses)
            taken = [name for name, state in world.states().items() if state in ("starting", "awake", "stopping")]
            assert len(taken) <= 3
            assert sum(memory[name] for name in taken) <= 10
            for name in names:
                waits = world.states()[name] == Wakefulness.ASLEEP and name in uses
                waiting[name] = waiting[name] + 1.0 if waits else 0.0
                assert waiting[name] < 6 * (wake_plan.TURN_S + wake_plan.DRAIN_S + 20.0)
