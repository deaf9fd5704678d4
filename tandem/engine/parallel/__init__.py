"""Tensor parallelism: the ranks of an engine share each layer's weights. The engine's build and its ranks may enter.

    leader (rank 0)   step ─ message ──> ranks 1 … n-1       in memory that these processes share
    each rank         its heads, its outputs of every linear layer ──meet──> all ranks read the whole

Every linear layer is split by its outputs, never by its inputs, so no sum is split: each number is computed by one
rank, exactly as a single rank would compute it. The KV cache lies in shared memory as that of a single rank would;
each rank reads and writes its own heads there.
"""

from tandem.engine.parallel.exchange import RankExchange, SharedMemory
from tandem.engine.parallel.leader import RankedForward
from tandem.engine.parallel.ranks import (
    BEAT_S,
    NO_RANKS,
    RankDied,
    RankMemory,
    Ranks,
    RunningRank,
    StartRank,
    as_processes,
)
from tandem.engine.parallel.rooms import Rooms
from tandem.engine.parallel.sharded import ShardedDecoder, part_columns
from tandem.engine.parallel.sharding import Shard, check_split
from tandem.engine.parallel.steps import AdapterViews, StepMessage, read_message

__all__ = [
    "BEAT_S",
    "NO_RANKS",
    "AdapterViews",
    "RankDied",
    "RankExchange",
    "RankMemory",
    "RankedForward",
    "Ranks",
    "Rooms",
    "RunningRank",
    "Shard",
    "ShardedDecoder",
    "SharedMemory",
    "StartRank",
    "StepMessage",
    "as_processes",
    "check_split",
    "part_columns",
    "read_message",
]
