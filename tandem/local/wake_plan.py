"""Decides which on-demand models have workers. The plan knows no processes and no clock.

    asleep ──(wanted, and there is room)──> starting ──> awake ──(idle, or room is needed)──> stopping ──> asleep
      │                                        │           ^                                     │
      │<──(its pause is over)── failed <───────┘           └──(idle, and used after all)─────────┘

A stop is reported to gateways first; the model then has SETTLE_S for the requests they began before. The model wanted
for longest starts first. The model used least recently makes room; a model in use keeps its place for TURN_S, so that
two models which are both wanted take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tandem.cluster import Service
from tandem.registry import ModelStatus, ModelUse, Wakefulness

# Gateways report at least once a second the models they use, and more often the models they want.
IN_USE_S, SETTLE_S = 3.0, 2.0
TURN_S = 30.0
# How long a wish lasts: a client that was told when to come back finds the model started, even after another's turn.
WISH_S = 60.0
# How long a model that stops to make room may finish its requests.
DRAIN_S = 30.0
FIRST_PAUSE_S, MAX_PAUSE_S = 10.0, 300.0  # after a failed start; twice as long each time
LONG_AGO = float("-inf")
GIB = 2**30


@dataclass(frozen=True, slots=True)
class OnDemandModel:
    """A model that starts on demand, and its workers."""

    name: str
    services: tuple[Service, ...]
    idle_s: float  # seconds without a request after which it stops
    memory: int  # bytes that all its workers need
    start_s: float  # expected seconds of its first start


@dataclass(frozen=True, slots=True)
class WakeBudget:
    """The most that all models which are not asleep may take together; None: unlimited."""

    models: int | None = None
    memory: int | None = None

    def holds(self, models: Sequence[OnDemandModel]) -> bool:
        fits = self.memory is None or sum(model.memory for model in models) <= self.memory
        return fits and (self.models is None or len(models) <= self.models)


@dataclass(slots=True)
class _ModelLife:
    """The state of one model."""

    model: OnDemandModel
    since: float
    state: Wakefulness = Wakefulness.ASLEEP
    ran_at: float = LONG_AGO
    wanted_at: float = LONG_AGO
    wanted_since: float = LONG_AGO
    start_s: float = 0.0  # seconds of the last start
    num_failed: int = 0  # failed starts in a row
    served_at: float = LONG_AGO  # when the wishes up to then were met: it was awake, or had failed
    room_s: float = 0.0  # expected seconds until there is room for it
    makes_room: bool = False  # it stops to make room, not because it is idle
    ending: bool = False  # its workers have been told to stop
    reason: str = ""

    @property
    def used_at(self) -> float:
        return max(self.ran_at, self.wanted_at)

    def turn(self, state: Wakefulness, now: float, reason: str = "") -> None:
        self.state, self.since, self.reason, self.ending, self.room_s = state, now, reason, False, 0.0

    def hear(self, use: ModelUse, now: float) -> None:
        was_wanted = self.is_wanted(now)
        self.ran_at, self.wanted_at = max(self.ran_at, now - use.ran_s), max(self.wanted_at, now - use.wanted_s)
        if not was_wanted:
            self.wanted_since = self.wanted_at

    def is_wanted(self, now: float) -> bool:
        return self.wanted_at > max(self.served_at + IN_USE_S, now - WISH_S)

    @property
    def pause_s(self) -> float:
        return min(FIRST_PAUSE_S * 2.0 ** (self.num_failed - 1), MAX_PAUSE_S)

    def left_s(self, now: float) -> float:
        usual = self.start_s or self.model.start_s
        if self.state is Wakefulness.STARTING:
            return max(usual - (now - self.since), 0.0)
        if self.state is Wakefulness.FAILED:
            return max(self.since + self.pause_s - now, 0.0)
        room_s = SETTLE_S if self.state is Wakefulness.STOPPING else self.room_s
        return 0.0 if self.state is Wakefulness.AWAKE else usual + room_s


class WakePlan:
    """The plan.

    Call `hear`, then `decide`; report the outcome by `awake`, `failed` or `asleep`. All times: one clock.
    """

    def __init__(self, models: Iterable[OnDemandModel], room: WakeBudget, now: float) -> None:
        self._lives = {model.name: _ModelLife(model, now) for model in models}
        self._room = room

    def hear(self, uses: Mapping[str, ModelUse], now: float) -> None:
        for name, use in uses.items():
            self._lives[name].hear(use, now)

    def statuses(self, now: float) -> list[ModelStatus]:
        return [
            ModelStatus(name, life.state, round(life.left_s(now), 3), round(life.start_s, 3), life.reason)
            for name, life in self._lives.items()
        ]

    def decide(self, now: float) -> tuple[list[OnDemandModel], list[OnDemandModel]]:
        """Returns the models to start now, and the models to stop."""
        stopping = [life.model for life in self._lives.values() if self._is_to_end(life, now)]
        return self._to_start(now), stopping

    def awake(self, name: str, now: float) -> None:
        life = self._lives[name]
        life.start_s, life.num_failed, life.served_at = now - life.since, 0, now
        life.turn(Wakefulness.AWAKE, now)

    def failed(self, name: str, now: float, reason: str) -> None:
        life = self._lives[name]
        life.num_failed, life.served_at = life.num_failed + 1, now
        life.turn(Wakefulness.FAILED, now, reason)

    def asleep(self, name: str, now: float) -> None:
        self._lives[name].turn(Wakefulness.ASLEEP, now)

    def _is_to_end(self, life: _ModelLife, now: float) -> bool:
        idle_s = now - max(life.used_at, life.since)
        match life.state:
            case Wakefulness.FAILED if now >= life.since + life.pause_s:
                life.turn(Wakefulness.ASLEEP, now)
            case Wakefulness.AWAKE if idle_s > life.model.idle_s:
                life.turn(Wakefulness.STOPPING, now)
                life.makes_room = False
            case Wakefulness.STOPPING if not life.ending:
                if not life.makes_room and life.used_at > life.since:
                    life.turn(Wakefulness.AWAKE, now)
                elif now >= life.since + SETTLE_S and (not _in_use(life, now) or now >= life.since + DRAIN_S):
                    life.ending = True
                    return True
        return False

    def _to_start(self, now: float) -> list[OnDemandModel]:
        asleep = [life for life in self._lives.values() if life.state is Wakefulness.ASLEEP]
        for life in asleep:
            life.reason, life.room_s = "", 0.0
        found = []
        for life in sorted((life for life in asleep if life.is_wanted(now)), key=lambda life: life.wanted_since):
            if not self._room.holds([life.model]):
                needs = f"its workers need {life.model.memory / GIB:.1f} GiB, more than all may have"
                self.failed(life.model.name, now, needs)
            elif self._has_room(life, now):
                life.turn(Wakefulness.STARTING, now)
                found.append(life.model)
            else:
                break  # later wishes do not overtake this one, or a large model might never start
        return found

    def _has_room(self, life: _ModelLife, now: float) -> bool:
        """True if there is room for the model. If not, begins to stop models that may make room."""
        taken = [one for one in self._lives.values() if one.state not in (Wakefulness.ASLEEP, Wakefulness.FAILED)]
        if self._room.holds([life.model, *(one.model for one in taken)]):
            return True
        staying = [one for one in taken if one.state is not Wakefulness.STOPPING]
        while not self._room.holds([life.model, *(one.model for one in staying)]):
            free = [one for one in staying if _may_make_room(one, now)]
            if not free:
                life.reason = f"waits for {', '.join(sorted(one.model.name for one in staying))}, in use now"
                life.room_s = SETTLE_S + max(0.0, min(one.since for one in staying) + TURN_S - now)
                return False
            least = min(free, key=lambda one: (_in_use(one, now), one.used_at, one.since))
            least.turn(Wakefulness.STOPPING, now)
            least.makes_room = True
            staying.remove(least)
        life.room_s = SETTLE_S
        life.reason = f"waits for {', '.join(sorted(one.model.name for one in taken if one not in staying))} to stop"
        return False


def _in_use(life: _ModelLife, now: float) -> bool:
    return now - life.ran_at < IN_USE_S


def _may_make_room(life: _ModelLife, now: float) -> bool:
    if life.state is not Wakefulness.AWAKE:
        return False
    return now >= life.since + TURN_S or now - life.used_at >= IN_USE_S
