"""How fast KV blocks go from one process to another, beside memcpy of as many bytes in the same run.

    this process                              a process of its own
    cache -> gather, sum -> arena or socket -> copy to the cache, sum -> commit -> ack

Every checksum is taken and verified. A push is one layer of `push_tokens` tokens, and one frame where it fits. Blocks
lie in runs, as a block pool gives them at first, or scattered, each somewhere else on both sides: the worst there is.
memcpy: one thread, between two arrays of as many bytes, more than any cache holds.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import torch

from benchmarks.models import Shape
from tandem.transfer import Link, LinkPeer, LocalPeer, Receiver, Sender

BLOCK_SIZE = 16
ORDERS = ("in runs", "scattered")
PREFILL, DECODE = LinkPeer("prefill", "p", "layout"), LinkPeer("decode", "d", "layout")
BOUND_S = 60.0


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Medians: GB/s of a transfer and of memcpy, and seconds until one layer of a prompt is there and acknowledged."""

    transport: str
    order: str
    push_tokens: int
    gb_s: float
    memcpy_gb_s: float
    layer_s: float

    @property
    def ratio(self) -> float:
        return self.gb_s / self.memcpy_gb_s


def bandwidth(
    shape: Shape,
    transport: str,
    order: str,
    *,
    num_bytes: int,
    push_tokens: int,
    layer_blocks: int,
    rounds: int,
    device: str = "cpu",
) -> Bandwidth:
    """Moves `num_bytes` of the shape's KV `rounds` times, each time beside a memcpy; a round that counts not first."""
    cache = kv_cache(shape, num_bytes, device)
    rates: list[tuple[float, float]] = []
    with linked(shape, transport, order, num_bytes, device) as (link, pipe):
        for name in range(rounds + 1):
            seconds = moved(link, pipe, cache, order, push_tokens, str(name))
            rates.append((num_bytes / 1e9 / seconds, memcpy_gb_s(num_bytes)))
        layer_s = statistics.median(_probed(link, layer_blocks * cache[0][0].nbytes) for _ in range(20))
    ours, memcpy = (statistics.median(rate) for rate in zip(*rates[1:], strict=True))
    return Bandwidth(transport, order, push_tokens, ours, memcpy, layer_s)


def _probed(link: Link, num_bytes: int) -> float:
    return link.probe(num_bytes, timeout_s=BOUND_S).result(BOUND_S)


def kv_cache(shape: Shape, num_bytes: int, device: str = "cpu") -> list[torch.Tensor]:
    """A layer's (num_blocks, 2, kv_heads, block_size, head_dim) for each layer, `num_bytes` in all at most."""
    block = (2, shape.kv_heads, BLOCK_SIZE, shape.hidden // shape.heads)
    num_blocks = num_bytes // (shape.layers * 2 * int(np.prod(block)))
    return [torch.ones(num_blocks, *block, dtype=torch.bfloat16, device=device) for _ in range(shape.layers)]


def block_ids(order: str, num_blocks: int, seed: int) -> list[int]:
    """order: one of ORDERS."""
    if order == "in runs":
        return list(range(num_blocks))
    ids: list[int] = np.random.default_rng(seed).permutation(num_blocks).tolist()
    return ids


def moved(
    link: Link, pipe: Connection, cache: Sequence[torch.Tensor], order: str, push_tokens: int, name: str
) -> float:
    """Seconds from the first frame until the receiver has verified the last."""
    num_blocks, step = len(cache[0]), push_tokens // BLOCK_SIZE
    pipe.send(name)
    pipe.recv()
    here = block_ids(order, num_blocks, seed=1)
    start = time.perf_counter()
    push = link.begin(name, first_block=0, num_blocks=num_blocks, num_layers=len(cache), timeout_s=BOUND_S)
    for first in range(0, num_blocks, step):
        for layer, kv in enumerate(cache):
            push.push(layer, first, here[first : first + step], kv)
    push.commit(b"").result(BOUND_S)
    return time.perf_counter() - start


def memcpy_gb_s(num_bytes: int) -> float:
    """The best of three: one thread, memory to memory."""
    source, target = np.ones(num_bytes, np.uint8), np.ones(num_bytes, np.uint8)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        target.data[:] = source.data
        seconds.append(time.perf_counter() - start)
    return num_bytes / 1e9 / min(seconds)


@contextmanager
def linked(
    shape: Shape, transport: str, order: str, num_bytes: int, device: str = "cpu"
) -> Iterator[tuple[Link, Connection]]:
    """A link to a receiver in a process of its own, and the pipe that tells it which transfer to expect."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_receive, args=(theirs, shape, transport, order, num_bytes, device), daemon=True)
    process.start()
    sender = Sender(LocalPeer(PREFILL), transports=(transport,))
    try:
        if not ours.poll(BOUND_S):
            raise TimeoutError("the receiving process did not start")
        yield sender.open_link(DECODE, ours.recv(), timeout_s=BOUND_S).result(BOUND_S), ours
    finally:
        sender.close()
        ours.send("")
        process.join(BOUND_S)


def _receive(pipe: Connection, shape: Shape, transport: str, order: str, num_bytes: int, device: str) -> None:
    torch.set_num_threads(1)
    cache = kv_cache(shape, num_bytes, device)
    receiver = Receiver(LocalPeer(DECODE), cache, host="127.0.0.1", transports=(transport,))
    pipe.send(receiver.address)
    while name := pipe.recv():
        receiver.expect(
            name, block_ids=block_ids(order, len(cache[0]), seed=2), first_block=0, timeout_s=BOUND_S,
            on_commit=lambda *_: None, on_abort=lambda *_: None,
        )  # fmt: skip
        pipe.send(name)
    receiver.close()
