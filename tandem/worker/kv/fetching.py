"""Fetching of cached KV from any worker to any other, by the same links and fences as other transfers.

    fetcher  takes blocks for what its cache lacks of a prompt ── FETCH, by its link to the holder ──> lender
    lender   pins the blocks that it has cached and pushes them, by its own link to the fetcher: BEGIN, FRAMEs, COMMIT
    fetcher  committed: all blocks are verified, and cached ──> else the transfer is fenced, and the blocks are released

A fetch only saves work: if it fails, the prompt is computed. No block is fetched twice at the same time: other
sequences that need the block wait in the engine, at most as long as the fetch may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import structlog
from opentelemetry import trace

from tandem.block_hash import HASH_BYTES
from tandem.catalogue.spans import TRUNCATED
from tandem.engine import Engine, ExpectedBlocks, LentBlocks, Request
from tandem.process import WorkThreads
from tandem.transfer import Fetch, KVSource, Link, LinkPeer, TransferError
from tandem.v1 import worker_pb2
from tandem.worker.engine import EngineDied, EnginePort, at_once, block_chain, give_up, land, release
from tandem.worker.kv.tiers import KVTiers

# The longest wait for a fetch, which takes milliseconds: after this it is better to compute.
FETCH_S = 1.0
OPEN_TIMEOUT_S = 1.5
# A transfer that cannot be fenced within this time keeps its blocks: the worker then ends, and is started again.
FENCE_WAIT_S = 10.0
# The most fetches that a worker serves at a time; further fetchers compute.
MAX_LENT = 32
LENDING_THREADS = 2
# The name of the block before those that a fetch asks for, which it does not say.
UNKNOWN = bytes(HASH_BYTES)

log = structlog.get_logger(__name__)
tracer = trace.get_tracer("tandem.worker")
LinkTo = Callable[[LinkPeer, str], Awaitable[Link]]


class KVLandings(Protocol):
    """The part of a Receiver that fetches use. Callbacks may run on any thread."""

    def expect(
        self, transfer_id: str, *, block_ids: Sequence[int], first_block: int, timeout_s: float,
        on_commit: Callable[[bytes, int], None], on_abort: Callable[[str, str], None], sender: str = "",
        may_be_less: bool = False, places: Sequence[int] = (),
    ) -> None: ...  # fmt: skip

    def cancel(self, transfer_id: str) -> Future[None]: ...


@dataclass(frozen=True, slots=True)
class Holder:
    """A worker whose cache has more of a prompt than this worker's."""

    peer: LinkPeer
    address: str

    @classmethod
    def of(cls, holder: worker_pb2.CacheHolder, layout_hash: str) -> Holder:
        return cls(LinkPeer(holder.worker, holder.incarnation, layout_hash), holder.transfer_address)


