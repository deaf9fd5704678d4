"""Start-time fair queueing: whose turn it is among parties that share by weight.

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
    """`start` is the virtual time at which its next work begins."""

    def __init__(self, name: str, weight: float, rank: int) -> None:
        self.name = name
        self.weight = weight
        self.rank = rank  # unique among those that share
        self.start = 0.0


P = TypeVar("P", bound=Party)


class FairShare(Generic[P]):
    """Knows those that wait, not what they wait with. Its owner adds and removes those that take part."""

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.waiting: list[P] = []  # by start, then rank
        self._latest = 0.0

    def join(self, party: P) -> None:
        party.start = max(party.start, self.virtual_time)
        insort(self.waiting, party, key=_order)

    def leave(self, party: P) -> None:
        """Nothing of it waits any more. Where nobody waits nobody is owed: all begin anew."""
        self._remove(party)
        if not self.waiting:
            self.virtual_time = self._latest

    def take(self, party: P, tokens: int) -> None:
        """The first party, or one that passes it, and so many tokens of its work."""
        self.virtual_time = self.waiting[0].start
        self._remove(party)
        party.start += tokens / party.weight
        self._latest = max(self._latest, party.start)
        insort(self.waiting, party, key=_order)

    def pass_through(self, party: P, tokens: int) -> None:
        """As it would `join`, be taken and `leave`, where nobody waits."""
        party.start = max(party.start, self.virtual_time) + tokens / party.weight
        self.virtual_time = self._latest = max(self._latest, party.start)

    def correct(self, party: P, unused: int, is_waiting: bool) -> None:
        """So many of the tokens it took were not used."""
        if is_waiting:
            self._remove(party)
        party.start = max(party.start - unused / party.weight, min(party.start, self.virtual_time))
        if is_waiting:
            insort(self.waiting, party, key=_order)

    def holds(self, parties: Iterable[P]) -> bool:
        """True if exactly these wait, in the right order."""
        return sorted(parties, key=_order) == self.waiting

    def _remove(self, party: P) -> None:
        place = bisect_left(self.waiting, _order(party), key=_order)
        assert self.waiting[place] is party
        del self.waiting[place]


def _order(party: Party) -> tuple[float, int]:
    return party.start, party.rank
