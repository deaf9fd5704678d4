"""The ranks beside the leader: starting them, noticing that one has died or stands still, ending them.

A rank shows ten times a second that it is alive (RankExchange.beat). The leader counts only time in which it was awake
itself, so a starved machine is no dead rank.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from tandem.containment import RAISED, OomKills
from tandem.engine.parallel.exchange import RankExchange, SharedMemory
from tandem.process import dying_with_parent

BEAT_S = 0.1
STALLED_S = 1.5  # a rank that has shown no life for so long stands still
AWAKE_S = 0.3  # the most that one look adds to that time
START_S = 600.0  # the longest until a rank's first beat
COUNT_S = 1.0  # the time between two counts of OOM kills
END_S = 5.0


class RankDied(Exception):
    """The error that a rank has ended, or stands still; no step can be computed any more.

    cause: a signal's name, OOM, RAISED, or empty if unknown.
    """

    def __init__(self, message: str, cause: str) -> None:
        super().__init__(message)
        self.cause = cause


class RunningRank(Protocol):
    """A rank that runs."""

    def status(self) -> int | None:
        """Returns the status with which it has ended, as subprocess does; None while it runs."""

    def kill(self) -> None:
        """Ends it, and waits for its end for a bounded time."""


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory that all ranks of an engine share: for their meetings, and the KV cache."""

    exchange: SharedMemory
    kv: SharedMemory


# Starts the rank whose job (anything that can be pickled) it gets, with the memory that it shares.
StartRank = Callable[[Any, RankMemory], RunningRank]


class Ranks:
    """The other ranks of an engine. `check` may be called by several threads."""

    def __init__(
        self, running: Sequence[RunningRank] = (), exchange: RankExchange | None = None,
        memory: RankMemory | None = None, now: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._running, self._exchange, self._memory, self._lock = running, exchange, memory, threading.Lock()
        self._seen, self._quiet_s, self._now, self._looked = [0] * len(running), [0.0] * len(running), now, now()
        self._oom_kills, self._counted = OomKills() if running else None, self._looked
        self._died: tuple[str, str] | None = None

    def check(self) -> None:
        """Raises RankDied if a rank has ended or stands still; the rank is then killed."""
        if self._oom_kills is None:
            return
        with self._lock:
            self._died = self._died or self._look(self._oom_kills)
        if self._died:
            raise RankDied(*self._died)

    def close(self) -> None:
        """Ends the ranks and closes what they share."""
        for rank in self._running:
            rank.kill()
        if self._memory is not None:
            self._memory.exchange.close()
            self._memory.kv.close()

    def _look(self, oom_kills: OomKills) -> tuple[str, str] | None:
        """Returns what has happened to a rank, and the cause, if one is lost."""
        now = self._now()
        awake_s, self._looked = min(now - self._looked, AWAKE_S), now
        if now > self._counted + COUNT_S:
            self._counted = now
            oom_kills.look()
        for i, rank in enumerate(self._running):
            if (status := rank.status()) is not None:
                cause = oom_kills.how_it_died(status) or RAISED
                return f"rank {i + 1} ended with status {status}", cause
            beats = self._exchange.beats(i + 1) if self._exchange else 0
            self._quiet_s[i] = self._quiet_s[i] + awake_s if beats == self._seen[i] else 0.0
            self._seen[i] = beats
            if self._quiet_s[i] > (STALLED_S if beats else START_S):
                rank.kill()
                return f"rank {i + 1} stood still for {self._quiet_s[i]:.1f} s", ""
        return None


NO_RANKS = Ranks()


class RankProcess:
    """A rank in a process of its own, which never outlives this one."""

    def __init__(self, job: Any, memory: RankMemory) -> None:
        self._started = threading.Event()
        self._child: subprocess.Popen[bytes] | None = None
        # A child dies with the thread that started it. This one lives as long as the rank, the caller's perhaps not.
        self._thread = threading.Thread(target=self._run, args=(job, memory), name="rank", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._child is None:
            raise ValueError("tensor_parallel: the process of a rank cannot be started")

    def status(self) -> int | None:
        return self._child.returncode if self._child else None

    def kill(self) -> None:
        if self._child:
            self._child.kill()
        self._thread.join(END_S)

    def _run(self, job: Any, memory: RankMemory) -> None:
        fds = memory.exchange.fd, memory.kv.fd
        sizes = memory.exchange.size, memory.kv.size
        command = dying_with_parent(sys.executable, "-m", "tandem.engine.loading.rank")
        try:
            self._child = child = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=fds)
        finally:
            self._started.set()
        with suppress(BrokenPipeError):  # it has ended already
            child.communicate(pickle.dumps((job, fds, sizes)))
        child.wait()


def as_processes(job: Any, memory: RankMemory) -> RunningRank:
    return RankProcess(job, memory)