class KVFetcher:
    """Fetches what this worker's cache lacks.

    `address`: its receiver's. `stuck`: why the worker cannot go on, or "".
    """

    def __init__(
        self, engine: EnginePort, receiver: KVLandings, link_to: LinkTo, *, address: str, new_id: Callable[[], str],
        tiers: KVTiers | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._receiver, self._link_to, self._tiers = engine, receiver, link_to, tiers
        self._address, self._new_id = address, new_id
        self._under_way: set[str] = set()
        self.stuck = ""

    def transfer_ids(self) -> set[str]:
        return set(self._under_way)

    async def complete(self, request: Request, holder: Holder | None, timeout_s: float) -> int:
        """Caches what `holder` and the tiers have of the prompt. Returns the number of tokens that the holder sent."""
        if self._tiers is not None:
            await self._tiers.restore(request, timeout_s)
        return await self.fetch(request, holder, timeout_s) if holder else 0

    async def fetch(self, request: Request, holder: Holder, timeout_s: float) -> int:
        """Fetches the prompt's missing blocks. Returns the number of tokens fetched; 0 if the fetch failed."""
        chain, transfer_id = block_chain(self._engine.engine.layout, request), self._new_id()
        room = await at_once(self._engine, transfer_id, lambda engine: _expect(engine, transfer_id, chain))
        if room is None:
            return 0
        with tracer.start_as_current_span("kv.fetch") as span:
            num_blocks = await self._landed(transfer_id, chain, room, holder, min(timeout_s, FETCH_S))
            span.set_attributes(
                {
                    "kv.transfer.peer": holder.peer.worker_id,
                    "kv.transfer.peer_incarnation": holder.peer.incarnation,
                    "kv.transfer.blocks": num_blocks,
                    "kv.transfer.bytes": self._engine.engine.layout.moved_bytes(num_blocks),
                }
            )
            if not num_blocks:
                span.set_attribute(TRUNCATED, True)
        return num_blocks * self._engine.engine.layout.block_size

    async def _landed(
        self, transfer_id: str, chain: Sequence[bytes], room: ExpectedBlocks, holder: Holder, timeout_s: float
    ) -> int:
        """Runs one transfer into `room`. Returns the number of blocks that have arrived and are cached."""
        num_cached, block_ids, places = room
        num_blocks, why = 0, ""
        loop = asyncio.get_running_loop()
        landed: asyncio.Future[tuple[int, str]] = loop.create_future()
        self._under_way.add(transfer_id)
        try:
            async with asyncio.timeout(timeout_s):
                self._receiver.expect(
                    transfer_id, block_ids=block_ids, first_block=0, timeout_s=timeout_s,
                    on_commit=lambda *sent: _soon(loop, _settle, landed, self._num_sent(len(block_ids), *sent), ""),
                    on_abort=lambda code, reason: _soon(loop, _settle, landed, 0, f"{code}: {reason}"),
                    sender=holder.peer.incarnation, may_be_less=True, places=places,
                )  # fmt: skip
                link = await self._link_to(holder.peer, holder.address)
                link.fetch(Fetch.of(transfer_id, self._address, timeout_s, chain[1 + num_cached :]))
                num_blocks, why = await landed
        except TimeoutError:
            why = f"it has not come in {timeout_s} s"
        except TransferError as error:
            why = str(error)
        finally:
            # The transfer has ended: nothing writes to the blocks any more.
            if landed.done() and not landed.cancelled():
                self._end(transfer_id, num_cached, num_blocks)
            else:
                give_up(self._engine, transfer_id)
                fence = self._receiver.cancel(transfer_id)
                fence.add_done_callback(lambda done: self._end(transfer_id, num_cached, 0))
                loop.call_later(FENCE_WAIT_S, self._look_at_fence, transfer_id)
        if not num_blocks:
            log.info("not fetched", holder=holder.peer.worker_id, reason=why or "it has none of it")
        return num_blocks

    def _end(self, transfer_id: str, num_cached: int, num_blocks: int) -> None:
        """Ends a transfer, once nothing writes to its blocks any more. Runs on any thread."""
        self._under_way.discard(transfer_id)
        land(self._engine, transfer_id, num_cached, num_blocks)

    def _look_at_fence(self, transfer_id: str) -> None:
        if transfer_id in self._under_way:
            self.stuck = f"transfer {transfer_id} is still being written after {FENCE_WAIT_S} s"

    def _num_sent(self, most: int, payload: bytes, num_bytes: int) -> int:
        """Returns how many of `most` blocks have come, which the lender says, for of layers with a window fewer bytes
        come; 0 if what it says cannot be so."""
        layout = self._engine.engine.layout
        said = int.from_bytes(payload[:4]) if payload else num_bytes // layout.whole_block_bytes
        return said if said <= most and layout.moved_bytes(said) == num_bytes else 0


class KVLender:
    """Pushes blocks to workers that fetch them: what is cached, and what `tiers` bring back. `concurrent`: on threads,
    as a push may wait for its link.
    """

    def __init__(
        self, engine: EnginePort, link_to: LinkTo, *, new_id: Callable[[], str], now: Callable[[], float],
        concurrent: bool, tiers: KVTiers | None = None,
    ) -> None:  # fmt: skip
        self._engine, self._link_to, self._new_id, self._now, self._tiers = engine, link_to, new_id, now, tiers
        self._loop = asyncio.get_running_loop()
        self._threads = WorkThreads("kv-lend", LENDING_THREADS) if concurrent else None
        self._lending: dict[str, asyncio.Task[None]] = {}
        self._pushing: set[str] = set()
        if self._threads:
            self._threads.start()

    def transfer_ids(self) -> set[str]:
        """Returns the ids of the pushes that are not committed yet."""
        return set(self._pushing)

    @property
    def num_lending(self) -> int:
        return len(self._lending)

    def asked(self, peer: LinkPeer, fetch: Fetch) -> None:
        """Starts to lend the blocks that a peer asks for; from any thread."""
        _soon(self._loop, self._start, peer, fetch)

    async def close(self) -> None:
        for task in self._lending.values():
            task.cancel()
        await asyncio.gather(*self._lending.values(), return_exceptions=True)
        if self._threads:
            self._threads.close()

    def _start(self, peer: LinkPeer, fetch: Fetch) -> None:
        if len(self._lending) >= MAX_LENT:
            log.info("not lent: too many ask", peer=peer.worker_id)
            return
        name = self._new_id()
        task = self._lending[name] = asyncio.create_task(self._lend(name, peer, fetch))
        task.add_done_callback(partial(self._lent, name))

    def _lent(self, name: str, task: asyncio.Task[None]) -> None:
        del self._lending[name]
        error = None if task.cancelled() else task.exception()
        if isinstance(error, TransferError | TimeoutError | EngineDied):
            log.info("not lent", reason=str(error) or "it took too long")
        elif error is not None:
            log.error("blocks could not be lent", exc_info=error)

    async def _lend(self, name: str, peer: LinkPeer, fetch: Fetch) -> None:
        names, timeout_s = fetch.block_names(), min(fetch.timeout_ms / 1000, FETCH_S)
        if self._tiers is not None:
            await self._tiers.restore_chain([UNKNOWN, *names], timeout_s / 2)
        lent = await at_once(self._engine, name, lambda engine: engine.moving.lend(name, names))
        try:
            async with asyncio.timeout(timeout_s):
                link = await self._link_to(peer, fetch.address)
                await self._push(link, fetch.transfer_id, lent, timeout_s)
        finally:
            release(self._engine, name)

    async def _push(self, link: Link, transfer_id: str, lent: LentBlocks, timeout_s: float) -> None:
        """Pushes blocks and waits until the peer has verified them.

        Once this returns or raises, they may be overwritten.
        """
        layers, blocks = self._engine.engine.kv_cache, lent.blocks
        windows = self._engine.engine.layout.windows
        first_near = windows.first_moved(0, len(blocks)) if windows else 0
        push = link.begin(
            transfer_id, first_block=0, num_blocks=len(blocks), num_layers=len(layers), timeout_s=timeout_s,
            source=KVSource.CACHE,
        )  # fmt: skip
        self._pushing.add(transfer_id)

        def push_all() -> Future[None]:
            for layer, kv in enumerate(layers):
                if blocks and windows and layer in windows.layers:
                    push.push(layer, first_near, lent.places[first_near:], kv)
                elif blocks:
                    push.push(layer, 0, blocks, kv)
            return push.commit(len(blocks).to_bytes(4))

        started = self._now()
        try:
            pushing = self._threads.run(push_all) if self._threads else None
            committed = await asyncio.shield(pushing) if pushing else push_all()
            self._pushing.discard(transfer_id)
            await asyncio.wrap_future(committed)
        except BaseException:
            push.abort("the lender gave it up")
            if pushing:
                await asyncio.wait([pushing])  # the abort ends the thread's push
            raise
        finally:
            self._pushing.discard(transfer_id)
        if blocks:
            num_tokens = len(blocks) * self._engine.engine.layout.block_size
            self._engine.rates.moved(link.remote.worker_id, num_tokens, self._now() - started)


def _expect(engine: Engine, transfer_id: str, chain: Sequence[bytes]) -> ExpectedBlocks | None:
    return engine.moving.expect(transfer_id, chain, engine.stats().num_running)


def _settle(landed: asyncio.Future[tuple[int, str]], num_blocks: int, error: str) -> None:
    if not landed.done():
        landed.set_result((num_blocks, error))


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    loop.call_soon_threadsafe(callback, *arguments)
