"""Launchers start a cluster's services and keep them running; the one here as processes of this machine.

start ──> running ──(ends by itself)──> before all were ready once: ServiceFailed with its last output
             │                          later: started again under the same name, after ever longer pauses
             └────> stop: SIGTERM, last started first; SIGKILL for what has not ended in time
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tandem.cluster import Service
from tandem.containment import OomKills
from tandem.process import LogOutput, dying_with_parent

STOP_WAIT_S = 10.0
# A service that lived shorter than this waits before it is started again: twice as long each time.
MIN_LIFE_S = 5.0
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
# A service that has ended this often during the start is given up.
MOST_ENDS = 3
MAX_DOUBLINGS = 16  # keeps the power of two within a float's range
LAST_LINES = 15
MAX_LINE = 2**20
LOOK_S = 1.0
# Settings that may hold a password: passed by the environment, as every user of a machine can read command lines.
SECRETS = frozenset({"redis_url", "redis_password", "store_url"})

T = TypeVar("T")


class ServiceFailed(Exception):
    """A service ended before all were ready; the message contains its last output."""


class Launcher(Protocol):
    """A way to run services."""

    async def start(self, services: Sequence[Service]) -> None:
        """Starts more services. `stop` ends the services that were started last first."""

    async def watch(self, *, restart: bool) -> None:
        """Waits until cancelled for services that end. `restart`: starts them again.

        Raises:
            ServiceFailed: a service ended, and `restart` is False.
        """

    def loading(self) -> Mapping[str, tuple[int, int]]:
        """Returns (loaded, all) weights of each service by name; (0, 0) before it has begun to load."""

    async def hosts(self) -> Mapping[str, str]:
        """Returns the hosts of gateways by name, if they are on other machines."""

    async def given_up(self, names: Iterable[str]) -> str:
        """Returns why one of these services will not run, in one line; empty while all of them may."""

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Ends these services, or all, in bounded time."""


