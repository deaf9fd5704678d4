"""Volumes, variables, users and autoscalers that a platform team asks of the chart, in what it renders."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

from tests.helm.chart import Object, Values, of_kind, pod_templates, render, rendered, values_of

CA = "/etc/tandem/ca/ca.crt"
# Settings and variables of the value set `platform` that name a file or a folder.
PATHS = {"TANDEM_LORA_DIR", "TANDEM_SPECULATIVE_MODEL", "FLASHINFER_WORKSPACE_BASE", "CUDA_CACHE_PATH"}
PATHS |= {"OTEL_EXPORTER_OTLP_CERTIFICATE"}


def main_container(pod: Object) -> Object:
    found: Object = pod["spec"]["containers"][0]
    return found


def variables(pod: Object) -> dict[str, Any]:
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in main_container(pod)["env"]}


def mounted(pod: Object, path: str) -> bool:
    mounts = [mount["mountPath"] for mount in main_container(pod)["volumeMounts"]]
    return any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)


@pytest.mark.parametrize("name", ["cpu-trial", "platform"])
def test_every_pod_has_the_labels_and_registries_of_all(name: str) -> None:
    values = values_of(name) | {"commonLabels": {"cost": "42"}}
    values["image"] = values.get("image", {}) | {"pullSecrets": ["registry"]}
    pods = [pod for _, pod in pod_templates(render(values))]
    assert {pod["metadata"]["labels"].get("cost") for pod in pods} == {"42"}
    assert all(pod["spec"].get("imagePullSecrets") == [{"name": "registry"}] for pod in pods)


def test_each_path_that_a_pod_is_told_is_mounted() -> None:
    told = [(pod, name, value) for _, pod in pod_templates(rendered("platform"))
            if "env" in main_container(pod) for name, value in variables(pod).items() if name in PATHS]  # fmt: skip
    assert {name for _, name, _ in told} == PATHS
    assert [(name, value) for pod, name, value in told if not mounted(pod, value)] == []


def test_every_pod_that_speaks_to_redis_has_the_ca_bundle_and_one_place_for_traces() -> None:
    objects = rendered("platform")
    [secret] = [o for o in of_kind(objects, "Secret") if o["metadata"]["name"] == "rel-llm-redis"]
    assert secret["stringData"]["url"].endswith(f"?ssl_ca_certs={CA}")
    speakers = [pod for _, pod in pod_templates(objects) if "TANDEM_REDIS_URL" in str(main_container(pod).get("env"))]
    assert {pod["metadata"]["labels"]["app.kubernetes.io/component"] for pod in speakers} == {
        "gateway", "prefill", "decode", "kvstore", "doctor",
    }  # fmt: skip
    assert all(mounted(pod, CA) for pod in speakers)
    assert {variables(pod)["OTEL_EXPORTER_OTLP_ENDPOINT"] for pod in speakers} == {
        "https://otel-collector.observability:4318"
    }


def test_a_workload_may_send_its_traces_elsewhere() -> None:
    elsewhere = {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "http://sidecar:4317"}
    values = values_of("platform")
    values["gateway"]["env"] = [elsewhere]
    for maker in of_kind(render(values), "Deployment"):
        entries = [e for e in main_container(maker["spec"]["template"])["env"] if e["name"] == elsewhere["name"]]
        assert len(entries) == 1
        assert (entries == [elsewhere]) is maker["metadata"]["name"].startswith("rel-llm-gateway")


def test_users_that_a_platform_chooses_are_left_to_it() -> None:
    for name, pod in pod_templates(rendered("platform")):
        security = pod["spec"]["securityContext"]
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & security.keys(), name
        assert security["runAsNonRoot"] is True


def scaled(kind: str, **more: object) -> Object:
    monitoring = {"prometheusAuth": {"modes": "bearer", "ref": {"name": "prometheus"}}}
    values: Values = {"workers": {"autoscaling": {"kind": kind, **more}}, "monitoring": monitoring}
    found = of_kind(render(values), "HorizontalPodAutoscaler", "ScaledObject")
    return {one["metadata"]["name"]: one["spec"] for one in found}


BEHAVIOR = {"scaleUp": {"policies": [{"type": "Pods", "value": 2, "periodSeconds": 60}]}}


def test_hpa_and_keda_take_a_behaviour_beside_the_slow_way_down() -> None:
    expected = {"scaleDown": {"stabilizationWindowSeconds": 300}} | BEHAVIOR
    assert scaled("hpa", behavior=BEHAVIOR)["rel-decode"]["behavior"] == expected
    keda = scaled("keda", behavior=BEHAVIOR)["rel-decode"]["advanced"]["horizontalPodAutoscalerConfig"]
    assert keda["behavior"] == expected


def test_keda_knows_what_to_do_without_prometheus_and_who_it_is_there() -> None:
    fallback = {"failureThreshold": 3, "replicas": 4}
    for spec in scaled("keda", fallback=fallback, pollingInterval=10).values():
        assert (spec["fallback"], spec["pollingInterval"]) == (fallback, 10)
        for trigger in spec["triggers"]:
            assert trigger["metadata"]["authModes"] == "bearer"
            assert trigger["authenticationRef"] == {"name": "prometheus"}
