"""Blocks of sequences: taken from the prefix cache, the free blocks and the swap space, and released to them.

    has_room ──> take ──> grow, extend ──> release ──────────────> free, or cached
                  ^                        swap_out, release ──┐
                  └──────── copied back from host memory ──────┘

A block that a sink still reads or a step may still write to when its sequence leaves is lent: it is released once the
sink or step is done.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

from tandem.engine.scheduling.block_pool import BlockPool
from tandem.engine.scheduling.moving_blocks import MovingBlocks
from tandem.engine.scheduling.sequence import BlockUser, Sequence
from tandem.engine.scheduling.sequence_windows import SequenceWindows

if TYPE_CHECKING:
    from tandem.engine.kv import Copies, SwapSpace


class BlockNeed(NamedTuple):
    """A need of blocks for `num_tokens` tokens. The first `num_known` are known, and all but the last of them may be
    cached. `leaves_spare`: one more block for each running sequence must stay free."""

    num_tokens: int
    num_known: int
    leaves_spare: bool


class SequenceBlocks:
    """Owns the block tables of all sequences and collects the copies of blocks to carry out until `take_copies`."""

    def __init__(self, pool: BlockPool, swap: SwapSpace, *, block_size: int, prefix_caching: bool) -> None:
        self._pool, self._swap, self._block_size, self._prefix_caching = pool, swap, block_size, prefix_caching
        self._windows = None if pool.windows is None else SequenceWindows(pool.windows, block_size)
        self.moving = MovingBlocks(pool, prefix_caching)
        # Blocks of left sequences, those of them that are held in windows, and their user.
        self.lent: list[tuple[BlockUser, list[int], list[int]]] = []
        self._copies: Copies = []
        self._window_copies: Copies = []  # between places of windows

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def cached(self, seq: Sequence, num_tokens: int) -> list[int]:
        if not self.may_share(seq):
            return []
        return self._pool.match(seq.hashes.up_to(seq.token_ids, num_tokens // self._block_size))

    def num_cached_tokens(self, seq: Sequence) -> int:
        """Returns how many of the sequence's tokens are cached and would not be computed if it took blocks now."""
        return len(self.cached(seq, seq.num_tokens - 1)) * self._block_size

    def may_share(self, seq: Sequence) -> bool:
        """True if the sequence may use KV that other sequences have computed."""
        return self._prefix_caching and not seq.reads_whole_prompt

    def has_room(self, seq: Sequence, need: BlockNeed, num_running: int, leaving: Items[Sequence] = ()) -> bool:
        """True if `take` will succeed once the running sequences `leaving` have released their blocks."""
        cached = self.cached(seq, need.num_known - 1)
        new = self.blocks_for(need.num_tokens) - len(cached)
        spare = num_running - len(leaving) if need.leaves_spare else 0
        if not self._pool.has_room(new, cached, spare, [other.block_table for other in leaving]):
            return False
        return self._windows is None or self._windows.has_room(
            cached, *self._first_held(need, len(cached)), spare, leaving
        )

    def _first_held(self, need: BlockNeed, num_cached: int) -> tuple[int, int]:
        """Returns the blocks that a sequence with `num_cached` blocks holds in windows from the beginning: (first,
        end). For more, which a long prompt takes, it may have to wait."""
        assert self._pool.windows is not None
        windows, most = self._pool.windows.windows, self._pool.windows.num_places
        first, end = num_cached - windows.seen - 1, num_cached + windows.held
        if need.num_tokens > need.num_known:  # another worker prefills the prompt, and sends only `moved` blocks
            end = self.blocks_for(need.num_known) + 1
            sent = end - 1 - windows.moved
            first = sent if sent > num_cached else need.num_known // self._block_size - windows.seen - 1
        first = max(0, first)
        return first, min(end, self.blocks_for(need.num_tokens), first + most)

    def take(self, seq: Sequence, need: BlockNeed) -> None:
        """Takes cached blocks and new ones; swapped blocks beyond the cached ones are copied back to new ones."""
        cached = self.cached(seq, need.num_known - 1)
        reads_rest = need.num_tokens == need.num_known  # for a reservation, another worker prefills the rest
        source = self._tail_source(seq, need.num_known, len(cached)) if reads_rest else None
        place = 0 if source is None or self._pool.windows is None else self._pool.windows.at[source]
        blocks = self._pool.take(self.blocks_for(need.num_tokens) - len(cached), cached)
        assert blocks is not None, f"{seq.request_id}: no blocks, although there was room"
        seq.block_table, seq.num_registered_blocks = blocks, len(cached)
        self._copies += zip(seq.swapped_blocks[len(cached) :], blocks[len(cached) :], strict=False)
        self.release_swapped(seq)
        if self._windows is not None:
            self._windows.enter(seq, len(cached), *self._first_held(need, len(cached)))
        seq.num_computed_tokens = max(seq.num_computed_tokens, len(cached) * self._block_size)
        if source is not None:
            self._copy_tail(seq, need.num_known, source, place)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens

    def grow(self, seq: Sequence) -> bool:
        """Takes one more block if the sequence has none for its last token; False if no block is free."""
        length = len(seq.token_ids)
        if length > len(seq.block_table) * self._block_size:
            if (new := self._pool.take(1)) is None:
                return False
            seq.block_table += new
        return self._windows is None or self._windows.reach(seq, length - 1, length) == length

    def has_place(self, seq: Sequence, num_tokens: int) -> bool:
        end = len(seq.block_table) if self._windows is None else seq.window_end
        return num_tokens <= end * self._block_size

    def reach(self, seq: Sequence, num_tokens: int) -> int:
        """Returns how many of the next `num_tokens` tokens the sequence has room to compute now, all but where layers
        have windows: then it takes that room."""
        if self._windows is None:
            return num_tokens
        start = seq.num_computed_tokens
        return max(0, self._windows.reach(seq, start, start + num_tokens) - start)

    def extend(self, seq: Sequence, num_ahead: int) -> int:
        """Takes free blocks for `num_ahead` proposed tokens, preempting no sequence; returns how many tokens fit."""
        room = len(seq.block_table) * self._block_size - seq.num_tokens
        while room < num_ahead and (new := self._pool.take(1)) is not None:
            seq.block_table += new
            room += self._block_size
        ahead = min(room, num_ahead)
        if self._windows is not None:
            ahead = self._windows.reach(seq, seq.num_computed_tokens, seq.num_tokens + ahead) - seq.num_tokens
        return max(0, ahead)

    def release_ahead(self, seq: Sequence) -> None:
        """Releases the blocks that only refused proposals needed."""
        needed = max(self.blocks_for(seq.num_tokens), seq.num_reserved_blocks)
        if needed < len(seq.block_table):
            if self._windows is not None:
                self._windows.cut(seq, needed)
            self._pool.release(seq.block_table[needed:])
            del seq.block_table[needed:]

    def swap_out(self, seq: Sequence) -> bool:
        """Has the sequence's KV copied to host memory if that pays; otherwise all of its KV must be computed again."""
        if self._windows is not None:  # host memory holds no windows
            seq.num_computed_tokens = 0
            return False
        used = seq.block_table[: self.blocks_for(seq.num_computed_tokens)]
        seq.swapped_blocks = self._swap.take(seq.num_computed_tokens, len(used)) or []
        self._copies += zip(used, seq.swapped_blocks, strict=False)
        if not seq.swapped_blocks:
            seq.num_computed_tokens = 0
        return bool(seq.swapped_blocks)

    def release(self, seq: Sequence) -> None:
        held = [] if self._windows is None else self._windows.leave(seq)
        if (reader := seq.reader) is not None:
            self.lent.append((reader, seq.block_table, held))
        else:
            self._give_back(seq.block_table, held)
        seq.block_table, seq.num_registered_blocks, seq.num_drafted_tokens = [], 0, 0
        seq.num_reserved_blocks = 0

    def release_swapped(self, seq: Sequence) -> None:
        self._swap.release(seq.swapped_blocks)
        seq.swapped_blocks = []

    def release_lent(self) -> None:
        lent, self.lent = self.lent, []
        for reader, blocks, held in lent:
            if reader.reading:
                self.lent.append((reader, blocks, held))
            else:
                self._give_back(blocks, held)

    def _give_back(self, blocks: list[int], held: list[int]) -> None:
        if self._pool.windows is not None:
            self._pool.windows.drop(held)
        self._pool.release(blocks)

    def take_copies(self) -> tuple[Copies, Copies]:
        """Returns the copies to carry out, in this order, before any block is written again: of blocks, and of places
        in windows."""
        copies, self._copies, self._window_copies = (self._copies, self._window_copies), [], []
        return copies

    def register(self, seq: Sequence) -> None:
        """Makes the blocks that the sequence has filled findable."""
        num_full = seq.num_computed_tokens // self._block_size
        if num_full == seq.num_registered_blocks or not self._prefix_caching:
            return
        for block in range(seq.num_registered_blocks, num_full):
            self._pool.register(seq.block_table[block], *seq.hashes.link(seq.token_ids, block), seq.hashes.root)
            seq.num_registered_blocks = block + 1

    def register_tail(self, seq: Sequence) -> None:
        """Makes the part-full last block, if any, of a computed prompt findable."""
        if self._prefix_caching and seq.num_prompt_tokens % self._block_size:
            block = seq.block_table[seq.num_prompt_tokens // self._block_size]
            self._pool.register_tail(block, seq.hashes.tail(seq.token_ids, seq.num_prompt_tokens))

    def to_be_prefilled(self, seq: Sequence) -> set[bytes]:
        names = seq.hashes.up_to(seq.token_ids, seq.num_prompt_tokens // self._block_size)
        return {*names[seq.num_registered_blocks :], seq.hashes.tail(seq.token_ids, seq.num_prompt_tokens)}

    def first_missing(self, seq: Sequence) -> bytes | None:
        """Returns the name of the first block of which the sequence must compute more than one token, if any."""
        if seq.swapped_blocks:
            return None
        names = seq.hashes.up_to(seq.token_ids, (seq.num_tokens - 1) // self._block_size)
        num_cached = len(self._pool.match(names))
        if num_cached < len(names):
            return names[num_cached]
        if self._ends_alone(seq.num_tokens):
            return None
        tail = seq.hashes.tail(seq.token_ids, seq.num_tokens)
        return tail if self._pool.match_tail(tail) is None else None

    def _tail_source(self, seq: Sequence, num_known: int, num_cached: int) -> int | None:
        """Returns the tail block that holds the known tokens after the cached blocks, if more than one token is
        missing.
        """
        if not self.may_share(seq) or seq.swapped_blocks or self._ends_alone(num_known):
            return None
        if num_cached < (num_known - 1) // self._block_size:
            return None
        return self._pool.match_tail(seq.hashes.tail(seq.token_ids, num_known))

    def _copy_tail(self, seq: Sequence, num_known: int, source: int, place: int) -> None:
        """Has the tail copied from the block `source`, whose place in windows was `place`."""
        target = seq.block_table[(num_known - 1) // self._block_size]
        self._copies.append((source, target))
        if self._pool.windows is not None:
            self._window_copies.append((place, self._pool.windows.at[target]))
        self._pool.register_tail(target, seq.hashes.tail(seq.token_ids, num_known))
        seq.num_computed_tokens = num_known - 1

    def _ends_alone(self, num_tokens: int) -> bool:
        return num_tokens % self._block_size == 1 or self._block_size == 1

    def check_integrity(self, live: Items[Sequence]) -> None:
        """Raises AssertionError if the references to blocks do not match their holders, or if a sequence of `live`,
        which are all sequences, has too few blocks for its tokens or more than they need."""
        for seq in live:
            room = (len(seq.block_table) + len(seq.swapped_blocks)) * self._block_size
            assert seq.num_computed_tokens <= room, f"{seq.request_id}: KV for more tokens than it has blocks"
            needed = max(self.blocks_for(seq.num_tokens), seq.num_reserved_blocks)
            assert len(seq.block_table) <= needed, f"{seq.request_id}: more blocks than its tokens need"
        lent = [blocks for _, blocks, _ in self.lent]
        if self._windows is not None:
            of_lent = (held for _, _, held in self.lent)
            self._windows.check_integrity(live, [*of_lent, *self.moving.held_in_windows()], self.moving.places())
        self._pool.check_integrity([*(seq.block_table for seq in live), *lent, *self.moving.tables()])
        self._swap.check_integrity(seq.swapped_blocks for seq in live)
