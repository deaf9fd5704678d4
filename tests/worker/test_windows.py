"""KV of layers with a window from another worker or a tier: only what is needed, and the right tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path

import pytest

from tandem.engine import EngineConfig
from tandem.tiers import HostBlocks, KVTier
from tandem.transfer import SocketNetwork
from tandem.worker.kv import fetching
from tandem.worker.kv.tiers import KVTiers
from tests.engine import tiny
from tests.worker.test_fetching import LONG_S, CachingWorker, caching_worker, request

BLOCK, PROMPT = 4, tiny.prompt_of(50)
WHOLE = 48
MODELS = ("gemma3", "mistral-window")  # some layers have a window, and all


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tiny.make(request.param).save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
async def workers(model: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[list[CachingWorker]]:
    monkeypatch.setattr(fetching, "FETCH_S", LONG_S)
    config = EngineConfig(model, "demo", dtype="float32", block_size=BLOCK, num_blocks=32, max_num_batched_tokens=16)
    made = [caching_worker(config, name, "tcp", SocketNetwork(), name) for name in ("one", "two")]
    yield made
    for worker in made:
        await worker.close()


async def said(worker: CachingWorker, prompt: list[int]) -> tuple[list[int], int]:
    """Returns the answer's last tokens and how many of the prompt were cached."""
    last = await worker.answer(prompt, 5)
    return [token.token_id for token in last.tokens], last.num_cached_tokens


async def test_a_window_is_fetched_and_gone_on_with(workers: list[CachingWorker]) -> None:
    asker, holder = workers
    expected, _ = await said(holder, PROMPT)
    assert await asker.fetcher.fetch(request(PROMPT, 5), holder.holder, LONG_S) == WHOLE
    assert await said(asker, PROMPT) == (expected, WHOLE)
    for worker in workers:
        await idle(worker)


async def test_what_a_window_lacks_is_not_lent(workers: list[CachingWorker]) -> None:
    asker, holder = workers
    expected, _ = await said(holder, PROMPT)
    windows = holder.engine.engine._pool.windows
    assert windows is not None
    lost = [block for block, place in enumerate(windows.at) if place][5:]
    for block in lost:
        windows.forget(block)
    fetched = await asker.fetcher.fetch(request(PROMPT, 5), holder.holder, LONG_S)
    assert fetched < WHOLE
    assert await said(asker, PROMPT) == (expected, fetched)
    for worker in workers:
        await idle(worker)


async def test_a_lender_that_says_too_much_is_not_believed(workers: list[CachingWorker]) -> None:
    asker, _ = workers
    layout = asker.engine.engine.layout
    sent = layout.moved_bytes(12)
    for said, believed in ((12, 12), (13, 0), (2**31, 0), (2, 0)):
        assert asker.fetcher._num_sent(12, said.to_bytes(4), sent) == believed
    # A worker of before windows says nothing.
    assert asker.fetcher._num_sent(12, b"", 3 * layout.whole_block_bytes) == 3


async def test_blocks_come_back_from_a_tier_with_their_windows(workers: list[CachingWorker]) -> None:
    one, two = workers
    layout = one.engine.engine.layout
    host = KVTier("host", HostBlocks(block_bytes=layout.whole_block_bytes, budget_bytes=1 << 20))
    new_id = map(str, count()).__next__
    tiers = KVTiers(one.engine, [host], new_id)
    writing = asyncio.create_task(tiers.run())
    await one.engine.prepare(request(PROMPT), LONG_S)
    expected, _ = await said(one, PROMPT)
    chain = fetching.block_chain(layout, request(PROMPT))
    tiers.stored(chain[1:])
    async with asyncio.timeout(LONG_S):
        while any(host.lacks(name) for name in chain[1:]):
            await asyncio.sleep(0.005)
    writing.cancel()
    await said(one, tiny.prompt_of(100, 5))  # takes all blocks
    back = KVTiers(two.engine, [host], new_id)
    restored = await back.restore(request(PROMPT), LONG_S)
    assert restored == WHOLE
    found, cached = await said(two, PROMPT)
    assert found == expected
    assert cached == restored
    tiers.close()
    for worker in workers:
        await idle(worker)


async def idle(worker: CachingWorker) -> None:
    engine = worker.engine.engine
    async with asyncio.timeout(LONG_S):
        while engine.stats().free_blocks < engine.stats().num_blocks or worker.lender.num_lending:
            await asyncio.sleep(0.005)
    await worker.engine.call(lambda engine: engine.check_integrity())
