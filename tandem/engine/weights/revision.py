"""The revision of a model's weights: a hash of every byte of them, made by a thread while they are loaded.

hash   one file behind the other, from its start; it is faster than loading, so it is the one that waits for the disk
load   meanwhile, out of the page cache
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
# What says how the bytes of weights are read.
BESIDE_WEIGHTS = ("config.json", TENSORS_FILE)


def weights_revision(path: Path, shards: list[Path], stop: Event | None = None) -> str:
    """32 hex digits: equal on every machine, others for any other byte of the weights of the folder at `path`.

    Args:
        stop: nobody asks any more.

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
    """`weights_revision`, while the body runs; given up where the body fails."""
    stop = Event()
    with ThreadPoolExecutor(1, "weights-revision") as thread:
        try:
            yield thread.submit(weights_revision, path, shards, stop)
        finally:
            stop.set()
