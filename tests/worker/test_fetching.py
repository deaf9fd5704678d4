"""KV from another worker's cache: real links, and engines that find every wrong byte of what they compute on.

Whatever goes wrong, nothing is cached that was not verified, every block is free again, and the prompt is computed.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import pytest
import torch

from tandem.engine import EngineConfig, Request, SamplingParams, SequenceOutput, StepTime
from tandem.transfer import (
    Fetch,
    Link,
    LinkPeer,
    LinkRuntime,
    LocalPeer,
    Network,
    Push,
    Receiver,
    Sender,
    SocketNetwork,
    TransferError,
)
from tandem.worker import Event, Holder, InlineEngine, KVFetcher
from tandem.worker.kv import fetching
from tandem.worker.kv.fetching import KVLender
from tandem.worker.kv.links import near_layers
from tests.transfer.tampering import TamperingNetwork

BLOCK, BLOCKS = 16, 16
PROMPT = list(range(1, 6 * BLOCK + 4))
WHOLE = 6 * BLOCK  # what can be fetched of it
LONG_S = 60.0


@dataclass
class CachingWorker:
    """An engine, and both ends of its links."""

    engine: InlineEngine
    peer: LinkPeer
    sender: Sender
    receiver: Receiver
    fetcher: KVFetcher
    lender: KVLender
    outputs: dict[str, list[SequenceOutput]] = field(default_factory=dict)
    on_link: Callable[[Link], None] = lambda link: None

    @property
    def holder(self) -> Holder:
        return Holder(self.peer, self.receiver.address)

    def on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, SequenceOutput):
                self.outputs.setdefault(event.request_id, []).append(event)

    async def answer(self, prompt: list[int], max_tokens: int = 4) -> SequenceOutput:
        """The last output of the prompt's answer, computed here."""
        name = uuid4().hex
        await self.engine.call(lambda engine: engine.add(request(prompt, max_tokens, name)))
        async with asyncio.timeout(LONG_S):
            while not (self.outputs.get(name) and self.outputs[name][-1].finished):
                await asyncio.sleep(0.002)
        last = self.outputs[name][-1]
        assert last.error is None
        return last

    async def idle(self) -> None:
        """Every block is free, and nothing moves."""
        async with asyncio.timeout(LONG_S):
            while self.engine.engine.stats().free_blocks < BLOCKS or self.lender.num_lending:
                await asyncio.sleep(0.005)
            while self.receiver.check_integrity(set()).violations:  # its thread may not be back from the last report
                await asyncio.sleep(0.005)
        await self.engine.call(lambda engine: engine.check_integrity())
        assert not len(self.engine.engine.moving)
        assert not self.fetcher.transfer_ids()

    async def close(self) -> None:
        await self.lender.close()
        self.sender.close()
        self.receiver.close()
        self.engine.close()


def request(prompt: list[int], max_tokens: int = 4, name: str = "r", salt: str = "") -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, temperature=0), cache_salt=salt)


def null_config(model: Path) -> EngineConfig:
    return EngineConfig(model, "demo", block_size=BLOCK, num_blocks=BLOCKS, null=StepTime(prefill_tokens_per_s=1e6))


def caching_worker(
    config: EngineConfig, name: str, transport: str, network: Network, incarnation: str
) -> CachingWorker:
    engine, runtime = InlineEngine(config), LinkRuntime(network)
    peer = LinkPeer(name, incarnation, engine.engine.layout.hash)
    local = LocalPeer(peer, near=near_layers(engine.engine.layout))
    sender = Sender(local, transports=(transport,), runtime=runtime)
    receiver = Receiver(local, engine.engine.kv_cache, host="127.0.0.1", transports=(transport,), runtime=runtime)

    async def link_to(remote: LinkPeer, address: str) -> Link:
        link = await asyncio.wrap_future(sender.open_link(remote, address, timeout_s=LONG_S))
        made.on_link(link)
        return link

    fetcher = KVFetcher(engine, receiver, link_to, address=receiver.address, new_id=lambda: uuid4().hex)
    lender = KVLender(
        engine, link_to, new_id=lambda: uuid4().hex, now=runtime.driver.now, concurrent=runtime.driver.concurrent
    )
    receiver.on_fetch = lender.asked
    made = CachingWorker(engine, peer, sender, receiver, fetcher, lender)
    engine.start(made.on_events, lambda error: None)
    return made


