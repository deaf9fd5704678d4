"""KV that only a tier of another worker has: it brings it back and lends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import uuid4

import pytest

from tandem.tiers import HostBlocks, KVTier
from tandem.transfer import SocketNetwork
from tandem.worker.engine import block_chain
from tandem.worker.kv import KVTiers
from tandem.worker.kv.publisher import BlockPublisher
from tests.transfer.tampering import TamperingNetwork
from tests.worker.conftest import a_step
from tests.worker.test_fetching import (
    BLOCK,
    BLOCKS,
    LONG_S,
    PROMPT,
    WHOLE,
    CachingWorker,
    Two,
    caching_worker,
    null_config,
    patient,
    request,
)

__all__ = ["patient"]
OTHER = [9] * (BLOCKS - 1) * BLOCK  # takes all blocks


@pytest.fixture
async def two_and_tiers(demo_model: Path) -> AsyncIterator[tuple[Two, KVTiers]]:
    network = TamperingNetwork(SocketNetwork())
    asker = caching_worker(null_config(demo_model), "p0", "shm", SocketNetwork(), "p-1")
    holder = caching_worker(null_config(demo_model), "d0", "shm", network, "d-1")
    block_bytes = holder.engine.engine.layout.whole_block_bytes
    host = KVTier("host", HostBlocks(block_bytes=block_bytes, budget_bytes=100 * block_bytes))
    tiers = KVTiers(holder.engine, [host], lambda: uuid4().hex)
    holder.lender._tiers = tiers
    writing = asyncio.create_task(tiers.run())
    yield Two(asker, holder, network), tiers
    writing.cancel()
    await asker.close()
    await holder.close()
    tiers.close()


async def kept(worker: CachingWorker, tiers: KVTiers, prompt: list[int]) -> None:
    """The worker answers, and its tier has the prompt's blocks."""
    await worker.engine.prepare(request(prompt), LONG_S)  # whose it is, without which no tier keeps it
    await worker.answer(prompt)
    publisher = BlockPublisher(worker.engine, None, "d0", "d-1", tiers=tiers)  # type: ignore[arg-type]
    publisher.note(await worker.engine.call(lambda engine: engine.take_block_events()))
    async with asyncio.timeout(LONG_S):
        while not all(map(tiers.has, block_chain(worker.engine.engine.layout, request(prompt))[1:])):
            await asyncio.sleep(0.002)


async def test_what_only_a_tier_has_is_lent(two_and_tiers: tuple[Two, KVTiers], patient: None) -> None:
    two, tiers = two_and_tiers
    await kept(two.holder, tiers, PROMPT)
    await two.holder.answer(OTHER)
    assert await two.fetch() == WHOLE
    assert tiers.stats["host"].restored == 6
    await two.computes(WHOLE)


async def test_what_follows_on_what_was_lent_is_kept_too(two_and_tiers: tuple[Two, KVTiers], patient: None) -> None:
    two, tiers = two_and_tiers
    await kept(two.holder, tiers, PROMPT)
    await two.holder.answer(OTHER)
    assert await two.fetch() == WHOLE
    await kept(two.holder, tiers, [*PROMPT, *range(500, 500 + 2 * BLOCK)])


async def test_what_was_just_restored_is_lent_while_a_step_computes(
    two_and_tiers: tuple[Two, KVTiers], patient: None
) -> None:
    two, tiers = two_and_tiers
    tiers._chunk = 2
    await kept(two.holder, tiers, PROMPT)
    await two.holder.answer(OTHER)
    with a_step(two.holder.engine):
        assert await two.fetch() == WHOLE
    await two.computes(WHOLE)


async def test_a_fetch_goes_on_behind_what_was_just_restored(two_and_tiers: tuple[Two, KVTiers], patient: None) -> None:
    two, _ = two_and_tiers
    block_bytes = two.asker.engine.engine.layout.whole_block_bytes
    host = KVTier("host", HostBlocks(block_bytes=block_bytes, budget_bytes=100 * block_bytes))
    own = KVTiers(two.asker.engine, [host], lambda: uuid4().hex)
    writing = asyncio.create_task(own.run())
    try:
        two.asker.fetcher._tiers = own
        await kept(two.asker, own, PROMPT[: 2 * BLOCK + 1])
        await two.asker.answer(OTHER)
        await two.holder.answer(PROMPT)
        with a_step(two.asker.engine):
            assert await two.asker.fetcher.complete(request(PROMPT), two.holder.holder, LONG_S) == WHOLE - 2 * BLOCK
        await two.computes(WHOLE)
    finally:
        writing.cancel()
        own.close()
