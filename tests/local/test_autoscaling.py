"""Ray's own autoscaler, started as `ray start --autoscaling-config` does: workers that find no room bring nodes.

`AutoscalingCluster` of ray.cluster_utils reads a file that Ray's wheels lack, and begins by ending every Ray of the
machine. So its provider, of raylets on this machine for nodes, is named here in a configuration of ours.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FakeMultiNodeProvider
from ray.cluster_utils import Cluster as Raylets

from tandem.commands.clusters.detached import down
from tandem.local import free_ports
from tandem.local.ray import ActorState, RayLauncher
from tests.e2e.cluster import eventually

pytestmark = [pytest.mark.long, pytest.mark.timeout(300)]
MEMORY = 80 * 2**20
# Of nodes that Ray's autoscaler sets up by ssh; it asks for them all the same.
COMMANDS = ("worker_setup_commands", "worker_start_ray_commands")
COMMAND_S, LEAVE_S = 180.0, 60.0


def scaling(gcs_address: str) -> dict[str, object]:
    """As users write it: a head that holds no worker, and nodes of two CPUs, which leave when nothing is on them."""
    node = {"resources": {"CPU": 2, "object_store_memory": MEMORY}, "node_config": {}, "max_workers": 3}
    provider = {
        "type": "external",
        "module": f"{FakeMultiNodeProvider.__module__}.{FakeMultiNodeProvider.__name__}",
        "gcs_address": gcs_address,
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
    }
    return {
        "cluster_name": "scaled",
        "provider": provider,
        "max_workers": 3,
        "idle_timeout_minutes": 0.1,
        "head_node_type": "ray.head.default",
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "two-cpus": node,
        },
        **{name: [] for name in ("cluster_synced_files", *COMMANDS)},
        "auth": {},
        "file_mounts": {},
    }


@pytest.fixture
def scaled(tmp_path: Path) -> Iterator[str]:
    """Address of a head whose autoscaler looks once a second."""
    [port] = free_ports(1)
    address = ray.util.get_node_ip_address() + f":{port}"
    (file := tmp_path / "scaling.yaml").write_text(yaml.safe_dump(scaling(address)), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_FAKE_CLUSTER", "1")
        patch.setenv("AUTOSCALER_UPDATE_INTERVAL_S", "1")
        raylets = Raylets(
            initialize_head=True,
            head_node_args={
                "num_cpus": 0, "include_dashboard": False, "include_log_monitor": False, "object_store_memory": MEMORY,
                "gcs_server_port": port, "autoscaling_config": str(file),
                "env_vars": {"RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID},
            },
        )  # fmt: skip
    ray.init(address, namespace="tandem", log_to_driver=False, configure_logging=False)
    try:
        yield address
    finally:
        [monitor] = raylets.head_node.all_processes["monitor"]
        nodes = psutil.Process(monitor.process.pid).children(recursive=True)
        monitor.process.kill()
        for process in nodes:
            with suppress(psutil.NoSuchProcess):  # with its parent
                process.kill()
        ray.shutdown()
        raylets.shutdown()


def test_workers_without_room_bring_nodes_which_leave_after_them(scaled: str, demo_model: Path, tmp_path: Path) -> None:
    """A pair, whose placement group waits, and a worker beside it, whose actor does."""
    common = {"model": "demo", "resources": {"requests": {"cpu": 1}}}
    ports = free_ports(3)
    cluster = {
        "models": [{"id": "demo", "name": "tandem-demo", "weights": {"path": str(demo_model)}}],
        "workers": {"settings": {"dtype": "float32", "transports": ["shm"], "num_blocks": 64, "threads": 1}},
        "pools": [
            common | {"name": "prefill", "role": "prefill"},
            common | {"name": "decode", "role": "decode", "replicas": 2},
        ],
        "gateway": {"settings": {"http_port": ports[0], "grpc_port": ports[1]}},
        "redis": {"port": ports[2]},
    }
    (file := tmp_path / "cluster.yaml").write_text(yaml.safe_dump(cluster), encoding="utf-8")
    assert alive() == {FAKE_HEAD_NODE_ID}
    command = [sys.executable, "-m", "tandem", "up", f"--ray={scaled}", "--detach", f"--file={file}"]
    done = subprocess.run(
        [*command, "--ready-timeout-s=150"], capture_output=True, encoding="utf-8", timeout=COMMAND_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    states = asyncio.run(RayLauncher(print, detached=True).states())
    nodes = {name: state.node for name, state in states.items() if isinstance(state, ActorState) and state.ready}
    assert sorted(nodes) == ["decode-0", "decode-1", "gateway", "kvstore", "prefill-0"]
    assert nodes["gateway"] == nodes["kvstore"] == FAKE_HEAD_NODE_ID
    assert nodes["prefill-0"] == nodes["decode-0"]
    assert alive() == {FAKE_HEAD_NODE_ID, nodes["decode-0"], nodes["decode-1"]}
    assert len(alive()) == 3
    down([f"--ray={scaled}"])
    eventually(lambda: alive() == {FAKE_HEAD_NODE_ID}, LEAVE_S, "nodes that nothing needs leave")


def alive() -> set[str]:
    return {node["NodeID"] for node in ray.nodes() if node["Alive"]}
