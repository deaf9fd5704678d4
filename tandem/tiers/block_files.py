"""Blocks as files: one file per block, named by its chained hash, so that a look-up finds the right block or none.

    folder/<layout>-<n>/        of one process at a time, by `lock`; the next process of that layout takes it over
        ab/cdef…                magic, version, layout, name, length, checksum; then the block's bytes of all layers

A file that is incomplete, or does not match its header or name, is removed and counts as a miss. Files appear by
renaming, without fsync: the checksum finds a file that a power cut has torn. Beyond the budget the block of least worth
is dropped. Used by one thread; `in` by any.
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
# A folder that no process has used for so long is removed, as its model or worker will not come back.
KEEP_S = 7 * 24 * 3600.0
log = structlog.get_logger(__name__)


class BlockFiles:
    """Blocks of one layout in files. `layout_hash`: 32 hex digits. `close` it.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: the budget is less than one block.
    """

    def __init__(self, folder: Path, layout_hash: str, *, block_bytes: int, budget_bytes: int) -> None:
        self._layout, self._block_bytes = bytes.fromhex(layout_hash), block_bytes
        most = budget_bytes // (HEADER.size + block_bytes)
        if not most:
            raise ValueError(f"kv_disk: {budget_bytes} bytes are less than one block of {block_bytes}")
        self.num_damaged = 0
        self._used_at = 0  # the last time stamp given, in ns since 1970
        self._lock, self._folder = _claim(folder, layout_hash)
        self._held = Worth(most)
        self._take_over()

    @property
    def size(self) -> int:
        return self._held.size

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._held)

    def __contains__(self, name: bytes) -> bool:
        return name in self._held

    def write(self, name: bytes, block: memoryview) -> None:
        """Keeps a block, of `block_bytes` bytes.

        Raises:
            OSError: the block was not kept.
        """
        while self._held.is_full and name not in self._held:
            self._unlink(self._held.pop())
        path, part = self._path(name), self._folder / PART
        header = HEADER.pack(MAGIC, VERSION, 0, self._layout, name, len(block), xxh3_64_intdigest(block))
        path.parent.mkdir(mode=0o700, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            written = os.writev(file.fileno(), [header, block])
        if written != len(header) + len(block):  # a full disk writes a part, and fails only the next time
            raise OSError(f"{written} bytes of {len(header) + len(block)} were written")
        self._stamp(part)
        part.replace(path)
        self._held.use(name)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fills `block`. Returns False, with undefined content, if there is no such block.

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
        """Marks blocks as used, the last one most recently. The mark outlives the process."""
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
        """Sets a file's time of use, strictly increasing even if the clock stands still."""
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
        """Indexes the blocks that the last process left."""
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
    """Returns the first folder of that layout that no other process uses, and its lock."""
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
    """Returns a descriptor that holds the folder's lock; None if another process holds it."""
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
