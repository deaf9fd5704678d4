"""The order in which a full tier drops blocks: least recently used first, with a bonus for each earlier use.

The bonus of an earlier use is BONUS times the tier's size, in uses of other blocks, so that a prefix of many prompts
survives a burst of prompts that never come again, and a prefix that was once popular is dropped in the end. Use counts
of as many dropped blocks are kept, too, as a tier too small for its traffic would otherwise see each block only once.
`python -m benchmarks.keeping` compares this with plain LRU.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush

# A larger BONUS keeps shared prefixes longer, but also conversations that have ended.
BONUS, MOST_USES = 0.1, 32


class Worth:
    """The names of up to `size` blocks with their worth. Used by one thread; `in` and `len` by any."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._now = 0
        self._worth: dict[bytes, float] = {}
        self._uses: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, int] = OrderedDict()  # numbers of uses of dropped blocks, the last dropped last
        self._queue: list[tuple[float, bytes]] = []  # a heap, with outdated entries

    def __len__(self) -> int:
        return len(self._worth)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._worth)

    def __contains__(self, name: bytes) -> bool:
        return name in self._worth

    @property
    def is_full(self) -> bool:
        return len(self._worth) >= self.size

    def use(self, name: bytes) -> None:
        """Adds a block, or counts another use of it."""
        earlier = self._uses.get(name) or self._gone.pop(name, 0)
        self._now += 1
        self._uses[name] = earlier + 1
        self._worth[name] = self._now + BONUS * self.size * min(earlier, MOST_USES)
        heappush(self._queue, (self._worth[name], name))
        if len(self._queue) > 2 * len(self._worth) + 64:
            self._queue = [(worth, name) for name, worth in self._worth.items()]
            heapify(self._queue)

    def pop(self) -> bytes:
        """Removes and returns the block of least worth.

        Raises:
            IndexError: there is no block.
        """
        worth, name = heappop(self._queue)
        while self._worth.get(name) != worth:
            worth, name = heappop(self._queue)
        self._gone[name] = self._uses[name]
        while len(self._gone) > self.size:
            self._gone.popitem(last=False)
        self.discard(name)
        return name

    def discard(self, name: bytes) -> None:
        """Removes a block that the tier no longer has."""
        self._worth.pop(name, None)
        self._uses.pop(name, None)
