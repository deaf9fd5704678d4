"""A worker's disk tier: real files, which outlive its process. Their disk may be slow, fail, lose, damage,
reorder or repeat them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from tandem.engine import KVLayout
from tandem.tiers import BlockFiles
from tandem.tiers.block_files import HEADER
from tandem.tiers.kept import KeptBlock

# What becomes of an operation: "" or one of the kinds of faults.
Strike = Callable[[], str]


class SimulatedDisk:
    """BlockFiles under `folder`, of up to `num_blocks` blocks; `strike` is asked before one is read or written.

    What is reordered is written behind the next write that nothing strikes, the last first; what is repeated, again.
    """

    def __init__(self, folder: Path, layout: KVLayout, num_blocks: int, strike: Strike) -> None:
        block_bytes = layout.block_bytes * layout.num_layers
        budget_bytes = num_blocks * (HEADER.size + block_bytes)
        self._files = BlockFiles(folder, layout.hash, block_bytes=block_bytes, budget_bytes=budget_bytes)
        self._strike, self.size, self.block_bytes = strike, num_blocks, self._files.block_bytes
        self.gone = self._files.gone
        self._late: list[tuple[bytes, bytes, bytes]] = []  # names, owners and bytes that are still to be written

    @property
    def num_damaged(self) -> int:
        return self._files.num_damaged

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._files)

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    @property
    def counts(self) -> Mapping[bytes, int]:
        return self._files.counts

    def write(self, name: bytes, owner: bytes, block: memoryview) -> None:
        kind = self._struck(name, owner)
        if kind in ("disk-reorder", "disk-repeat"):
            self._late.append((name, owner, bytes(block)))
        if kind != "disk-reorder":
            self._files.write(name, owner, block)
        if kind == "disk-lose":
            self._files._path(KeptBlock(owner, name)).unlink()
        while self._late and not kind:
            late, of, written = self._late.pop()
            self._files.write(late, of, memoryview(written))

    def read(self, name: bytes, block: memoryview) -> bool:
        if owner := self._files._kept.owner(name):
            self._struck(name, owner)
        return self._files.read(name, block)

    def touch(self, names: Iterable[bytes]) -> None:
        self._files.touch(names)

    def expire(self, most: int) -> int:
        return self._files.expire(most)

    def drop(self, owner: bytes | None) -> int:
        return self._files.drop(owner)

    def pin(self, owner: bytes, seconds: float) -> None:
        self._files.pin(owner, seconds)

    def close(self) -> None:
        self._files.close()

    def _struck(self, name: bytes, owner: bytes) -> str:
        """Strikes the block's file. Returns the kind of fault, or "".

        Raises:
            OSError: the disk fails.
        """
        kind, path = self._strike(), self._files._path(KeptBlock(owner, name))
        if kind == "disk-fail":
            raise OSError("the disk fails")
        if kind == "disk-lose":
            path.unlink(missing_ok=True)
        if kind == "disk-damage" and path.exists():
            block = bytearray(path.read_bytes())
            block[-1 - len(self._files) % len(block)] ^= 4
            path.write_bytes(block)
        return kind
