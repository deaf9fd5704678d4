"""The pods of the CPU trial run: they become ready, answer, move KV, and end within their grace."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from tandem.commands.fetch import FetchSettings, fetch
from tandem.local import RedisServer
from tandem.registry import Registry
from tests.checkpoints.hub_server import running_hub
from tests.helm.chart import NAMESPACE, of_kind, render, rendered
from tests.helm.pods import Node, Pod, has_own_root

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("node"), rendered("cpu-trial"), subnet=71)
    try:
        node.start_release()
        yield node
    finally:
        node.stop()


def pod_of(node: Node, component: str) -> Pod:
    return next(p for p in node.pods.values() if p.component == component)


def test_a_request_is_answered_by_the_rendered_pods(node: Node) -> None:
    url = f"http://{pod_of(node, 'gateway').ip}:8000/v1/completions"
    body = {"model": "tandem-demo", "prompt": "import " * 40, "max_tokens": 8}
    key = node.data("Secret", "rel-api-keys")["key"]
    assert httpx.post(url, json=body).status_code == 401
    answer = httpx.post(url, json=body, headers={"authorization": f"Bearer {key}"}, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == 8


@pytest.mark.skipif(not has_own_root(), reason="a root of its own is what root alone can give to a process")
def test_a_pod_writes_to_its_volumes_alone(node: Node) -> None:
    for component in ("gateway", "prefill", "decode", "kvstore", "redis"):
        pod = pod_of(node, component)
        for place, may in {"/app": False, "/": False, "/tmp": component != "redis"}.items():
            done = pod.run(["touch", f"{place}/written"], 10)
            assert (done.returncode == 0) is may, (component, place, done.stderr)


def test_workers_are_known_by_the_names_and_addresses_of_their_pods(node: Node) -> None:
    doctor = next(o for o in node.objects if o["kind"] == "Pod")
    pod = node.start(doctor, "doctor")
    assert pod.wait(200) == 0, pod.log
    for worker in (pod_of(node, "prefill"), pod_of(node, "decode")):
        assert f"{worker.name} " in pod.log
        assert f"{worker.ip}:50061" in pod.log


def test_pods_report_what_autoscalers_follow(node: Node) -> None:
    scaled = {"gateway": {"autoscaling": {"kind": "hpa"}}, "workers": {"autoscaling": {"kind": "hpa"}}}
    for scaler in of_kind(render(scaled), "HorizontalPodAutoscaler"):
        pod = next(p for p in node.pods.values() if p.name.startswith(scaler["metadata"]["name"]))
        text = httpx.get(f"http://{pod.ip}:{8000 if pod.component == 'gateway' else 9090}/metrics").text
        for metric in scaler["spec"]["metrics"]:
            assert f"\n{metric['pods']['metric']['name']}" in text


def test_pods_end_within_their_grace(node: Node) -> None:
    for component in ("gateway", "prefill", "decode", "kvstore", "redis"):
        pod = pod_of(node, component)
        hook, rest = pod.terminate()
        assert hook + rest < pod.grace_s


def test_pods_fetch_a_model_by_its_name(demo_model: Path, tmp_path: Path) -> None:
    """The gateway's without weights. Their caches cannot be written, as the root of their containers."""
    files = {path.name: path.read_bytes() for path in demo_model.iterdir()}
    with running_hub({"org/demo": files}) as hub, RedisServer.start() as redis:
        digests = {name: sha256(data).hexdigest() for name, data in files.items()}
        weights = {"kind": "download", "url": "hf://org/demo@v1", "secret": "hub", "files": digests}
        values = {
            "redis": {"url": redis.url}, "models": [{"id": "demo", "name": "demo", "weights": weights}],
            "pools": [{"name": "decode", "role": "decode", "model": "demo", "settings": {"threads": 1}}],
        }  # fmt: skip
        said = {"HF_ENDPOINT": hub.url, "XDG_CACHE_HOME": "/proc/cache"}
        secret = {"kind": "Secret", "metadata": {"name": "hub"}, "stringData": said}
        node = Node(tmp_path, [*render(values), secret], 75)
        try:
            gateway = node.start(node.find("Deployment", "rel-gateway"))
            assert hub.weights_asked() == []
            decode = node.start(node.find("Deployment", "rel-decode"))
            decode.wait_ready()
        finally:
            node.stop()
        assert not (gateway.folder / "models" / "weights" / "model.safetensors").exists()
        assert (decode.folder / "models" / "weights" / "model.safetensors").read_bytes() == files["model.safetensors"]


async def test_two_releases_on_one_redis_know_nothing_of_each_other(demo_model: Path, tmp_path: Path) -> None:
    """Their weights come by the init container, which checks them."""
    files = fetch(FetchSettings(url=demo_model.as_uri(), folder=tmp_path / "once"))
    weights = {"kind": "download", "url": demo_model.as_uri(), "files": files}
    with RedisServer.start() as redis:
        values = {
            "redis": {"url": redis.url}, "models": [{"id": "demo", "name": "demo", "weights": weights}],
            "pools": [{"name": "decode", "role": "decode", "model": "demo", "settings": {"threads": 1}}],
        }  # fmt: skip
        nodes = []
        try:
            for subnet, release in ((73, "one"), (74, "two")):
                (tmp_path / release).mkdir()
                node = Node(tmp_path / release, render(values, release=release), subnet)
                nodes.append(node)
                node.start(node.find("Deployment", f"{release}-decode"), f"{release}-decode-0").wait_ready()
            for release in ("one", "two"):
                registry = Registry.connect(redis.url, namespace=f"{NAMESPACE}.{release}", timeout=30.0)
                assert [w.info.worker_id for w in await registry.workers()] == [f"{release}-decode-0"]
                await registry.close()
        finally:
            for node in nodes:
                node.stop()
