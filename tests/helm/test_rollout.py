"""A new revision of the weights is rolled out under load: every pool at once, and no request fails.

Each Deployment is rolled as Kubernetes does it with the manifest's own strategy (one more pod, none fewer): a new pod
is started, found ready by its probes and left for minReadySeconds; then an old one gets its preStop hook and SIGTERM.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.helm.chart import Object, Values, of_kind, render
from tests.helm.pods import Node, Pod

pytestmark = pytest.mark.long

# How long a balancer may go on sending requests to a pod that is being stopped.
LAG_S = 1.0
CLIENTS = 4
# Between a client's requests: what else is tested on this machine shall not wait for them.
PAUSE_S = 0.05
# New decode pods come so much later, for want of a node: new prefill pods must wait for them.
SLOW_S = 6.0


def values(weights: Path, tag: str) -> Values:
    model = {"id": "demo", "name": "demo", "weights": {"kind": "hostPath", "hostPath": str(weights)}}
    return {
        "apiKeys": {"required": False}, "image": {"tag": tag}, "models": [model],
        "workers": {"settings": {"threads": 1, "drain_s": 30}},
        # A request that no linked pair takes fails: nothing is answered by a decode worker alone.
        "gateway": {"settings": {"disaggregation": "require", "drain_s": 30}},
    }  # fmt: skip


@dataclass
class Balancer:
    """The gateway's Service: which pods get requests."""

    pods: list[Pod] = field(default_factory=list)

    def choose(self, number: int) -> Pod:
        pods = self.pods
        return pods[number % len(pods)]

    def later_without(self, pod: Pod) -> None:
        threading.Timer(LAG_S, lambda: self.pods.remove(pod)).start()


@dataclass
class RolloutLoad:
    balancer: Balancer
    answers: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    pairs: list[int] = field(default_factory=list)
    stopping: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """One client, with connections that it keeps, until told to stop."""
        with httpx.Client(timeout=120) as client:
            while not self.stopping.wait(PAUSE_S):
                number += CLIENTS
                self._ask(client, number)

    def watch(self) -> None:
        """How many pairs of workers could take a request, ten times a second."""
        while not self.stopping.wait(0.1):
            found = httpx.get(f"http://{self.balancer.choose(0).ip}:8000/health/ready", timeout=60).json()
            self.pairs.append(found["linked_pairs"])

    def _ask(self, client: httpx.Client, number: int) -> None:
        pod = self.balancer.choose(number)
        try:
            answer = client.post(
                f"http://{pod.ip}:8000/v1/completions",
                json={"model": "demo", "prompt": f"{number} = " * 20, "max_tokens": 24, "temperature": 0},
            )  # fmt: skip
        except httpx.HTTPError as error:
            self.failures.append(f"{pod.name}: {error!r}")
            return
        if answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] > 0:
            self.answers.append(answer.json()["usage"]["tandem"][0])
        else:
            self.failures.append(f"{pod.name}: {answer.status_code} {answer.text}")


def roll(node: Node, workload: Object, balancer: Balancer) -> None:
    """One Deployment, of which one pod runs."""
    strategy = workload["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}
    [old] = [pod for pod in node.pods.values() if pod.is_of(workload)]
    time.sleep(SLOW_S if old.component == "decode" else 0)
    new = node.start(workload)
    new.wait_ready()
    serves = new.component == "gateway"
    balancer.pods += [new] if serves else []
    time.sleep(workload["spec"]["minReadySeconds"])
    if serves:
        balancer.later_without(old)
    old.terminate()


def until(check: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture
def revisions(tmp_path: Path, demo_model: Path) -> list[Path]:
    """The demo model twice: its fingerprint covers the config's bytes."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        shutil.copytree(demo_model, folder)
    with (folders[1] / "config.json").open("a") as config:
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
    balancer = Balancer([pod for pod in node.pods.values() if pod.component == "gateway"])
    load = RolloutLoad(balancer)
    with ThreadPoolExecutor(16) as threads:
        clients = [threads.submit(load.run, number) for number in range(CLIENTS)]
        clients.append(threads.submit(load.watch))
        try:
            until(lambda: bool(load.answers))
            node.use(render(values(revisions[1], "b")))
            rolled = [threads.submit(roll, node, o, balancer) for o in of_kind(node.objects, "Deployment")]
            for each in rolled:
                each.result(400)
            until(lambda: load.answers[-1]["decode_worker"] not in old)
        finally:
            load.stopping.set()
        for client in clients:
            client.result(120)
    assert load.failures == []
    assert min(load.pairs) >= 1
    paths = {(answer["prefill_worker"], answer["decode_worker"]) for answer in load.answers}
    # Each answer is one revision's alone, and both have answered.
    assert {prefill in old for prefill, _ in paths} == {True, False}
    assert all((prefill in old) is (decode in old) for prefill, decode in paths)
    assert old & set(node.pods) == {"rel-redis-0"}
