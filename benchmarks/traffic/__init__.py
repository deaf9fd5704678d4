"""Requests as people send them, from a trace or a seed, and their replay over gRPC. Benchmarks of routing may enter."""

from benchmarks.traffic.mooncake import BLOCK, SCALE, TraceRequest, read_trace, tokens_of
from benchmarks.traffic.replaying import TIMEOUT_S, Replayed, replay, replay_through
from benchmarks.traffic.shapes import SHAPES, shaped

__all__ = [
    "BLOCK", "SCALE", "SHAPES", "TIMEOUT_S", "Replayed", "TraceRequest", "read_trace", "replay", "replay_through",
    "shaped", "tokens_of",
]  # fmt: skip
