"""Chooses the tokens of the next step: one budget, shared by decode and chunked prefill.

    1 outrank   a waiting sequence takes blocks and seat of running sequences of a lower priority, the last first,
                if it needs them
    2 decode    every running sequence with one token left gets it; when blocks run out the last one in order is
                preempted: it releases its blocks, and waits to be computed again or copied back
    3 prefill   prompts get what remains of the budget, each in its turn; beside a decode, it is cut to what the
                decodes' targets leave, or to max_prefill_beside_decode (pace.py), so that no decode waits for a long
                chunk
    4 admit     a waiting sequence whose turn it is takes blocks for all its tokens and joins the running ones; one
                whose prefix another prefills, or a transfer brings, waits for it, then takes those blocks and copies
                the part-full last one

Order is (priority, arrival), but prompts of one priority are prefilled by their turn: the number of tokens prefilled
before the prompt arrived plus its own. So a short prompt does not queue behind long ones, and prompts that overtake a
long prompt have together no more tokens than it has. A preempted sequence resumes before any new one begins.

A reservation holds blocks for the prompt and a likely answer, and may preempt sequences of a lower priority; beyond
that its sequence grows as any other does. While it waits for its prompt it cannot be preempted, but that wait is
bounded. So all sequences before a given one end, and it then has all blocks to itself: no sequence waits forever. New
reservations do not overtake a preempted sequence that comes before them. Both leave one block free for each running
sequence, or they would be preempted immediately.

A suspect, which may have killed another engine, is alone in its steps; every other step is for all other sequences.
Sequences that begin apart join these steps one at a time, each only after the one before it has begun.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from heapq import merge
from itertools import chain
from typing import NamedTuple

from tandem.containment import NOBODY
from tandem.engine.scheduling.pace import Pace
from tandem.engine.scheduling.sequence import Sequence, Status
from tandem.engine.scheduling.sequence_blocks import BlockNeed, SequenceBlocks


class Scheduled(NamedTuple):
    """The next `num_tokens` tokens of a sequence. `samples`: these are the last known tokens, so a new one is drawn."""

    seq: Sequence
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Batch:
    budget: int
    scheduled: list[Scheduled] = field(default_factory=list)

    def add(self, seq: Sequence, num_tokens: int) -> None:
        self.budget -= num_tokens
        self.scheduled.append(Scheduled(seq, num_tokens, num_tokens == seq.num_uncomputed_tokens))

    def has(self, seq: Sequence) -> bool:
        return any(item.seq is seq for item in self.scheduled)


class SequenceQueue:
    """Sequences sorted by `order`, which must not change for a sequence in the queue."""

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
    """Owns every live sequence and has blocks taken for it; a sequence's blocks are released when it leaves."""

    def __init__(
        self,
        blocks: SequenceBlocks,
        *,
        max_num_batched_tokens: int,
        pace: Pace,
        max_num_seqs: int,
        overlaps: bool = False,
    ) -> None:
        """overlaps: decoding sequences also get the block of the next step, so that it can be launched ahead."""
        self.overlaps = overlaps
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self._pace = pace
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # one step can hold every decode
        self._num_prefilled_tokens = self.num_preempted = self.num_swapped = 0
        self._has_joined = False  # True if a sequence has joined since the last step
        self.suspects: dict[Sequence, None] = {}  # suspects in order of arrival
        self._alone: Sequence | None = None  # the suspect of the last scheduled step, if any
        self.apart: dict[Sequence, None] = {}  # sequences yet to begin apart, in order of arrival
        self._beginning: Sequence | None = None  # the sequence of `apart` that may begin now
        self._moved: list[Sequence] = []
        self._queues = {
            status: SequenceQueue(_turn if status is Status.WAITING else lambda seq: seq.key) for status in Status
        }
        self.waiting, self.running, self.reserved = (self._queues[status] for status in Status)

    def add(self, seq: Sequence) -> None:
        self._enter(seq, Status.WAITING)

    def reserve(self, seq: Sequence, num_tokens: int, outranks: bool) -> bool:
        """Takes blocks for `num_tokens` tokens and parks the sequence; False if there is no room. If it `outranks`,
        sequences of lower priority may be preempted for it; otherwise only free blocks are taken."""
        if any(s.was_preempted and s.key < seq.key for s in self.waiting):
            return False
        need = BlockNeed(num_tokens, seq.num_prompt_tokens, leaves_spare=True)
        if not (self._make_room(seq, need) if outranks else self._has_room(seq, need)):
            return False
        self.blocks.take(seq, need)
        seq.num_reserved_blocks = len(seq.block_table)
        self._enter(seq, Status.RESERVED)
        return True

    def join(self, seq: Sequence) -> None:
        """Runs a reserved sequence, whose prompt's KV is complete in its blocks."""
        seq.num_computed_tokens = seq.num_prompt_tokens
        self.blocks.register(seq)
        self.blocks.register_tail(seq)
        self._move(seq, Status.RUNNING)
        self._has_joined = True

    def remove(self, seq: Sequence) -> None:
        """Removes a sequence in any status and releases its blocks."""
        self._queues[seq.status].remove(seq)
        self.suspects.pop(seq, None)
        self.apart.pop(seq, None)
        self.blocks.release(seq)
        self.blocks.release_swapped(seq)

    def schedule(self) -> list[Scheduled]:
        self.blocks.release_lent()
        self._outrank()
        self._begin_apart()
        if not self.suspects:
            self._alone = None
            return self._schedule()
        for turn in self._turns():
            self._alone = turn
            if batch := self._schedule():
                return batch
        return []

    def go_on(self, under_way: list[Scheduled]) -> list[Scheduled]:
        """Returns the step that was launched ahead, as this step's schedule; extends its sequences by a block if
        needed.
        """
        self.blocks.release_lent()
        self._extend(under_way)
        return under_way

    def following(self, batch: list[Scheduled], max_model_len: int) -> list[Sequence]:
        """Returns the sequences of `batch` that surely decode in the next step too, whatever token this step draws.

        Returns none if the next step may have to compute other sequences, or more than one token of these.
        """
        if not self.overlaps or self.suspects or self.apart or len(batch) != len(self.running):
            return []
        if not all(item.num_tokens == 1 and item.samples and item.seq.overlaps for item in batch):
            return []
        if self.waiting and self._has_room(first := self.waiting.first(), self._need(first)):
            return []
        staying = [item.seq for item in batch if item.seq.num_tokens_to_come(max_model_len) > 1]
        return staying if all(self.blocks.has_place(seq, seq.num_tokens + 1) for seq in staying) else []

    def _extend(self, batch: list[Scheduled]) -> None:
        for item in batch:
            if item.num_tokens == 1 and item.samples:
                self.blocks.extend(item.seq, 1)

    def take_moved(self) -> list[Sequence]:
        """Returns the sequences that began to run or to wait since the last call; some may have left the engine."""
        moved, self._moved = self._moved, []
        return moved

    def _turns(self) -> list[Sequence | None]:
        """Returns the turns to try: a suspect alone, or None for all others; first the turn that the last step was
        not.
        """
        suspect = next((seq for seq in self.suspects if seq.status is not Status.RESERVED), None)
        if suspect is None:
            return [None]
        return [suspect, None] if self._alone is None else [None, suspect]

    def _takes_part(self, seq: Sequence) -> bool:
        return seq is self._alone if self._alone is not None else seq not in self.suspects and not self.waits_apart(seq)

    def waits_apart(self, seq: Sequence) -> bool:
        """True if another sequence has to begin before this one."""
        return seq in self.apart and seq is not self._beginning

    def _begin_apart(self) -> None:
        """Chooses the next sequence to begin apart: one that holds blocks, for which others may wait, before all
        others.
        """
        if not self.apart or (self._beginning in self.apart and self._beginning.status is Status.RUNNING):
            return
        ready = [seq for seq in self.apart if seq.status is not Status.RESERVED]
        self._beginning = min(ready, key=lambda seq: seq.status is not Status.RUNNING, default=None)
        if self._beginning is not None and self._beginning.slot != NOBODY:
            self._moved.append(self._beginning)  # the crash page names this sequence from now on

    def _schedule(self) -> list[Scheduled]:
        batch = Batch(self.max_num_batched_tokens)
        joined, self._has_joined = self._has_joined, False
        longer = self._schedule_decodes(batch)
        if longer or self.waiting:
            if batch.scheduled:
                batch.budget = min(batch.budget, self._beside(batch.scheduled, joined, longer))
            self._schedule_prefills(batch, sorted((seq for seq in longer if seq.status is Status.RUNNING), key=_turn))
        if self.overlaps:
            self._extend(batch.scheduled)
        return batch.scheduled

    def _beside(self, decodes: list[Scheduled], joined: bool, begun: list[Sequence]) -> int:
        """Returns how many prompt tokens a step with `decodes` may prefill.

        `joined`: one has joined since the last step.
        """
        targets = {item.seq.itl_target_s for item in decodes if item.seq.itl_target_s}
        waited_s = self._pace.stepped_s - min(seq.waits_since for seq in chain(begun, self.waiting))
        return self._pace.chunk(targets, joins=len(self.reserved) > 0, joined=joined, waited_s=waited_s)

    def _schedule_decodes(self, batch: Batch) -> list[Sequence]:
        """Schedules running sequences with one token left; returns the running sequences with more tokens left."""
        longer = []
        some = self.suspects or self.apart
        for seq in tuple(filter(self._takes_part, self.running) if some else self.running):
            # A preempted sequence comes later in the order than the one that took its blocks, so it is not in the
            # batch.
            if seq.status is not Status.RUNNING:
                continue
            if seq.num_uncomputed_tokens > 1:
                longer.append(seq)
            elif self.blocks.grow(seq) or self._grow(seq):
                batch.scheduled.append(Scheduled(seq, 1, True))
        batch.budget -= len(batch.scheduled)
        return longer

    def _grow(self, seq: Sequence) -> bool:
        """Takes a block for the sequence's last token, preempting last sequences; False if that preempted `seq`
        itself.
        """
        while not self.blocks.grow(seq):
            last = next(reversed(self.running))
            self._preempt(last)
            if last is seq:
                return False
        return True

    def _outrank(self) -> None:
        while self.waiting and self.running:
            seq, last = self.waiting.first(), next(reversed(self.running))
            if seq.priority >= last.priority or not self._make_room(seq, self._need(seq)):
                return
            self._admit(seq)

    def _make_room(self, seq: Sequence, need: BlockNeed) -> bool:
        """Preempts as many sequences of lower priority as `need` takes, the last in order first. Returns False, and
        preempts none, if preempting all of them would not suffice."""
        outranked = [other for other in reversed(self.running) if other.priority > seq.priority]
        if not self._has_room(seq, need, outranked):
            return False
        for other in outranked:
            if self._has_room(seq, need):
                break
            self._preempt(other)
        return self._has_room(seq, need)  # False while a sink still reads blocks of a preempted sequence

    def _preempt(self, seq: Sequence) -> None:
        self.num_swapped += self.blocks.swap_out(seq)
        self.num_preempted += 1
        self.blocks.release(seq)
        self._move(seq, Status.WAITING)

    def _schedule_prefills(self, batch: Batch, begun: list[Sequence]) -> None:
        """Schedules prompts, begun and waiting ones, by turn.

        No waiting sequence overtakes one for which there is no room.
        """
        coming = self._coming() if self.waiting else set()
        has_room = True
        left = batch.budget
        waiting = tuple(self.waiting)
        for seq, has_begun in merge(((seq, True) for seq in begun), ((seq, False) for seq in waiting), key=_turn_of):
            if not batch.budget:
                break
            if has_begun and seq.status is not Status.RUNNING:
                continue  # preempted in this loop
            if (self.suspects or self.apart) and not self._takes_part(seq):
                has_room = has_room and (seq.status is Status.RUNNING or self._has_room(seq, self._need(seq)))
            elif seq.status is Status.RUNNING:
                self._compute_more(batch, seq)
            elif has_room and not (self.blocks.may_share(seq) and self.blocks.first_missing(seq) in coming):
                has_room = self._admit(seq)
                if has_room:
                    self._compute_more(batch, seq)
                    coming |= self.blocks.to_be_prefilled(seq)
        self._num_prefilled_tokens += left - batch.budget

    def _compute_more(self, batch: Batch, seq: Sequence) -> None:
        """Schedules what the budget and blocks allow of a prompt; preempts sequences after it, rather than nothing."""
        wanted = min(seq.num_uncomputed_tokens, batch.budget)
        while not (num_tokens := self.blocks.reach(seq, wanted)):
            last = next(reversed(self.running))
            if last is seq or batch.has(last):
                return
            self._preempt(last)
        batch.add(seq, num_tokens)

    def _admit(self, seq: Sequence) -> bool:
        """Takes blocks for a waiting sequence and runs it; False if there is no room."""
        need = self._need(seq)
        if not self._has_room(seq, need):
            return False
        self.blocks.take(seq, need)
        self._move(seq, Status.RUNNING)
        return True

    def _need(self, seq: Sequence) -> BlockNeed:
        return BlockNeed(seq.num_tokens, seq.num_tokens, leaves_spare=seq.was_preempted)

    def _has_room(self, seq: Sequence, need: BlockNeed, leaving: Items[Sequence] = ()) -> bool:
        """True if there are a seat and blocks for `seq`, once the sequences `leaving` have left."""
        has_seat = self._num_free_seats() + len(leaving) > 0
        return has_seat and self.blocks.has_room(seq, need, len(self.running), leaving)

    def _coming(self) -> set[bytes]:
        """Returns the names of blocks, part-full ones included, that running prefills will fill or transfers bring."""
        return self.blocks.moving.coming().union(
            *(self.blocks.to_be_prefilled(seq) for seq in self.running if seq.num_uncomputed_tokens > 1)
        )

    def _num_free_seats(self) -> int:
        return self.max_num_seqs - len(self.running) - len(self.reserved)

    def _enter(self, seq: Sequence, status: Status) -> None:
        seq.status = status
        if status is Status.RUNNING or seq.slot != NOBODY:
            self._moved.append(seq)
        if seq.alone_until:
            self.suspects[seq] = None
        elif seq.apart_until:
            self.apart[seq] = None
        if status is Status.WAITING:
            seq.waits_since = self._pace.stepped_s
        if seq.was_preempted:
            seq.turn = -1
        elif seq.turn is None and status is Status.WAITING:
            seq.turn = self._num_prefilled_tokens + seq.num_tokens - self.blocks.num_cached_tokens(seq)
        self._queues[status].add(seq)

    def _move(self, seq: Sequence, status: Status) -> None:
        self._queues[seq.status].remove(seq)
        self._enter(seq, status)

    def check_integrity(self) -> None:
        """Raises AssertionError if a sequence is not in the queue of its status, or if its blocks are wrong."""
        for status, queue in self._queues.items():
            keys = [queue.order(seq) for seq in queue]
            assert keys == sorted(set(keys)), f"{status.value} is out of order: {keys}"
            for seq in queue:
                assert seq.status is status, f"{seq.request_id}: {seq.status.value} among the {status.value}"
        self.blocks.check_integrity([seq for queue in self._queues.values() for seq in queue])


def _turn_of(item: tuple[Sequence, bool]) -> tuple[int, int, int]:
    return _turn(item[0])


def _turn(seq: Sequence) -> tuple[int, int, int]:
    priority, arrival = seq.key
    return priority, seq.turn or 0, arrival
