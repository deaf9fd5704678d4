"""Which tokens are computed next: one token budget a step, shared by decode and chunked prefill.

    1 outrank   a waiting sequence takes blocks and seat of running ones of a lower priority, the last in order first,
                where it needs them
    2 decode    every running sequence with one token left gets it; when blocks run out the last one in order is
                preempted: it releases its blocks, and waits to compute everything again or to be copied back
    3 read      prompts get what remains of the budget, each in its turn; beside a decode, it is cut to
                max_prefill_beside_decode, so that no decode waits for a long chunk
    4 admit     a waiting sequence whose turn it is takes blocks for all its tokens and joins the running ones; one
                whose prefix another is reading waits for it, then takes those blocks and copies the part-full last one

Order is (priority, arrival), but prompts of a priority are read by their turn: the tokens that had been read when it
came, and those that it brings. So a short one does not stand in line behind long ones, and a long one is passed by no
more tokens of others than it has itself. Who was preempted goes on before anyone new.

A reservation holds blocks for the prompt and what is likely to follow, and outranks as well; beyond that its sequence
grows as any other does. While it waits for its prompt it is not preempted, but that ends by itself, and what is behind
everything in order has then all blocks there are: nobody waits for ever. New reservations do not pass a preempted
sequence that comes before them, and both leave a block for each running one, or would be preempted at once.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import merge
from typing import NamedTuple

from tandem.engine.block_pool import BlockPool
from tandem.engine.pace import Pace
from tandem.engine.sequence import Sequence, Status
from tandem.engine.swap import Copies, SwapSpace
from tandem.engine.types import KVSink


class Scheduled(NamedTuple):
    """The next `num_tokens` tokens of a sequence. `samples`: nothing is left to compute then, a new token follows."""

    seq: Sequence
    num_tokens: int
    samples: bool


class Need(NamedTuple):
    """Blocks for `num_tokens`, of which `num_known` are there and all but one may be cached. `leaves_spare`: beside
    them one for each running sequence stays free."""

    num_tokens: int
    num_known: int
    leaves_spare: bool


@dataclass(slots=True)
class Batch:
    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)

    def add(self, seq: Sequence) -> None:
        left = len(seq.token_ids) - seq.num_computed_tokens
        num_tokens = min(left, self.budget)
        self.budget -= num_tokens
        self.scheduled.append(Scheduled(seq, num_tokens, num_tokens == left))


class SequenceQueue:
    """Sequences in an order that does not change while they are in it."""

    def __init__(self, order: Callable[[Sequence], tuple[int, ...]]) -> None:
        self.order = order
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __reversed__(self) -> Iterator[Sequence]:
        return reversed(self._sequences)

    def first(self) -> Sequence:
        return self._sequences[0]

    def add(self, seq: Sequence) -> None:
        insort(self._sequences, seq, key=self.order)

    def remove(self, seq: Sequence) -> None:
        del self._sequences[bisect_left(self._sequences, self.order(seq), key=self.order)]


class Scheduler:
    """Owns every live sequence and its blocks: what it takes from pool and swap goes back when the sequence leaves."""

    def __init__(
        self,
        pool: BlockPool,
        swap: SwapSpace,
        *,
        block_size: int,
        max_num_batched_tokens: int,
        max_prefill_beside_decode: int,
        pace: Pace,
        max_num_seqs: int,
        prefix_caching: bool,
        grows_ahead: bool = False,
    ) -> None:
        """grows_ahead: sequences that write get the next step's block with this one's, so that it can be foreseen."""
        self._grows_ahead = grows_ahead
        self._pool, self._swap, self._block_size, self._prefix_caching = pool, swap, block_size, prefix_caching
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_prefill_beside_decode, self._pace = max_prefill_beside_decode, pace
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # so that one step can hold every decode
        self.lent: list[tuple[KVSink, list[int]]] = []  # blocks of sequences that have left, which their sinks read
        self._copies: Copies = []
        self._num_read_tokens = self.num_preempted = self.num_swapped = 0
        self._queues = {
            status: SequenceQueue(_turn if status is Status.WAITING else lambda seq: seq.key) for status in Status
        }
        self.waiting, self.running, self.reserved = (self._queues[status] for status in Status)

    def add(self, seq: Sequence) -> None:
        self._enter(seq, Status.WAITING)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Take blocks for `num_tokens` tokens and park the sequence; False without room for it."""
        if any(s.was_preempted and s.key < seq.key for s in self.waiting):
            return False
        need = Need(num_tokens, seq.num_prompt_tokens, leaves_spare=True)
        if not self._make_room(seq, need):
            return False
        self._take_blocks(seq, need)
        seq.num_reserved_blocks = len(seq.block_table)
        self._enter(seq, Status.RESERVED)
        return True

    def join(self, seq: Sequence) -> None:
        """The KV of a reserved sequence's whole prompt is in place: run it."""
        seq.num_computed_tokens = seq.num_prompt_tokens
        self.register_blocks(seq)
        self.register_tail(seq)
        self._move(seq, Status.RUNNING)

    def remove(self, seq: Sequence) -> None:
        """The sequence leaves, whatever it was doing."""
        self._queues[seq.status].remove(seq)
        self._release_blocks(seq)
        self._release_swapped(seq)

    def take_copies(self) -> Copies:
        """What is to be copied, in this order, before any block is written again."""
        copies, self._copies = self._copies, []
        return copies

    def schedule(self) -> list[Scheduled]:
        self._release_lent()
        batch = Batch(self.max_num_batched_tokens)
        self._outrank()
        longer = self._schedule_decodes(batch)
        if batch.scheduled:
            batch.budget = min(batch.budget, self._beside(batch.scheduled))
        self._schedule_reading(batch, sorted((seq for seq in longer if seq.status is Status.RUNNING), key=_turn))
        if self._grows_ahead:
            for item in batch.scheduled:
                if item.num_tokens == 1 and item.samples:
                    self.extend(item.seq, 1)
        return batch.scheduled

    def _beside(self, decodes: list[Scheduled]) -> int:
        """How much of prompts a step with these may read."""
        targets = [item.seq.itl_target_s for item in decodes if item.seq.itl_target_s]
        usual = self._max_prefill_beside_decode
        return self._pace.chunk(min(targets), usual) if targets else usual

    def extend(self, seq: Sequence, num_ahead: int) -> int:
        """Make room for so many proposed tokens where nobody has to leave for it; returns how many fit."""
        room = len(seq.block_table) * self._block_size - seq.num_tokens
        while room < num_ahead and (new := self._pool.take(1)) is not None:
            seq.block_table += new
            room += self._block_size
        return min(room, num_ahead)

    def release_ahead(self, seq: Sequence) -> None:
        """The blocks that only refused tokens needed go back."""
        needed = max(self.blocks_for(seq.num_tokens), seq.num_reserved_blocks)
        if needed < len(seq.block_table):
            self._pool.release(seq.block_table[needed:])
            del seq.block_table[needed:]

    def register_blocks(self, seq: Sequence) -> None:
        """Make the blocks that the sequence has filled findable."""
        num_full = seq.num_computed_tokens // self._block_size
        if num_full == seq.num_registered_blocks or not self._prefix_caching:
            return
        for block in range(seq.num_registered_blocks, num_full):
            self._pool.register(seq.block_table[block], *seq.hashes.link(seq.token_ids, block))
            seq.num_registered_blocks = block + 1

    def register_tail(self, seq: Sequence) -> None:
        """The prompt is computed: make its last block findable, if it is part-full."""
        if self._prefix_caching and seq.num_prompt_tokens % self._block_size:
            block = seq.block_table[seq.num_prompt_tokens // self._block_size]
            self._pool.register_tail(block, seq.hashes.tail(seq.token_ids, seq.num_prompt_tokens))

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _schedule_decodes(self, batch: Batch) -> list[Sequence]:
        """Returns the running sequences with more than one token left."""
        longer = []
        for seq in tuple(self.running):
            # Preempted ones come later in the order than the one that needed their blocks, so none is in the batch.
            if seq.status is not Status.RUNNING:
                continue
            num_tokens = len(seq.token_ids)
            if num_tokens - seq.num_computed_tokens > 1:
                longer.append(seq)
            elif num_tokens <= len(seq.block_table) * self._block_size or self._grow(seq):
                batch.add(seq)
        return longer

    def _grow(self, seq: Sequence) -> bool:
        """One block more, preempting the last one; False if that was the sequence itself."""
        while (new := self._pool.take(1)) is None:
            last = next(reversed(self.running))
            self._preempt(last)
            if last is seq:
                return False
        seq.block_table += new
        return True

    def _outrank(self) -> None:
        while self.waiting and self.running:
            seq, last = self.waiting.first(), next(reversed(self.running))
            if seq.priority >= last.priority or not self._make_room(seq, self._need(seq)):
                return
            self._admit(seq)

    def _make_room(self, seq: Sequence, need: Need) -> bool:
        """Preempt those of lower priority, the last in order first, as far as that is needed; False, and nobody is
        preempted, where it would not do."""
        outranked = [other for other in reversed(self.running) if other.priority > seq.priority]
        if not self._has_room(seq, need, outranked):
            return False
        for other in outranked:
            if self._has_room(seq, need):
                break
            self._preempt(other)
        return self._has_room(seq, need)  # not while a sink still reads what they left

    def _preempt(self, seq: Sequence) -> None:
        used = seq.block_table[: self.blocks_for(seq.num_computed_tokens)]
        seq.swapped_blocks = self._swap.take(seq.num_computed_tokens, len(used)) or []
        self._copies += zip(used, seq.swapped_blocks, strict=False)
        if not seq.swapped_blocks:
            seq.num_computed_tokens = 0
        self.num_preempted += 1
        self.num_swapped += bool(seq.swapped_blocks)
        self._release_blocks(seq)
        self._move(seq, Status.WAITING)

    def _schedule_reading(self, batch: Batch, begun: list[Sequence]) -> None:
        """Those begun and those that wait, each in its turn; nobody passes a waiting one for whom there is no room."""
        reading = self._being_read() if self.waiting else set()
        has_room = True
        left = batch.budget
        for seq in merge(begun, tuple(self.waiting), key=_turn):
            if not batch.budget:
                break
            if seq.status is Status.RUNNING:
                batch.add(seq)
            elif has_room and not (self._may_share(seq) and self._first_missing(seq) in reading):
                has_room = self._admit(seq)
                if has_room:
                    batch.add(seq)
                    reading |= self._to_be_read(seq)
        self._num_read_tokens += left - batch.budget

    def _admit(self, seq: Sequence) -> bool:
        """False where there is no room."""
        need = self._need(seq)
        if not self._has_room(seq, need):
            return False
        self._take_blocks(seq, need)
        self._move(seq, Status.RUNNING)
        return True

    def _need(self, seq: Sequence) -> Need:
        return Need(seq.num_tokens, seq.num_tokens, leaves_spare=seq.was_preempted)

    def _has_room(self, seq: Sequence, need: Need, leaving: Items[Sequence] = ()) -> bool:
        """Whether there are a seat and blocks, once those `leaving` the running ones have."""
        cached = self._cached_blocks(seq, need.num_known - 1)
        new = self.blocks_for(need.num_tokens) - len(cached)
        spare = len(self.running) - len(leaving) if need.leaves_spare else 0
        has_seat = self._num_free_seats() + len(leaving) > 0
        return has_seat and self._pool.has_room(new, cached, spare, [other.block_table for other in leaving])

    def _being_read(self) -> set[bytes]:
        """Names of the blocks, part-full ones too, that running sequences will have filled when they have read."""
        return set[bytes]().union(*(self._to_be_read(seq) for seq in self.running if seq.num_uncomputed_tokens > 1))

    def _to_be_read(self, seq: Sequence) -> set[bytes]:
        names = seq.hashes.up_to(seq.token_ids, seq.num_prompt_tokens // self._block_size)
        return {*names[seq.num_registered_blocks :], seq.hashes.tail(seq.token_ids, seq.num_prompt_tokens)}

    def _first_missing(self, seq: Sequence) -> bytes | None:
        """Name of the first block that the sequence would have to compute more than one token of."""
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

    def _num_free_seats(self) -> int:
        return self.max_num_seqs - len(self.running) - len(self.reserved)

    def _take_blocks(self, seq: Sequence, need: Need) -> None:
        """What there is room for: cached blocks first, then those that were swapped, copied back."""
        cached = self._cached_blocks(seq, need.num_known - 1)
        reads_rest = need.num_tokens == need.num_known  # for a reservation another worker does
        source = self._tail_source(seq, need.num_known, len(cached)) if reads_rest else None
        blocks = self._pool.take(self.blocks_for(need.num_tokens) - len(cached), cached)
        assert blocks is not None, f"{seq.request_id}: no blocks, although there was room"
        seq.block_table, seq.num_registered_blocks = blocks, len(cached)
        self._copies += zip(seq.swapped_blocks[len(cached) :], blocks[len(cached) :], strict=False)
        self._release_swapped(seq)
        seq.num_computed_tokens = max(seq.num_computed_tokens, len(cached) * self._block_size)
        if source is not None:
            self._copy_tail(seq, need.num_known, source)
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens

    def _tail_source(self, seq: Sequence, num_known: int, num_cached: int) -> int | None:
        """The block that holds what cached ones lack of the `num_known` tokens, if more than one is lacking."""
        if not self._may_share(seq) or seq.swapped_blocks or self._ends_alone(num_known):
            return None
        if num_cached < (num_known - 1) // self._block_size:
            return None
        return self._pool.match_tail(seq.hashes.tail(seq.token_ids, num_known))

    def _copy_tail(self, seq: Sequence, num_known: int, source: int) -> None:
        target = seq.block_table[(num_known - 1) // self._block_size]
        self._copies.append((source, target))
        self._pool.register_tail(target, seq.hashes.tail(seq.token_ids, num_known))
        seq.num_computed_tokens = num_known - 1

    def _ends_alone(self, num_tokens: int) -> bool:
        return num_tokens % self._block_size == 1 or self._block_size == 1

    def _cached_blocks(self, seq: Sequence, num_tokens: int) -> list[int]:
        if not self._may_share(seq):
            return []
        return self._pool.match(seq.hashes.up_to(seq.token_ids, num_tokens // self._block_size))

    def _may_share(self, seq: Sequence) -> bool:
        """Whether KV that others have computed will do."""
        return self._prefix_caching and not seq.reads_whole_prompt

    def _release_lent(self) -> None:
        lent, self.lent = self.lent, []
        for sink, blocks in lent:
            if sink.reading:
                self.lent.append((sink, blocks))
            else:
                self._pool.release(blocks)

    def _release_blocks(self, seq: Sequence) -> None:
        if seq.sink is not None and seq.sink.reading:
            self.lent.append((seq.sink, seq.block_table))
        else:
            self._pool.release(seq.block_table)
        seq.block_table, seq.num_registered_blocks, seq.num_drafted_tokens = [], 0, 0
        seq.num_reserved_blocks = 0

    def _release_swapped(self, seq: Sequence) -> None:
        self._swap.release(seq.swapped_blocks)
        seq.swapped_blocks = []

    def _enter(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        if seq.was_preempted:
            seq.turn = -1
        elif seq.turn is None and status is Status.WAITING:
            uncached = seq.num_tokens - len(self._cached_blocks(seq, seq.num_tokens - 1)) * self._block_size
            seq.turn = self._num_read_tokens + uncached
        self._queues[status].add(seq)

    def _move(self, seq: Sequence, status: Status) -> None:
        self._queues[seq.status].remove(seq)
        self._enter(seq, status)

    def check_integrity(self) -> None:
        """AssertionError if a block is held by none or too many, or a sequence is not where its status says."""
        for status, queue in self._queues.items():
            keys = [queue.order(seq) for seq in queue]
            assert keys == sorted(set(keys)), f"{status.value} is out of order: {keys}"
            for seq in queue:
                assert seq.status is status, f"{seq.request_id}: {seq.status.value} among the {status.value}"
                room = (len(seq.block_table) + len(seq.swapped_blocks)) * self._block_size
                assert seq.num_computed_tokens <= room, f"{seq.request_id}: KV for more tokens than it has blocks"
                needed = max(self.blocks_for(seq.num_tokens), seq.num_reserved_blocks)
                assert len(seq.block_table) <= needed, f"{seq.request_id}: more blocks than its tokens need"
        live = [seq for queue in self._queues.values() for seq in queue]
        self._pool.check_integrity([*(seq.block_table for seq in live), *(blocks for _, blocks in self.lent)])
        self._swap.check_integrity(seq.swapped_blocks for seq in live)


def _turn(seq: Sequence) -> tuple[int, int, int]:
    priority, arrival = seq.key
    return priority, seq.turn or 0, arrival
