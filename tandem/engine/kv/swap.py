"""Host memory for the KV of preempted sequences, used if copying KV back takes less time than computing it again.

    preempt   block ──copy──> host block         admit   host block ──copy──> block

Host blocks are numbered after those of the KV cache, so one list of copies serves both directions. The list is carried
out in order: a block is overwritten only after its contents have been copied out. The code is the same on CPUs, where
blocks are copied within host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from torch import Tensor

from tandem.engine.device import sent, settle
from tandem.engine.scheduling import BlockPool, WindowBlocks
from tandem.engine.step_cost import StepCost

# Copies of blocks: (from, to).
Copies: TypeAlias = list[tuple[int, int]]
WEIGHT = 0.2  # the weight of the latest copy in the mean time of copying a block


class SwapSpace:
    """Owns the host's blocks and lends them to the scheduler. `now` returns the time in seconds.

    Layers of `windows`, whose caches have places of their own, are never swapped: sequences of such models are computed
    again.
    """

    def __init__(
        self, kv_cache: list[Tensor], num_blocks: int, now: Callable[[], float], windows: WindowBlocks | None = None
    ) -> None:
        near = windows.windows.layers if windows is not None else frozenset[int]()
        self.pool = BlockPool(0 if near else num_blocks)
        self._num_device_blocks = len(windows.at) if windows is not None else len(kv_cache[0])
        self._kv_cache = [kv for layer, kv in enumerate(kv_cache) if layer not in near]
        self._near = [kv_cache[layer] for layer in sorted(near)]
        self._now = now
        shapes = [(self.pool.num_blocks, *kv.shape[1:]) for kv in self._kv_cache]
        self._host = [
            torch.empty(shape, dtype=kv.dtype, pin_memory=kv.is_cuda)
            for shape, kv in zip(shapes, self._kv_cache, strict=True)
        ]
        self._block_s = 0.0  # mean seconds of copying a block one way; 0 before the first copy
        self._step_cost = StepCost()

    def take(self, num_tokens: int, num_blocks: int) -> list[int] | None:
        """Takes host blocks for `num_blocks` blocks with the KV of `num_tokens` tokens.

        Returns None if too few are free, or if copying them out and back would take longer than computing these tokens.
        """
        base, each = self._step_cost.line()
        if 2 * num_blocks * self._block_s > base + num_tokens * each:
            self._block_s *= 1 - WEIGHT  # forget a slow copy after a while
            return None
        blocks = self.pool.take(num_blocks)
        return blocks and [self._num_device_blocks + block for block in blocks]

    def release(self, blocks: Iterable[int]) -> None:
        self.pool.release([block - self._num_device_blocks for block in blocks])

    def copy(self, copies: Copies, of_windows: Sequence[tuple[int, int]] = ()) -> None:
        """Carries out copies between blocks, and `of_windows` between places of layers with a window."""
        for source, target in of_windows:
            for kv in self._near:
                kv[target] = kv[source]
        for (from_host, to_host), run in groupby(copies, key=self._direction):
            pairs = list(run)
            if not from_host and not to_host:  # one by one: a copy's target may be the next one's source
                for source, target in pairs:
                    for kv in self._kv_cache:
                        kv[target] = kv[source]
                continue
            started = self._now()
            self._move(pairs, from_host=from_host)
            taken = (self._now() - started) / len(pairs)
            self._block_s += WEIGHT * (taken - self._block_s) if self._block_s else taken

    def passed(self, num_tokens: int, seconds: float) -> None:
        """Records that a step computed `num_tokens` tokens in `seconds`."""
        if num_tokens:
            self._step_cost.add(num_tokens, seconds)

    def check_integrity(self, swapped: Iterable[list[int]]) -> None:
        """Raises AssertionError unless the taken host blocks are exactly `swapped`, those of all live sequences."""
        self.pool.check_integrity([block - self._num_device_blocks for block in blocks] for blocks in swapped)

    def _direction(self, copy: tuple[int, int]) -> tuple[bool, bool]:
        return copy[0] >= self._num_device_blocks, copy[1] >= self._num_device_blocks

    def _move(self, pairs: Copies, *, from_host: bool) -> None:
        """Copies blocks between device and host through a contiguous buffer on the device.

        Blocks that are neighbours in the host's pinned memory go in one copy, and only the end of all copies is waited
        for.
        """
        blocks = sorted((s if from_host else t, t if from_host else s) for s, t in pairs)
        runs = list(_runs([there - self._num_device_blocks for there, _ in blocks]))
        device = self._kv_cache[0].device
        on_device = sent(torch.tensor([here for _, here in blocks]), device)
        for kv, host in zip(self._kv_cache, self._host, strict=True):
            row = kv.new_empty((len(blocks), *kv.shape[1:])) if from_host else kv[on_device]
            for place, first, count in runs:
                here, there = row[place : place + count], host[first : first + count]
                if from_host:
                    here.copy_(there, non_blocking=True)
                else:
                    there.copy_(here, non_blocking=True)
            if from_host:
                kv[on_device] = row
        settle(device)  # from now on other streams may write to these blocks


def _runs(numbers: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields the runs of consecutive numbers in an ascending list: (index in the list, first number, length)."""
    for _, run in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        members = list(run)
        yield (*members[0], len(members))
