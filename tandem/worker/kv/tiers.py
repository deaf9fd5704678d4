"""Tiers below a worker's prefix cache: cached blocks are written to each tier, and restored for prompts that need them.

    cached ──> queue ──> pinned, copied to memory ──> each tier that lacks it         (run)
    a tier ──> copy in memory ──> copied into new blocks ──> cached                   (restore)

What `drop` drops is not brought back by what was under way: blocks that were lent before it are not written, and what
was read before it does not land.

The engine takes no part: blocks are pinned only for copies in memory, never while a tier reads or writes. A block comes
from the first tier that has it, and only if that is at least as fast as computing it, by recently measured rates.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile

import torch
from opentelemetry import trace
from torch import Tensor

from tandem.catalogue.spans import TRUNCATED
from tandem.engine import Engine, ExpectedBlocks, LentBlocks, Request
from tandem.process import WorkThreads
from tandem.tiers import KVTier, OwnedBlock, TierHolds, TierStats, owner_of
from tandem.worker.engine import EnginePort, Line, at_once, block_chain, land, release

# The bytes that are read, or copied to be written, at a time.
CHUNK_BYTES = 8 << 20
# The most blocks that wait to be written; beyond that the oldest are dropped.
MAX_PENDING = 4096
# The most used prompts that wait to be reported to the tiers; beyond that the oldest are dropped.
MAX_USED = 256
# One in so many restores that seem slower than computing is made all the same, as the tier may be faster by now.
TRY_EVERY = 16
MOST_COUNTED = 2**31 - 1
# The interval at which blocks that nobody has used for long are looked for.
EXPIRE_EVERY_S = 5.0
tracer = trace.get_tracer("tandem.worker")


@dataclass(slots=True)
class Stretch:
    """Blocks `first` to `end` of a prompt, all from one tier, at most CHUNK_BYTES: they are restored together."""

    tier: KVTier
    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first


class KVTiers:
    """The tiers of one worker, fastest first. `run` writes to them, `restore` reads, `close` ends them."""

    def __init__(self, engine: EnginePort, tiers: Sequence[KVTier], new_id: Callable[[], str]) -> None:
        self._engine, self._tiers, self._new_id = engine, tiers, new_id
        self._layout = layout = engine.engine.layout
        self._chunk = max(1, CHUNK_BYTES // layout.whole_block_bytes)
        # An own thread, so that copies, which pin blocks, never wait for a tier.
        self._copies = WorkThreads("kv-copy", 1)
        self._pending: dict[bytes, None] = {}
        self._used: deque[Sequence[bytes]] = deque(maxlen=MAX_USED)
        self._woken = asyncio.Event()
        self._speeds = {tier.name: Line() for tier in tiers}  # restored tokens per second
        self._skipped = 0
        self._num_drops = 0

    @property
    def stats(self) -> dict[str, TierStats]:
        return {tier.name: tier.stats for tier in self._tiers}

    @property
    def holds(self) -> dict[str, TierHolds]:
        return {tier.name: tier.holds for tier in self._tiers}

    def stored(self, names: Iterable[bytes]) -> None:
        """Queues newly cached blocks, by name, to be written."""
        self._pending.update((name, None) for name in names if self._lacked(name))
        while len(self._pending) > MAX_PENDING:
            del self._pending[next(iter(self._pending))]
        self._woken.set()

    async def run(self) -> None:
        """Writes the queued blocks, and reports used blocks to the tiers, until cancelled."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(EXPIRE_EVERY_S):
                    await self._woken.wait()
            self._woken.clear()
            for tier in self._tiers:
                if await tier.expire():
                    self._woken.set()
            while self._used:
                chain = self._used.popleft()
                for tier in self._tiers:
                    await tier.touch(reversed(chain[1:]))
            while self._pending:
                names = list(self._pending)[: self._chunk]
                for name in names:
                    del self._pending[name]
                await self._write([name for name in names if self._lacked(name)])

    @property
    def size(self) -> int:
        """The most blocks that the tiers can keep, as far as the registry counts them."""
        return min(sum(tier.size for tier in self._tiers), MOST_COUNTED)

    def has(self, name: bytes) -> bool:
        """True if a tier that is used now has the block."""
        return self._holder(name) is not None

    def names(self) -> set[bytes]:
        """Returns the names of the blocks that the tiers have."""
        return {name for tier in self._tiers for name in tier.names()}

    def take_gone(self) -> list[bytes]:
        """Returns the names of the blocks that went since the last call, and that no tier has."""
        return [name for tier in self._tiers for name in tier.take_gone() if not self.has(name)]

    async def restore(self, request: Request, timeout_s: float) -> int:
        """Restores a prompt's missing blocks from the tiers. Returns the number of tokens newly cached."""
        return await self.restore_chain(block_chain(self._layout, request), timeout_s)

    async def restore_chain(self, chain: Sequence[bytes], timeout_s: float) -> int:
        """Restores the missing blocks of a chain: its root, or what comes before it, and its blocks' names."""
        now = asyncio.get_running_loop().time
        until = now() + timeout_s
        if all(self._holder(name) is None for name in chain[1:]):
            return 0
        self._used.append(chain)
        self._woken.set()
        drops = self._num_drops
        first = await at_once(self._engine, self._new_id(), lambda engine: engine.moving.num_cached(chain[1:]))
        stretches = [*takewhile(self._is_quicker, self._stretches(chain, first))]
        if not stretches:
            return 0
        with tracer.start_as_current_span("kv.restore") as span:
            reached = first
            for stretch in stretches:
                started = now()
                if started >= until:
                    break
                reached = stretch.first + (num_restored := await self._restore(chain, stretch, drops))
                if num_restored < len(stretch):
                    break
                self._speeds[stretch.tier.name].add(len(stretch) * self._layout.block_size, now() - started)
                stretch.tier.num_restored += len(stretch)
            span.set_attribute("kv.restored_blocks", reached - first)
            if reached < stretches[-1].end:
                span.set_attribute(TRUNCATED, True)
        return (reached - first) * self._layout.block_size

    async def drop(self, owner: bytes | None) -> Mapping[str, int]:
        """Drops an owner's blocks from all tiers; None: all; after the engine has dropped its own, so that none is lent
        again. Returns how many each had.

        Raises:
            OSError: some may be left.
        """
        self._num_drops += 1
        dropped = {tier.name: tier.drop(owner) for tier in self._tiers}  # all begin now, behind what was under way
        await asyncio.wait(dropped.values())
        return {name: done.result() for name, done in dropped.items()}

    async def pin(self, owner: bytes, seconds: float) -> None:
        """Has an owner's blocks go by nobody else's pressure for so long; 0: no longer."""
        for tier in self._tiers:
            await tier.pin(owner, seconds)

    def close(self) -> None:
        self._copies.close()
        for tier in self._tiers:
            tier.close()

    # --- into the cache ---

    def _stretches(self, chain: Sequence[bytes], first: int) -> Iterator[Stretch]:
        """Yields the stretches from the prompt's block `first` on, up to the first block that no tier has."""
        stretch: Stretch | None = None
        for place, name in enumerate(chain[1 + first :], first):
            tier = self._holder(name)
            if stretch is not None and (tier is not stretch.tier or len(stretch) == self._chunk):
                yield stretch
                stretch = None
            if tier is None:
                return
            stretch = stretch or Stretch(tier, place, place)
            stretch.end += 1
        if stretch is not None:
            yield stretch

    async def _restore(self, chain: Sequence[bytes], stretch: Stretch, drops: int) -> int:
        """Restores a stretch, unless there was a drop since `drops`. Returns how many of its blocks are cached now."""
        names, name = chain[1 + stretch.first : 1 + stretch.end], self._new_id()
        staged = self._staging(len(names))
        staged = staged[: await stretch.tier.read(list(zip(names, _rows(staged), strict=True)))]
        if not len(staged):
            return 0
        chain = chain[: 1 + stretch.first + len(staged)]
        room = await at_once(
            self._engine, name, lambda engine: None if drops != self._num_drops else _expect(engine, name, chain)
        )
        if room is None:
            return 0
        num_cached, blocks, places = room
        if num_cached < stretch.first:  # the block before the stretch has been evicted meanwhile
            land(self._engine, name, num_cached, 0)
            return 0
        new = staged[num_cached - stretch.first :]
        copied = self._copies.run(_copy_in, self._engine.engine, new, LentBlocks(blocks, places))
        copied.add_done_callback(lambda done: land(self._engine, name, num_cached, _landed(done, len(blocks))))
        await asyncio.shield(copied)
        return len(staged)

    # --- out of the cache ---

    async def _write(self, names: Sequence[bytes]) -> None:
        if not names:
            return
        name, drops = self._new_id(), self._num_drops
        names, lent, tenants = await at_once(self._engine, name, lambda engine: _lend(engine, name, names))
        if not names:
            release(self._engine, name)
            return
        staged = self._staging(len(names))
        copied = self._copies.run(_copy_out, self._engine.engine, lent, staged)
        copied.add_done_callback(lambda done: release(self._engine, name))
        await asyncio.shield(copied)
        owners = [None if tenant is None else owner_of(tenant) for tenant in tenants]
        blocks = [
            OwnedBlock(block, owner, row)
            for block, owner, row in zip(names, owners, _rows(staged), strict=True)
            if owner is not None
        ]
        for tier in self._tiers:
            if drops != self._num_drops:
                self.stored(names)  # those that are still cached are written again
                return
            await tier.write([block for block in blocks if tier.lacks(block.name)])

    def _staging(self, num_blocks: int) -> Tensor:
        """Returns host memory for blocks; pinned if there is a GPU, which copies it several times as fast."""
        of_layer = self._layout.block_shape(num_blocks)[1:]
        shape, on_device = (num_blocks, self._layout.num_layers, *of_layer), self._engine.engine.kv_cache[0].is_cuda
        return torch.empty(shape, dtype=self._layout.kv_dtype, pin_memory=on_device)

    # --- whether to use it ---

    def _holder(self, name: bytes) -> KVTier | None:
        return next((tier for tier in self._tiers if name in tier), None)

    def _lacked(self, name: bytes) -> bool:
        return any(tier.lacks(name) for tier in self._tiers)

    def _is_quicker(self, stretch: Stretch) -> bool:
        speed, computing = self._speeds[stretch.tier.name].per_second, self._engine.rates.prefill_tokens_per_s
        if not speed or not computing or speed >= computing:
            return True
        self._skipped += 1
        return self._skipped % TRY_EVERY == 0


