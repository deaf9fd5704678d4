"""Evidence that a choice made its workers crash, and what follows from it.

a worker's stream breaks     -> the choices that it had wait a moment for word of its death
its crash page is told       -> whom it names is a suspect; the others, and all where it did not crash, go on at once
nothing is told              -> all go on at once, only that on each worker one begins at a time
a suspect goes on            -> computing alone, as its worker's only suspect, until it is past that place: acquitted
named by two deaths' pages   -> Poison, where nobody else was at the same place both times: it goes on nowhere

A launcher tells of a death at once; the worker's next start does where there is none, and of a host that has vanished
nobody ever. Behind two deaths of which something is unknown a choice waits: a third worker is not risked for a while.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

from services.gateway.errors import Poison
from tandem.containment import Death
from tandem.registry import RegistryUnavailable

# A launcher reports a death within this time.
TOLD_S = 0.25
ASK_S = 0.02
# Tokens that a worker may have computed and its gateway not received.
UNHEARD_TOKENS = 16
# An answer has passed the place of a death after this many more tokens: one of prefill, then one of decode.
PAST_TOKENS = 2
MAX_LOSSES = 2
MAX_KNOWN = 256


class Deaths:
    """The known deaths of workers. One query serves all choices that wait for it."""

    def __init__(self, ask: Callable[[str], Awaitable[Death | None]]) -> None:
        """`ask` may raise RegistryUnavailable."""
        self._ask = ask
        self._known: dict[str, Death] = {}
        self._asking: dict[str, asyncio.Task[Death | None]] = {}
        self._explained: dict[str, None] = {}
        self._heard: dict[str, dict[str, int]] = {}

    def note(self, incarnation: str, choice_id: str, num_written: int) -> None:
        """Note that a choice was lost with this incarnation after `num_written` received tokens."""
        self._heard.setdefault(incarnation, {})[choice_id] = num_written
        if len(self._heard) > MAX_KNOWN:
            del self._heard[next(iter(self._heard))]

    def at_the_same_place(self, first: Death, second: Death) -> list[str]:
        """Returns the choices that may have caused both deaths, as they had made no progress between them.

        Received tokens are part of the next attempt's prompt: prefill may pass it and decode crash one token later.
        Tokens that another gateway received are unknown here; then both deaths may have one cause.
        """
        heard = self._heard.get(first.incarnation, {})
        most = {name: int(heard.get(name, place) == place) for name, place in first.named.items()}
        return [name for name in most if 0 <= second.named.get(name, -1) - first.named[name] <= most[name]]

    def explain(self, deaths: Iterable[Death]) -> None:
        """Note that a choice was convicted of these deaths, so that no other choice is a suspect for them."""
        self._explained |= dict.fromkeys(death.incarnation for death in deaths)
        while len(self._explained) > MAX_KNOWN:
            del self._explained[next(iter(self._explained))]

    def is_explained(self, incarnation: str) -> bool:
        return incarnation in self._explained

    async def of(self, incarnation: str, wait_s: float) -> Death | None:
        """Returns how an incarnation died; None if unknown after `wait_s`."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                while (death := await self._look(incarnation)) is None:
                    await asyncio.sleep(ASK_S)
                return death
        return None

    async def _look(self, incarnation: str) -> Death | None:
        if incarnation in self._known:
            return self._known[incarnation]
        if incarnation not in self._asking:
            asking = self._asking[incarnation] = asyncio.create_task(self._asked(incarnation))
            asking.add_done_callback(lambda _: self._asking.pop(incarnation))
        return await asyncio.shield(self._asking[incarnation])

    async def _asked(self, incarnation: str) -> Death | None:
        try:
            death = await self._ask(incarnation)
        except RegistryUnavailable:
            return None
        if death is not None:
            self._known[incarnation] = death
            if len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]
        return death


@dataclass(slots=True)
class Loss:
    """A lost worker: the answer's length then, and how the worker died, once known."""

    num_written: int
    death: Death | None = None


class Suspicion:
    """The losses of one choice. `patience_s`: how long it waits for word of two deaths."""

    def __init__(self, choice_id: str, deaths: Deaths, patience_s: float) -> None:
        self._choice_id, self._deaths, self._patience_s = choice_id, deaths, patience_s
        self._losses: dict[str, Loss] = {}

    async def lost(self, incarnations: Collection[str], num_written: int, deadline: float) -> None:
        """Note lost workers, and wait until the choice may resume. Raises Poison."""
        self._forget(num_written)
        self._losses |= {incarnation: Loss(num_written) for incarnation in incarnations}
        for incarnation in incarnations:
            self._deaths.note(incarnation, self._choice_id, num_written)
        now = asyncio.get_running_loop().time
        patient_until = min(now() + self._patience_s, deadline)
        await self._learn(deadline)
        while len(self._losses) >= MAX_LOSSES and self._unknown() and now() < patient_until:
            await self._learn(patient_until)
        self._forget(num_written)
        for both in combinations([loss.death for loss in self._losses.values() if loss.death], 2):
            if self._is_convicted(*both):
                self._deaths.explain(both)
                raise Poison(list(self._losses))

    @property
    def alone_until(self) -> int:
        """Returns the length of its answer from which it is no suspect; 0 if it is none."""
        if self.begins_apart:
            return 0
        return max((self._place(loss) + PAST_TOKENS for loss in self._losses.values()), default=0)

    @property
    def begins_apart(self) -> bool:
        """True if it was lost once for an unknown reason."""
        return len(self._losses) == len(self._unknown()) == 1

    def _is_convicted(self, first: Death, second: Death) -> bool:
        """True if no other choice can have caused both deaths: a page also names innocent choices of the same step."""
        return len(second.named) == 1 or self._deaths.at_the_same_place(first, second) == [self._choice_id]

    def _forget(self, num_written: int) -> None:
        """Drop losses that another choice caused, and losses at places that this choice has passed since."""
        reached = num_written
        for incarnation, loss in reversed(list(self._losses.items())):
            if self._deaths.is_explained(incarnation) or self._place(loss) + PAST_TOKENS <= reached:
                del self._losses[incarnation]
            elif loss.death:
                reached = max(reached, self._place(loss))

    def _unknown(self) -> list[str]:
        return [incarnation for incarnation, loss in self._losses.items() if loss.death is None]

    async def _learn(self, until: float) -> None:
        now = asyncio.get_running_loop().time
        for incarnation in self._unknown():
            death = await self._deaths.of(incarnation, max(min(TOLD_S, until - now()), 0.0))
            if death is not None and self._choice_id not in death.named:
                del self._losses[incarnation]
            else:
                self._losses[incarnation].death = death

    def _place(self, loss: Loss) -> int:
        """Returns the index of the token that was being computed, or a later one."""
        return loss.death.named[self._choice_id] if loss.death else loss.num_written + UNHEARD_TOKENS
