"""Shapes of traffic that a router meets, made from a seed: requests as the trace has them, with other habits.

unique      prompts that share nothing
agents      conversations of many turns; each turn's prompt is all before it, an answer and long tool output
documents   questions about a few long documents that many share
bursts      ten at a time behind one of a few system prompts
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from itertools import accumulate, count, islice

from benchmarks.traffic.mooncake import BLOCK, TraceRequest

Prompts = Iterator[tuple[tuple[int, ...], int]]  # names of a prompt's blocks, and tokens to write


def shaped(name: str, num_requests: int, per_second: float, seed: int = 1) -> list[TraceRequest]:
    """`num_requests` of a shape, arriving at random `per_second` on average (a burst's together)."""
    dice = random.Random(seed)
    prompts = list(islice(SHAPES[name](dice), num_requests))
    together = BURST if name == "bursts" else 1
    gaps = [dice.expovariate(per_second / together) if i % together == 0 else 0.0 for i in range(num_requests)]
    return [
        TraceRequest(at, len(blocks) * BLOCK, new_tokens, blocks)
        for at, (blocks, new_tokens) in zip(accumulate(gaps), prompts, strict=True)
    ]


def _unique(dice: random.Random) -> Prompts:
    names = count()
    while True:
        yield tuple(islice(names, dice.randint(4, 50))), 16


def _agents(dice: random.Random) -> Prompts:
    names, agents = count(), list[list[int]]()
    while True:
        agents = [agent for agent in agents if len(agent) < 300]
        while len(agents) < 24:
            agents.append(list(islice(names, 8)))
        agent = dice.choice(agents)
        agent.extend(islice(names, dice.choice((2, 4, 40))))
        yield tuple(agent), 16


def _documents(dice: random.Random) -> Prompts:
    names = count()
    documents = [list(islice(names, dice.randint(150, 300))) for _ in range(40)]
    while True:
        yield (*dice.choice(documents), *islice(names, 4)), 16


BURST = 10


def _bursts(dice: random.Random) -> Prompts:
    names = count()
    systems = [list(islice(names, 60)) for _ in range(6)]
    while True:
        system = dice.choice(systems)
        for _ in range(BURST):
            yield (*system, *islice(names, dice.randint(4, 30))), 16


SHAPES: dict[str, Callable[[random.Random], Prompts]] = {
    "unique": _unique,
    "agents": _agents,
    "documents": _documents,
    "bursts": _bursts,
}
