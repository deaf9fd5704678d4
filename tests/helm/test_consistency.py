"""The objects of a release agree with one another: selectors, ports, references, what an upgrade may change."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ByteSize, TypeAdapter

from services.prefill.settings import PrefillSettings
from tandem.checkpoints import MemoryNeed, misfit
from tandem.settings import load
from tests.helm.chart import (
    NAMESPACE,
    RELEASE,
    SETS,
    Object,
    containers,
    loaded,
    name_of,
    of_kind,
    pod_templates,
    render,
    rendered,
    values_of,
)  # fmt: skip

GIB = 2**30
MAKERS = ("Deployment", "StatefulSet")
# What the API server refuses to change, by kind.
IMMUTABLE = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "volumeClaimTemplates", "podManagementPolicy"),
    "Service": ("clusterIP",),
}


# Bytes of memory of each GPU that an example names, and where it names none of the least that it is for; of weights.
GPUS = {"NVIDIA-H100-80GB-HBM3": 79 * GIB, "NVIDIA-H200": 139 * GIB, "": 79 * GIB}
WEIGHTS = {"qwen3-8b": 8_190_735_360 * 2, "qwen3-32b": 32_762_123_264 * 2}
LLAMA_70B = 70_553_706_496 * 2


def selects(selector: Object, labels: dict[str, str]) -> bool:
    """A LabelSelector, of which In is the only operator used."""
    named = selector.get("matchLabels", {}).items() <= labels.items()
    return named and all(labels.get(e["key"]) in e["values"] for e in selector.get("matchExpressions", ()))


def pods(objects: list[Object]) -> list[Object]:
    return [template for _, template in pod_templates(objects)]


def port_names(pod: Object) -> dict[str, int]:
    return {p["name"]: p["containerPort"] for c in pod["spec"]["containers"] for p in c.get("ports", ())}


def test_a_workload_selects_its_own_pods_and_no_other(value_set: str) -> None:
    objects = rendered(value_set)
    for maker in of_kind(objects, *MAKERS):
        selected = [pod for pod in pods(objects) if selects(maker["spec"]["selector"], pod["metadata"]["labels"])]
        assert selected == [maker["spec"]["template"]], name_of(maker)


def test_services_budgets_and_policies_select_pods_that_exist(value_set: str) -> None:
    objects = rendered(value_set)
    found = [(s, {"matchLabels": s["spec"]["selector"]}) for s in of_kind(objects, "Service")]
    found += [(o, o["spec"]["selector"]) for o in of_kind(objects, "PodDisruptionBudget", "InferencePool")]
    found += [(o, o["spec"]["podSelector"]) for o in of_kind(objects, "NetworkPolicy")]
    found += [(o, o["spec"]["selector"]) for o in of_kind(objects, "PodMonitor")]
    assert found
    for owner, selector in found:
        assert any(selects(selector, pod["metadata"]["labels"]) for pod in pods(objects)), name_of(owner)


def test_target_ports_are_ports_of_the_pods(value_set: str) -> None:
    objects = rendered(value_set)
    for service in of_kind(objects, "Service"):
        for pod in pods(objects):
            if service["spec"]["selector"].items() <= pod["metadata"]["labels"].items():
                for port in service["spec"]["ports"]:
                    assert port_names(pod)[port["targetPort"]] == port["port"], name_of(service)


def test_probes_and_monitors_name_ports_of_the_pods(value_set: str) -> None:
    objects = rendered(value_set)
    for pod in pods(objects):
        for container in pod["spec"]["containers"]:
            ports = port_names(pod)
            for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container.get(kind, {})
                for port in (probe.get(how, {}).get("port") for how in ("grpc", "tcpSocket", "httpGet")):
                    assert port is None or port in ports or port in ports.values(), (container["name"], kind)
    for monitor in of_kind(objects, "PodMonitor"):
        for pod in pods(objects):
            if selects(monitor["spec"]["selector"], pod["metadata"]["labels"]):
                assert {e["port"] for e in monitor["spec"]["podMetricsEndpoints"]} <= port_names(pod).keys()
    for monitor in of_kind(objects, "ServiceMonitor"):
        for service in of_kind(objects, "Service"):
            if selects(monitor["spec"]["selector"], service["metadata"]["labels"]):
                ports = {port["name"] for port in service["spec"]["ports"]}
                assert {e["port"] for e in monitor["spec"]["endpoints"]} <= ports


def references(pod: Object) -> Iterator[tuple[str, str, str | None]]:
    """Kind, name and key of what a pod needs to start."""
    spec = pod["spec"]
    yield "ServiceAccount", spec["serviceAccountName"], None
    for secret in spec.get("imagePullSecrets", ()):
        yield "Secret", secret["name"], None
    for container in containers(pod):
        for variable in container.get("env", ()):
            for source, kind in (("secretKeyRef", "Secret"), ("configMapKeyRef", "ConfigMap")):
                if reference := variable.get("valueFrom", {}).get(source):
                    yield kind, reference["name"], reference["key"]
        for source in container.get("envFrom", ()):
            for field, kind in (("secretRef", "Secret"), ("configMapRef", "ConfigMap")):
                if field in source:
                    yield kind, source[field]["name"], None
    for volume in spec.get("volumes", ()):
        if "configMap" in volume:
            yield "ConfigMap", volume["configMap"]["name"], None
        if "secret" in volume:
            yield "Secret", volume["secret"]["secretName"], None
            for item in volume["secret"].get("items", ()):
                yield "Secret", volume["secret"]["secretName"], item["key"]


def brought(value_set: str) -> set[str]:
    """Names of Secrets, ConfigMaps and a ServiceAccount that the user says exist."""
    values = values_of(value_set)
    names = {values.get(owner, {}).get("existingSecret") for owner in ("redis", "store", "apiKeys", "cluster")}
    names |= {values.get("cluster", {}).get("tlsSecret"), values.get("caBundle", {}).get("configMap")}
    told = (variable.get("valueFrom", {}) for variable in values.get("telemetry", {}).get("env", ()))
    names |= {source["secretKeyRef"]["name"] for source in told if "secretKeyRef" in source}
    names |= {*values.get("image", {}).get("pullSecrets", ()), values.get("serviceAccount", {}).get("existing")}
    for block in (values.get("gateway", {}), values.get("workers", {})):
        names |= {source["configMapRef"]["name"] for source in block.get("envFrom", ())}
        names |= {volume["configMap"]["name"] for volume in block.get("volumes", ()) if "configMap" in volume}
    return names | {m["weights"].get("secret") for m in values.get("models", ())} - {None, ""}


def test_what_pods_refer_to_exists(value_set: str) -> None:
    objects = rendered(value_set)
    there = {(o["kind"], o["metadata"]["name"]): {**o.get("data", {}), **o.get("stringData", {})} for o in objects}
    seen = 0
    for pod in pods(objects):
        for kind, name, key in references(pod):
            seen += 1
            if kind in ("Secret", "ConfigMap", "ServiceAccount") and name in brought(value_set):
                continue
            assert (kind, name) in there, (kind, name)
            assert key is None or key in there[kind, name], (kind, name, key)
    assert seen


def test_mounts_name_volumes_and_volumes_are_mounted(value_set: str) -> None:
    objects = rendered(value_set)
    for name, pod in pod_templates(objects):
        maker = next((o for o in of_kind(objects, "StatefulSet") if name_of(o) == name), {"spec": {}})
        claims = {c["metadata"]["name"] for c in maker["spec"].get("volumeClaimTemplates", ())}
        volumes = {v["name"] for v in pod["spec"].get("volumes", ())} | claims
        mounted = {m["name"] for c in containers(pod) for m in c.get("volumeMounts", ())}
        assert mounted == volumes, name


def test_an_autoscaled_workload_has_one_autoscaler_and_no_replicas(value_set: str) -> None:
    objects = rendered(value_set)
    targets = [o["spec"]["scaleTargetRef"]["name"] for o in of_kind(objects, "HorizontalPodAutoscaler", "ScaledObject")]
    assert len(targets) == len(set(targets))
    workloads = {o["metadata"]["name"]: o["spec"] for o in of_kind(objects, "Deployment")}
    assert not [name for name in targets if "replicas" in workloads[name]]


def test_routes_lead_to_ports_of_services(value_set: str) -> None:
    objects = rendered(value_set)
    services = {o["metadata"]["name"]: o["spec"]["ports"] for o in of_kind(objects, "Service")}
    for route in of_kind(objects, "HTTPRoute", "GRPCRoute"):
        for backend in (b for rule in route["spec"]["rules"] for b in rule["backendRefs"]):
            assert backend["port"] in {p["port"] for p in services[backend["name"]]}, name_of(route)
    for ingress in of_kind(objects, "Ingress"):
        for backend in (p["backend"]["service"] for r in ingress["spec"]["rules"] for p in r["http"]["paths"]):
            assert backend["port"]["name"] in {p["name"] for p in services[backend["name"]]}, name_of(ingress)


def test_the_grace_of_a_pod_covers_its_drain(value_set: str) -> None:
    for maker in of_kind(rendered(value_set), "Deployment"):
        pod = maker["spec"]["template"]["spec"]
        drains = [e["value"] for e in pod["containers"][0]["env"] if e["name"] == "TANDEM_DRAIN_S"]
        assert pod["terminationGracePeriodSeconds"] >= sum(map(float, drains)) + 15, name_of(maker)


def test_a_pods_secrets_are_in_no_argument_and_no_plain_variable(value_set: str) -> None:
    objects = rendered(value_set)
    secrets = {text for o in of_kind(objects, "Secret") for text in o["stringData"].values()}
    secrets |= {url.rpartition("@")[0].rpartition(":")[2] for url in secrets if "@" in url}
    for pod in pods(objects):
        for container in containers(pod):
            plain = [*container.get("command", ()), *container.get("args", ())]
            plain += [str(e["value"]) for e in container.get("env", ()) if "value" in e]
            assert not [s for s in secrets if s and any(s in text for text in plain)], container["name"]


# --- upgrades ---


def changed(before: Object, after: Object) -> list[str]:
    fields = IMMUTABLE.get(before["kind"], ())
    return [field for field in fields if before["spec"].get(field) != after["spec"].get(field)]


@pytest.mark.parametrize("before", sorted(SETS))
def test_an_upgrade_changes_nothing_that_is_immutable(before: str, value_set: str) -> None:
    there = {name_of(o): o for o in rendered(before)}
    for found in rendered(value_set):
        old = there.get(name_of(found))
        # Whether the trial's Redis has a volume is settled when it is installed.
        if old and not (before != value_set and "bare" in (before, value_set) and found["kind"] == "StatefulSet"):
            assert not changed(old, found), name_of(found)


def test_the_check_for_immutable_fields_sees_one() -> None:
    [before, *_] = of_kind(rendered("cpu-trial"), "StatefulSet")
    after = {**before, "spec": {**before["spec"], "serviceName": "other"}}
    assert changed(before, after) == ["serviceName"]


def test_install_upgrade_and_rollback() -> None:
    """By Helm's own actions, with releases kept in memory and no cluster."""
    from helm_python import Config

    with Config(namespace=NAMESPACE, storage_driver="memory", kubeconfig_content="") as helm:
        installed = helm.install(loaded(), RELEASE, values_of("cpu-trial"), dry_run="client")
        assert installed["manifest"].count("kind: Deployment") == 4


