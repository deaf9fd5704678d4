"""KV blocks and the prefix cache over them: which sequences hold which blocks, and which blocks can be found again.

    free ──take──> referenced ──register (full, named by its chained hash)──> referenced + cached
      ^                │ release                                                   │ release
      └────────────────┘                 take evicts the oldest first     free but still cached <── match, take: back
                                                                                                    to referenced

A prompt's part-full last block, its tail, is findable too, in use or free, until another sequence takes it. Sequences
never share a tail: one that finds it continues in a copy of it.

`free` is one queue: nameless blocks in front, cached ones behind in the order they were released. A sequence releases
its last block first, so the leaves of a chain are evicted before the blocks that lead to them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from tandem.engine.scheduling.block_owners import BlockOwners
from tandem.engine.scheduling.window_blocks import WindowBlocks
from tandem.engine.types import BlockRemoved, BlockStored


class BlockPool:
    """Counts references to physical blocks 0 … num_blocks - 1. Callers release each reference they take once."""

    def __init__(self, num_blocks: int, windows: WindowBlocks | None = None) -> None:
        """windows: the places of these blocks in layers with a window, where a model has such."""
        self.num_blocks, self.windows = num_blocks, windows
        self.owners = BlockOwners()
        self.num_evicted = 0
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._tail_of: dict[bytes, int] = {}
        self._tail_name_of: dict[int, bytes] = {}
        if windows is not None:
            windows.is_named = self._hash_of.__contains__
        self._stored: dict[bytes, bytes] = {}
        self._removed: dict[bytes, None] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that no sequence references, cached or not."""
        return len(self._free)

    @property
    def least_free(self) -> int:
        """The same; fewer where the places in layers with a window are scarcer, by the share of these that is free."""
        windows = self.windows
        if windows is None:
            return len(self._free)
        return min(len(self._free), windows.num_free * self.num_blocks // windows.num_places)

    def match(self, hashes: Iterable[bytes], seen: int | None = None) -> list[int]:
        """Returns the blocks of the longest cached prefix of a chain, without taking references to them.

        seen: how many of its last blocks must be here for layers with a window, too; None: as many as these see.
        """
        found: list[int] = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found if self.windows is None else found[: self.windows.usable(found, seen)]

    def match_tail(self, name: bytes) -> int | None:
        """Returns a block that begins with the named tokens, or None; it may be copied until the next step computes."""
        block = self._tail_of.get(name, self._block_of.get(name))
        return None if block is not None and self.windows is not None and not self.windows.at[block] else block

    def has_room(
        self, num_new: int, cached: Sequence[int] = (), spare: int = 0, leaving: Iterable[Sequence[int]] = ()
    ) -> bool:
        """True if, once the tables `leaving` are released, `take` would succeed and leave `spare` blocks free."""
        held = Counter(block for table in leaving for block in table)
        freed = {block for block, count in held.items() if count == self._references[block]}
        free = len(self._free) + len(freed) - sum(block in self._free or block in freed for block in cached)
        return num_new + spare <= free

    def take(self, num_new: int, cached: Sequence[int] = ()) -> list[int] | None:
        """References `cached` blocks and `num_new` new ones, in this order; without room, takes nothing and returns
        None.
        """
        if not self.has_room(num_new, cached):
            return None
        for block in cached:
            self._references[block] += 1
            self._free.pop(block, None)
        return [*cached, *(self._take_new() for _ in range(num_new))]

    def _take_new(self) -> int:
        block, _ = self._free.popitem(last=False)
        self._references[block] = 1
        if self.windows is not None:
            self.windows.forget(block)
        self.num_evicted += block in self._hash_of
        self._forget(block)
        self._forget_tail(block)
        return block

    def release(self, blocks: Sequence[int]) -> None:
        """Releases one reference to each of a sequence's `blocks`, given in logical order."""
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._hash_of)

    def register(self, block: int, name: bytes, parent: bytes, root: bytes = b"") -> None:
        """Makes a full, referenced block findable as `name`, which follows `parent` in the chain of `root`.

        If another block with the same contents is findable and in use, that block stays the findable one.
        """
        known = self._block_of.get(name)
        if known is not None and known not in self._free and not self._is_better(block, known):
            return
        if known is not None:
            self._forget(known)
            if known in self._free:
                self._free.move_to_end(known, last=False)
        self._block_of[name], self._hash_of[block] = block, name
        self.owners.stored(name, parent, root)
        if name in self._removed:
            del self._removed[name]
        else:
            self._stored[name] = parent

    def _is_better(self, block: int, known: int) -> bool:
        """True if layers with a window have the new block alone."""
        return self.windows is not None and not self.windows.at[known] and bool(self.windows.at[block])

    def register_tail(self, block: int, name: bytes) -> None:
        """Makes a referenced block findable by `name`, the hash of the tokens that it begins with."""
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
        self.owners.removed(name)
        if name in self._stored:
            del self._stored[name]
        else:
            self._removed[name] = None

    def drop(self, tenant: str | None) -> int:
        """Takes their names from a tenant's blocks, None: from all. Returns how many there were.

        Blocks whose tenant is not known lose theirs too, and so do all tails, of which none is known.
        """
        names = [name for name in self._block_of if self.owners.is_owned(name, tenant)]
        for name in names:
            block = self._block_of[name]
            self._forget(block)
            if block in self._free:
                self._free.move_to_end(block, last=False)
        for block in list(self._tail_name_of):
            self._forget_tail(block)
        return len(names)

    def counts(self) -> Counter[str | None]:
        """Returns how many cached blocks each tenant has."""
        return self.owners.counts(self._block_of)

    def take_events(self) -> list[BlockStored | BlockRemoved]:
        """Returns the changes since the last call. Only net changes are kept, so a slow reader costs bounded memory."""
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
        """Raises AssertionError unless the references are exactly those of `block_tables`, the tables of all owners."""
        counted = Counter(block for table in block_tables for block in table)
        for block, references in enumerate(self._references):
            live = counted[block]
            assert references == live, f"block {block}: {references} references, {live} sequences hold it"
            assert (block in self._free) == (live == 0), f"block {block}: free although {live} sequences hold it"
        assert len(self._free) <= self.num_blocks, f"{len(self._free)} of {self.num_blocks} blocks are free"
        names = {name: block for block, name in self._hash_of.items()}
        assert names == self._block_of, "the prefix cache's two directions disagree"
        assert len(self.owners) <= len(names), "blocks that are not cached have owners"
        tails = {name: block for block, name in self._tail_name_of.items()}
        assert tails == self._tail_of, "the tails' two directions disagree"
