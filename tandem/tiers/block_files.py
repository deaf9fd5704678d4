"""Blocks as files: one file per block, named by its chained hash, so that a look-up finds the right block or none.

    folder/<layout>-<n>/        of one process at a time, by `lock`; the next process of that layout takes it over
        <owner>/ab/cdef…        magic, version, layout, name, owner, length, checksum; then its bytes of all layers
        dropped-0/              what was an owner's, on its way out

A file that is incomplete, or does not match its header or name, is removed and counts as a miss. Files appear by
renaming, without fsync: the checksum finds a file that a power cut has torn. Which blocks go, `KeptBlocks` decides; an
owner's go all at once, by renaming their folder. Used by one thread; `in` and `counts` by any.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from struct import Struct

import structlog
from xxhash import xxh3_64_intdigest

from tandem.block_hash import HASH_BYTES
from tandem.process import WorkThreads
from tandem.tiers.kept import ALL_ALIKE, OWNER_BYTES, KeepRules, KeptBlock, KeptBlocks

MAGIC, VERSION = b"TANDEMKV", 2
HEADER = Struct("<8sII16s16s8sQQ")  # magic, version, 0, layout, name, owner, length, checksum
LOCK, PART, DROPPED = "lock", "part", "dropped-"
# A folder that no process has used for so long is removed, as its model or worker will not come back.
KEEP_S = 7 * 24 * 3600.0
log = structlog.get_logger(__name__)


class BlockFiles:
    """Blocks of one layout in files. `layout_hash`: 32 hex digits. `close` it.

    Raises:
        OSError: the folder cannot be made or written.
        ValueError: the budget is less than one block.
    """

    def __init__(
        self,
        folder: Path,
        layout_hash: str,
        *,
        block_bytes: int,
        budget_bytes: int,
        rules: KeepRules = ALL_ALIKE,
    ) -> None:
        self._layout, self._block_bytes = bytes.fromhex(layout_hash), block_bytes
        self.block_bytes = HEADER.size + block_bytes
        self.size = budget_bytes // self.block_bytes
        if not self.size:
            raise ValueError(f"kv_disk: {budget_bytes} bytes are less than one block of {block_bytes}")
        self.num_damaged = 0
        self._used_at = 0  # the last time stamp given, in ns since 1970
        self._shared_folder = folder
        self._lock, self._folder = _claim(folder, layout_hash)
        self._deleting = WorkThreads("kv-drop", 1)
        self._kept = KeptBlocks(self.size, rules)
        self.gone = self._kept.gone
        self._take_over()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self._kept)

    def __contains__(self, name: bytes) -> bool:
        return name in self._kept

    @property
    def counts(self) -> Mapping[bytes, int]:
        """Returns how many blocks each owner has."""
        return self._kept.counts

    def write(self, name: bytes, owner: bytes, block: memoryview) -> None:
        """Keeps a block, of `block_bytes` bytes.

        Raises:
            OSError: the block was not kept.
        """
        self._unlink(self._kept.make_room(name, owner))
        path, part = self._path(KeptBlock(owner, name)), self._folder / PART
        header = HEADER.pack(MAGIC, VERSION, 0, self._layout, name, owner, len(block), xxh3_64_intdigest(block))
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", buffering=0) as file:
            written = os.writev(file.fileno(), [header, block])
        if written != len(header) + len(block):  # a full disk writes a part, and fails only the next time
            raise OSError(f"{written} bytes of {len(header) + len(block)} were written")
        self._stamp(part)
        part.replace(path)
        self._kept.use(name, owner)

    def read(self, name: bytes, block: memoryview) -> bool:
        """Fills `block`. Returns False, with undefined content, if there is no such block.

        Raises:
            OSError: the disk fails.
        """
        if name not in self._kept or (owner := self._kept.owner(name)) is None:
            return False
        path, header = self._path(KeptBlock(owner, name)), bytearray(HEADER.size)
        try:
            with path.open("rb", buffering=0) as file:
                num_read = os.readv(file.fileno(), [header, block, bytearray(1)])
        except FileNotFoundError:
            self._kept.discard(name)
            return False
        wanted = (MAGIC, VERSION, 0, self._layout, name, owner, len(block), xxh3_64_intdigest(block))
        if num_read != HEADER.size + len(block) or HEADER.unpack(header) != wanted:
            self._kept.discard(name)
            self._remove_damaged(path)
            return False
        return True

    def touch(self, names: Iterable[bytes]) -> None:
        """Marks blocks as used, the last one most recently. The mark outlives the process."""
        for name in names:
            if name in self._kept and (owner := self._kept.owner(name)) is not None:
                self._kept.use(name, owner)
                with suppress(FileNotFoundError):
                    self._stamp(self._path(KeptBlock(owner, name)))

    def expire(self, most: int) -> int:
        """Drops up to `most` blocks that nobody has used for long. Returns how many it has dropped."""
        gone = self._kept.expire(most)
        self._unlink(gone)
        return len(gone)

    def drop(self, owner: bytes | None) -> int:
        """Drops an owner's blocks; None: all. Returns how many there were. None of them is read again, nor by another
        process, as their folder has another name now, here and where no process is at work; the files go later.

        Raises:
            OSError: some could not be dropped.
        """
        gone = self._kept.drop(owner)
        for folder in self._folders():
            for path in _folders_in(folder):
                if path.name == owner.hex() if owner is not None else not path.name.startswith(DROPPED):
                    self._delete(path)
        return len(gone)

    def pin(self, owner: bytes, seconds: float) -> None:
        """Has an owner's blocks go by nobody else's pressure for so long; 0: no longer."""
        self._kept.pin(owner, seconds)

    def close(self) -> None:
        self._deleting.close()
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

    def _unlink(self, gone: Iterable[KeptBlock]) -> None:
        for block in gone:
            self._path(block).unlink(missing_ok=True)

    def _remove_damaged(self, path: Path) -> None:
        self.num_damaged += 1
        log.warning("a KV block on disk is damaged, and is removed", file=str(path))
        path.unlink(missing_ok=True)

    def _path(self, block: KeptBlock) -> Path:
        return self._folder / block.owner.hex() / block.name[:1].hex() / block.name[1:].hex()

    def _folders(self) -> Iterator[Path]:
        """Yields this process's folder, and those of its layout that no process uses, while it holds their locks."""
        yield self._folder
        for other in self._shared_folder.glob(f"{self._layout.hex()}-*"):
            if (other / LOCK).exists() and (lock := _locked(other)) is not None:
                yield other
                os.close(lock)

    def _delete(self, path: Path) -> None:
        """Gives a folder another name at once, and deletes it on a thread of its own."""
        dropped = next(new for number in count() if not (new := path.parent / f"{DROPPED}{number}").exists())
        path.rename(dropped)
        self._deleting.begin(shutil.rmtree, dropped, ignore_errors=True)

    def _take_over(self) -> None:
        """Indexes the blocks that the last process left."""
        found: list[tuple[int, KeptBlock]] = []
        folders = _folders_in(self._folder)
        others = [path for path in folders if _bytes_of(path.name, OWNER_BYTES) is None]
        if any(not path.name.startswith(DROPPED) for path in others):
            log.warning("KV blocks on disk are of an older version, and are removed", folder=str(self._folder))
        for folder in others:
            self._delete(folder)
        for folder in folders:
            if (owner := _bytes_of(folder.name, OWNER_BYTES)) is None:
                continue
            for path in _files(folder):
                stat, name = path.stat(), _bytes_of(path.parent.name + path.name, HASH_BYTES)
                if name is None or stat.st_size != self.block_bytes:
                    self._remove_damaged(path)
                else:
                    found.append((stat.st_mtime_ns, KeptBlock(owner, name)))
        for used_at, block in sorted(found):
            self._unlink(self._kept.make_room(block.name, block.owner))
            self._kept.use(block.name, block.owner, used_at / 1e9)


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


def _folders_in(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if path.is_dir() and not path.is_symlink()]


def _files(folder: Path) -> Iterator[Path]:
    for part in _folders_in(folder):
        yield from (path for path in part.iterdir() if path.is_file())


def _bytes_of(digits: str, length: int) -> bytes | None:
    with suppress(ValueError):
        found = bytes.fromhex(digits)
        return found if len(found) == length else None
    return None
