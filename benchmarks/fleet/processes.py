"""A fleet of null-engine workers on this machine, behind gateways that route by a policy; each is a real process.

kvstore (redis-server) -> prefill x n, decode x m -> gateways -> ready when every gateway sees every pair linked
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

import httpx

from benchmarks.models import OUT
from tandem.cluster import Service
from tandem.commands.up import DEMO_MODEL
from tandem.engine import StepTime
from tandem.local import LocalLauncher, free_ports, unless_failed

MODEL, MAX_MODEL_LEN = "null", 8192
READY_BOUND_S = 120.0
LOGS = OUT / "logs" / f"fleet-{os.getpid()}"  # two may run at a time


@dataclass(frozen=True, slots=True)
class NullFleet:
    """How many of each, the size of each worker's KV cache in blocks of 16 tokens, and how long a step takes.

    `kv_host`: bytes of host memory below each cache.
    `gateways`: for each, its routing policy and its disaggregation; `gateway_settings`: more of all of them.
    """

    prefill: int = 8
    decode: int = 8
    prefill_blocks: int = 4096
    decode_blocks: int = 4096
    decode_seqs: int | None = None
    gateways: tuple[tuple[str, str], ...] = (("tandem", "require"),)
    gateway_settings: Mapping[str, object] = field(default_factory=dict)
    kv_host: int = 0
    step_time: StepTime = field(default_factory=lambda: StepTime(decode_step_s=0.02))


class Address(NamedTuple):
    """The address of one gateway, as host:port."""

    http: str
    grpc: str


@asynccontextmanager
async def running(fleet: NullFleet) -> AsyncIterator[list[Address]]:
    """The gateways, once everything is ready.

    Raises:
        ServiceFailed: a process ended; its last words.
        TimeoutError: not ready in time.
    """
    ports = free_ports(2 * len(fleet.gateways) + 1)
    http, grpc, redis = ports[1::2], ports[2::2], ports[0]
    launcher = LocalLauncher(LOGS, print)
    try:
        shutil.rmtree(LOGS, ignore_errors=True)
        await launcher.start([Service("kvstore", "services.kvstore", {"redis_port": redis, "grpc_port": 0})])
        await asyncio.sleep(1.0)
        await launcher.start(_workers(fleet, redis))
        await launcher.start(_gateways(fleet, http, grpc, redis))
        await unless_failed(launcher, _ready(fleet, http))
        yield [Address(*(f"127.0.0.1:{port}" for port in ports)) for ports in zip(http, grpc, strict=True)]
    finally:
        await launcher.stop()


def tokens_read(role: str) -> int:
    """Prompt tokens that the engines of the last fleet's workers computed, by their own last words."""
    return sum(worker_tokens(role, "prefilled"))


def worker_tokens(role: str, what: str) -> list[int]:
    """Tokens that each of the last fleet's workers "prefilled" or "written", by its last words."""
    lines = [line for log in LOGS.glob(f"{role}-*.log") for line in log.read_text(encoding="utf-8").splitlines()]
    return [int(json.loads(line)["tokens"][what]) for line in lines if '"stopped"' in line]


def model_folder() -> Path:
    """A config and the demo model's tokenizer: all that a null engine and a gateway need."""
    folder = OUT / "models" / MODEL
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((DEMO_MODEL / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(
        json.dumps({**config, "max_position_embeddings": MAX_MODEL_LEN}), encoding="utf-8"
    )
    shutil.copyfile(DEMO_MODEL / "tokenizer.json", folder / "tokenizer.json")
    return folder


def _workers(fleet: NullFleet, redis: int) -> list[Service]:
    null = {"engine": "null", "null_step": asdict(fleet.step_time)}
    model = {"model_path": model_folder(), "model_name": MODEL, "redis_url": f"redis://127.0.0.1:{redis}"}
    same = model | null | {"threads": 1, "log_level": "info", "kv_host": fleet.kv_host}
    seqs: dict[str, object] = {"max_num_seqs": fleet.decode_seqs} if fleet.decode_seqs else {}
    pools: dict[str, tuple[int, dict[str, object]]] = {
        "prefill": (fleet.prefill, {"num_blocks": fleet.prefill_blocks}),
        "decode": (fleet.decode, {"num_blocks": fleet.decode_blocks} | seqs),
    }
    return [
        Service(f"{role}-{i}", f"services.{role}", same | {"worker_id": f"{role}-{i}"} | size)
        for role, (count, size) in pools.items()
        for i in range(count)
    ]


def _gateways(fleet: NullFleet, http: list[int], grpc: list[int], redis: int) -> list[Service]:
    def settings(i: int, policy: str, disaggregation: str) -> dict[str, object]:
        ports = {"host": "127.0.0.1", "http_port": http[i], "grpc_port": grpc[i]}
        return (
            {"redis_url": f"redis://127.0.0.1:{redis}"}
            | ports
            | dict(fleet.gateway_settings)
            | {"policy": policy, "disaggregation": disaggregation}
        )

    return [
        Service(f"gateway-{i}", "benchmarks.routing", settings(i, *gateway)) for i, gateway in enumerate(fleet.gateways)
    ]


async def _ready(fleet: NullFleet, ports: list[int]) -> None:
    async with asyncio.timeout(READY_BOUND_S), httpx.AsyncClient(timeout=2.0, trust_env=False) as client:
        for port in ports:
            while not await _linked(client, port, fleet):
                await asyncio.sleep(0.2)


async def _linked(client: httpx.AsyncClient, port: int, fleet: NullFleet) -> bool:
    try:
        found = (await client.get(f"http://127.0.0.1:{port}/health/ready")).json()
    except httpx.TransportError:
        return False
    return bool(found["decode_workers"] >= fleet.decode and found["linked_pairs"] >= fleet.prefill * fleet.decode)
