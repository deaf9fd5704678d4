"""One cluster.yaml, rendered: the chart takes its values."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.cluster import Cluster
from tandem.commands.render import helm_values, main
from tandem.local import free_ports
from tests.helm.chart import of_kind, render


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


def test_gpus_get_their_images() -> None:
    said = cluster_of("/models/m")
    for pool in said["pools"]:
        pool |= {"resources": {"limits": {"nvidia.com/gpu": 2}}, "settings": {"device": "cuda"}}
    cluster = Cluster.model_validate(said)
    assert {pool["accelerator"] for pool in helm_values(cluster)["pools"]} == {"cuda"}


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
def test_what_the_chart_cannot_have_is_refused_by_its_field(
    changed: dict[str, Any], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster_of("m", **changed)), encoding="utf-8")
    with pytest.raises(SystemExit, match=re.escape(f"tandem render: {named}: ")):
        main(["helm", f"--file={tmp_path / 'cluster.yaml'}"])
    assert capsys.readouterr().out == ""