def _expect(engine: Engine, name: str, chain: Sequence[bytes]) -> ExpectedBlocks | None:
    return engine.moving.expect(name, chain, engine.stats().num_running, is_whole=True)


def _lend(engine: Engine, name: str, names: Sequence[bytes]) -> tuple[list[bytes], LentBlocks, list[str | None]]:
    """Lends cached blocks, and says whose they are."""
    names, lent = engine.moving.lend_each(name, names)
    return names, lent, [engine.moving.owners.of(block) for block in names]


def _landed(copied: asyncio.Future[None], num_blocks: int) -> int:
    return 0 if copied.cancelled() or copied.exception() else num_blocks


def _copy_in(engine: Engine, staged: Tensor, to: LentBlocks) -> None:
    for layer, kv in enumerate(engine.kv_cache):
        kv[to.of(layer, engine.layout)] = staged[:, layer].to(kv.device)


def _copy_out(engine: Engine, lent: LentBlocks, staged: Tensor) -> None:
    for layer, kv in enumerate(engine.kv_cache):
        staged[:, layer] = kv[lent.of(layer, engine.layout)].to(staged.device)


def _rows(staged: Tensor) -> Iterator[memoryview]:
    """Yields each block's bytes."""
    for block in staged:
        yield memoryview(block.view(torch.uint8).numpy().reshape(-1))
