"""The leader's side of loading: it starts the other ranks, loads its own shard meanwhile, and waits for theirs."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from tandem.engine.forward import Taps
from tandem.engine.kv import KVLayout
from tandem.engine.loading.jobs import RankJob
from tandem.engine.loading.loaded import load_shard, shard_kernels, shared_kv_bytes, shared_kv_cache
from tandem.engine.models import ModelConfig
from tandem.engine.parallel import (
    RankDied,
    RankedForward,
    RankExchange,
    RankMemory,
    Ranks,
    Rooms,
    Shard,
    SharedMemory,
    StartRank,
)
from tandem.engine.types import EngineConfig, Progress


class Led(NamedTuple):
    """A forward pass by all ranks, the KV cache that they share, and the ranks beside the leader. `library`: the
    compiled kernels, if ranks compute with them."""

    forward: RankedForward
    kv_cache: list[Tensor]
    ranks: Ranks
    library: ctypes.CDLL | None


def lead(
    config: EngineConfig, model: ModelConfig, layout: KVLayout, num_blocks: int, start: StartRank, taps: Taps,
    on_progress: Progress | None,
) -> Led:  # fmt: skip
    """Loads a model among `config.tensor_parallel` ranks. Raises ValueError naming what is wrong."""
    count = config.tensor_parallel
    most_blocks = min(num_blocks, -(-model.max_model_len // config.block_size))
    rooms = Rooms.of(model, count, config.max_num_batched_tokens, most_blocks)
    memory = RankMemory(SharedMemory.new(rooms.size), SharedMemory.new(shared_kv_bytes(layout, num_blocks)))
    threads = max(1, torch.get_num_threads() // count)
    exchange = RankExchange(memory.exchange, rooms, 0, count, lambda: ranks.check())
    library = shard_kernels(config, model, layout)
    parts = config, model, layout, num_blocks, rooms, threads, library is not None
    jobs = [RankJob(Shard(rank, count), *parts) for rank in range(1, count)]
    ranks = Ranks([start(job, memory) for job in jobs], exchange, memory)
    try:
        torch.set_num_threads(threads)
        kv_cache = shared_kv_cache(layout, num_blocks, memory.kv)
        loaded = load_shard(config, model, layout, Shard(0, count), exchange, library, on_progress)
        forward = loaded.forward(kv_cache, threads, taps)
        exchange.meet()
    except RankDied as died:
        ranks.close()
        raise ValueError(f"tensor_parallel: {died} while it loaded") from None
    except BaseException:
        ranks.close()
        raise
    return Led(RankedForward(forward, loaded.model, exchange), kv_cache, ranks, library)
