from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tandem.commands.up import DEMO_MODEL
from tandem.engine import Engine, EngineConfig
from tandem.registry import Registry
from tests.e2e.cluster import RunningCluster, running_cluster


@pytest.fixture(scope="session")
def config_only(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Path:
    """The demo model's folder without its weights."""
    folder = tmp_path_factory.mktemp("config-only")
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_bytes((demo_model / name).read_bytes())
    return folder


@pytest.fixture(scope="package")
def shm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """float32, KV over shared memory, evicted KV kept in host memory."""
    folder = tmp_path_factory.mktemp("shm")
    settings = "--dtype=float32", "--transports=shm", "--disaggregation=require"
    with running_cluster(folder, *settings, env={"TANDEM_KV_HOST": "64MiB"}) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def tcp_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """float32, KV over TCP, tokens proposed ahead."""
    folder, draft = tmp_path_factory.mktemp("tcp"), DEMO_MODEL.parent / "draft"
    ahead = ("--speculative-method=ngram", f"--speculative-model={draft}")
    with running_cluster(folder, "--dtype=float32", "--transports=tcp", "--disaggregation=require", *ahead) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def one_process_engine(demo_model: Path) -> Engine:
    """The oracle: the same weights in one engine, prefill and decode together."""
    config = EngineConfig(
        model_path=demo_model, model_name="oracle", dtype="float32", num_blocks=512, enable_prefix_caching=False
    )
    return Engine(config)


# A worker reports every half second: what is read so much later was reported after the first look.
REPORTED_S = 0.6


@pytest.fixture
def at_baseline() -> Callable[[RunningCluster], object]:
    """Is everything released: blocks on every worker, reservations and load in Redis?"""

    async def look(registry: Registry) -> bool:
        return all(
            w.load.free_blocks == w.info.num_blocks
            and w.load.num_running == w.load.num_waiting == 0
            and w.reserved_tokens == w.reserved_blocks == 0
            for w in await registry.workers()
        )

    async def check(cluster: RunningCluster) -> bool:
        registry = Registry.connect(cluster.redis_url, timeout=30.0)
        try:
            if not await look(registry):
                return False
            await asyncio.sleep(REPORTED_S)
            return await look(registry)
        finally:
            await registry.close()

    return check
