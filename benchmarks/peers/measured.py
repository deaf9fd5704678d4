"""Peers: whatever speaks OpenAI's HTTP at a URL; those we know how to start are started and stopped here.

1. install    where the peer lives in an environment of its own, once
2. start      its processes, as a session of their own, writing to a log
3. ready      when its health URL answers 200 and one request was answered
4. stop       SIGTERM, then SIGKILL for what is left of the session
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.load import Job, LoadClient, PeerError
from benchmarks.models import OUT
from benchmarks.peers import environments
from benchmarks.peers.environments import PeerUnavailable
from benchmarks.peers.gguf_file import WeightType, written
from tandem.local import free_ports
from tandem.machine.resources import usable_cpus

START_BOUND_S = 600.0
STOP_BOUND_S = 20.0
KV_GIB = 1
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
SLOTS = 16


@dataclass(frozen=True, slots=True)
class MeasuredPeer:
    """A server to measure.

    `command(model folder, port)` is how it is started; None for one that runs already, at `url`.
    """

    name: str
    title: str
    command: Callable[[Path, int], list[str]] | None = None
    url: str = ""
    health: str = "/v1/models"
    environment: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    @contextmanager
    def running(self, model: Path) -> Iterator[LoadClient]:
        """The peer serving the model's folder by the folder's name, ready and warm. Raises PeerUnavailable."""
        if self.command is None:
            yield self._ready(LoadClient(self.url.rstrip("/"), model.name, dict(self.extra)), lambda: True)
            return
        port = free_ports(1)[0]
        log = self.log(model)
        log.parent.mkdir(parents=True, exist_ok=True)
        with started(self.command(model, port), log, self.environment) as process:
            client = LoadClient(f"http://127.0.0.1:{port}", model.name, dict(self.extra))
            try:
                yield self._ready(client, lambda: process.poll() is None)
            except PeerUnavailable as error:
                raise PeerUnavailable(f"{error}; its log is {log}") from None

    def log(self, model: Path) -> Path:
        return OUT / "logs" / f"{self.name}-{model.name}.log"

    def _ready(self, client: LoadClient, alive: Callable[[], bool]) -> LoadClient:
        end = time.monotonic() + START_BOUND_S
        while not _answers(client.url + self.health):
            if not alive() or self.command is None:
                raise PeerUnavailable("the process ended" if self.command else f"nothing answers at {self.url}")
            if time.monotonic() > end:
                raise PeerUnavailable(f"not ready after {START_BOUND_S:.0f} s")
            time.sleep(0.2)
        try:
            asyncio.run(client.send(Job(range(300, 332), 8)))
        except (PeerError, OSError, TimeoutError) as error:
            raise PeerUnavailable(f"its first request failed: {error!r}") from None
        return client


@contextmanager
def started(
    command: list[str], log: Path, environment: Mapping[str, str], folder: Path | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """The command, run in `folder`, as the leader of a session; the whole session is gone when the block ends."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True,
            cwd=folder,
        )  # fmt: skip
    try:
        yield process
    finally:
        _signal(process.pid, signal.SIGTERM, whole=False)
        try:
            process.wait(STOP_BOUND_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            _signal(process.pid, signal.SIGKILL, whole=True)
            process.wait(STOP_BOUND_S)


def _signal(leader: int, number: signal.Signals, whole: bool) -> None:
    try:
        (os.killpg if whole else os.kill)(leader, number)
    except ProcessLookupError:
        return


def _answers(url: str) -> bool:
    try:
        with DIRECT.open(url, timeout=5) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def tandem(name: str, title: str, *options: str) -> MeasuredPeer:
    def command(model: Path, port: int) -> list[str]:
        grpc, redis = free_ports(2)
        return [
            sys.executable, "-m", "tandem", "up", f"--model-path={model}", f"--model-name={model.name}",
            f"--http-port={port}", f"--grpc-port={grpc}",
            f"--redis-port={redis}", f"--prefill-kv-memory={KV_GIB}GiB", f"--decode-kv-memory={KV_GIB}GiB",
            f"--logs={OUT / 'logs' / f'{name}-{model.name}'}", *options,
        ]  # fmt: skip

    return of_tandem(name, title, command)


def of_tandem(name: str, title: str, command: Callable[[Path, int], list[str]]) -> MeasuredPeer:
    """One whose command starts a cluster of ours."""
    return MeasuredPeer(name, title, command, health="/health/ready")


def vllm(name: str, title: str, *options: str) -> MeasuredPeer:
    eager = () if shutil.which("g++") else ("--enforce-eager",)  # compiled steps need a C++ compiler

    def command(model: Path, port: int) -> list[str]:
        return [str(environments.vllm()), *serving_of_vllm(model, port, most_tokens=4096), *eager, *options]

    # Its own choice leaves one core to its HTTP server: half of a small machine. Its manual asks for Intel's OpenMP.
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, os.sched_getaffinity(0))),
        "LD_PRELOAD": str(environments.VLLM_ENVIRONMENT / "lib" / "libiomp5.so"), "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    return MeasuredPeer(name, title, command, "", "/health", environment, {"return_token_ids": True})


