"""A cluster on one machine: every service as a process of its own, started, watched and stopped together.

    kvstore (starts redis-server) -> gateway, prefill x n, decode x m

A worker that dies is started again under the same name and a new incarnation; one that keeps dying, or the death of
any other process, ends the cluster with that process's last words.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.clock import Clock
from tandem.local.child import dying_with_parent

STOP_WAIT_S = 10.0
MIN_LIFE_S = 5.0
MAX_QUICK_DEATHS = 3
LAST_LINES = 15


class ProcessFailed(Exception):
    """A process of the cluster ended when it should not have; the message holds its last words."""


@dataclass(slots=True)
class Process:
    """One child process. Its output goes to a log file; its last lines are kept for error messages."""

    name: str
    arguments: Sequence[str]
    log_path: Path
    environment: dict[str, str] = field(default_factory=dict)
    restart: bool = False
    loading: tuple[int, int] = (0, 0)
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=LAST_LINES))
    child: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.child = await asyncio.create_subprocess_exec(
            *dying_with_parent(sys.executable, "-m", *self.arguments),
            env=os.environ | self.environment, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, limit=2**20,
        )  # fmt: skip

    async def run(self) -> int:
        """Copy its output to the log until it ends. Returns the exit status."""
        assert self.child is not None
        assert self.child.stdout is not None
        with self.log_path.open("ab") as log:
            async for line in self.child.stdout:
                log.write(line)
                log.flush()
                self._note(line.decode(errors="replace").rstrip())
        return await self.child.wait()

    def _note(self, line: str) -> None:
        self.last_lines.append(line)
        if '"loading"' in line:
            event = json.loads(line)
            self.loading = (event["done"], event["total"])

    def signal(self, number: int) -> None:
        if self.child is not None and self.child.returncode is None:
            self.child.send_signal(number)

    def kill_group(self) -> None:
        """Whatever it may have left behind, too."""
        if self.child is not None:
            try:
                os.killpg(self.child.pid, signal.SIGKILL)
            except ProcessLookupError:
                return


class Cluster:
    """The processes, in starting order. They are stopped in the opposite order of `stages`."""

    def __init__(self, stages: Sequence[Sequence[Process]], clock: Clock, tell: Callable[[str], None]) -> None:
        self._stages = stages
        self._clock = clock
        self._tell = tell
        self._watchers: list[asyncio.Task[None]] = []
        self._stopping = False

    @property
    def processes(self) -> list[Process]:
        return [process for stage in self._stages for process in stage]

    async def start(self, started: Callable[[int], asyncio.Future[None] | asyncio.Task[None]] | None = None) -> None:
        """Start each stage; `started(i)` may hold the next one back until stage i is usable."""
        for i, stage in enumerate(self._stages):
            for process in stage:
                await process.start()
                self._watchers.append(asyncio.create_task(self._watch(process)))
            if started is not None:
                await started(i)

    async def ended(self) -> None:
        """Waits for the cluster to break.

        Raises:
            ProcessFailed: always, when it does.
        """
        done, _ = await asyncio.wait(self._watchers, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    async def stop(self) -> None:
        """SIGTERM stage by stage, last started first; what has not ended in time is killed."""
        self._stopping = True
        for stage in reversed(self._stages):
            for process in stage:
                process.signal(signal.SIGTERM)
            await self._wait_for(stage)
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)

    async def _wait_for(self, stage: Sequence[Process]) -> None:
        children = [process.child for process in stage if process.child is not None]
        try:
            async with asyncio.timeout(STOP_WAIT_S):
                await asyncio.gather(*(child.wait() for child in children))
        except TimeoutError:
            self._tell("killing what did not stop in time")
        for process in stage:
            process.kill_group()

    async def _watch(self, process: Process) -> None:
        quick_deaths = 0
        while True:
            born = self._clock.now()
            status = await process.run()
            if self._stopping:
                return
            process.kill_group()
            quick_deaths = quick_deaths + 1 if self._clock.now() - born < MIN_LIFE_S else 0
            words = "\n".join(process.last_lines)
            if not process.restart or quick_deaths >= MAX_QUICK_DEATHS:
                raise ProcessFailed(f"{process.name} ended with status {status}; its last words:\n{words}")
            self._tell(f"{process.name} ended with status {status}; starting it again")
            await process.start()
