"""KV blocks and the prefix cache over them: who may write where, and what can be found again.

    free ──take──> referenced ──register (full, named by its chained hash)──> referenced + cached
      ^                │ release                                                   │ release
      └────────────────┘                 take evicts the oldest first     free but still cached <── match, take: back
                                                                                                    to referenced

A prompt's part-full last block, its tail, is findable too, in use or free, until it is taken anew. It never leaves its
owner: the sequence that finds it goes on in a copy.

`free` is one queue: nameless blocks in front, cached ones behind in the order they were released. A sequence releases
its last block first, so the leaves of a chain are evicted before the blocks that lead to them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tandem.engine.types import BlockRemoved, BlockStored


class BlockPool:
    """Counts references to physical blocks 0 … num_blocks - 1. Each reference taken is released once."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tail_of: dict[bytes, int] = {}
        self._tail_name_of: dict[int, bytes] = {}
        self._stored: dict[bytes, bytes] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no sequence references, cached or not."""
        return len(self._free)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest cached prefix of a chain; they stay unreferenced until taken."""
        found: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def match_tail(self, name: bytes) -> int | None:
        """A block that begins with these tokens, whose contents may be copied until the next step computes."""
        return self._tail_of.get(name, self._block_of.get(name))

    def has_room(
        self, num_new: int, cached: Sequence[int] = (), spare: int = 0, leaving: Iterable[Sequence[int]] = ()
    ) -> bool:
        """True if `take` gets these and leaves `spare` ones free, once the tables `leaving` have been released."""
        held = Counter(block for table in leaving for block in table)
        freed = {block for block, count in held.items() if count == self._references[block]}
        free = len(self._free) + len(freed) - sum(block in self._free or block in freed for block in cached)
        return num_new + spare <= free

    def take(self, num_new: int, cached: Sequence[int] = ()) -> list[int] | None:
        """Reference `cached` blocks and `num_new` more, in this order; None, and nothing taken, without room."""
        if not self.has_room(num_new, cached):
            return None
        for block in cached:
            self._references[block] += 1
            self._free.pop(block, None)
        return [*cached, *(self._take_new() for _ in range(num_new))]

    def _take_new(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        self.num_evicted += block in self._hash_of
        self._forget(block)
        self._forget_tail(block)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Release one reference to each of a sequence's `blocks`, given in logical order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def register(self, block: int, name: bytes, parent: bytes) -> None:
        """Make a full, referenced block findable as `name`, whose chain goes on from `parent`.

        Of two blocks with the same contents the one in use is kept findable.
        """
        known = self._block_of.get(name)
        if known is not None and known not in self._free:
            return
        if known is not None:
            self._forget(known)
            self._free.move_to_end(known, last=False)
        self._block_of[name], self._hash_of[block] = block, name
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = parent

    def register_tail(self, block: int, name: bytes) -> None:
        """Make a referenced block findable by the tokens that it begins with."""
        self._forget_tail(block)
        self._forget_tail(self._tail_of.get(name))
        self._tail_of[name], self._tail_name_of[block] = block, name

    def _forget_tail(self, block: int | None) -> None:
        if block in self._tail_name_of:
            del self._tail_of[self._tail_name_of.pop(block)]

    def _forget(self, block: int) -> None:
        name = self._hash_of.pop(block, None)
        if name is None:
            return
        del self._block_of[name]
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """Changes since the last call. Only the net change is kept, so a slow reader costs bounded memory."""
        events: list[BlockStored | BlockRemoved] = []
        if self._removed:
            events.append(BlockRemoved(tuple(self._removed)))
        chain: list[bytes] = []
        for name, parent in self._stored.items():
            if chain and parent != chain[-1]:
                events.append(BlockStored(tuple(chain), self._stored[chain[0]]))
                chain = []
            chain.append(name)
        if chain:
            events.append(BlockStored(tuple(chain), self._stored[chain[0]]))
        self._removed, self._stored = {}, {}
        return events

    def check_integrity(self, block_tables: Iterable[Sequence[int]]) -> None:
        """AssertionError unless exactly the blocks of `block_tables`, those of every live sequence, are referenced."""
        counted = Counter(block for table in block_tables for block in table)
        for block, references in enumerate(self._references):
            live = counted[block]
            assert references == live, f"block {block}: {references} references, {live} sequences hold it"
            assert (block in self._free) == (live == 0), f"block {block}: free although {live} sequences hold it"
        assert len(self._free) <= self.num_blocks, f"{len(self._free)} of {self.num_blocks} blocks are free"
        names = {name: block for block, name in self._hash_of.items()}
        assert names == self._block_of, "the prefix cache's two directions disagree"
        tails = {name: block for block, name in self._tail_name_of.items()}
        assert tails == self._tail_of, "the tails' two directions disagree"