async def unless_failed(launcher: Launcher, awaited: Coroutine[Any, Any, T]) -> T:
    """Returns the result of `awaited`.

    Raises:
        ServiceFailed: a service ended first.
    """
    failed, done = asyncio.create_task(launcher.watch(restart=False)), asyncio.create_task(awaited)
    try:
        await asyncio.wait((failed, done), return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            failed.result()
        return done.result()
    finally:
        failed.cancel()
        done.cancel()
        await asyncio.gather(failed, done, return_exceptions=True)


class LocalLauncher:
    """Runs each service as a child process that dies with this process; its output goes to `logs`/name.log."""

    def __init__(
        self,
        logs: Path,
        report: Callable[[str], None],
        on_death: Callable[[Mapping[str, object], str], Awaitable[object]] | None = None,
    ) -> None:
        """`on_death(settings, cause)` is awaited for a service that ended, before its next start."""
        self._logs = logs
        self._report = report
        self._on_death = on_death
        self._oom_kills = OomKills()
        self._stages: list[list[_Process]] = []
        self._logged: set[str] = set()  # services whose log has been begun
        self._ended: asyncio.Queue[_Process] = asyncio.Queue()

    async def start(self, services: Sequence[Service]) -> None:
        stage: list[_Process] = []
        self._stages.append(stage)
        for service in services:
            process = _Process(service, self._begun_log(service.name), self._ended.put_nowait)
            await process.start()
            stage.append(process)

    def _begun_log(self, name: str) -> Path:
        """Returns the path of a service's log, emptied at its first start of what an earlier cluster wrote."""
        path = self._logs / f"{name}.log"
        if name not in self._logged:
            self._logged.add(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b"")
        return path

    async def watch(self, *, restart: bool) -> None:
        while True:
            process = await self._next_ended()
            status = await process.ending()
            if self._on_death:
                await self._on_death(process.service.settings, self._oom_kills.how_it_died(status))
            ended = f"{process.service.name} ended with status {status}"
            if not restart:
                raise ServiceFailed(f"{ended}; its last words:\n" + "\n".join(process.last_lines))
            pause_s = process.pause_s
            self._say(f"{ended}; starting it again" + (f" in {pause_s:g} s" if pause_s else ""))
            process.start_again(pause_s)

    async def _next_ended(self) -> _Process:
        while True:
            self._oom_kills.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    return await self._ended.get()

    def loading(self) -> Mapping[str, tuple[int, int]]:
        return {process.service.name: process.loading for process in self._processes}

    @property
    def _processes(self) -> list[_Process]:
        return [process for stage in self._stages for process in stage]

    async def hosts(self) -> Mapping[str, str]:
        return {}

    async def given_up(self, names: Iterable[str]) -> str:
        wanted = set(names)
        for process in self._processes:
            if process.service.name in wanted and process.num_ends >= MOST_ENDS:
                said = process.last_lines[-1] if process.last_lines else "nothing"
                return f"{process.service.name} ended {process.num_ends} times; its last words: {said}"
        return ""

    async def stop(self, names: Iterable[str] | None = None) -> None:
        wanted = {process.service.name for process in self._processes} if names is None else set(names)
        for stage in reversed(self._stages):
            ending = [process for process in stage if process.service.name in wanted]
            for process in ending:
                process.terminate()
            lives = [process.life for process in ending]
            if lives and (await asyncio.wait(lives, timeout=STOP_WAIT_S))[1]:
                self._say("killing what did not stop in time")
            await asyncio.gather(*(process.kill() for process in ending))
            stage[:] = [process for process in stage if process not in ending]
            if ending and not stage:
                self._stages = [other for other in self._stages if other is not stage]

    def _say(self, text: str) -> None:
        with suppress(OSError):  # the loss of the terminal does not end the cluster
            self._report(text)


async def until_set(stop: asyncio.Event, life: Coroutine[Any, Any, None]) -> None:
    """Runs `life` until `stop` is set, then cancels it. If `life` fails before, raises its error."""
    living, stopped = asyncio.create_task(life), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((living, stopped), return_when=asyncio.FIRST_COMPLETED)
        if living.done():
            living.result()
    finally:
        for task in (living, stopped):
            task.cancel()
        await asyncio.gather(living, stopped, return_exceptions=True)


class _Process:
    """A service and its present process, which is replaced at each restart."""

    def __init__(self, service: Service, log_path: Path, ended: Callable[[_Process], None]) -> None:
        self.service = service
        self.loading = (0, 0)
        self._quick_deaths = 0
        self.last_lines: deque[str] = deque(maxlen=LAST_LINES)
        self.num_ends = 0
        self._log_path = log_path
        self._ended = ended
        self._stopping = False

    @property
    def pause_s(self) -> float:
        """Seconds to wait before the next start; 0 if the last process lived long enough, or ended early for the first
        time.
        """
        doublings = min(self._quick_deaths - 2, MAX_DOUBLINGS)
        return min(FIRST_PAUSE_S * 2.0**doublings, MAX_PAUSE_S) if self._quick_deaths > 1 else 0.0

    async def start(self) -> None:
        await self._spawn()
        self._live(self._follow(self._child))

    def start_again(self, pause_s: float) -> None:
        """Starts the process again after a pause, which is part of the task `life`: cancelling the task ends it."""
        if not self._stopping:
            self._live(self._after(pause_s))

    def _live(self, life: Coroutine[Any, Any, int]) -> None:
        self.life = asyncio.create_task(life, name=self.service.name)
        self.life.add_done_callback(lambda _: self._stopping or self._ended(self))

    async def _after(self, pause_s: float) -> int:
        await asyncio.sleep(pause_s)
        await self._spawn()
        return await self._follow(self._child)

    async def _spawn(self) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._child = await asyncio.create_subprocess_exec(
            *dying_with_parent(sys.executable, "-m", self.service.module, *_options(self.service)),
            env=_environment(self.service), stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, limit=MAX_LINE,
        )  # fmt: skip

    async def ending(self) -> int:
        """Returns the exit status of the process that has ended, and kills children that it left behind."""
        self._kill_group()
        age = asyncio.get_running_loop().time() - self._started_at
        self.num_ends += 1
        self._quick_deaths = self._quick_deaths + 1 if age < MIN_LIFE_S else 0
        return await self.life

    def terminate(self) -> None:
        """Sends SIGTERM. From now on the process's end is not reported."""
        self._stopping = True
        if self._child.returncode is None:
            self._child.terminate()
        elif not self.life.done():
            self.life.cancel()  # the pause before its next start

    async def kill(self) -> None:
        self._kill_group()
        self.life.cancel()
        await asyncio.gather(self.life, self._child.wait(), return_exceptions=True)

    def _kill_group(self) -> None:
        try:
            os.killpg(self._child.pid, signal.SIGKILL)
        except ProcessLookupError:
            return

    async def _follow(self, child: asyncio.subprocess.Process) -> int:
        """Copies a child's output to the log until it ends. Returns its exit status."""
        assert child.stdout is not None
        with self._log_path.open("ab", buffering=0) as file, closing(LogOutput(file.fileno())) as log:
            while line := await _line_of(child.stdout):
                log.write_bytes(line)
                self._note(line.decode(errors="replace").rstrip())
        return await child.wait()

    def _note(self, line: str) -> None:
        self.last_lines.append(line)
        if '"loading"' in line:
            # A line of a library may look like the event.
            with suppress(ValueError, TypeError, KeyError, RecursionError):
                event = json.loads(line)
                self.loading = (int(event["done"]), int(event["total"]))


async def _line_of(output: asyncio.StreamReader) -> bytes:
    try:
        return await output.readline()
    except ValueError:  # readline has dropped the line
        return f"a line longer than {MAX_LINE} bytes is left out\n".encode()


def threads_environment(threads: int) -> dict[str, str]:
    """Returns OpenMP's variables. Idle threads sleep, as another service may need their core."""
    return {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def is_setting(variable: str) -> bool:
    """True if a service would read this environment variable as a setting."""
    return variable.startswith(("TANDEM_", "REDIS_URL"))


def _options(service: Service) -> list[str]:
    shown = {name: value for name, value in service.settings.items() if name not in SECRETS}
    return [_option(name.replace("_", "-"), value) for name, value in shown.items()]


def _option(name: str, value: object) -> str:
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    if isinstance(value, Mapping):
        return f"--{name}={json.dumps(value)}"
    return f"--{name}={','.join(map(str, value)) if isinstance(value, list | tuple) else value}"


def _environment(service: Service) -> dict[str, str]:
    """Returns this process's environment, with only the service's own settings and its secrets."""
    inherited = {name: value for name, value in os.environ.items() if not is_setting(name)}
    secrets = {f"TANDEM_{name}".upper(): str(service.settings[name]) for name in SECRETS & service.settings.keys()}
    return {**inherited, **threads_environment(service.threads), **service.environment, **secrets}
