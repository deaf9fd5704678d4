"""Ranks as threads of one process, which share memory as processes do."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tandem.engine import Engine, EngineConfig
from tandem.engine.loading.rank import serve
from tandem.engine.parallel import RankMemory


class RankEnded(Exception):
    pass


class RankThread:
    """A rank in a thread, which ends when it next waits for others."""

    def __init__(self, job: Any, memory: RankMemory) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(job, memory), daemon=True)
        self._thread.start()

    def status(self) -> int | None:
        return None if self._thread.is_alive() else 1

    def kill(self) -> None:
        self._end.set()
        self._thread.join(30)

    def _run(self, job: Any, memory: RankMemory) -> None:
        with suppress(RankEnded):
            serve(job, memory, self._look, self._end)

    def _look(self) -> None:
        if self._end.is_set():
            raise RankEnded


def ranked_engine(path: Path, ranks: int, **config: Any) -> Engine:
    """Returns an engine as tiny.make_engine makes it, of so many ranks."""
    settings = {"dtype": "float32", "num_blocks": 64, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 8}
    chosen = EngineConfig(path, "tiny", **{**settings, **config, "tensor_parallel": ranks})
    return Engine(chosen, now=time.monotonic, start_rank=RankThread)
