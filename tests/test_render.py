"""One cluster.yaml, rendered: the chart takes its values, and what compose would start is a cluster that answers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tandem.cluster import Cluster
from tandem.commands.render import compose_file, helm_values, main
from tandem.local import free_ports
from tests.helm.chart import of_kind, render

ROOT = Path(__file__).parents[1]
ADDRESS, PASSWORD = "127.78.0.%d", "a-secret"


def cluster_of(path: str, **changed: Any) -> dict[str, Any]:
    pool = {"model": "demo", "resources": {"requests": {"cpu": 1, "memory": "1Gi"}}, "settings": {"num_blocks": 64}}
    http_port, grpc_port = free_ports(2)
    return {
        "models": [{"id": "demo", "name": "tandem-demo", "weights": {"path": path}}],
        "workers": {"settings": {"transports": ["tcp"], "threads": 1}},
        "pools": [{"name": "prefill", "role": "prefill", **pool}, {"name": "decode", "role": "decode", **pool}],
        "gateway": {"settings": {"http_port": http_port, "grpc_port": grpc_port, "drain_s": 5}},
        **changed,
    }  # fmt: skip


def test_the_chart_takes_the_values(demo_model: Path) -> None:
    objects = render(helm_values(Cluster.model_validate(cluster_of("models/demo/target"))))
    found = {o["metadata"]["name"]: o for o in of_kind(objects, "Deployment")}
    assert {"rel-gateway", "rel-prefill", "rel-decode", "rel-kvstore"} <= found.keys()
    container = found["rel-decode"]["spec"]["template"]["spec"]["containers"][0]
    said = {one["name"]: one.get("value") for one in container["env"]}
    assert said["TANDEM_NUM_BLOCKS"] == "64"
    assert said["TANDEM_TRANSPORTS"] == '["tcp"]'
    assert said["TANDEM_MODEL_PATH"] == "/app/models/demo/target"
    assert container["resources"] == {"requests": {"cpu": 1, "memory": "1Gi"}, "limits": {"memory": "2Gi"}}
    absolute = helm_values(Cluster.model_validate(cluster_of(str(demo_model))))
    assert absolute["models"][0]["weights"]["hostPath"] == str(demo_model)
    assert of_kind(render(absolute), "Deployment")


def test_gpus_get_their_images_and_devices() -> None:
    said = cluster_of("/models/m")
    for pool in said["pools"]:
        pool |= {"resources": {"limits": {"nvidia.com/gpu": 2}}, "settings": {"device": "cuda"}}
    cluster = Cluster.model_validate(said)
    assert {pool["accelerator"] for pool in helm_values(cluster)["pools"]} == {"cuda"}
    decode = compose_file(cluster)["services"]["decode"]
    assert "/decode-cuda:" in decode["image"]
    (device,) = decode["deploy"]["resources"]["reservations"]["devices"]
    assert (device["count"], device["capabilities"]) == (2, ["gpu"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"security": {"cluster_secret": "/s"}}, "security.cluster_secret"),
        ({"gateway": {"settings": {"api_keys": "/k"}}}, "gateway.settings.api_keys"),
        (
            {
                "models": [{"id": "demo", "name": "d", "weights": {"kind": "runtime_env", "path": "t"}}],
                "ray": {"runtime_env": {"working_dir": "w"}},
            },
            "models.demo.weights.kind",
        ),
        (
            {"models": [{"id": "demo", "name": "d", "weights": {"path": "t"}, "idle": "stop"}]},
            "models.demo.idle",
        ),
        (
            {"models": [{"id": "demo", "name": "d", "weights": {"kind": "download", "url": "hf://a/b"}}]},
            "models.demo.weights.files",
        ),
    ],
)
def test_what_neither_can_have_is_refused_by_its_field(
    changed: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_of("m", **changed)), encoding="utf-8")
    with pytest.raises(SystemExit, match=re.escape(f"tandem render: {named}: ")):
        main(["helm", f"--file={tmp_path / 'cluster.yaml'}"])
    assert capsys.readouterr().out == ""


@pytest.mark.long
def test_what_compose_would_start_answers(demo_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its services as processes, each at an address of its own in place of a container's."""
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_of(str(demo_model))), encoding="utf-8")
    main(["compose", f"--file={tmp_path / 'cluster.yaml'}"])
    services = yaml.safe_load(capsys.readouterr().out)["services"]
    assert {name: one["deploy"]["replicas"] for name, one in services.items() if "deploy" in one} == {
        "prefill": 1, "decode": 1
    }  # fmt: skip
    with composed(services, tmp_path):
        url = f"http://{ADDRESS % list(services).index('gateway')}:8000"
        end = time.monotonic() + 120
        while not is_ready(url):
            assert time.monotonic() < end
            time.sleep(0.2)
        asked = {"model": "tandem-demo", "prompt": "import os", "max_tokens": 4}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60)
        assert answer.json()["usage"]["completion_tokens"] == 4


def is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/ready", timeout=10).json().get("linked_pairs") == 1
    except httpx.HTTPError:
        return False


@contextmanager
def composed(services: dict[str, Any], folder: Path) -> Iterator[None]:
    places = {name: ADDRESS % number for number, name in enumerate(services)}
    running = []
    try:
        for name, service in services.items():
            module = service["image"].rpartition("/")[2].partition(":")[0]
            mounts = dict(volume.split(":")[1::-1] for volume in service.get("volumes", ()))
            said = {key: placed(text, name, places, mounts) for key, text in service["environment"].items()}
            with (folder / f"{name}.log").open("wb") as log:
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", f"services.{module}"],
                        cwd=ROOT,
                        stdout=log,
                        stderr=log,
                        env={"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), **said},
                    )
                )
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait(60)


def placed(text: str, name: str, places: dict[str, str], mounts: dict[str, str]) -> str:
    """As compose and its network would make of it."""
    text = re.sub(r"\$\{REDIS_PASSWORD:\?[^}]*\}", PASSWORD, text)
    text = text.replace("@kvstore:", f"@{places['kvstore']}:")
    return places[name] if text == "0.0.0.0" else mounts.get(text, text)
