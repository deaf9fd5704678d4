"""Evidence that a choice is what its workers have died of, and what follows from it.

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

# A launcher has reported a death by then.
TOLD_S = 0.25
ASK_S = 0.02
# What a worker may have computed of an answer that its gateway had not heard of yet.
UNHEARD_TOKENS = 16
# It is past a worker's end once it has so many tokens more: the next one is prefill's, then decode has to bring one.
PAST_TOKENS = 2
MAX_LOSSES = 2
MAX_KNOWN = 256


class Deaths:
    """How workers died, as far as it is known: asked for once for all who wait for it."""

    def __init__(self, ask: Callable[[str], Awaitable[Death | None]]) -> None:
        """`ask` may raise RegistryUnavailable."""
        self._ask = ask
        self._known: dict[str, Death] = {}
        self._asking: dict[str, asyncio.Task[Death | None]] = {}
        self._explained: dict[str, None] = {}
        self._heard: dict[str, dict[str, int]] = {}

    def note(self, incarnation: str, choice_id: str, num_written: int) -> None:
        """This choice was lost with it when so many of its tokens had been heard."""
        self._heard.setdefault(incarnation, {})[choice_id] = num_written
        if len(self._heard) > MAX_KNOWN:
            del self._heard[next(iter(self._heard))]

    def at_the_same_place(self, first: Death, second: Death) -> list[str]:
        """Returns the choices that can be what both have died of: they had come no further.

        All that was heard of one is the end of its prompt, which prefill may pass, and decode then die of it a token
        later. What another gateway has heard is not known here: then both are possible.
        """
        heard = self._heard.get(first.incarnation, {})
        most = {name: int(heard.get(name, place) == place) for name, place in first.named.items()}
        return [name for name in most if 0 <= second.named.get(name, -1) - first.named[name] <= most[name]]

    def explain(self, deaths: Iterable[Death]) -> None:
        """A choice was convicted of these: nobody else is a suspect for them."""
        self._explained |= dict.fromkeys(death.incarnation for death in deaths)
        while len(self._explained) > MAX_KNOWN:
            del self._explained[next(iter(self._explained))]

    def is_explained(self, incarnation: str) -> bool:
        return incarnation in self._explained

    async def of(self, incarnation: str, wait_s: float) -> Death | None:
        """None if nothing becomes known within `wait_s`."""
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
    """A worker that was lost: how much of the answer there was, and what it died of, once that is known."""

    num_written: int
    death: Death | None = None


class Suspicion:
    """One choice's record. `patience_s`: how long it waits to hear of two deaths."""

    def __init__(self, choice_id: str, deaths: Deaths, patience_s: float) -> None:
        self._choice_id, self._deaths, self._patience_s = choice_id, deaths, patience_s
        self._losses: dict[str, Loss] = {}

    async def lost(self, incarnations: Collection[str], num_written: int, deadline: float) -> None:
        """Workers' streams broke when it had so many tokens. Returns when it may go on.

        Raises:
            Poison
        """
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
        """How many tokens of its answer there are when it is past where workers have died; 0: it is no suspect."""
        if self.begins_apart:
            return 0
        return max((self._place(loss) + PAST_TOKENS for loss in self._losses.values()), default=0)

    @property
    def begins_apart(self) -> bool:
        """True if it was lost once, and nobody has said of what."""
        return len(self._losses) == len(self._unknown()) == 1

    def _is_convicted(self, first: Death, second: Death) -> bool:
        """True if no other choice can be what both have died of: one may be named for what was computed beside it."""
        return len(second.named) == 1 or self._deaths.at_the_same_place(first, second) == [self._choice_id]

    def _forget(self, num_written: int) -> None:
        """Losses that another was, or at places that it is past, as it has written or a later death has found it."""
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
        """Index of the token that was being computed, or a later one."""
        return loss.death.named[self._choice_id] if loss.death else loss.num_written + UNHEARD_TOKENS
