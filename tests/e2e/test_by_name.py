"""Clusters whose file names their model, from a hub on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.checkpoints.hub_server import Hub, running_hub
from tests.e2e.cluster import running_cluster

FILE = """
models: [{{id: demo, name: demo, weights: {{kind: download, url: "hf://org/demo@v1"}}}}]
pools: [{{name: decode, role: decode, model: demo, settings: {{num_blocks: 256, threads: 1}}}}]
gateway: {{settings: {{http_port: {http}, grpc_port: {grpc}}}}}
redis: {{port: {redis}}}
"""


@pytest.fixture(scope="module")
def hub(demo_model: Path) -> Iterator[Hub]:
    with running_hub({"org/demo": {path.name: path.read_bytes() for path in demo_model.iterdir()}}) as hub:
        yield hub


@pytest.mark.parametrize(
    "options",
    [pytest.param((), marks=pytest.mark.long), pytest.param(("--ray=local",), marks=pytest.mark.long)],
    ids=["here", "ray"],
)
def test_a_cluster_fetches_the_model_that_its_file_names(options: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    before = len(hub.weights_asked())
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    with running_cluster(tmp_path, *options, env=environment, file=FILE) as cluster:
        body = {"model": "demo", "prompt": "import ", "max_tokens": 4}
        answer = httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4, answer.text
    assert len(hub.weights_asked()) == before + 1


@pytest.mark.long
@pytest.mark.parametrize("options", [(), ("--ray=local",)], ids=["here", "ray"])
def test_a_model_that_is_not_there_is_one_line(options: tuple[str, ...], hub: Hub, tmp_path: Path) -> None:
    environment = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hub")}
    with (
        pytest.raises(AssertionError, match=r"tandem up: org/none: .* has no such model, or it is private"),
        running_cluster(tmp_path, *options, env=environment, file=FILE.replace("org/demo@v1", "org/none")),
    ):
        pass
