"""The fronts: how each is installed, started and pointed at its backend.

installed   in an environment of its own, once (sglang-router, Dynamo)
ready       when it has answered a request
"""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]

from benchmarks.frontends.byte_server import byte_server
from benchmarks.frontends.clients import StreamLoad
from benchmarks.frontends.null_worker import null_worker
from benchmarks.frontends.pace import BackendPace
from benchmarks.load import PeerError
from benchmarks.models import OUT
from benchmarks.peers import PeerUnavailable, environments, started
from services.gateway.text import Tokenizer
from tandem.local import RedisServer, free_ports

READY_BOUND_S = 90.0
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class RunningFront:
    """A front that answers. `process` is all that it runs in, without its backend."""

    load: StreamLoad
    process: psutil.Process


@dataclass(frozen=True, slots=True)
class Front:
    title: str
    does: str
    stamps: bool  # its backend's clock is the clients'
    begin: Callable[[AsyncExitStack, Path, BackendPace, int], AbstractAsyncContextManager[subprocess.Popen[bytes]]]

    @asynccontextmanager
    async def running(self, model: Path, pace: BackendPace) -> AsyncIterator[RunningFront]:
        """Raises PeerUnavailable."""
        port = free_ports(1)[0]
        async with AsyncExitStack() as stack:
            process = await stack.enter_async_context(self.begin(stack, model, pace, port))
            load = StreamLoad(port, model.name, pace)
            await _ready(load, process)
            yield RunningFront(load, psutil.Process(process.pid))


async def _ready(load: StreamLoad, process: subprocess.Popen[bytes]) -> None:
    error: Exception | None = None
    try:
        async with asyncio.timeout(READY_BOUND_S):
            while process.poll() is None:
                try:
                    await load.run(1, 2, 1)
                    return
                except* (PeerError, OSError) as group:
                    error = group.exceptions[0]
                await asyncio.sleep(0.3)
    except TimeoutError:
        pass
    raise PeerUnavailable(f"not ready; its last answer: {error!r}; logs are in {OUT / 'logs'}")


@asynccontextmanager
async def _tandem(
    stack: AsyncExitStack, model: Path, pace: BackendPace, port: int
) -> AsyncIterator[subprocess.Popen[bytes]]:
    redis = stack.enter_context(RedisServer.start())
    await stack.enter_async_context(null_worker(redis.url, model, _letters(model), pace))
    command = [
        sys.executable, "-m", "services.gateway", f"--redis-url={redis.url}",
        f"--http-port={port}", "--grpc-port=0", "--max-queued=4096",
    ]  # fmt: skip
    yield stack.enter_context(started(command, _log("tandem"), {}))


@asynccontextmanager
async def _router(
    stack: AsyncExitStack, model: Path, pace: BackendPace, port: int
) -> AsyncIterator[subprocess.Popen[bytes]]:
    python = await asyncio.to_thread(environments.sglang_router)
    backend = await stack.enter_async_context(byte_server(pace))
    command = [
        str(python), "-m", "sglang_router.launch_router", "--host=127.0.0.1", f"--port={port}",
        f"--worker-urls=http://127.0.0.1:{backend}", "--policy=round_robin", "--log-level=warn",
        f"--prometheus-port={free_ports(1)[0]}", "--max-concurrent-requests=8192", "--queue-size=8192",
    ]  # fmt: skip
    yield stack.enter_context(started(command, _log("sglang-router"), {}))


@asynccontextmanager
async def _dynamo(
    stack: AsyncExitStack, model: Path, pace: BackendPace, port: int
) -> AsyncIterator[subprocess.Popen[bytes]]:
    python = await asyncio.to_thread(environments.dynamo)
    shutil.rmtree(OUT / "dynamo", ignore_errors=True)
    where = {"DYN_FILE_KV": str(OUT / "dynamo"), "DYN_SYSTEM_PORT": "-1", "HF_HUB_OFFLINE": "1"}
    options = ["--discovery-backend=file", "--request-plane=tcp", "--event-plane=zmq"]
    letters = ",".join(map(str, _letters(model)))
    worker = [str(python), str(Path(__file__).parent / "dynamo_worker.py"), str(model), letters]
    stack.enter_context(started(worker, _log("dynamo-worker"), where))
    command = [str(python), "-m", "dynamo.frontend", f"--http-port={port}", *options]
    yield stack.enter_context(started(command, _log("dynamo"), where))


def _letters(model: Path) -> list[int]:
    """A token each, so that clients count tokens by characters."""
    tokenizer = Tokenizer.load(model)
    return [tokenizer.token_ids(letter)[0] for letter in LETTERS]


def _log(name: str) -> Path:
    log = OUT / "logs" / f"front-{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    return log


FRONTS = {
    "tandem": Front(
        "Tandem", "tokenizes, admits by fair share, routes by prefixes in Redis, detokenizes; gRPC to its worker", True,
        _tandem,
    ),
    "sglang-router": Front("sglang-router 0.3.2", "passes bytes on, round robin; HTTP to its backend", True, _router),
    "dynamo": Front("Dynamo 1.6.1's frontend", "tokenizes, detokenizes; TCP to its worker", False, _dynamo),
}  # fmt: skip
