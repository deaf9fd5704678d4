"""Two clusters on one device, one after the other: what splitting a GPU between prefill and decode workers costs."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.rows import ReportRow, Scale
from benchmarks.load import Job, LoadClient, disturbed, prompt
from benchmarks.models import OUT
from benchmarks.peers import MeasuredPeer
from benchmarks.results import percentile
from tandem.local import free_ports

NAMES = {"aggregated": ("decode",), "split": ("prefill", "decode")}


def serving_rows(scale: Scale, model: Path) -> list[ReportRow]:
    split, alone = (_measured(scale, model, name) for name in ("split", "aggregated"))
    rows = [
        ReportRow(name, "ms", split[name], "aggregated", alone[name], wanted=1.1, better="lower")
        for name in split
        if name.startswith("TTFT")
    ]
    gap = "ITL p99 beside prompts"
    return [*rows, ReportRow(gap, "ms", split[gap], "aggregated", alone[gap], better="lower")]


def _measured(scale: Scale, model: Path, name: str) -> dict[str, float]:
    def command(folder: Path, port: int) -> list[str]:
        file = OUT / f"gpu-{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(cluster(scale, folder, name, port)))
        return [sys.executable, "-m", "tandem", "up", f"--file={file}", f"--logs={OUT / 'logs' / name}"]

    with MeasuredPeer(f"gpu-{name}", name, command).running(model) as client:
        return asyncio.run(_figures(client, scale))


async def _figures(client: LoadClient, scale: Scale) -> dict[str, float]:
    dice, found = random.Random(5), dict[str, float]()
    for length in scale.prompts:
        answers = [await client.send(Job(prompt(dice, length), 1)) for _ in range(scale.rounds)]
        found[f"TTFT of {length:,} tokens"] = 1e3 * percentile([answer.ttft for answer in answers], 50)
    beside = await disturbed(client, dice, length=scale.prompt, every_s=2)
    return found | {"ITL p99 beside prompts": beside["itl p99"]}


def cluster(scale: Scale, model: Path, name: str, port: int) -> dict[str, Any]:
    """As `tandem up --file` reads it."""
    grpc, redis = free_ports(2)
    return {
        "models": [{"id": "model", "name": model.name, "weights": {"path": str(model)}}],
        "workers": {
            "settings": {
                "device": scale.device, "dtype": scale.dtype, "kv_memory": scale.kv_mib << 20,
                "transports": [scale.transport, "tcp"], "cuda_graphs": scale.device != "cpu",
                "max_num_batched_tokens": scale.prompt,
            }
        },
        "pools": [{"name": role, "role": role, "model": "model"} for role in NAMES[name]],
        "gateway": {
            "settings": {
                "http_port": port, "grpc_port": grpc,
                "disaggregation": "require" if name == "split" else "prefer",
            }
        },
        "redis": {"port": redis},
    }  # fmt: skip
