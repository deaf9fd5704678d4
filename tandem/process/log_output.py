"""A text stream for logs. Writing to it never raises and never waits, whatever became of the place they go to.

write ──> kept ──> descriptor      no room, as in a pipe that nobody reads: kept, and tried again by a thread
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
    """Its descriptor; one of nowhere where it was closed before Python began, whose number others now have."""
    return stream.fileno() if stream else os.open(os.devnull, os.O_WRONLY)


class LogOutput:
    """Lines to a descriptor, which stays its opener's. From any thread, and from finalizers that run within a write."""

    encoding = "utf-8"

    def __init__(self, descriptor: int, notice: Callable[[int, str], str] = plain_notice) -> None:
        self._descriptor = descriptor
        self._notice = notice
        self._kept: deque[bytes] = deque()
        self._together = 0  # blocks that are to be over first
        self._begun = False  # the first that is kept is the rest of a line
        self._torn = False  # what was written last is no whole line
        self._lost, self._reason = 0, ""
        self._writing = threading.Lock()
        self._retrying: threading.Thread | None = None
        self._polled = self._make_poll()  # by who writes; others wait by one of their own

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
        """Writes the lines of a block at its end, several at once. For one thread, whose block is short."""
        self._together += 1
        try:
            yield
        finally:
            self._together -= 1
            self._write_kept()

    def flush(self) -> None:
        """Do nothing: what can be written has been."""

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def fileno(self) -> int:
        return self._descriptor

    def close(self) -> None:
        """Give what is kept a last chance, in bounded time. The descriptor stays open."""
        while self._kept and self._room(WAIT_MS):
            self._write_kept()

    def _write_kept(self) -> None:
        """One writes for all: a thread that finds another at it leaves, so that none waits for itself either."""
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
        """True for a descriptor that is broken, too: writing says how."""
        try:
            return bool((self._make_poll() if wait_ms else self._polled).poll(wait_ms))
        except OSError:  # a process that may have no descriptors
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
        """As many lines as CHUNK has room for, or the beginning of one."""
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
            except RuntimeError:  # no more threads: the next write tries again
                self._retrying = None

    def _retry(self) -> None:
        while self._kept:
            if self._room(WAIT_MS):
                self._write_kept()
        self._retrying = None
        self._write_kept()  # what came before the line above and left it to this thread
