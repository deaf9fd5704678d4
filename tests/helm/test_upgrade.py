"""`helm upgrade` from the last release under load: its chart and its code first, then these; no request fails.

Where both have another registry format, neither's gateways route to the other's workers, and each says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tandem.registry import THIS_RELEASE
from tests.helm.chart import Object, of_kind, render
from tests.helm.pods import ROOT, Node, Pod
from tests.helm.rollouts import roll_all, under_load, until
from tests.helm.test_rollout import values
from tests.release import last_release, released_files

pytestmark = pytest.mark.long
# Long enough that workers of the last release would all have gone, were they not waited for.
LATE_S = 25.0


@pytest.fixture
def node(tmp_path: Path, demo_model: Path) -> Iterator[Node]:
    """The last release, ready."""
    (tmp_path / "release").mkdir()
    (tmp_path / "node").mkdir()
    tree = released_files(tmp_path / "release")
    chart = tree / "deploy" / "helm"
    node = Node(tmp_path / "node", render(values(demo_model, "old"), chart=chart), subnet=76, code=tree)
    try:
        node.start_release()
        yield node
    finally:
        node.stop()


def test_an_upgrade_from_the_last_release_fails_no_request(node: Node, demo_model: Path) -> None:
    old, (version, _) = set(node.pods), last_release()
    with under_load(node) as load:
        node.code = ROOT
        node.use(render(values(demo_model, "new")))
        gateway = node.start(node.find("Deployment", "rel-gateway-demo"))
        until(lambda: both_named(refusal(gateway), version))
        gateway.kill()
        del node.pods[gateway.name]
        roll_all(node, of_kind(node.objects, "Deployment"), load.balancer, late=slow_gateway)
        until(lambda: load.answers[-1]["decode_worker"] not in old)
    assert load.failures == []
    paths = {(answer["prefill_worker"], answer["decode_worker"]) for answer in load.answers}
    assert {prefill in old for prefill, _ in paths} == {True, False}
    assert all((prefill in old) is (decode in old) for prefill, decode in paths)
    for component in ("prefill", "decode"):
        (worker,) = (pod for pod in node.pods.values() if pod.component == component)
        assert both_named(worker.log, version)


def slow_gateway(workload: Object) -> float:
    """The new one comes late, for want of a node."""
    labels = workload["spec"]["template"]["metadata"]["labels"]
    return LATE_S if labels["app.kubernetes.io/component"] == "gateway" else 0.0


def refusal(gateway: Pod) -> str:
    """Answer of a gateway of this release to a completion, beside workers of the last one alone."""
    try:
        answer = httpx.post(
            f"http://{gateway.ip}:8000/v1/completions", json={"model": "demo", "prompt": "a"}, timeout=60
        )
    except httpx.HTTPError:
        return ""
    return answer.text if answer.status_code == 503 else ""


def both_named(text: str, version: str) -> bool:
    return f"Tandem {version} (registry format " in text and THIS_RELEASE in text
