"""A text stream for logs. Writing never raises and never blocks, whatever the state of its file or pipe.

write ──> kept ──> descriptor      no room, as in a full pipe without a reader: kept, and a thread tries again
                                   refused, as on a full disk, or too many are kept: lost, and counted
                                   before the next line that can be written: how many were lost, and why
"""

from __future__ import annotations

import os
import select
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

MAX_KEPT_LINES = 1024
MAX_LINE = 2**16
CUT = b" [cut]\n"
# A pipe that poll calls writable takes this much without waiting (PIPE_BUF).
CHUNK = 4096
WAIT_MS = 1000


def plain_notice(lines: int, reason: str) -> str:
    return f"{lines} lines of output were lost: {reason}\n"


def descriptor_of(stream: TextIO | None) -> int:
    """Returns a stream's descriptor; /dev/null if the stream is None: it was closed before Python began."""
    return stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY)


class LogOutput:
    """Writes lines to a descriptor, which it does not close. For any thread, and finalizers that run within a write."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, notice: Callable[[int, str], str] = plain_notice) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._kept: deque[bytes] = deque()
        self._together = 0  # number of open `together` blocks; lines wait for their end
        self._begun = False  # the first kept line is partly written
        self._torn = False  # the last line written is incomplete
        self._lost, self._reason = 0, ""
        self._writing = threading.Lock()
        self._retrying: threading.Thread | None = None
        self._polled = self._make_poll()  # the writer's; threads that wait make their own

    def write(self, text: str) -> int:
        self.write_bytes(text.encode(errors="backslashreplace"))
        return len(text)

    def write_bytes(self, line: bytes) -> None:
        if len(self._kept) >= MAX_KEPT_LINES:
            self._lose("nobody reads the output")
        elif line:
            self._kept.append(line if len(line) <= MAX_LINE else line[:MAX_LINE] + CUT)
        if not self._together:
            self._write_kept()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Writes the lines of a short block together at its end. For one thread."""
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            self._write_kept()

    def flush(self) -> None:
        """Does nothing: all that can be written has been written."""

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Tries once more to write kept lines, in bounded time. The descriptor stays open."""
        while self._kept and self._room(WAIT_MS):
            self._write_kept()

    def _write_kept(self) -> None:
        """Writes kept lines.

        If another thread is writing, it writes these lines, too, so that no thread waits, even for itself.
        """
        while self._kept and self._writing.acquire(blocking=False):
            try:
                room = self._write_while_room()
            finally:
                self._writing.release()
            if not room:
                self._retry_later()
                break

    def _write_while_room(self) -> bool:
        while self._kept:
            if not self._room():
                return False
            self._write_some()
        return True

    def _room(self, wait_ms: int = 0) -> bool:
        """Returns True if writing will not block; also for a broken descriptor, as writing then raises the error."""
        try:
            return bool((self._make_poll() if wait_ms else self._polled).poll(wait_ms))
        except OSError:  # the process has no descriptors left
            return True

    def _make_poll(self) -> select.poll:
        polled = select.poll()
        polled.register(self._descriptor, select.POLLOUT)
        return polled

    def _write_some(self) -> None:
        try:
            if self._lost and not self._begun:
                self._report_loss()
            else:
                self._write_first()
        except OSError as error:
            self._kept.popleft()
            self._lose(error.strerror or str(error))
            self._torn, self._begun = self._torn or self._begun, False

    def _write_first(self) -> None:
        """Writes as many lines as fit into CHUNK, or the beginning of one line."""
        lines = [self._kept[0]]
        size = len(lines[0])
        while len(lines) < len(self._kept) and (size := size + len(self._kept[len(lines)])) <= CHUNK:
            lines.append(self._kept[len(lines)])
        written = os.write(self._descriptor, b"".join(lines)[:CHUNK])
        for line in lines:
            if written < len(line):
                if written:
                    self._kept[0], self._begun = line[written:], True
                return
            written -= len(line)
            self._begun = False
            self._kept.popleft()

    def _report_loss(self) -> None:
        lost = self._lost
        notice = self._notice(lost, self._reason).encode(errors="backslashreplace")
        whole = (b"\n" if self._torn else b"") + notice[:CHUNK]
        self._torn = os.write(self._descriptor, whole) < len(whole)
        self._lost -= lost

    def _lose(self, reason: str) -> None:
        self._lost += 1
        self._reason = reason

    def _retry_later(self) -> None:
        if self._retrying is None:
            self._retrying = threading.Thread(target=self._retry, name="log-output", daemon=True)
            try:
                self._retrying.start()
            except RuntimeError:  # no thread can be started: the next write tries again
                self._retrying = None

    def _retry(self) -> None:
        while self._kept:
            if self._room(WAIT_MS):
                self._write_kept()
        self._retrying = None
        self._write_kept()  # lines that came before `_retrying` was reset, and were left to this thread
