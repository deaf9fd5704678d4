"""A sender and a receiver on an event loop with virtual time: no thread, and the same again with the same seed."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from concurrent.futures import Future
from typing import Any, TypeVar

import pytest
import torch

from tandem.liveness.silence import LIMIT_S
from tandem.transfer import Link, LinkRuntime, LocalPeer, MemoryNetwork, Receiver, Sender, TransferError
from tandem.transfer.runtime.loop import LoopDriver
from tandem.transfer.runtime.receiver import BEGIN_SECONDS
from tests.transfer.pair import DECODE, NUM_LAYERS, PREFILL, kv_cache
from tests.virtual_time import run

T = TypeVar("T")


class TransferEnds:
    def __init__(self, seed: int = 0, **options: Any) -> None:
        loop = asyncio.get_running_loop()
        seeded = random.Random(seed)
        runtime = LinkRuntime(MemoryNetwork(), LoopDriver(loop), lambda: seeded.getrandbits(63))
        memory = ("memory",)
        self.source, self.cache = kv_cache(32, seed=1), [torch.zeros_like(layer) for layer in kv_cache(48)]
        self.receiver = Receiver(LocalPeer(DECODE), self.cache, host="d", transports=memory, runtime=runtime)
        self.sender = Sender(LocalPeer(PREFILL), transports=memory, runtime=runtime, **options)
        self.log: list[tuple[float, str, object]] = []
        self.loop = loop

    async def link(self) -> Link:
        return await wait(self.sender.open_link(DECODE, self.receiver.address, timeout_s=1.5))

    def expect(self, name: str, blocks: list[int], timeout_s: float = 5.0, sender: str = "") -> None:
        self.receiver.expect(
            name, block_ids=blocks, first_block=0, timeout_s=timeout_s,
            on_commit=lambda payload, size: self.log.append((self.loop.time(), name, (payload, size))),
            on_abort=lambda code, _reason: self.log.append((self.loop.time(), name, code)), sender=sender,
        )  # fmt: skip

    async def move(self, name: str, there: list[int], here: list[int]) -> None:
        link = await self.link()
        push = link.begin(name, first_block=0, num_blocks=len(there), num_layers=NUM_LAYERS, timeout_s=5.0)
        for layer, kv in enumerate(self.source):
            push.push(layer, 0, here, kv)
        await wait(push.commit(name.encode()))

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


async def wait(future: Future[T]) -> T:
    return await asyncio.wrap_future(future)


def test_blocks_move_without_a_thread() -> None:
    async def scene() -> None:
        ends = TransferEnds()
        ends.expect("t", [5, 1, 9])
        await ends.move("t", [5, 1, 9], [2, 0, 7])
        assert all(torch.equal(c[[5, 1, 9]], s[[2, 0, 7]]) for c, s in zip(ends.cache, ends.source, strict=True))
        assert threading.active_count() == threads
        ends.close()

    threads = threading.active_count()
    run(scene)


def test_a_minute_of_traffic_is_the_same_twice_and_takes_no_minute() -> None:
    async def scene() -> list[tuple[float, str, object]]:
        ends, seeded = TransferEnds(seed=7), random.Random(7)
        for number in range(120):
            there, here = seeded.sample(range(48), 6), seeded.sample(range(32), 6)
            ends.expect(f"t{number}", there)
            if number % 10 == 3:
                ends.receiver.cancel(f"t{number}")
            elif number % 10 == 6:
                ends.sender.close_link(DECODE.worker_id, DECODE.incarnation)
            try:
                await ends.move(f"t{number}", there, here)
            except TransferError as error:
                ends.log.append((ends.loop.time(), f"t{number}", error.message))
            await asyncio.sleep(seeded.random())
        ends.close()
        return ends.log

    start = time.process_time()
    first, second = run(scene), run(scene)
    assert first == second
    assert len(first) == 120
    assert first[-1][0] > 50
    assert time.process_time() - start < 30


def test_a_deadline_and_a_silent_peer_end_a_transfer_in_virtual_time() -> None:
    async def scene() -> None:
        ends = TransferEnds()
        link = await ends.link()
        ends.expect("late", [1], timeout_s=3.0)
        link.begin("late", first_block=0, num_blocks=1, num_layers=NUM_LAYERS, timeout_s=30.0)
        await asyncio.sleep(4)
        ((at, name, code),) = ends.log
        assert (name, code) == ("late", "DEADLINE_EXCEEDED")
        assert 3.0 <= at < 3.2
        assert link.healthy  # pings went to and fro
        ends.close()
        assert not link.healthy

    run(scene)


def test_a_push_that_would_have_to_wait_says_so() -> None:
    async def scene() -> None:
        ends = TransferEnds(arena_bytes=kv_cache(1)[0].nbytes)
        ends.expect("t", list(range(40)))
        link = await ends.link()
        push = link.begin("t", first_block=0, num_blocks=1 << 20, num_layers=NUM_LAYERS, timeout_s=5.0)
        with pytest.raises(TransferError, match="RESOURCE_EXHAUSTED"):
            push.push(0, 0, [0] * (1 << 20), ends.source[0])
        ends.close()

    run(scene)


def test_a_named_sender_that_does_not_begin_in_time_ends_its_transfer() -> None:
    """It may have begun it on a link that was lost here before; once it has opened another, that is known soon."""

    async def scene() -> list[tuple[float, str, object]]:
        ends = TransferEnds()
        ends.expect("before", [0], timeout_s=2 * BEGIN_SECONDS, sender=PREFILL.incarnation)
        ends.expect("begun", [2], timeout_s=2 * BEGIN_SECONDS, sender=PREFILL.incarnation)
        ends.expect("any", [3], timeout_s=2 * BEGIN_SECONDS)
        link = await ends.link()
        ends.expect("named", [1], timeout_s=2 * BEGIN_SECONDS, sender=PREFILL.incarnation)
        link.begin("begun", first_block=0, num_blocks=1, num_layers=NUM_LAYERS, timeout_s=2 * BEGIN_SECONDS)
        await asyncio.sleep(BEGIN_SECONDS + 1.0)
        log = list(ends.log)
        ends.close()
        return log

    (soon, *one), (at, *other) = run(scene)
    assert (one, other) == (["before", "UNAVAILABLE"], ["named", "UNAVAILABLE"])
    assert LIMIT_S <= soon < LIMIT_S + 0.2
    assert BEGIN_SECONDS <= at < BEGIN_SECONDS + 0.2
