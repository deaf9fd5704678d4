"""KV below a worker's cache, in memory and on disk: engines that find every wrong byte of what they compute on.

Whatever becomes of a tier, prompts are answered as without it, and every block is free again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tandem.engine import EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.tiers import BlockFiles, HostBlocks, KVTier, TierStats, tier
from tandem.worker import Event, InlineEngine
from tandem.worker.engine import block_chain
from tandem.worker.kv.publisher import BlockPublisher
from tandem.worker.kv.tiers import TRY_EVERY, KVTiers
from tests.spans import catalogued, seen
from tests.worker.conftest import a_step

BLOCK, BLOCKS = 16, 24
PROMPT = list(range(1, 6 * BLOCK + 4))
WHOLE = 6 * BLOCK
OTHER = [9] * (BLOCKS - 1) * BLOCK  # takes all blocks
BOUND_S = 60.0


async def eventually(check: Callable[[], bool]) -> None:
    async with asyncio.timeout(BOUND_S):
        while not check():
            await asyncio.sleep(0.002)


@dataclass
class TieredWorker:
    """An engine and its tiers; blocks' events go by way of the publisher's notes, as in a worker."""

    engine: InlineEngine
    files: BlockFiles
    tiers: KVTiers
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)

    @property
    def disk(self) -> TierStats:
        return self.tiers.stats["disk"]

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceOutput):
                self.outputs.setdefault(event.request_id, []).append(event)

    async def answer(self, prompt: list[int], salt: str = "") -> tuple[int, list[int]]:
        """Cached tokens, and the answer's."""
        request = self.request(prompt, salt)
        await self.engine.prepare(request, BOUND_S)
        await self.tiers.restore(request, BOUND_S)
        await self.engine.call(lambda engine: engine.add(request))
        outputs = self.outputs.setdefault(request.request_id, [])
        async with asyncio.timeout(BOUND_S):
            while not (outputs and outputs[-1].finished):
                await asyncio.sleep(0.002)
        assert outputs[-1].error is None
        return outputs[-1].num_cached_tokens, [token.token_id for output in outputs for token in output.tokens]

    def request(self, prompt: list[int], salt: str = "") -> Request:
        return Request(uuid4().hex, prompt, SamplingParams(max_tokens=4, temperature=0), cache_salt=salt, tenant=salt)

    async def written(self, num_blocks: int) -> None:
        await self.noted()
        await eventually(lambda: self.disk.written >= num_blocks)

    async def noted(self) -> None:
        publisher = BlockPublisher(self.engine, None, "p0", "p-1", tiers=self.tiers)  # type: ignore[arg-type]
        publisher.note(await self.engine.call(lambda engine: engine.take_block_events()))

    async def idle(self) -> None:
        async with asyncio.timeout(BOUND_S):
            while self.engine.engine.stats().free_blocks < BLOCKS or len(self.engine.engine.moving):
                await asyncio.sleep(0.005)
        await self.engine.call(lambda engine: engine.check_integrity())


Opened = Callable[..., AbstractAsyncContextManager[TieredWorker]]


@pytest.fixture
def a_worker(tmp_path: Path, demo_model: Path) -> Opened:
    @asynccontextmanager
    async def opened(engine: str = "null", on_host: int = 0, **config: object) -> AsyncIterator[TieredWorker]:
        """The next start of the one that was opened before."""
        null = StepTime(prefill_tokens_per_s=1e6) if engine == "null" else None
        dtype = {} if null else {"dtype": "float32"}
        made = EngineConfig(
            demo_model,
            "demo",
            block_size=BLOCK,
            num_blocks=BLOCKS,
            null=null,
            **(dtype | config),  # type: ignore[arg-type]
        )
        port = InlineEngine(made)
        layout = port.engine.layout
        block_bytes = layout.block_bytes * layout.num_layers
        files = BlockFiles(tmp_path, layout.hash, block_bytes=block_bytes, budget_bytes=100 * block_bytes)
        tiers = [KVTier("disk", files)]
        if on_host:
            tiers.insert(0, KVTier("host", HostBlocks(block_bytes=block_bytes, budget_bytes=on_host * block_bytes)))
        worker = TieredWorker(port, files, KVTiers(port, tiers, lambda: uuid4().hex))
        port.start(worker.on_events, lambda error: None)
        writing = asyncio.create_task(worker.tiers.run())
        try:
            yield worker
            await worker.idle()
        finally:
            writing.cancel()
            worker.tiers.close()
            port.close()

    return opened


