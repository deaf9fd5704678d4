"""A fleet of null-engine workers on this machine, behind gateways that route by a policy; each is a real process.

kvstore (redis-server) -> prefill x n, decode x m -> gateways -> ready when every gateway sees every pair linked
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from benchmarks.models import OUT
from benchmarks.peers import free_ports
from tandem.clock import SystemClock
from tandem.commands.up import DEMO_MODEL
from tandem.engine import StepTime
from tandem.local import Cluster, Process

MODEL, MAX_MODEL_LEN = "null", 8192
READY_BOUND_S = 120.0
LOGS = OUT / "logs" / "fleet"


@dataclass(frozen=True, slots=True)
class Fleet:
    """How many of each, the size of each worker's KV cache in blocks of 16 tokens, and how long a step takes.

    `gateways`: for each, its routing policy and its disaggregation.
    """

    prefill: int = 8
    decode: int = 8
    prefill_blocks: int = 4096
    decode_blocks: int = 4096
    gateways: tuple[tuple[str, str], ...] = (("tandem", "require"),)
    step_time: StepTime = field(default_factory=lambda: StepTime(decode_step_s=0.02))


@asynccontextmanager
async def running(fleet: Fleet) -> AsyncIterator[list[str]]:
    """The gateways' gRPC addresses, once everything is ready.

    Raises:
        ProcessFailed: a process ended; its last words.
        TimeoutError: not ready in time.
    """
    ports = free_ports(2 * len(fleet.gateways) + 1)
    http, grpc, redis = ports[1::2], ports[2::2], ports[0]
    cluster = Cluster(_processes(fleet, http, grpc, redis), SystemClock(), print)
    try:
        await cluster.start(lambda stage: asyncio.ensure_future(asyncio.sleep(1.0 if stage == 0 else 0)))
        broken, ready = asyncio.ensure_future(cluster.ended()), asyncio.ensure_future(_ready(fleet, http))
        await asyncio.wait((broken, ready), return_when=asyncio.FIRST_COMPLETED)
        (broken if broken.done() else ready).result()
        broken.cancel()
        yield [f"127.0.0.1:{port}" for port in grpc]
    finally:
        await cluster.stop()


def tokens_read(role: str) -> int:
    """Prompt tokens that the engines of the last fleet's workers computed, by their own last words."""
    lines = [line for log in LOGS.glob(f"{role}-*.log") for line in log.read_text().splitlines()]
    return sum(json.loads(line)["tokens"]["read"] for line in lines if '"stopped"' in line)


def model_folder() -> Path:
    """A config and the demo model's tokenizer: all that a null engine and a gateway need."""
    folder = OUT / "models" / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((DEMO_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}))
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", folder / "tokenizer.json")
    return folder


def _processes(fleet: Fleet, http: list[int], grpc: list[int], redis: int) -> list[list[Process]]:
    shutil.rmtree(LOGS, ignore_errors=True)
    LOGS.mkdir(parents=True)

    def process(name: str, module: str, *options: str) -> Process:
        return Process(name, [module, *options, "--log-level=info"], LOGS / f"{name}.log", {"OMP_NUM_THREADS": "1"})

    shared = [f"--model-path={model_folder()}", f"--model-name={MODEL}", f"--redis-url=redis://127.0.0.1:{redis}"]
    times = fleet.step_time
    null = [
        "--engine=null", "--threads=1", f"--null-prefill-tokens-per-s={times.prefill_tokens_per_s}",
        f"--null-decode-step-s={times.decode_step_s}", f"--null-decode-sequence-s={times.decode_sequence_s}",
        f"--null-speedup={times.speedup}",
    ]  # fmt: skip

    def workers(role: str, count: int, blocks: int) -> list[Process]:
        names = [f"{role}-{i}" for i in range(count)]
        size = f"--num-blocks={blocks}"
        return [process(name, f"services.{role}", *shared, *null, f"--worker-id={name}", size) for name in names]

    gateways = [
        process(
            f"gateway-{i}", "benchmarks.routing", *shared, "--host=127.0.0.1", f"--http-port={http[i]}",
            f"--grpc-port={grpc[i]}", f"--policy={policy}", f"--disaggregation={disaggregation}",
        )
        for i, (policy, disaggregation) in enumerate(fleet.gateways)
    ]  # fmt: skip
    kvstore = process("kvstore", "services.kvstore", f"--redis-port={redis}", "--grpc-port=0")
    prefill = workers("prefill", fleet.prefill, fleet.prefill_blocks)
    return [[kvstore], [*prefill, *workers("decode", fleet.decode, fleet.decode_blocks)], gateways]


async def _ready(fleet: Fleet, ports: list[int]) -> None:
    pairs = fleet.prefill * fleet.decode
    async with asyncio.timeout(READY_BOUND_S), httpx.AsyncClient(timeout=2.0) as client:
        for port in ports:
            while not await _linked(client, port, pairs):
                await asyncio.sleep(0.2)


async def _linked(client: httpx.AsyncClient, port: int, pairs: int) -> bool:
    try:
        found = (await client.get(f"http://127.0.0.1:{port}/health/ready")).json()
    except httpx.TransportError:
        return False
    return bool(found["linked_pairs"] >= pairs)
