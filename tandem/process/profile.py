"""A sampling profiler of this process's threads, from within, which makes a file for speedscope.

No other process is needed, so a container that forbids ptrace can be profiled. A sample costs well under a millisecond;
waiting threads are sampled, too, with the place where they wait.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from types import FrameType
from typing import Any

EVERY_S = 0.01
MAX_S = 60.0
MAX_DEPTH = 200
SCHEMA = "https://www.speedscope.app/file-format-schema.json"


class Profiler:
    """Takes profiles, one at a time."""

    def __init__(self) -> None:
        self._running = threading.Lock()

    def profile(self, seconds: float, name: str) -> bytes:
        """Takes samples for `seconds`, and blocks its thread for that time. Returns the profile.

        Raises:
            ValueError: `seconds` is out of range.
            RuntimeError: another profile is being taken.
        """
        if not 0 < seconds <= MAX_S:
            raise ValueError(f"seconds must be above 0 and at most {MAX_S:.0f}, got {seconds}")
        if not self._running.acquire(blocking=False):
            raise RuntimeError("another profile is being taken")
        try:
            return _sampled(seconds, name)
        finally:
            self._running.release()


class _Samples:
    """The sampled stacks of each thread, outermost frame first, as indices into `frames`."""

    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []
        self.threads: dict[int, tuple[list[list[int]], list[float]]] = {}
        self._indices: dict[tuple[str, str, int], int] = {}

    def add(self, thread: int, frame: FrameType | None, weight: float) -> None:
        stack: list[int] = []
        while frame is not None and len(stack) < MAX_DEPTH:
            stack.append(self._index(frame))
            frame = frame.f_back
        samples, weights = self.threads.setdefault(thread, ([], []))
        samples.append(stack[::-1])
        weights.append(weight)

    def _index(self, frame: FrameType) -> int:
        code = frame.f_code
        key = code.co_qualname, code.co_filename, code.co_firstlineno
        if key not in self._indices:
            self._indices[key] = len(self.frames)
            self.frames.append({"name": key[0], "file": key[1], "line": key[2]})
        return self._indices[key]


def _sampled(seconds: float, name: str) -> bytes:
    samples, own, before = _Samples(), threading.get_ident(), time.monotonic()
    end = before + seconds
    while before < end:
        time.sleep(EVERY_S)
        now = time.monotonic()
        for thread, frame in sys._current_frames().items():
            if thread != own:
                samples.add(thread, frame, now - before)
        before = now
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    profiles = [
        {
            "type": "sampled", "name": names.get(thread, str(thread)), "unit": "seconds", "startValue": 0,
            "endValue": sum(weights), "samples": stacks, "weights": weights,
        }
        for thread, (stacks, weights) in samples.threads.items()
    ]  # fmt: skip
    whole = {"$schema": SCHEMA, "name": name, "shared": {"frames": samples.frames}, "profiles": profiles}
    return json.dumps(whole).encode()