def damage(folder: Path, name: bytes) -> None:
    path = next(folder.glob(f"*/*/{name[:1].hex()}/{name[1:].hex()}"))
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)


@pytest.mark.parametrize("kind", [{}, {"engine": "model"}, {"engine": "model", "kv_cache_dtype": "int8"}])
async def test_the_next_start_finds_what_this_one_cached(a_worker: Opened, kind: dict[str, str]) -> None:
    async with a_worker(**kind) as worker:
        first = await worker.answer(PROMPT)
        await worker.written(6)
    async with a_worker(**kind) as worker:
        cached, tokens = await worker.answer(PROMPT)
        assert (first[0], cached, tokens) == (0, WHOLE, first[1])
        assert worker.disk.restored == 6


async def test_what_memory_has_evicted_is_restored(a_worker: Opened, spans: InMemorySpanExporter) -> None:
    async with a_worker() as worker:
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        assert await worker.answer(PROMPT) == (WHOLE, tokens)
        assert await worker.tiers.restore(worker.request(PROMPT), BOUND_S) == 0, "it is cached"
    expected = catalogued("any worker")
    assert seen(spans.get_finished_spans(), *expected) == expected


@pytest.mark.parametrize("kind", [{}, {"engine": "model"}])
async def test_the_quickest_tier_that_has_a_block_restores_it(a_worker: Opened, kind: dict[str, str]) -> None:
    async with a_worker(on_host=4, **kind) as worker:
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        assert await worker.answer(PROMPT) == (WHOLE, tokens)
        stats = worker.tiers.stats
        assert (stats["host"].held, stats["host"].restored, stats["disk"].restored) == (4, 4, 2)


async def test_all_is_restored_while_one_step_computes(a_worker: Opened) -> None:
    async with a_worker(on_host=8) as worker:
        worker.tiers._chunk = 2
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        with a_step(worker.engine):
            assert await worker.tiers.restore(worker.request(PROMPT), BOUND_S) == WHOLE
        assert await worker.answer(PROMPT) == (WHOLE, tokens)


async def test_all_is_restored_where_blocks_land_behind_a_step(a_worker: Opened) -> None:
    async with a_worker(on_host=8) as worker:
        worker.tiers._chunk = 3
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        beside, is_held = worker.engine.beside_step, iter([False, False, True, *[False] * 9])
        worker.engine.beside_step = lambda fn: None if next(is_held) else beside(fn)  # held when the first blocks land
        with a_step(worker.engine) as waiting:
            restoring = asyncio.create_task(worker.tiers.restore(worker.request(PROMPT), BOUND_S))
            await eventually(lambda: len(waiting) == 2 or restoring.done())
        assert await restoring == WHOLE
        assert await worker.answer(PROMPT) == (WHOLE, tokens)


async def test_a_disk_that_fails_takes_nothing_from_the_host(a_worker: Opened) -> None:
    def failing(name: bytes, owner: bytes, block: memoryview) -> None:
        raise OSError(28, "No space left on device")

    async with a_worker(on_host=8) as worker:
        worker.files.write = failing
        _, tokens = await worker.answer(PROMPT)
        await worker.noted()
        await eventually(lambda: worker.tiers.stats["host"].written == 6 and not worker.disk.up)
        await worker.answer(OTHER)
        assert await worker.answer(PROMPT) == (WHOLE, tokens)


