"""`helm upgrade` from the last release and `helm rollback` to it, under load: by the charts and the code of both; no
request fails.

Where both have another registry format, neither's gateways route to the other's workers, and each says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tandem.registry import THIS_RELEASE
from tests.helm.chart import Object, of_kind, render
from tests.helm.pods import ROOT, Node, Pod
from tests.helm.rollouts import RolloutLoad, roll_all, under_load, until
from tests.helm.test_rollout import values
from tests.release import last_release, released_files

pytestmark = pytest.mark.long
# A gateway that replaces another comes late, for want of a node: so long that workers of the last release would all
# have gone, were they not waited for; and so long after those of this one were told to go.
LATE_S, LATE_BACK_S = 25.0, 3.0


@dataclass(frozen=True)
class Release:
    code: Path
    objects: list[Object]


@pytest.fixture
def last(tmp_path: Path, demo_model: Path) -> Release:
    (folder := tmp_path / "release").mkdir()
    tree = released_files(folder)
    return Release(tree, render(values(demo_model, "old"), chart=tree / "deploy" / "helm"))


@pytest.fixture
def this(demo_model: Path) -> Release:
    new = values(demo_model, "new")
    new["gateway"]["perModel"] = True  # as the last release has it: Services keep their names
    new["workers"]["settings"]["drain_s"] = 60
    return Release(ROOT, render(new))


@contextmanager
def running(release: Release, folder: Path) -> Iterator[Node]:
    """All of it, ready."""
    (folder / "node").mkdir()
    node = Node(folder / "node", release.objects, subnet=76, code=release.code)
    try:
        node.start_release()
        yield node
    finally:
        node.stop()


def test_an_upgrade_from_the_last_release_fails_no_request(last: Release, this: Release, tmp_path: Path) -> None:
    version, _ = last_release()
    with running(last, tmp_path) as node, under_load(node) as load:
        old, node.code = set(node.pods), this.code
        node.use(this.objects)
        gateway = node.start(node.find("Deployment", "rel-gateway-demo"))
        until(lambda: both_named(refusal(gateway), version))
        gateway.kill()
        del node.pods[gateway.name]
        replace_all(node, load, old, lambda: LATE_S)
    answered_by_both(load, old)
    assert all(both_named(worker.log, version) for worker in workers(node))


def test_a_rollback_to_the_last_release_fails_no_request(last: Release, this: Release, tmp_path: Path) -> None:
    """Workers of the last release are ready, and those of this one told to go, before a gateway of the last one is."""
    version, _ = last_release()

    def told_to_go(worker: Pod) -> bool:
        assert worker.process is not None
        return worker.process.poll() is not None or both_named(worker.log, version)

    def late() -> float:
        until(lambda: all(map(told_to_go, new)), 200)
        return LATE_BACK_S

    with running(this, tmp_path) as node, under_load(node) as load:
        new, old = workers(node), set(node.pods)
        node.code = last.code
        node.use(last.objects)
        replace_all(node, load, old, late)
    answered_by_both(load, old)
    assert all(both_named(worker.log, version) for worker in new)


def replace_all(node: Node, load: RolloutLoad, old: set[str], late: Callable[[], float]) -> None:
    """All Deployments are rolled at once, the gateways' so much later."""

    def later(workload: Object) -> float:
        labels = workload["spec"]["template"]["metadata"]["labels"]
        return late() if labels["app.kubernetes.io/component"] == "gateway" else 0.0

    roll_all(node, of_kind(node.objects, "Deployment"), load.balancer, later)
    until(lambda: load.answers[-1]["decode_worker"] not in old)


def answered_by_both(load: RolloutLoad, old: set[str]) -> None:
    """Nothing failed, and each answer is one release's alone."""
    assert load.failures == []
    paths = {(answer["prefill_worker"], answer["decode_worker"]) for answer in load.answers}
    assert {prefill in old for prefill, _ in paths} == {True, False}
    assert all((prefill in old) is (decode in old) for prefill, decode in paths)


def workers(node: Node) -> list[Pod]:
    return [pod for pod in node.pods.values() if pod.component in ("prefill", "decode")]


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
