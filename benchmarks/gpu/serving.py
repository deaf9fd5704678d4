"""Clusters on one device, one after the other: what splitting a GPU between prefill and decode workers costs; and one
worker alone beside vLLM, where that is installed."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import yaml

from benchmarks.gpu.rows import CannotRun, ReportRow, Scale, carried
from benchmarks.load import Job, LoadClient, closed_loop, disturbed, prompt
from benchmarks.models import OUT
from benchmarks.peers import MeasuredPeer, PeerUnavailable, of_tandem, serving_of_vllm
from benchmarks.results import percentile, throughput
from tandem.local import free_ports

NAMES = {"aggregated": ("decode",), "split": ("prefill", "decode")}
Figures = Callable[[LoadClient, Scale], Coroutine[Any, Any, dict[str, float]]]
VLLM = "vllm.entrypoints.cli.main"


def serving_rows(scale: Scale, model: Path) -> list[ReportRow]:
    split, alone = (_measured(tandem(scale, name), scale, model, _beside_prompts) for name in ("split", "aggregated"))
    rows = [
        ReportRow(name, "ms", split[name], "aggregated", alone[name], wanted=1.1, better="lower")
        for name in split
        if name.startswith("TTFT")
    ]
    gap = "ITL p99 beside prompts"
    return [*rows, ReportRow(gap, "ms", split[gap], "aggregated", alone[gap], better="lower")]


def vllm_rows(scale: Scale, model: Path) -> list[ReportRow]:
    """Raises CannotRun where it is not installed, or is not for this device."""
    if PathFinder.find_spec("vllm", [*carried(), *sys.path]) is None:
        raise CannotRun("vLLM is not installed here")
    ours = _measured(tandem(scale, "aggregated"), scale, model, _alone)
    try:
        theirs = _measured(vllm(scale), scale, model, _alone)
    except PeerUnavailable as error:
        if scale.device == "cpu":
            raise CannotRun(f"vLLM for GPUs, on a CPU: {error}") from None
        raise
    return [
        ReportRow(name, "ms", ours[name], "vLLM", theirs[name], better="lower")
        if name.startswith("TTFT")
        else ReportRow(name, "tok/s", ours[name], "vLLM", theirs[name])
        for name in ours
    ]


def tandem(scale: Scale, name: str) -> MeasuredPeer:
    def command(model: Path, port: int) -> list[str]:
        file = OUT / f"gpu-{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(yaml.safe_dump(cluster(scale, model, name, port)), encoding="utf-8")
        return [sys.executable, "-m", "tandem", "up", f"--file={file}", f"--logs={OUT / 'logs' / name}"]

    return of_tandem(f"gpu-{name}", name, command)


def vllm(scale: Scale) -> MeasuredPeer:
    """With as much memory for KV, and as many tokens a step; by what is carried for it, if anything is."""

    def command(model: Path, port: int) -> list[str]:
        told = serving_of_vllm(model, port, most_tokens=scale.shape.max_positions)
        sizes = [f"--kv-cache-memory-bytes={scale.kv_mib << 20}", f"--max-num-batched-tokens={scale.prompt}"]
        return [sys.executable, "-m", VLLM, *told, *sizes]

    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    environment.update(("PYTHONPATH", place) for place in carried())
    return MeasuredPeer("gpu-vllm", "vLLM", command, "", "/health", environment, {"return_token_ids": True})


def _measured(peer: MeasuredPeer, scale: Scale, model: Path, figures: Figures) -> dict[str, float]:
    try:
        with peer.running(model) as client:
            return asyncio.run(figures(client, scale))
    except PeerUnavailable:
        # The log may lie where nobody can read it later.
        print(peer.log(model).read_text(encoding="utf-8", errors="replace")[-3000:], flush=True)
        raise


async def _beside_prompts(client: LoadClient, scale: Scale) -> dict[str, float]:
    dice = random.Random(5)
    found = await _first_tokens(client, scale, dice)
    beside = await disturbed(client, dice, length=scale.prompt, every_s=2)
    return found | {"ITL p99 beside prompts": beside["itl p99"]}


async def _alone(client: LoadClient, scale: Scale) -> dict[str, float]:
    dice = random.Random(5)
    found = await _first_tokens(client, scale, dice)
    for streams in scale.batches:
        jobs = [Job(prompt(dice, scale.context), 2 * scale.steps) for _ in range(streams)]
        answers = await closed_loop(client, jobs, streams)
        found[f"answers of {streams} at once"] = throughput(answers)
    return found


async def _first_tokens(client: LoadClient, scale: Scale, dice: random.Random) -> dict[str, float]:
    found = dict[str, float]()
    for length in scale.prompts:
        answers = [await client.send(Job(prompt(dice, length), 1)) for _ in range(scale.rounds)]
        found[f"TTFT of {length:,} tokens"] = 1e3 * percentile([answer.ttft for answer in answers], 50)
    return found


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
