"""The order in which a full tier drops blocks: least recently used first, with a bonus for each earlier use.

The bonus of an earlier use is BONUS times the tier's size, in uses of other blocks, so that a prefix of many prompts
survives a burst of prompts that never come again, and a prefix that was once popular is dropped in the end. Use counts
of as many dropped blocks are kept, too, as a tier too small for its traffic would otherwise see each block only once.
`python -m benchmarks.keeping` compares this with plain LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from heapq import heapify, heappop, heappush

# A larger BONUS keeps shared prefixes longer, but also conversations that have ended.
BONUS, MOST_USES = 0.1, 32


class Worth:
    """The names of up to `size` blocks with their worth and owners. Used by one thread; `in` and `len` by any."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._now = 0
        self._worth: dict[bytes, float] = {}
        self._uses: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, int] = OrderedDict()  # numbers of uses of dropped blocks, the last dropped last
        self._all = _Queue(self._worth)
        self._of: dict[bytes, _Queue] = {}  # each owner's

    def __len__(self) -> int:
        return len(self._worth)

    def __contains__(self, name: bytes) -> bool:
        return name in self._worth

    @property
    def is_full(self) -> bool:
        return len(self._worth) >= self.size

    def use(self, name: bytes, owner: bytes = b"") -> None:
        """Adds a block, or counts another use of it, always by the same owner."""
        earlier = self._uses.get(name) or self._gone.pop(name, 0)
        self._now += 1
        self._uses[name] = earlier + 1
        self._worth[name] = self._now + BONUS * self.size * min(earlier, MOST_USES)
        self._all.add(name)
        if (own := self._of.get(owner)) is None:
            own = self._of[owner] = _Queue(self._worth)
        own.add(name)

    def pop(self, owner: bytes | None = None, spared: Collection[bytes] = ()) -> bytes:
        """Removes and returns the block of least worth: of `owner`'s, or of all but those of `spared` owners.

        Raises:
            IndexError: there is no block.
        """
        if owner is not None:
            name = self._of[owner].first()
        elif not spared:
            name = self._all.first()
        else:
            firsts = (queue.first() for other, queue in self._of.items() if other not in spared)
            name = min(filter(None, firsts), key=lambda first: (self._worth[first], first), default=None)
        if name is None:
            raise IndexError("no block is left")
        self._gone[name] = self._uses[name]
        while len(self._gone) > self.size:
            self._gone.popitem(last=False)
        self.discard(name)
        return name

    def discard(self, name: bytes) -> None:
        """Removes a block that the tier no longer has."""
        self._worth.pop(name, None)
        self._uses.pop(name, None)

    def leave(self, owner: bytes) -> None:
        """Forgets an owner that has no block any more."""
        self._of.pop(owner, None)


class _Queue:
    """Blocks of which the one of least worth is first. A heap, with outdated entries."""

    def __init__(self, worth: dict[bytes, float]) -> None:
        self._worth = worth
        self._entries: list[tuple[float, bytes]] = []
        self._most = 64

    def add(self, name: bytes) -> None:
        heappush(self._entries, (self._worth[name], name))
        if len(self._entries) > self._most:
            self._entries = [(worth, name) for worth, name in self._entries if self._worth.get(name) == worth]
            heapify(self._entries)
            self._most = 2 * len(self._entries) + 64

    def first(self) -> bytes | None:
        while self._entries and self._worth.get(self._entries[0][1]) != self._entries[0][0]:
            heappop(self._entries)
        return self._entries[0][1] if self._entries else None
