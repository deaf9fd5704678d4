"""`tandem up` keeps its services running, each with the settings it was given, by options or the environment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import httpx
import psutil
import pytest

from tandem.local import free_ports
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def null_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """Started in an environment that would mislead every service that read all of it."""
    (port,) = free_ports(1)
    env = {
        "TANDEM_HOST": "0.0.0.0",
        "TANDEM_INSECURE": "true",
        "TANDEM_GRPC_PORT": str(port),
        "TANDEM_MAX_BODY_BYTES": "1000",
        "TANDEM_KV_MEMORY": "1MiB",
        "TANDEM_NAMESPACE": "other",
        "TANDEM_TENANT_WEIGHTS": '{"acme": 2}',
        "TANDEM_GATEWAY_SERVICE_HOST": "10.0.0.1",
        "TANDEM_PORT": "tcp://10.0.0.1:80",
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


def test_settings_without_an_option_reach_the_services_that_have_them(null_cluster: RunningCluster) -> None:
    body = {"model": "tandem-demo", "prompt": "x" * 2000}
    assert httpx.post(f"{null_cluster.http}/v1/completions", json=body, timeout=60).status_code == 413
    held = httpx.get(f"{null_cluster.http}/health/ready", timeout=60).json()["kv_tokens"]
    assert held == 2**20 // 32, "of 1 MiB; a token of the null engine has 32 bytes"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TANDEM_KV_MEMROY", "1MiB", "TANDEM_KV_MEMROY: there is no such setting; did you mean TANDEM_KV_MEMORY?"),
        ("TANDEM_ZZZ", "1", "TANDEM_ZZZ: there is no such setting\n"),
        ("TANDEM_WORKER_ID", "same", "TANDEM_WORKER_ID: each process needs its own"),
        ("TANDEM_MAX_QUEUED", "few", "TANDEM_MAX_QUEUED: Input should be a valid integer"),
        ("TANDEM_TENANT_WEIGHTS", "a=1", "TANDEM_TENANT_WEIGHTS: Expecting value"),
    ],
)
def test_a_setting_of_the_environment_that_is_wrong_is_named(variable: str, value: str, words: str) -> None:
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "redis"), free_ports(3), strict=True)]
    command = [sys.executable, "-m", "tandem", "up", "--engine=null", *ports]
    result = subprocess.run(
        command, capture_output=True, encoding="utf-8", timeout=120, env=os.environ | {variable: value}
    )
    assert result.returncode == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


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
