"""Pods hold to the Pod Security level "restricted", and policies let through the architecture's edges and no other."""

from __future__ import annotations

from collections.abc import Iterator

from tests.helm.chart import Object, containers, of_kind, pod_templates, render, rendered, values_of
from tests.helm.test_consistency import selects

# Volumes that "restricted" allows; `image` is an OCI image, read-only.
VOLUMES = {"configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
VOLUMES |= {"image"}
# Value sets that ask for more, and for what.
EXCEPTIONS = {"two-models": {"volume models is hostPath"}, "gpu-4p8d": {"capability IPC_LOCK is added"}}


def violations(pod: Object) -> Iterator[str]:
    """Rule by rule, in the words of the Pod Security Standards."""
    spec = pod["spec"]
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            yield f"{name} is set"
    for volume in spec.get("volumes", ()):
        if kinds := volume.keys() - {"name"} - VOLUMES:
            yield f"volume {volume['name']} is {min(kinds)}"
    security = spec.get("securityContext", {})
    for container in containers(pod):
        own = {**security, **container.get("securityContext", {})}
        if own.get("runAsNonRoot") is not True:
            yield "runAsNonRoot is not true"
        if own.get("runAsUser") == 0:
            yield "runAsUser is 0"
        if own.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile is not RuntimeDefault"
        if own.get("privileged"):
            yield "privileged is set"
        if own.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation is not false"
        if own.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "capabilities are not all dropped"
        if added := set(own.get("capabilities", {}).get("add", ())) - {"NET_BIND_SERVICE"}:
            yield f"capability {min(added)} is added"
        if own.get("procMount", "Default") != "Default":
            yield "procMount is not Default"
        if any(port.get("hostPort") for port in container.get("ports", ())):
            yield "hostPort is set"
        if own.get("readOnlyRootFilesystem") is not True:  # beyond the standard
            yield "the root file system is writable"
    if any(name.startswith("container.apparmor") for name in pod["metadata"].get("annotations", {})):
        yield "AppArmor is overridden"
    if security.get("sysctls"):
        yield "sysctls are set"


def test_pods_are_restricted(value_set: str) -> None:
    found = {problem for _, pod in pod_templates(rendered(value_set)) for problem in violations(pod)}
    assert found == EXCEPTIONS.get(value_set, set())


def test_the_check_sees_each_violation() -> None:
    bad = {
        "metadata": {"annotations": {"container.apparmor.security.beta.kubernetes.io/c": "unconfined"}},
        "spec": {
            "hostIPC": True, "hostPID": True, "hostNetwork": True, "volumes": [{"name": "v", "hostPath": {}}],
            "securityContext": {"sysctls": [{}], "runAsUser": 0},
            "containers": [{"ports": [{"hostPort": 1}], "securityContext": {
                "privileged": True, "procMount": "Unmasked", "capabilities": {"add": ["SYS_ADMIN"]}}}],
        },
    }  # fmt: skip
    assert len(set(violations(bad))) == 16


def test_pods_have_no_token_and_bounded_memory(value_set: str) -> None:
    for name, pod in pod_templates(rendered(value_set)):
        assert pod["spec"]["automountServiceAccountToken"] is False, name
        for container in containers(pod):
            assert "memory" in container["resources"]["limits"], name


# --- who may connect to whom ---

ANYONE = "anyone"
# To, port: from. Probes come from the node itself, which no policy keeps out.
EDGES = {
    ("gateway", 8000): {ANYONE},
    ("gateway", 50051): {ANYONE},
    ("prefill", 50061): {"gateway", "doctor"},
    ("prefill", 50062): {"decode"},
    ("prefill", 9090): {ANYONE},
    ("decode", 50061): {"gateway", "doctor"},
    ("decode", 50062): {"prefill"},
    ("decode", 9090): {ANYONE},
    ("kvstore", 50052): {"doctor"},
    ("kvstore", 9090): {ANYONE},
    ("redis", 6379): {"gateway", "prefill", "decode", "kvstore", "doctor"},
    ("store", 6379): {"gateway"},
}
WORKERS = {"prefill", "decode"}
STRANGER = {"app.kubernetes.io/name": "tandem", "app.kubernetes.io/instance": "another"}


def component(labels: dict[str, str]) -> str:
    return labels["app.kubernetes.io/component"]


def allows(policies: list[Object], to: dict[str, str], port: int, source: dict[str, str]) -> bool:
    """True if a pod with labels `source`, of this namespace, may connect."""
    over = [p["spec"] for p in policies if selects(p["spec"]["podSelector"], to)]
    if not over:
        return True
    for rule in (rule for policy in over for rule in policy["ingress"]):
        if port in {p["port"] for p in rule.get("ports", [{"port": port}])}:
            peers = rule.get("from", [])
            if not peers or any("podSelector" in p and selects(p["podSelector"], source) for p in peers):
                return True
    return False


def test_gpu_workers_that_choose_their_transports_may_choose_nccl() -> None:
    values = values_of("gpu-4p8d")
    values["workers"]["settings"]["transports"] = None
    objects = render(values)
    policies, pods = of_kind(objects, "NetworkPolicy"), [pod["metadata"]["labels"] for _, pod in pod_templates(objects)]
    workers = [labels for labels in pods if component(labels) in WORKERS]
    assert all(allows(policies, to, 40000, source) for to in workers for source in workers)


def test_policies_let_through_the_architectures_edges_and_no_other(value_set: str) -> None:
    objects = rendered(value_set)
    policies = of_kind(objects, "NetworkPolicy")
    pods = [pod["metadata"]["labels"] for _, pod in pod_templates(objects)]
    if value_set == "bare":
        assert not policies
        return
    watched = "gpu-4p8d"  # where metrics are for the monitoring namespace alone
    for to in pods:
        for port in {port for _, port in EDGES} | {8081, 1}:
            meant = EDGES.get((component(to), port), set())
            if value_set == watched and port == 9090:
                meant = set()
            if value_set == watched and component(to) in WORKERS:  # NCCL listens where it likes
                meant = meant | WORKERS
            if component(to) == "doctor":
                continue  # listens on nothing
            for source in [*pods, STRANGER]:
                expected = ANYONE in meant or (source is not STRANGER and component(source) in meant)
                assert allows(policies, to, port, source) is expected, (to, port, source)


def test_each_port_that_a_pod_opens_is_an_edge_or_for_probes(value_set: str) -> None:
    for _, pod in pod_templates(rendered(value_set)):
        for container in pod["spec"]["containers"]:
            for port in container.get("ports", ()):
                known = (component(pod["metadata"]["labels"]), port["containerPort"]) in EDGES
                assert known or port["name"] == "health"
