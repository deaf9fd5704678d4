"""KV below a cluster's caches: conversations return from host memory and, to one that starts again, from disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import BOUND_S, eventually, running_cluster

pytestmark = pytest.mark.long
PROMPT = [5 + i % 900 for i in range(400)]  # 25 blocks, the last one not whole
CACHED = 24 * 16


def answered(http: str, prompt: list[int] = PROMPT) -> tuple[str, int]:
    """Text, and tokens of the prompt that nobody computed."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 24, "temperature": 0}
    answer: dict[str, Any] = httpx.post(f"{http}/v1/completions", json=body, timeout=BOUND_S).raise_for_status().json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("pair", [("--prefill=1", "--disaggregation=require"), ("--prefill=0",)])
def test_a_cluster_that_starts_again_finds_its_cache(tmp_path: Path, demo_model: Path, pair: tuple[str, ...]) -> None:
    disk = {"TANDEM_KV_DISK": "64MiB", "TANDEM_KV_DISK_FOLDER": str(tmp_path / "kv"), "TANDEM_DTYPE": "float32"}
    options = (f"--model-path={demo_model}", "--model-name=demo", "--decode=1", *pair)
    with running_cluster(tmp_path, *options, env=disk) as cluster:
        first, cached = answered(cluster.http)
        assert cached == 0
        eventually(lambda: len(list(tmp_path.glob("kv/*/*/??/*"))) >= 24, BOUND_S, "its blocks are on disk")
    with running_cluster(tmp_path, *options, env=disk) as cluster:
        assert answered(cluster.http) == (first, CACHED)


def test_what_the_caches_have_evicted_comes_from_the_host(tmp_path: Path, demo_model: Path) -> None:
    host = {"TANDEM_KV_HOST": "64MiB", "TANDEM_NUM_BLOCKS": "64", "TANDEM_DTYPE": "float32"}
    options = (
        f"--model-path={demo_model}",
        "--model-name=demo",
        "--decode=1",
        "--prefill=1",
        "--disaggregation=require",
    )
    with running_cluster(tmp_path, *options, env=host) as cluster:
        first, cached = answered(cluster.http)
        assert cached == 0
        for other in range(1, 5):
            answered(cluster.http, [other * 100 + i % 50 for i in range(400)])
        assert answered(cluster.http) == (first, CACHED)
