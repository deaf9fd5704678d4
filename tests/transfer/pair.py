"""A sender and a receiver that meet over one transport, and what the tests ask of them."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tandem.transfer import (
    Link,
    LinkPeer,
    LinkRuntime,
    LocalPeer,
    MemoryNetwork,
    Network,
    Push,
    Receiver,
    Sender,
    SocketNetwork,
)
from tests.transfer.toy import buffers

PREFILL = LinkPeer("prefill-0", "p-1", "layout-a")
DECODE = LinkPeer("decode-0", "d-1", "layout-a")
BLOCK = (2, 2, 4, 8)  # K and V, num_kv_heads, block_size, head_dim
NUM_LAYERS = 3
SOON = 30.0  # by far longer than anything takes on any machine


def until(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    """True if `condition` comes true within `seconds`."""
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


def kv_cache(num_blocks: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_blocks, *BLOCK, generator=generator).to(dtype) for _ in range(NUM_LAYERS)]


class Outcome:
    """How one expected transfer ended: ("commit", payload, bytes) or ("abort", code, reason)."""

    def __init__(self) -> None:
        self._ended: queue.Queue[tuple[object, ...]] = queue.Queue()

    def on_commit(self, payload: bytes, num_bytes: int) -> None:
        self._ended.put(("commit", payload, num_bytes))

    def on_abort(self, code: str, reason: str) -> None:
        self._ended.put(("abort", code, reason))

    def get(self, timeout: float = SOON) -> tuple[object, ...]:
        return self._ended.get(timeout=timeout)

    def silent(self) -> bool:
        return self._ended.empty()


@dataclass
class Pair:
    transport: str
    network: Network
    sender: Sender
    receiver: Receiver
    source: list[torch.Tensor]
    cache: list[torch.Tensor]

    def link(self) -> Link:
        return self.opened(self.sender, DECODE)

    def opened(self, sender: Sender, remote: LinkPeer = DECODE) -> Link:
        return sender.open_link(remote, self.receiver.address, timeout_s=SOON).result(SOON)

    def expect(
        self, name: str, block_ids: Sequence[int], first_block: int = 0, seconds: float = SOON, sender: str = ""
    ) -> Outcome:
        outcome = Outcome()
        self.receiver.expect(
            name, block_ids=block_ids, first_block=first_block, timeout_s=seconds,
            on_commit=outcome.on_commit, on_abort=outcome.on_abort, sender=sender,
        )  # fmt: skip
        return outcome

    def begin(self, name: str, num_blocks: int, first_block: int = 0, seconds: float = SOON) -> Push:
        return self.link().begin(
            name, first_block=first_block, num_blocks=num_blocks, num_layers=NUM_LAYERS, timeout_s=seconds
        )

    def push_all(self, push: Push, first_block: int, block_ids: Sequence[int]) -> None:
        for layer, kv in enumerate(self.source):
            push.push(layer, first_block, block_ids, kv)

    def finish(self, push: Push, here: Sequence[int], layers: Sequence[int] = range(NUM_LAYERS)) -> None:
        """Pushes what is missing of `here` and commits. Raises as they do."""
        for layer in layers:
            push.push(layer, 0, here, self.source[layer])
        push.commit(b"done").result(SOON)

    def landed(self, there: Sequence[int], here: Sequence[int]) -> bool:
        """True if the cache's blocks `there` hold what the source's blocks `here` hold."""
        return all(
            torch.equal(cache[list(there)], source[list(here)])
            for cache, source in zip(self.cache, self.source, strict=True)
        )

    def moves(self, name: str, there: Sequence[int], here: Sequence[int]) -> None:
        """One whole transfer, start to end, arrives."""
        outcome = self.expect(name, there)
        self.finish(self.begin(name, len(there)), here)
        assert outcome.get()[:2] == ("commit", b"done")
        assert self.landed(there, here)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    @classmethod
    def of(cls, transports: Sequence[str]) -> Pair:
        """Both ends prefer these, in this order."""
        network, cache = SocketNetwork(), [torch.zeros_like(layer) for layer in kv_cache(48)]
        sender = Sender(LocalPeer(PREFILL), transports=transports, runtime=LinkRuntime(network))
        receiver = Receiver(
            LocalPeer(DECODE), cache, host="127.0.0.1", transports=transports, runtime=LinkRuntime(network)
        )
        return cls(transports[0], network, sender, receiver, kv_cache(32, seed=1), cache)


Meet = Callable[..., Pair]  # make_pair, with somebody who closes what it made


def network_for(transport: str) -> Network:
    return MemoryNetwork() if transport == "memory" else SocketNetwork()


def make_pair(
    transport: str, *, network: Network | None = None, dtype: torch.dtype = torch.float32, arena_bytes: int = 1 << 20,
    frame_bytes: int = 1 << 16, max_links: int = 8,
) -> Pair:  # fmt: skip
    network = network or network_for(transport)
    cache = [torch.zeros_like(layer) for layer in kv_cache(48, dtype)]
    return Pair(
        transport,
        network,
        Sender(
            LocalPeer(PREFILL),
            transports=(transport,),
            runtime=LinkRuntime(network),
            arena_bytes=arena_bytes,
            frame_bytes=frame_bytes,
        ),
        Receiver(
            LocalPeer(DECODE),
            cache,
            host="127.0.0.1",
            transports=(transport,),
            runtime=LinkRuntime(network),
            max_links=max_links,
        ),
        kv_cache(32, dtype, seed=1),
        cache,
    )


def open_things() -> tuple[int, list[str], list[str]]:
    """Descriptors, shared memory among them, threads of this package, buffers of the toy: what no test leaves."""
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("kv-"))
    return len(os.listdir("/proc/self/fd")), threads, [f"toy {n}" for n in buffers]
