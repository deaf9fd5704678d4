"""Proposers of tokens: the interface, and prompt lookup (Saxena 2023), which has no state."""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import NamedTuple, Protocol

import numpy as np

from tandem.engine.scheduling import Sequence

SHORTEST, LONGEST = 2, 16  # the lengths of a sequence's end that are looked up in its earlier tokens


class Wanted(NamedTuple):
    """A request for proposals: `seq` has blocks for `most` tokens ahead."""

    seq: Sequence
    most: int


class Proposer(Protocol):
    """Proposes tokens. `reads_first`: before it can propose for a sequence, it has to read the sequence's tokens."""

    reads_first: bool

    def propose(self, wanted: Items[Wanted]) -> bool:
        """Puts up to `most` tokens into the `proposed` of each `seq`; False if it had to read sequences first."""


class NgramProposer:
    """Proposes the tokens that followed the last earlier occurrence of the sequence's end."""

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
    period = len(ids) - after  # a continuation that reaches the end of `ids` repeats with this period
    found += [found[i % period] for i in range(len(found), most)]
    return found
