"""Several models on real Ray, one raylet: an alias of two, one that starts when it is asked for; null engines."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import yaml
from ray.cluster_utils import Cluster as Raylets

from tandem.local import free_ports
from tests.e2e.cluster import BOUND_S, eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
NODE = {"object_store_memory": 80 * 2**20, "include_log_monitor": False}
NO_SPARE_WORKERS = {"prestart_worker_first_driver": False, "enable_worker_prestart": False}
START_S, STOP_S = 200.0, 100.0


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("models")
    http_port, grpc_port, redis_port = free_ports(3)
    models: list[dict[str, Any]] = [
        {"id": name, "name": name, "weights": {"path": str(demo_model)}, "aliases": {"both": 1}} for name in ("a", "b")
    ] + [{"id": "c", "name": "c", "weights": {"path": str(demo_model)}, "idle": {"stop": 5}, "aliases": {"late": 1}}]
    settings = {"engine": "null", "num_blocks": 64, "threads": 1}
    cluster = {
        "models": models,
        "workers": {"settings": settings},
        "pools": [{"name": name, "role": "decode", "model": name} for name in ("a", "b", "c")],
        "gateway": {"settings": {"http_port": http_port, "grpc_port": grpc_port}},
        "redis": {"port": redis_port},
    }
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
    raylets = Raylets(initialize_head=True, head_node_args={"num_cpus": 4, "_system_config": NO_SPARE_WORKERS, **NODE})
    command = [sys.executable, "-m", "tandem", "up", f"--ray={raylets.address}", f"--file={folder / 'cluster.yaml'}"]
    with (folder / "up.log").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        said = folder / "up.log"
        eventually(
            lambda: "is ready" in said.read_text(encoding="utf-8") or process.poll() is not None,
            START_S,
            "cluster ready",
        )
        assert process.poll() is None, said.read_text(encoding="utf-8")
        yield f"http://127.0.0.1:{http_port}"
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(STOP_S)
        ray.shutdown()
        raylets.shutdown()


def ask(http: str, model: str, **more: Any) -> httpx.Response:
    body = {"model": model, "prompt": [5, 6, 7, 8] * 8, "max_tokens": 3, **more}
    headers = {"x-request-timeout": str(2 * BOUND_S)}
    return httpx.post(f"{http}/v1/completions", json=body, headers=headers, timeout=3 * BOUND_S)


def test_an_alias_is_answered_by_both_and_each_user_by_one(http: str) -> None:
    found = Counter[str]()
    for user in map(str, range(8)):
        answers = [ask(http, "both", user=user) for _ in range(2)]
        assert {answer.status_code for answer in answers} == {200}
        (name,) = {answer.headers["x-tandem-model"] for answer in answers}
        assert answers[0].headers["x-tandem-decode-worker"] == f"{name}-0"
        found[name] += 1
    assert set(found) == {"a", "b"}


def test_a_model_starts_when_it_is_asked_for_and_stops_when_it_is_idle(http: str) -> None:
    def state() -> str:
        cards = httpx.get(f"{http}/v1/models", timeout=10.0).json()["data"]
        return next(card["state"] for card in cards if card["id"] == "c")

    for name in ("c", "late"):
        eventually(lambda: state() == "asleep", STOP_S, "it is idle")
        answer = ask(http, name)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-tandem-decode-worker"] == "c-0"
        assert float(answer.headers["x-tandem-woken-after-s"]) > 0.1
