"""A rank beside the leader: it loads its shard and computes what the leader says, until it is ended.

python -m tandem.engine.loading.rank < job        the leader starts it (parallel/ranks.py)
"""

from __future__ import annotations

import pickle
import sys
import threading
from collections.abc import Callable

import torch

from tandem.engine.forward import Forward
from tandem.engine.kernels import load_library
from tandem.engine.loading.jobs import RankJob
from tandem.engine.loading.loaded import load_shard, shared_kv_cache
from tandem.engine.parallel import (
    BEAT_S,
    AdapterViews,
    RankExchange,
    RankMemory,
    SharedMemory,
    StepMessage,
    read_message,
)  # fmt: skip


def serve(job: RankJob, memory: RankMemory, look: Callable[[], None], ended: threading.Event) -> None:
    """Loads the rank's shard, meets the others, and computes each step that the leader says, until `look` raises."""
    shard = job.shard
    exchange = RankExchange(memory.exchange, job.rooms, shard.rank, shard.ranks, look)
    exchange.beat()
    threading.Thread(target=_beat, args=(exchange, ended), name=f"rank-{shard.rank}-beats", daemon=True).start()
    kv_cache = shared_kv_cache(job.layout, job.num_blocks, memory.kv)
    library = load_library() if job.with_kernels else None
    if job.with_kernels and library is None:
        raise RuntimeError("the leader computes with compiled kernels, which this rank cannot load")
    loaded = load_shard(job.config, job.model, job.layout, shard, exchange, library)
    forward = loaded.forward(kv_cache, job.threads)
    exchange.meet()
    with torch.inference_mode():
        _compute(forward, exchange)


def _compute(forward: Forward, exchange: RankExchange) -> None:
    adapters, hidden = AdapterViews(), torch.empty(0)
    while True:
        message = read_message(exchange.hear())
        if isinstance(message, StepMessage):
            hidden = forward(adapters.step(message))
        else:
            forward.logits(hidden, message.rows)


def _beat(exchange: RankExchange, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        exchange.beat()


def main() -> None:
    job, fds, sizes = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(job.threads)
    memory = RankMemory(*(SharedMemory(fd, size) for fd, size in zip(fds, sizes, strict=True)))
    serve(job, memory, lambda: None, threading.Event())


if __name__ == "__main__":
    main()
