"""Start-time fair queueing (Goyal et al., 1996): whose turn it is among parties that share by weight.

    join      has work from now on: starts at the virtual time, or where its last work ended if that is later
    first     the least start; of equals, the least rank
    take      the virtual time becomes its start; its start moves on by tokens / weight
    correct   fewer tokens were used: its start moves back, but never before the virtual time

So every waiting party starts between the virtual time and its last work / weight after it. Hence, in tokens:
 - while g waits, f is given at most  weight_f * (g's last work / weight_g)  and one work more: nobody starves
 - of two that both wait, the shares given since any moment differ by at most  f's largest work / weight_f + g's
   (a correction is lost only as far as others were served in the meantime: who asks for more room than it uses pays
   for the room while it has it)
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Generic, TypeVar


class Party:
    """A party that shares. `start`: the virtual time at which its next work begins."""

    def __init__(self, name: str, weight: float, rank: int) -> None:
        self.name = name
        self.weight = weight
        self.rank = rank  # unique among sharing parties
        self.start = 0.0


P = TypeVar("P", bound=Party)


class FairShare(Generic[P]):
    """The waiting parties, without their work. Its owner lets parties join and leave."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.waiting: list[P] = []  # by start, then rank
        self._latest = 0.0

    def join(self, party: P) -> None:
        party.start = max(party.start, self.virtual_time)
        insort(self.waiting, party, key=_order)

    def leave(self, party: P) -> None:
        """Remove an idle party. With none waiting, virtual time is reset, so that no credit is carried over."""
        self._remove(party)
        if not self.waiting:
            self.virtual_time = self._latest

    def take(self, party: P, tokens: int) -> None:
        """Charge tokens to the first party, or to one that passes it."""
        self.virtual_time = self.waiting[0].start
        self._remove(party)
        party.start += tokens / party.weight
        self._latest = max(self._latest, party.start)
        insort(self.waiting, party, key=_order)

    def pass_through(self, party: P, tokens: int) -> None:
        """Join, take and leave in one step, as no party waits."""
        party.start = max(party.start, self.virtual_time) + tokens / party.weight
        self.virtual_time = self._latest = max(self._latest, party.start)

    def correct(self, party: P, unused: int, is_waiting: bool) -> None:
        """Refund tokens that the party did not use."""
        if is_waiting:
            self._remove(party)
        party.start = max(party.start - unused / party.weight, min(party.start, self.virtual_time))
        if is_waiting:
            insort(self.waiting, party, key=_order)

    def holds(self, parties: Iterable[P]) -> bool:
        """True if exactly these parties wait, in the right order."""
        return sorted(parties, key=_order) == self.waiting

    def _remove(self, party: P) -> None:
        place = bisect_left(self.waiting, _order(party), key=_order)
        assert self.waiting[place] is party
        del self.waiting[place]


def _order(party: Party) -> tuple[float, int]:
    return party.start, party.rank