def serving_of_vllm(model: Path, port: int, most_tokens: int) -> list[str]:
    """Arguments of its program."""
    longest = str(
        min(most_tokens, json.loads((model / "config.json").read_text(encoding="utf-8"))["max_position_embeddings"])
    )
    return [
        "serve", str(model), "--served-model-name", model.name, "--dtype", "bfloat16",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", longest,
    ]  # fmt: skip


def transformers() -> MeasuredPeer:
    def command(model: Path, port: int) -> list[str]:
        return [sys.executable, "-m", "benchmarks.servers.transformers_server", str(model), f"--port={port}"]

    return MeasuredPeer("transformers", "transformers, generate()", command)


def llama_cpp(
    name: str, title: str, weights: WeightType | None, *options: str, draft: Path | None = None
) -> MeasuredPeer:
    """With a context of 4,096 tokens for each of 16, of which any may take what others leave.

    `weights`: None where models are GGUF files already.
    """

    def file(model: Path) -> str:
        return str(written(model, weights) if weights else model)

    def command(model: Path, port: int) -> list[str]:
        cores = str(usable_cpus())
        drafting = ["--spec-type", "draft-simple", "--model-draft", file(draft)] if draft else []
        return [
            str(environments.llama_cpp()), "--model", file(model), "--alias", model.name,
            "--host", "127.0.0.1", "--port", str(port), "--threads", cores, "--threads-batch", cores,
            "--ctx-size", str(SLOTS * 4096), "--parallel", str(SLOTS), "--kv-unified", "--cache-ram", "0", "--offline",
            *drafting, *options,
        ]  # fmt: skip

    return MeasuredPeer(name, title, command, health="/health")


def openvino(name: str, title: str, weights: WeightType) -> MeasuredPeer:
    """Its own choice for the KV cache is 8 bits."""

    def command(model: Path, port: int) -> list[str]:
        python = str(environments.openvino())
        return [python, "-m", "benchmarks.servers.openvino_server", str(written(model, weights)), f"--port={port}"]

    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    return MeasuredPeer(name, title, command, environment=environment)


def known() -> dict[str, MeasuredPeer]:
    """The peers that can be started here, by name."""
    peers = (
        tandem("tandem", "Tandem, aggregated", "--prefill=0", "--decode=1"),
        tandem("tandem-1p1d", "Tandem, 1 prefill + 1 decode", "--prefill=1", "--decode=1"),
        tandem("tandem-ray", "Tandem, 1 prefill + 1 decode, on Ray", "--prefill=1", "--decode=1", "--ray=local"),
        vllm("vllm", "vllm-cpu 0.32.0"),
        vllm("vllm-256", "vllm-cpu 0.32.0, chunk 256", "--max-num-batched-tokens=256"),
        transformers(),
        llama_cpp("llama-cpp", "llama.cpp's server, bf16", "bf16"),
        openvino("openvino", "OpenVINO GenAI, bf16, KV in 8 bits", "f16"),
        tandem("tandem-int8", "Tandem, int8", "--prefill=0", "--decode=1", "--quantization=int8"),
        tandem("tandem-int4", "Tandem, int4", "--prefill=0", "--decode=1", "--quantization=int4"),
        llama_cpp("llama-cpp-q8", "llama.cpp's server, Q8_0", "q8_0"),
        llama_cpp("llama-cpp-q4", "llama.cpp's server, Q4_0", "q4_0"),
        openvino("openvino-q8", "OpenVINO GenAI, Q8_0", "q8_0"),
        openvino("openvino-q4", "OpenVINO GenAI, Q4_0", "q4_0"),
    )
    return {peer.name: peer for peer in peers}


def by_url(text: str) -> MeasuredPeer:
    """A peer that runs already, from "name=http://host:port". Raises ValueError."""
    name, _, url = text.partition("=")
    if not name or not url.startswith("http://"):
        raise ValueError(f"peer: {text!r} is not name=http://host:port")
    return MeasuredPeer(name, f"{name} ({url})", url=url)
