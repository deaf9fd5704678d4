"""`python -m benchmarks.keeping`: what a tier of each size finds again, by which block it gives up first. Simulated.

Mooncake's trace, or another shape, by one cache: the prompt's blocks that are there up to the first that is not, as a
share of what a cache without an end finds.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Protocol

from rich.console import Console
from rich.table import Table

from benchmarks.traffic import SHAPES, TraceRequest, read_trace, shaped
from tandem.tiers import Worth

SIZES = (0.02, 0.05, 0.1, 0.2, 0.4)
SHAPE_REQUESTS = 2000


class Order(Protocol):
    """Names of a cache, and the one of them that goes first."""

    def __contains__(self, name: bytes) -> bool: ...
    def __len__(self) -> int: ...
    def use(self, name: bytes) -> None: ...
    def pop(self) -> bytes: ...


class Oldest:
    """The name that was used longest ago goes first."""

    def __init__(self) -> None:
        self._held: OrderedDict[bytes, None] = OrderedDict()

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def __len__(self) -> int:
        return len(self._held)

    def use(self, name: bytes) -> None:
        self._held[name] = None
        self._held.move_to_end(name)

    def pop(self) -> bytes:
        return self._held.popitem(last=False)[0]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.keeping", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="mooncake", choices=["mooncake", *SHAPES])
    shape = parser.parse_args().shape
    requests = read_trace(1.0) if shape == "mooncake" else shaped(shape, SHAPE_REQUESTS, 1.0)
    chains = [_names(request) for request in requests]
    footprint = len({name for chain in chains for name in chain})
    endless = found(chains, Oldest(), footprint)
    table = Table("blocks, of all", "longest ago", "worth least")
    for share in SIZES if endless else ():
        size = int(share * footprint)
        shares = [found(chains, order, size) / endless for order in (Oldest(), Worth(size))]
        table.add_row(f"{share:.0%}", *(f"{share:.3f}" for share in shares))
    console = Console(width=120)
    console.print(f"{shape}: {len(chains):,} prompts, {footprint:,} blocks; without an end {endless:.1%} are found")
    console.print(table)


def found(chains: Iterable[Sequence[bytes]], order: Order, size: int) -> float:
    """Share of all blocks that were there when they were asked for."""
    hits = asked = 0
    for chain in chains:
        asked += len(chain)
        hits += next((place for place, name in enumerate(chain) if name not in order), len(chain))
        for name in reversed(chain):  # a chain's end goes before what leads there
            if name not in order and len(order) >= size:
                order.pop()
            order.use(name)
    return hits / max(asked, 1)


def _names(request: TraceRequest) -> list[bytes]:
    return [block.to_bytes(8, "little") for block in request.full_blocks]


if __name__ == "__main__":
    main()
