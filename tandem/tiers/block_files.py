"""Blocks as files: one a block, named by its chained hash, so that what is found is what was asked for, or nothing.

    folder/<layout>-<n>/        of one process at a time, by `lock`; the next one of that layout takes it over
        ab/cdef…                magic, version, layout, name, length, checksum; then the block's bytes of all layers

A file that is not whole, or not what its header or its name says, is removed and is a miss. Files appear by renaming,
and nothing waits for the disk: what a power cut tears, the checksum finds. Beyond the budget the block that is worth
least goes. Used by one thread; `in` by any.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from struct import Struct

import structlog
from xxhash import xxh3_64_intdigest

from tandem.block_hash import HASH_BYTES
from tandem.tiers.worth import Worth

MAGIC, VERSION = b"TANDEMKV", 1
HEADER = Struct("<8sII16s16sQQ")  # magic, version, 0, layout, name, length, checksum
LOCK, PART = "lock", "part"
# A folder that no process has used for so long is removed: its model or its worker is not coming back.
KEEP_S = 7 * 24 * 3600.0
log = structlog.get_logger(__name__)


class BlockFiles:
    """`layout_hash`: 32 hex digits; only blocks of this layout are found. `close` it.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: not one block fits into the budget.
    """

    def __init__(self, folder: Path, layout_hash: str, *, block_bytes: int, budget_bytes: int) -> None:
        self._layout, self._block_bytes = bytes.fromhex(layout_hash), block_bytes
        most = budget_bytes // (HEADER.size + block_bytes)
        if not most:
            raise ValueError(f"kv_disk: {budget_bytes} bytes are less than one block of {block_bytes}")
        self.num_damaged = 0
        self._used_at = 0  # the last one's, in ns since 1970
        self._lock, self._folder = _claim(folder, layout_hash)
        self._held = Worth(most)
        self._take_over()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def write(self, name: bytes, block: memoryview) -> None:
        """Keep a block's bytes, `block_bytes` of them.

        Raises:
            OSError: then it is not kept.
        """
        while self._held.is_full and name not in self._held:
            self._unlink(self._held.pop())
        path, part = self._path(name), self._folder / PART
        header = HEADER.pack(MAGIC, VERSION, 0, self._layout, name, len(block), xxh3_64_intdigest(block))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            written = os.writev(file.fileno(), [header, block])
        if written != len(header) + len(block):  # a full disk takes a part, and says so the next time
            raise OSError(f"{written} bytes of {len(header) + len(block)} were written")
        self._stamp(part)
        part.replace(path)
        self._held.use(name)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fill `block`; False, with anything in it, where this block is not to be had.

        Raises:
            OSError: the disk fails.
        """
        path, header = self._path(name), bytearray(HEADER.size)
        try:
            with path.open("rb", buffering=0) as file:
                num_read = os.readv(file.fileno(), [header, block, bytearray(1)])
        except FileNotFoundError:
            self._held.discard(name)
            return False
        wanted = (MAGIC, VERSION, 0, self._layout, name, len(block), xxh3_64_intdigest(block))
        if num_read != HEADER.size + len(block) or HEADER.unpack(header) != wanted:
            self.num_damaged += 1
            log.warning("a KV block on disk is damaged, and is removed", file=str(path))
            self._remove(name)
            return False
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """They have been used, the last one most recently; the next start knows it, too."""
        for name in names:
            if name in self._held:
                self._held.use(name)
                with suppress(FileNotFoundError):
                    self._stamp(self._path(name))

    def close(self) -> None:
        if self._lock >= 0:
            os.utime(self._lock)
            os.close(self._lock)
        self._lock = -1

    def _stamp(self, path: Path) -> None:
        """The time that the file was used, in order also where the clock stands still for a while."""
        os.utime(path)
        used_at = path.stat().st_mtime_ns
        if used_at <= self._used_at:
            used_at = self._used_at + 1
            os.utime(path, ns=(used_at, used_at))
        self._used_at = used_at

    def _remove(self, name: bytes) -> None:
        self._held.discard(name)
        self._unlink(name)

    def _unlink(self, name: bytes) -> None:
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: bytes) -> Path:
        return self._folder / name[:1].hex() / name[1:].hex()

    def _take_over(self) -> None:
        """Find what the process before left."""
        found = []
        for path in _files(self._folder):
            stat = path.stat()
            if (name := _name_of(path)) and stat.st_size == HEADER.size + self._block_bytes:
                found.append((stat.st_mtime_ns, name))
            else:
                path.unlink()
        for _, name in sorted(found):
            if self._held.is_full:
                self._unlink(self._held.pop())
            self._held.use(name)


def _claim(folder: Path, layout_hash: str) -> tuple[int, Path]:
    """The first folder of that layout that no process has, and the lock on it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for number in count():
        own = folder / f"{layout_hash}-{number}"
        own.mkdir(mode=0o700, exist_ok=True)
        if (lock := _locked(own)) is not None:
            os.utime(lock)
            _remove_forgotten(folder, os.stat(lock).st_mtime - KEEP_S)
            return lock, own
    raise AssertionError("unreachable: numbers do not end")


def _remove_forgotten(folder: Path, before: float) -> None:
    for other in folder.iterdir():
        if not (other / LOCK).exists() or (lock := _locked(other)) is None:
            continue
        if os.stat(lock).st_mtime < before:
            shutil.rmtree(other, ignore_errors=True)
        os.close(lock)


def _locked(folder: Path) -> int | None:
    """A descriptor that holds the folder's lock; None where another process does."""
    lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return lock
    os.close(lock)
    return None


def _files(folder: Path) -> Iterator[Path]:
    for part in folder.iterdir():
        if part.is_dir() and not part.is_symlink():
            yield from (path for path in part.iterdir() if path.is_file())


def _name_of(path: Path) -> bytes | None:
    with suppress(ValueError):
        name = bytes.fromhex(path.parent.name + path.name)
        return name if len(name) == HASH_BYTES else None
    return None
