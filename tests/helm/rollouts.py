"""Rolling updates under load, as Kubernetes does them with the manifest's own strategy.

A new pod is started, found ready by its probes and left for minReadySeconds; then an old one gets its preStop hook and
SIGTERM.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.helm.chart import Object
from tests.helm.pods import Node, Pod

# How long a balancer may go on sending requests to a pod that is being stopped.
LAG_S = 1.0
CLIENTS = 4
# Between a client's requests: what else is tested on this machine shall not wait for them.
PAUSE_S = 0.05


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
    """One Deployment, of which one pod runs, or none where it is new."""
    strategy = workload["spec"]["strategy"]["rollingUpdate"]
    assert strategy == {"maxSurge": 1, "maxUnavailable": 0}
    old = [pod for pod in node.pods.values() if pod.is_of(workload)]
    new = node.start(workload)
    new.wait_ready()
    serves = new.component == "gateway"
    balancer.pods += [new] if serves else []
    time.sleep(workload["spec"]["minReadySeconds"])
    for pod in old:
        if serves:
            balancer.later_without(pod)
        pod.terminate()


def until(check: Callable[[], bool], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < end
        time.sleep(0.05)


@contextmanager
def under_load(node: Node) -> Iterator[RolloutLoad]:
    """Clients of the node's gateways, and what they saw once that is left."""
    load = RolloutLoad(Balancer([pod for pod in node.pods.values() if pod.component == "gateway"]))
    with ThreadPoolExecutor(CLIENTS + 1) as threads:
        clients = [threads.submit(load.run, number) for number in range(CLIENTS)]
        clients.append(threads.submit(load.watch))
        try:
            until(lambda: bool(load.answers))
            yield load
        finally:
            load.stopping.set()
        for client in clients:
            client.result(120)


def roll_all(node: Node, workloads: Iterable[Object], balancer: Balancer, late: Callable[[Object], float]) -> None:
    """Each Deployment, all at once. `late`: how many seconds its new pod comes later, for want of a node."""

    def roll_late(workload: Object) -> None:
        time.sleep(late(workload))
        roll(node, workload, balancer)

    with ThreadPoolExecutor(8) as threads:
        for rolled in [threads.submit(roll_late, workload) for workload in workloads]:
            rolled.result(400)
