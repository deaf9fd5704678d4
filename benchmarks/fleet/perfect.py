"""A router with perfect knowledge, simulated: what prefix hits could be, given the workers' caches.

1 know     at a request's arrival, to the block and at once: what every worker's cache holds, and its backlog of tokens
2 choose   the worker with the least (tokens to prefill + `backlog_weight` * backlog); of equals, the longest unchosen
3 prefill  its cache now holds the prompt's full blocks; the least recently used ones beyond its capacity are gone

It never sees a stale or a lost message, decides in no time and minds no decode worker.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.traffic import BLOCK, TraceRequest, tokens_of

BACKLOG_WEIGHTS = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)


@dataclass(slots=True)
class SimulatedWorker:
    """A prefill worker: an LRU cache of `num_blocks` blocks, and one queue read at `tokens_per_s`."""

    num_blocks: int
    tokens_per_s: float
    cache: OrderedDict[int, None] = field(default_factory=OrderedDict)
    free_at: float = 0.0
    chosen: int = -1

    def backlog(self, now: float) -> float:
        return max(0.0, self.free_at - now) * self.tokens_per_s

    def cached_tokens(self, request: TraceRequest) -> int:
        """As an engine counts: whole blocks from the first on, and at least one token left to compute."""
        found = 0
        for block in request.blocks[: (request.prompt_tokens - 1) // BLOCK]:
            if block not in self.cache:
                break
            found += 1
        return found * BLOCK

    def read(self, request: TraceRequest, turn: int) -> int:
        """Returns how many of its tokens were cached."""
        cached = self.cached_tokens(request)
        self.free_at = max(self.free_at, request.at) + (request.prompt_tokens - cached) / self.tokens_per_s
        self.chosen = turn
        for block in reversed(request.full_blocks):  # the ends of chains go first
            self.cache[block] = None
            self.cache.move_to_end(block)
        while len(self.cache) > self.num_blocks:
            self.cache.popitem(last=False)
        return cached


def hit_rate(requests: Sequence[TraceRequest], workers: list[SimulatedWorker], backlog_weight: float) -> float:
    """Share of all prompt tokens that were cached where they were sent."""
    cached = 0
    for turn, request in enumerate(requests):

        def cost(worker: SimulatedWorker, request: TraceRequest = request) -> tuple[float, int]:
            left = request.prompt_tokens - worker.cached_tokens(request)
            return left + backlog_weight * worker.backlog(request.at), worker.chosen

        cached += min(workers, key=cost).read(request, turn)
    return cached / tokens_of(requests)


def perfect_hit_rate(requests: Sequence[TraceRequest], num_workers: int, num_blocks: int, tokens_per_s: float) -> float:
    """The best over BACKLOG_WEIGHTS."""
    return max(
        hit_rate(requests, [SimulatedWorker(num_blocks, tokens_per_s) for _ in range(num_workers)], weight)
        for weight in BACKLOG_WEIGHTS
    )


def pooled_hit_rate(requests: Sequence[TraceRequest], num_blocks: int) -> float:
    """One worker with all caches as one: no router can do better for long."""
    return hit_rate(requests, [SimulatedWorker(num_blocks, 1.0)], 0.0)