@dataclass
class Two:
    asker: CachingWorker
    holder: CachingWorker
    network: TamperingNetwork

    async def fetch(self, prompt: list[int] = PROMPT, salt: str = "") -> int:
        return await self.asker.fetcher.fetch(request(prompt, salt=salt), self.holder.holder, LONG_S)

    async def computes(self, expected: int) -> None:
        """The prompt's answer is right at the asker, which had so many of its tokens."""
        here, there = await self.asker.answer(PROMPT), await self.holder.answer(PROMPT)
        assert here.num_cached_tokens == expected
        assert here.tokens == there.tokens
        await self.asker.idle()
        await self.holder.idle()


@pytest.fixture(params=["shm", "tcp"])
async def two(request: pytest.FixtureRequest, demo_model: Path) -> AsyncIterator[Two]:
    network = TamperingNetwork(SocketNetwork())
    asker = caching_worker(null_config(demo_model), "p0", request.param, SocketNetwork(), "p-1")
    holder = caching_worker(null_config(demo_model), "d0", request.param, network, "d-1")
    yield Two(asker, holder, network)
    await asker.close()
    await holder.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fetches are not given up for a busy machine's sake."""
    monkeypatch.setattr(fetching, "FETCH_S", LONG_S)


async def test_a_prompt_that_another_worker_has_is_fetched_whole(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    assert await two.fetch() == WHOLE
    await two.computes(WHOLE)


async def test_an_answer_is_fetched_with_its_prompt(two: Two, patient: None) -> None:
    await two.asker.answer(PROMPT)
    name = uuid4().hex
    await two.holder.engine.call(lambda engine: engine.add(request(PROMPT, 40, name)))
    async with asyncio.timeout(LONG_S):
        while not (two.holder.outputs.get(name) and two.holder.outputs[name][-1].finished):
            await asyncio.sleep(0.002)
    answer = [token.token_id for output in two.holder.outputs[name] for token in output.tokens]
    turn = [*PROMPT, *answer, 7, 8, 9]
    assert await two.fetch(turn) == (len(PROMPT) + 39) // BLOCK * BLOCK - WHOLE
    assert (await two.asker.answer(turn)).num_cached_tokens == (len(PROMPT) + 39) // BLOCK * BLOCK
    await two.asker.idle()


async def test_nothing_is_fetched_twice_or_without_room(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    assert await two.fetch() == WHOLE
    await two.asker.idle()
    assert await two.fetch() == 0
    chain = [bytes([i]) for i in range(BLOCKS + 1)]
    held = await two.asker.engine.call(lambda engine: engine.moving.expect("all", chain, 0))
    assert held is not None
    assert await two.fetch([5] * 40) == 0
    await two.asker.engine.call(lambda engine: engine.moving.release("all"))
    await two.asker.idle()


async def test_another_salts_blocks_are_not_found(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    assert await two.fetch(salt="of another tenant") == 0
    await two.computes(0)


async def test_blocks_evicted_since_the_choice_are_computed(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    await two.holder.answer([9] * (BLOCKS - 4) * BLOCK)  # the leaves of the prompt's chain go first
    fetched = await two.fetch()
    assert fetched < WHOLE
    await two.computes(fetched)


async def test_all_evicted(two: Two, patient: None) -> None:
    assert await two.fetch() == 0
    await two.computes(0)


async def test_a_holder_killed_in_mid_push_costs_nothing_but_the_wait(
    two: Two, patient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.holder.answer(PROMPT)
    push = Push.push

    def dying(self: Push, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        push(self, layer, first_block, block_ids, kv)
        threading.Thread(target=two.holder.sender.close).start()
        raise TransferError("UNAVAILABLE", "killed")

    monkeypatch.setattr(Push, "push", dying)
    assert await two.fetch() == 0
    monkeypatch.setattr(Push, "push", push)
    await two.computes(0)


@pytest.mark.parametrize("what", ["header", "payload"])
async def test_a_damaged_frame_is_cached_nowhere(two: Two, patient: None, what: str) -> None:
    await two.holder.answer(PROMPT)
    two.network.target.append(what)
    assert await two.fetch() == 0
    assert two.network.target == []
    await two.computes(0)


async def test_another_incarnation_at_the_same_address_lends_nothing(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    stale = Holder(LinkPeer("d0", "d-0", two.holder.peer.layout_hash), two.holder.receiver.address)
    assert await two.asker.fetcher.fetch(request(PROMPT), stale, LONG_S) == 0
    await two.computes(0)


async def test_what_comes_after_it_was_given_up_is_written_nowhere(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks belong to another sequence by then."""
    await two.holder.answer(PROMPT)
    monkeypatch.setattr(fetching, "FETCH_S", 0.3)
    stalled, go_on, push = threading.Event(), threading.Event(), Push.push

    def stalling(self: Push, layer: int, first_block: int, block_ids: Sequence[int], kv: torch.Tensor) -> None:
        stalled.set()
        go_on.wait(LONG_S)
        with suppress(TransferError):
            push(self, layer, first_block, block_ids, kv)

    monkeypatch.setattr(Push, "push", stalling)
    assert await two.fetch() == 0
    assert stalled.is_set()
    async with asyncio.timeout(LONG_S):
        while two.asker.engine.engine.stats().free_blocks < BLOCKS:
            await asyncio.sleep(0.005)
    running = asyncio.create_task(two.asker.answer([3] * (BLOCKS - 2) * BLOCK, 2 * BLOCK))
    await asyncio.sleep(0.05)
    go_on.set()
    await running  # or its engine would have found the damage
    monkeypatch.setattr(Push, "push", push)
    await two.asker.idle()
    await two.holder.idle()
    assert (await two.asker.answer(PROMPT)).num_cached_tokens == 0


async def test_another_prompt_with_what_is_fetched_waits_for_that_but_for_no_fence(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    await two.holder.answer(PROMPT)
    monkeypatch.setattr(fetching, "FETCH_S", 0.3)
    two.holder.on_link = lambda link: (_ for _ in ()).throw(TransferError("UNAVAILABLE", "no way back"))
    cancel, fence = two.asker.receiver.cancel, Future[None]()
    monkeypatch.setattr(two.asker.receiver, "cancel", lambda transfer_id: cancel(transfer_id) and fence)
    fetching_it = asyncio.create_task(two.fetch())
    async with asyncio.timeout(LONG_S):
        while not two.asker.fetcher.transfer_ids():
            await asyncio.sleep(0.002)
    assert await two.fetch() == 0  # at once: that another one fetches it already
    waits = asyncio.create_task(two.asker.answer(PROMPT))
    await asyncio.sleep(0.05)
    assert not fetching_it.done()
    assert not waits.done()
    assert await fetching_it == 0
    assert (await waits).num_cached_tokens == 0
    assert two.asker.fetcher.transfer_ids()
    fence.set_result(None)
    await two.asker.idle()


async def test_a_caller_that_leaves_releases_everything(two: Two, patient: None) -> None:
    await two.holder.answer(PROMPT)
    two.holder.on_link = lambda link: (_ for _ in ()).throw(TransferError("UNAVAILABLE", "no way back"))
    fetching_it = asyncio.create_task(two.fetch())
    async with asyncio.timeout(LONG_S):
        while not two.asker.fetcher.transfer_ids():
            await asyncio.sleep(0.002)
    fetching_it.cancel()
    await asyncio.wait([fetching_it])
    two.holder.on_link = lambda link: None
    await two.computes(0)


async def test_more_at_once_than_a_worker_lends_to_are_computed(two: Two, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetching, "FETCH_S", 0.3)
    monkeypatch.setattr(fetching, "MAX_LENT", 0)
    await two.holder.answer(PROMPT)
    assert await two.fetch() == 0
    await two.computes(0)


@pytest.mark.parametrize("names", ["zz", "ab", "a" * 31])
async def test_names_that_are_none_get_nothing_and_harm_nobody(two: Two, patient: None, names: str) -> None:
    link = await asyncio.wrap_future(
        two.asker.sender.open_link(two.holder.peer, two.holder.receiver.address, timeout_s=LONG_S)
    )
    link.fetch(Fetch(transfer_id="t", address="127.0.0.1:1", timeout_ms=1, names=names))
    await two.holder.answer(PROMPT)
    assert await two.fetch() == WHOLE
    await two.computes(WHOLE)
