"""Proposers of tokens: the interface, and prompt lookup (Saxena 2023), which has no state."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import numpy as np

from tandem.engine.scheduling import Sequence

SHORTEST, LONGEST = 2, 16  # tokens at the end of a sequence that are looked for in what came before


class Wanted(NamedTuple):
    """`seq` has blocks for `most` tokens ahead."""

    seq: Sequence
    most: int


class Proposer(Protocol):
    """`reads_first`: it reads what a sequence has so far before it can propose for it."""

    reads_first: bool

    def propose(self, wanted: Items[Wanted]) -> bool:
        """Puts up to `most` tokens into the `proposed` of each `seq`; False if that took longer than is usual."""


class NgramProposer:
    """Proposes what followed the last time that the sequence ended as it does now."""

    reads_first = False

    def propose(self, wanted: Items[Wanted]) -> bool:
        for seq, most in wanted:
            seq.proposed.extend(_continuation(seq, most))
        return True


def _continuation(seq: Sequence, most: int) -> list[int]:
    ids = np.frombuffer(seq.token_ids, dtype=np.int64)
    ends = np.flatnonzero(ids[:-1] == ids[-1])
    length = 1
    while length < LONGEST and len(ends):
        longer = ends[ends >= length]
        longer = longer[ids[longer - length] == ids[-1 - length]]
        if len(longer) == 0:
            break
        ends, length = longer, length + 1
    if length < SHORTEST or len(ends) == 0:
        return []
    after = int(ends[-1]) + 1
    found: list[int] = ids[after : after + most].tolist()
    period = len(ids) - after  # where the last time is so near that its continuation is not known yet, it repeats
    found += [found[i % period] for i in range(len(found), most)]
    return found
