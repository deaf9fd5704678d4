"""Evidence that a choice is what its workers have died of, and what follows from it.

a worker's stream breaks     -> the choices that it had are suspects, wherever each had come to
its crash page is told       -> those that it does not name, and all where it did not crash, are suspects no longer
a suspect goes on            -> computing alone, as its worker's only suspect, until it is past that place: acquitted
named by two deaths' pages   -> Poison: it goes on nowhere

The launcher tells of a death at once; where the worker's next start has to, a suspect goes on before it is known. The
others of that death would only stand in line behind it, so they wait a little longer for word, which acquits all that
it does not name. Behind two deaths of which nothing is known yet it waits: a third worker is not risked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from services.gateway.errors import Poison
from tandem.containment import Death
from tandem.registry import RegistryUnavailable

# A launcher has reported a death by then; on a busy machine, or where several workers died at once, by LATE_S.
TOLD_S = 0.25
LATE_S = 2.0
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
        self._asked_at: dict[str, float] = {}

    def patience_s(self, incarnation: str) -> float:
        """How long to wait for word of this death: the first who asks goes on soon, others behind it."""
        now = asyncio.get_running_loop().time()
        if incarnation in self._asked_at:
            return max(TOLD_S, self._asked_at[incarnation] + LATE_S - now)
        self._asked_at[incarnation] = now
        if len(self._asked_at) > MAX_KNOWN:
            del self._asked_at[next(iter(self._asked_at))]
        return TOLD_S

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
        self._losses = {
            name: loss for name, loss in self._losses.items() if self._place(loss) + PAST_TOKENS > num_written
        }
        self._losses |= {incarnation: Loss(num_written) for incarnation in incarnations}
        now = asyncio.get_running_loop().time
        patient_until = min(now() + self._patience_s, deadline)
        await self._learn(deadline)
        while len(self._losses) >= MAX_LOSSES and self._unknown() and now() < patient_until:
            await self._learn(patient_until)
        if len(self._losses) - len(self._unknown()) >= MAX_LOSSES:
            raise Poison(list(self._losses))

    @property
    def alone_until(self) -> int:
        """How many tokens of its answer there are when it is past where workers have died; 0: it is no suspect."""
        return max((self._place(loss) + PAST_TOKENS for loss in self._losses.values()), default=0)

    def _unknown(self) -> list[str]:
        return [incarnation for incarnation, loss in self._losses.items() if loss.death is None]

    async def _learn(self, until: float) -> None:
        now = asyncio.get_running_loop().time
        for incarnation in self._unknown():
            patience_s = min(self._deaths.patience_s(incarnation), until - now())
            death = await self._deaths.of(incarnation, max(patience_s, 0.0))
            if death is not None and self._choice_id not in death.named:
                del self._losses[incarnation]
            else:
                self._losses[incarnation].death = death

    def _place(self, loss: Loss) -> int:
        """Index of the token that was being computed, or a later one."""
        return loss.death.named[self._choice_id] if loss.death else loss.num_written + UNHEARD_TOKENS
