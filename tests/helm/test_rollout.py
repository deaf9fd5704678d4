"""A new revision of the weights is rolled out under load: every pool at once, and no request fails."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helm.chart import Object, Values, of_kind, render
from tests.helm.pods import Node
from tests.helm.rollouts import roll_all, under_load, until

pytestmark = pytest.mark.long
# A new pod comes so much later than others, for want of a node.
SLOW_S = 6.0


def values(weights: Path, tag: str) -> Values:
    model = {"id": "demo", "name": "demo", "weights": {"kind": "hostPath", "hostPath": str(weights)}}
    return {
        "apiKeys": {"required": False}, "image": {"tag": tag}, "models": [model],
        "workers": {"settings": {"threads": 1, "drain_s": 30}},
        # A request that no linked pair takes fails: nothing is answered by a decode worker alone.
        "gateway": {"settings": {"disaggregation": "require", "drain_s": 30}},
    }  # fmt: skip


@pytest.fixture
def revisions(tmp_path: Path, demo_model: Path) -> list[Path]:
    """The demo model twice: its fingerprint covers the config's bytes."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        shutil.copytree(demo_model, folder)
    with (folders[1] / "config.json").open("a", encoding="utf-8") as config:
        config.write("\n")
    return folders


@pytest.fixture
def node(tmp_path: Path, revisions: list[Path]) -> Iterator[Node]:
    (tmp_path / "node").mkdir()
    node = Node(tmp_path / "node", render(values(revisions[0], "a")), subnet=72)
    try:
        node.start_release()
        yield node
    finally:
        node.stop()


def test_all_pools_are_rolled_to_a_new_revision_under_load_and_nothing_fails(node: Node, revisions: list[Path]) -> None:
    old = set(node.pods)
    with under_load(node) as load:
        node.use(render(values(revisions[1], "b")))
        roll_all(node, of_kind(node.objects, "Deployment"), load.balancer, late=slow_decodes)
        until(lambda: load.answers[-1]["decode_worker"] not in old)
    assert load.failures == []
    assert min(load.pairs) >= 1
    paths = {(answer["prefill_worker"], answer["decode_worker"]) for answer in load.answers}
    # Each answer is one revision's alone, and both have answered.
    assert {prefill in old for prefill, _ in paths} == {True, False}
    assert all((prefill in old) is (decode in old) for prefill, decode in paths)
    assert old & set(node.pods) == {"rel-redis-0"}


def slow_decodes(workload: Object) -> float:
    """New prefill pods must wait for them."""
    return (
        SLOW_S if workload["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"] == "decode" else 0.0
    )
