"""The revision of a model's weights: a hash of every byte of them, made by a thread while they are loaded.

hash   one file after the other, each from its start; hashing is faster than loading, so it is what waits for the disk
load   meanwhile, from the page cache that hashing has filled
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import Event

from xxhash import xxh3_128

from tandem.checkpoints import TENSORS_FILE

CHUNK = 2**20
# The files that determine how the bytes of weights are read.
BESIDE_WEIGHTS = ("config.json", TENSORS_FILE)


def weights_revision(path: Path, shards: list[Path], stop: Event | None = None) -> str:
    """Returns a hash, 32 hex digits, of all bytes of the weights in the folder at `path`; equal on every machine.

    Args:
        stop: once set, the result is no longer wanted and hashing ends early.

    Raises:
        OSError: a file cannot be read.
    """
    beside = [file for name in BESIDE_WEIGHTS if (file := path / name).is_file()]
    digest, buffer = xxh3_128(), memoryview(bytearray(CHUNK))
    for file in (*beside, *shards):
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb", buffering=0) as opened:
            while (count := opened.readinto(buffer)) and not (stop and stop.is_set()):
                digest.update(buffer[:count])
    return digest.hexdigest()


@contextmanager
def hashing(path: Path, shards: list[Path]) -> Iterator[Future[str]]:
    """Computes `weights_revision` in a thread while the body runs; stops hashing if the body ends first."""
    stop = Event()
    with ThreadPoolExecutor(1, "weights-revision") as thread:
        try:
            yield thread.submit(weights_revision, path, shards, stop)
        finally:
            stop.set()
