"""`tandem up` keeps its services running, each with the settings that it was given and no others."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tandem.local import free_ports
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster


@pytest.fixture(scope="module")
def null_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Started in an environment that would mislead every service that read it."""
    (port,) = free_ports(1)
    env = {
        "TANDEM_HOST": "0.0.0.0",
        "TANDEM_INSECURE": "true",
        "TANDEM_GRPC_PORT": str(port),
        "TANDEM_WORKER_ID": "same",
        "REDIS_URL": "nowhere",
    }
    with running_cluster(tmp_path_factory.mktemp("up"), "--engine=null", env=env) as cluster:
        yield cluster


def listening(pid: int) -> set[str]:
    return {
        c.laddr.ip.removeprefix("::ffff:")
        for c in psutil.Process(pid).net_connections("inet")
        if c.status == psutil.CONN_LISTEN
    }


def test_settings_of_the_environment_reach_the_command_and_no_worker(null_cluster: RunningCluster) -> None:
    (gateway,) = null_cluster.pids("gateway")
    assert "0.0.0.0" in listening(gateway)
    for service in ("prefill", "decode", "kvstore"):
        (pid,) = null_cluster.pids(service)
        assert listening(pid) <= {"127.0.0.1"}, service


@pytest.mark.parametrize("service", ["gateway", "kvstore", "prefill", "decode"])
def test_a_killed_service_is_started_again(null_cluster: RunningCluster, service: str) -> None:
    (pid,) = null_cluster.pids(service)
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: null_cluster.pids(service) not in ([], [pid]), BOUND_S, f"another {service}")
    eventually(null_cluster.ready, BOUND_S, "ready")
    body = {"model": "tandem-demo", "prompt": "import ", "max_tokens": 4}
    eventually(
        lambda: httpx.post(f"{null_cluster.http}/v1/completions", json=body, timeout=60).status_code == 200,
        BOUND_S,
        "serves",
    )
