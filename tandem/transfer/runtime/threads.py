"""The driver of production: a thread for each task."""

from __future__ import annotations

import threading
import time

from tandem.transfer.runtime.driver import Task

JOIN_SECONDS = 5.0


class Threads:
    concurrent = True

    def now(self) -> float:
        return time.monotonic()

    def start(self, task: Task) -> TaskThread:
        thread = TaskThread(task)
        thread.start()
        return thread

    def pause(self, changed: threading.Condition, seconds: float) -> None:
        changed.wait(seconds)


class TaskThread:
    def __init__(self, task: Task) -> None:
        self._task = task
        self._thread = threading.Thread(target=self._run, name=task.name, daemon=True)
        self.start = self._thread.start

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _run(self) -> None:
        while (pause := self._task.step()) is not None:
            if pause > 0 and self._task.idle():
                self._task.wait(pause)
