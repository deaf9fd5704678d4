"""Measures one tree: its own processes do the work, and this one reads their CPU time, turn by turn.

start-up   gateway and decode worker with the demo model: their CPU until the gateway is ready, again for each turn
gateway    one gateway process, fed by a null worker: CPU of that process alone
1P+1D      gateway, prefill and decode worker with null engines: CPU of all processes, Redis and launcher too
engine     engines in one process, on one thread: its CPU

A child runs in the folder of its tree, with that folder first on its path, so that it imports nothing of the other.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import httpx
import psutil  # type: ignore[import-untyped]

from benchmarks.load import Job, LoadClient, PeerError, closed_loop
from benchmarks.models import OUT
from benchmarks.peers import started
from tandem.commands.up import DEMO_MODEL
from tandem.local import free_ports

BOUND_S = 60.0
LOOK_S = 0.05
REQUESTS, AT_ONCE, PROMPT_TOKENS, ANSWER_TOKENS = 300, 50, 64, 8
NULL_PAIR = (
    "--engine=null", "--null-speedup=100000", "--prefill=1", "--decode=1", "--disaggregation=require",
    "--decode-kv-memory=64MiB",
)  # fmt: skip
STARTED = {"services.gateway": "start-up: gateway, s", "services.decode": "start-up: worker, s"}
Turn = Callable[[], dict[str, float]]


class Unmeasured(RuntimeError):
    """The reason why a tree could not be measured."""


@contextmanager
def start_up(tree: Path) -> Iterator[Turn]:
    def turn() -> dict[str, float]:
        with _cluster(tree, "--prefill=0", "--decode=1") as (_, launcher):
            found = dict.fromkeys(STARTED.values(), 0.0)
            for process in launcher.children(recursive=True):
                for module in STARTED.keys() & set(process.cmdline()):
                    found[STARTED[module]] += _cpu_s(process)
            return found

    turn()  # It compiles what is kept: Python's modules, and kernels.
    yield turn


def gateway(tree: Path) -> AbstractContextManager[Turn]:
    return _probe(tree, "gateway_probe.py")


def engine(tree: Path) -> AbstractContextManager[Turn]:
    return _probe(tree, "engine_probe.py", str(DEMO_MODEL))


@contextmanager
def pair(tree: Path) -> Iterator[Turn]:
    dice = random.Random(0)
    with _cluster(tree, *NULL_PAIR) as (client, launcher):

        def turn() -> dict[str, float]:
            jobs = [Job(dice.choices(range(300, 4000), k=PROMPT_TOKENS), ANSWER_TOKENS) for _ in range(REQUESTS)]
            before = _cpu_s(launcher)
            try:
                asyncio.run(closed_loop(client, jobs, AT_ONCE))
            except (ExceptionGroup, PeerError) as error:
                raise Unmeasured(f"a request failed: {error!r}") from None
            return {"1P+1D: a request, ms": 1000 * (_cpu_s(launcher) - before) / REQUESTS}

        turn()
        yield turn


MEASURES: dict[str, Callable[[Path], AbstractContextManager[Turn]]] = {
    "start-up": start_up, "gateway": gateway, "1P+1D": pair, "engine": engine,
}  # fmt: skip


@contextmanager
def _probe(tree: Path, script: str, *arguments: str) -> Iterator[Turn]:
    """A script beside this file that answers a line with figures, run in `tree`. Raises Unmeasured."""
    log = _log(script)
    command = [sys.executable, "-P", str(Path(__file__).with_name(script)), *arguments]
    with log.open("wb") as output, subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=output, bufsize=0,
        cwd=tree, env=os.environ | _environment(tree), start_new_session=True,
    ) as process:  # fmt: skip
        try:
            turn = _turn_of(process, log)
            turn()
            yield turn
        finally:
            _kill(process)


def _turn_of(process: subprocess.Popen[bytes], log: Path) -> Turn:
    def turn() -> dict[str, float]:
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError):
            os.write(process.stdin.fileno(), b"\n")
        while select.select([process.stdout], [], [], BOUND_S)[0]:
            line = process.stdout.readline()
            if line.startswith(b"{"):  # Others are of a log.
                figures: dict[str, float] = json.loads(line)
                return figures
            if not line:
                raise Unmeasured(_last_line(log))
        raise Unmeasured(f"no answer within {BOUND_S:.0f} s")

    return turn


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Ends a child, with all that it has started."""
    if process.poll() is None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for one in family:
            with suppress(psutil.NoSuchProcess):
                one.kill()


@contextmanager
def _cluster(tree: Path, *options: str) -> Iterator[tuple[LoadClient, psutil.Process]]:
    """A cluster of the tree's `tandem up` that is ready: its client, and the launcher, whose children are the rest.

    Raises Unmeasured.
    """
    http, grpc, redis = free_ports(3)
    log, client = _log(f"cluster-{http}"), LoadClient(f"http://127.0.0.1:{http}", "demo", timeout_s=BOUND_S)
    command = [
        sys.executable, "-m", "tandem", "up", f"--model-path={DEMO_MODEL}", "--model-name=demo", f"--http-port={http}",
        f"--grpc-port={grpc}", f"--redis-port={redis}", f"--logs={log.with_suffix('')}", *options,
    ]  # fmt: skip
    with started(command, log, _environment(tree), tree) as process:
        end = time.monotonic() + BOUND_S
        while not _ready(client.url):
            if process.poll() is not None:
                raise Unmeasured(_last_line(log))
            if time.monotonic() > end:
                raise Unmeasured(f"not ready within {BOUND_S:.0f} s")
            time.sleep(LOOK_S)
        try:
            yield client, psutil.Process(process.pid)
        except psutil.NoSuchProcess:
            raise Unmeasured(f"it ended: {_last_line(log)}") from None


def _environment(tree: Path) -> dict[str, str]:
    """Variables of a child; compiled modules are kept, so that only the first start of a tree compiles them."""
    return {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": ""}


def _ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=2.0, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def _cpu_s(process: psutil.Process) -> float:
    """Returns the CPU seconds of a process and of all below it, those that have ended too."""
    total = 0.0
    for one in (process, *process.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # It has just ended, and its time is its parent's.
            times = one.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


def _log(name: str) -> Path:
    log = OUT / "logs" / "regress" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


def _last_line(log: Path) -> str:
    return (log.read_text(encoding="utf-8").splitlines() or ["it wrote nothing"])[-1]
