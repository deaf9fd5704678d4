"""The block of a full tier that goes first: the one that was used longest ago, where each earlier use counts as later.

An earlier use is worth BONUS times the tier's size in uses of others, so that what many prompts begin with survives a
burst of prompts that never come again, and what was only popular goes in the end. Counts of blocks that have gone are
kept for as many again, for a cache that is too small for its traffic sees each block only once otherwise.
`python -m benchmarks.keeping` compares this with what was used longest ago alone.
"""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

# More keeps shared beginnings better, and conversations that have ended, too.
BONUS, MOST_USES = 0.1, 32


class Worth:
    """Names of up to `size` blocks. Used by one thread; `in` and `len` by any."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._now = 0
        self._worth: dict[bytes, float] = {}
        self._uses: dict[bytes, int] = {}
        self._gone: OrderedDict[bytes, int] = OrderedDict()  # uses of those that have gone, the last one last
        self._queue: list[tuple[float, bytes]] = []  # with entries that hold no more

    def __len__(self) -> int:
        return len(self._worth)

    def __contains__(self, name: bytes) -> bool:
        return name in self._worth

    @property
    def is_full(self) -> bool:
        return len(self._worth) >= self._size

    def use(self, name: bytes) -> None:
        """Add a block, or say that it was used again."""
        earlier = self._uses.get(name) or self._gone.pop(name, 0)
        self._now += 1
        self._uses[name] = earlier + 1
        self._worth[name] = self._now + BONUS * self._size * min(earlier, MOST_USES)
        heappush(self._queue, (self._worth[name], name))
        if len(self._queue) > 2 * len(self._worth) + 64:
            self._queue = [(worth, name) for name, worth in self._worth.items()]
            heapify(self._queue)

    def pop(self) -> bytes:
        """Give up the block that is worth least.

        Raises:
            IndexError: there is none.
        """
        worth, name = heappop(self._queue)
        while self._worth.get(name) != worth:
            worth, name = heappop(self._queue)
        self._gone[name] = self._uses[name]
        while len(self._gone) > self._size:
            self._gone.popitem(last=False)
        self.discard(name)
        return name

    def discard(self, name: bytes) -> None:
        """Forget a block that is not there any more."""
        self._worth.pop(name, None)
        self._uses.pop(name, None)
