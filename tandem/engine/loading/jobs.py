"""The job of a rank, which the leader gives it when it starts."""

from __future__ import annotations

from dataclasses import dataclass

from tandem.engine.kv import KVLayout
from tandem.engine.models import ModelConfig
from tandem.engine.parallel import Rooms, Shard
from tandem.engine.types import EngineConfig


@dataclass(frozen=True)
class RankJob:
    """The part of a rank in an engine. `threads`: those that it computes with;
    `with_kernels`: in compiled kernels, as all ranks do or none."""

    shard: Shard
    config: EngineConfig
    model: ModelConfig
    layout: KVLayout
    num_blocks: int
    rooms: Rooms
    threads: int
    with_kernels: bool