async def test_a_tenant_finds_its_own_only(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await worker.answer(PROMPT, salt="one")
        await worker.written(6)
    async with a_worker() as worker:
        assert await worker.tiers.restore(worker.request(PROMPT, "another"), BOUND_S) == 0
        assert await worker.tiers.restore(worker.request(PROMPT, "one"), BOUND_S) == WHOLE


async def test_a_damaged_block_ends_what_is_restored_there(a_worker: Opened, tmp_path: Path) -> None:
    async with a_worker() as worker:
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        chain = block_chain(worker.engine.engine.layout, worker.request(PROMPT))
    damage(tmp_path, chain[4])
    async with a_worker() as worker:
        assert await worker.answer(PROMPT) == (3 * BLOCK, tokens)
        assert worker.disk.damaged == 1


async def test_the_registry_counts_what_a_tier_has_until_it_drops_it(a_worker: Opened, tmp_path: Path) -> None:
    async with a_worker() as worker:
        publisher = BlockPublisher(worker.engine, None, "p0", "p-1", tiers=worker.tiers)  # type: ignore[arg-type]
        chain = block_chain(worker.engine.engine.layout, worker.request(PROMPT))[1:]
        await worker.answer(PROMPT)
        publisher.note(await worker.engine.call(lambda engine: engine.take_block_events()))
        await eventually(lambda: worker.disk.written >= 6)
        await worker.answer(OTHER)
        publisher.note(await worker.engine.call(lambda engine: engine.take_block_events()))
        assert publisher.held.issuperset(chain), "its cache has evicted them, its disk has not"
        damage(tmp_path, chain[2])
        assert await worker.tiers.restore(worker.request(PROMPT), BOUND_S) == 2 * BLOCK
        publisher.note_gone()
        assert set(chain) - publisher.held == {chain[2]}


async def test_a_start_counts_what_its_disk_has_from_before(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await worker.answer(PROMPT)
        await worker.written(6)
        chain = block_chain(worker.engine.engine.layout, worker.request(PROMPT))[1:]
    async with a_worker() as worker:
        publisher = BlockPublisher(worker.engine, None, "p0", "p-2", tiers=worker.tiers)  # type: ignore[arg-type]
        publisher.begin()
        assert publisher.held == set(chain)


async def test_a_failing_disk_is_left_alone_for_a_while(a_worker: Opened, tmp_path: Path) -> None:
    async with a_worker() as worker:
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        real = worker.files.read

        def failing(name: bytes, block: memoryview) -> bool:
            raise OSError(5, "Input/output error")

        worker.files.read = failing
        await worker.answer(OTHER)
        assert await worker.answer(PROMPT) == (0, tokens)
        assert worker.disk.up == 0
        worker.files.read = real
        await worker.answer([8] * len(OTHER))
        assert await worker.answer(PROMPT) == (0, tokens), "it is not asked"


async def test_who_waits_for_a_disk_that_hangs_holds_no_blocks(
    a_worker: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "ANSWER_S", 0.3)
    hangs = threading.Event()
    async with a_worker() as worker:
        _, tokens = await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        worker.files.read = lambda name, block: hangs.wait(BOUND_S)
        waiting = asyncio.create_task(worker.answer(PROMPT))
        await asyncio.sleep(0.1)
        await worker.idle()
        assert await waiting == (0, tokens)
        assert worker.disk.up == 0
        hangs.set()


async def test_where_computing_is_quicker_most_is_computed(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await worker.answer(PROMPT)
        await worker.written(6)
        await worker.answer(OTHER)
        for _ in range(20):
            worker.tiers._speeds["disk"].add(WHOLE, 100.0)
        for _ in range(200):
            worker.engine.rates.step(WHOLE, 0, 0.01)
        restored = [await worker.tiers.restore(worker.request(PROMPT), BOUND_S) for _ in range(TRY_EVERY)]
        assert restored == [0] * (TRY_EVERY - 1) + [WHOLE]


async def test_a_client_that_leaves_takes_no_blocks_with_it(a_worker: Opened) -> None:
    async with a_worker() as worker:
        await worker.answer(PROMPT)
        await worker.written(6)
        for turns in range(40):
            await worker.answer(OTHER)
            restoring = asyncio.create_task(worker.tiers.restore(worker.request(PROMPT), BOUND_S))
            for _ in range(turns):
                await asyncio.sleep(0)
            restoring.cancel()
            await asyncio.gather(restoring, return_exceptions=True)
            await worker.idle()