def environment(pod: Object) -> dict[str, Any]:
    return {e["name"]: e.get("value") for e in pod["spec"]["containers"][0].get("env", ())}


def test_settings_become_variables_as_settings_read_them() -> None:
    deployments = {o["metadata"]["name"]: o["spec"]["template"] for o in of_kind(rendered("gpu-4p8d"), "Deployment")}
    found = environment(deployments["rel-prefill-h100"])
    assert found["TANDEM_TRANSPORTS"] == '["nccl","tcp"]'
    assert found["NCCL_IB_HCA"] == "mlx5"
    assert found["TANDEM_KV_MEMORY"] == "10GiB"
    assert found["TANDEM_MAX_NUM_BATCHED_TOKENS"] == "16384"
    assert found["TANDEM_NAMESPACE"] == f"{NAMESPACE}.{RELEASE}"


def test_what_a_gpu_pool_says_is_what_its_worker_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of("gpu-4p8d")
    values["workers"]["env"] = [{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/mps"}]
    deployments = {o["metadata"]["name"]: o["spec"]["template"] for o in of_kind(render(values), "Deployment")}
    found = environment(deployments["rel-prefill-h100"])
    for name, value in found.items():
        monkeypatch.setenv(name, value or "somewhere")
    settings = load(PrefillSettings, [])
    assert (settings.device, settings.transports, settings.max_num_batched_tokens) == ("cuda", ("nccl", "tcp"), 16384)
    # NCCL and CUDA read these themselves.
    assert (os.environ["NCCL_SOCKET_IFNAME"], os.environ["CUDA_MPS_PIPE_DIRECTORY"]) == ("eth0", "/mps")


def test_ranks_of_a_pool_are_what_its_worker_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    values = values_of("cpu-trial")
    values["pools"] = [
        {"name": "prefill", "role": "prefill", "model": "demo", "settings": {"tensor_parallel": 2}},
        {"name": "decode", "role": "decode", "model": "demo"},
    ]
    deployments = {o["metadata"]["name"]: o["spec"]["template"] for o in of_kind(render(values), "Deployment")}
    assert "TANDEM_TENSOR_PARALLEL" not in environment(deployments["rel-decode"])
    for name, value in environment(deployments["rel-prefill"]).items():
        monkeypatch.setenv(name, value or "somewhere")
    assert load(PrefillSettings, []).engine_config().tensor_parallel == 2


@pytest.mark.parametrize("name", [name for name in SETS if name.startswith("gpu-")])
def test_models_of_the_examples_fit_their_gpus(name: str) -> None:
    values = values_of(name)
    for pool in values["pools"]:
        settings = {**values["workers"].get("settings", {}), **pool.get("settings", {})}
        gpu = GPUS[pool.get("nodeSelector", {}).get("nvidia.com/gpu.product", "")]
        kv = TypeAdapter(ByteSize).validate_python(settings["kv_memory"])
        assert misfit([MemoryNeed(WEIGHTS[pool["model"]], kv)], gpu) == "", pool["name"]
        assert misfit([MemoryNeed(LLAMA_70B, kv)], gpu), "which no GPU of these holds in bfloat16"


def test_rdma_devices_are_asked_for_with_the_right_to_lock_their_memory() -> None:
    for maker in of_kind(rendered("gpu-4p8d"), "Deployment"):
        [container] = maker["spec"]["template"]["spec"]["containers"]
        works = container["name"] in ("prefill", "decode")
        assert container["resources"]["limits"].get("rdma/hca") == (1 if works else None)
        assert ("add" in container["securityContext"]["capabilities"]) is works


def test_a_crash_page_outlives_its_container(value_set: str) -> None:
    folder = PrefillSettings.model_fields["crash_dir"].default
    workers = [pod for pod in pods(rendered(value_set)) if "health" in port_names(pod) and "kv" in port_names(pod)]
    assert workers
    for pod in workers:
        lasting = {volume["name"] for volume in pod["spec"]["volumes"] if "emptyDir" in volume}
        mounts = [mount for one in pod["spec"]["containers"] for mount in one.get("volumeMounts", ())]
        assert any(folder.is_relative_to(mount["mountPath"]) and mount["name"] in lasting for mount in mounts)
