"""A cluster that knows its own: keys at its doors, a secret and certificates within."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from redis import AuthenticationError, Redis

from tandem.commands.clusters import LOGS, REDIS_URL_FILE, SECRET_FILE
from tandem.registry import LiveWorker, Registry, Role, WorkerInfo
from tandem.security import NO_SECRET, ClusterSecret
from tandem.transfer import LinkPeer, LocalPeer, Sender, TransferError
from tests.authority import Authority
from tests.e2e.cluster import RunningCluster, running_cluster

pytestmark = pytest.mark.long
BODY = {"model": "tandem-demo", "prompt": "import os\n" * 30, "max_tokens": 4}


def tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tandem", *arguments], capture_output=True, encoding="utf-8", timeout=60
    )


@pytest.fixture(scope="module")
def within(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of all that belong to the cluster."""
    folder = tmp_path_factory.mktemp("cluster")
    tls = Authority(folder / "tls").issue("cluster")
    (folder / "secret").write_text("nobody else knows this", encoding="utf-8")
    for own, said in (("certificate", "tls.crt"), ("key", "tls.key"), ("ca", "ca.crt")):
        (folder / said).write_bytes(getattr(tls, own).read_bytes())
    return [f"--cluster-secret={folder / 'secret'}", f"--tls={folder}"]


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "keys.json"


@pytest.fixture(scope="module")
def key(keys: Path) -> str:
    return tandem("keys", "add", "--tenant=acme", f"--file={keys}").stdout.strip()


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, within: list[str], keys: Path, key: str
) -> Iterator[RunningCluster]:
    options = ["--engine=null", "--disaggregation=require", f"--api-keys={keys}", *within]
    with running_cluster(tmp_path_factory.mktemp("secured"), *options) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    """One that was given nothing, as most are on one machine."""
    with running_cluster(tmp_path_factory.mktemp("plain"), "--engine=null") as cluster:
        yield cluster


def of(cluster: RunningCluster) -> dict[Role, WorkerInfo]:
    async def workers() -> list[LiveWorker]:
        registry = Registry.connect(cluster.redis_url, timeout=30.0)
        try:
            return await registry.workers()
        finally:
            await registry.close()

    return {worker.info.role: worker.info for worker in asyncio.run(workers())}


def linked(cluster: RunningCluster, role: Role, secret: ClusterSecret) -> bool:
    """Open a link to a worker, as one of the other role does that wants its blocks."""
    info = of(cluster)[role]
    stranger = LocalPeer(LinkPeer("stranger", "stranger-first", info.layout_hash), secret)
    sender, remote = Sender(stranger, transports=("tcp",)), LinkPeer(info.worker_id, info.incarnation, info.layout_hash)
    error = sender.open_link(remote, info.transfer_address, timeout_s=5.0).exception(10.0)
    sender.close()
    assert error is None or (isinstance(error, TransferError) and error.code == "UNAUTHENTICATED")
    return error is None


def test_a_plain_cluster_links_to_its_own_alone(plain: RunningCluster) -> None:
    path = plain.logs / SECRET_FILE
    assert path.stat().st_mode & 0o077 == 0
    for role in Role:
        assert not linked(plain, role, NO_SECRET)
        assert not linked(plain, role, ClusterSecret(b"a guess of at least 16 bytes"))
        assert linked(plain, role, ClusterSecret.read(path))
    family = psutil.Process(plain.process.pid).children(recursive=True)
    secret = path.read_text(encoding="utf-8")
    assert not [one for one in family if secret in " ".join(one.cmdline())]
    answer = httpx.post(f"{plain.http}/v1/completions", json=BODY, timeout=30)
    assert (answer.status_code, answer.headers["x-tandem-path"]) == (200, "remote")


def test_commands_find_the_secret_of_a_plain_cluster(plain: RunningCluster) -> None:
    addresses = [f"--redis-url={plain.redis_url}", f"--grpc-address={plain.grpc}", f"--gateway-url={plain.http}"]
    whole = tandem("doctor", *addresses, "--integrity")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    told = [f"--gateway-url={plain.http}", f"--redis-url={plain.redis_url}", "log_level=debug"]
    assert tandem("set", *told).returncode == 0


def test_who_has_a_key_is_answered_by_both_pools(cluster: RunningCluster, key: str) -> None:
    for headers, status in (({}, 401), ({"authorization": f"Bearer {key}"}, 200)):
        answer = httpx.post(f"{cluster.http}/v1/completions", json=BODY, headers=headers, timeout=30)
        assert answer.status_code == status
    assert answer.headers["x-tandem-path"] == "remote"
    assert int(answer.headers["x-tandem-transfer-bytes"]) > 0


def test_nobody_without_its_password_gets_into_redis(cluster: RunningCluster) -> None:
    address, password = urlsplit(cluster.redis_url), urlsplit(cluster.redis_url).password
    assert password
    with Redis(address.hostname or "", address.port or 0) as stranger, pytest.raises(AuthenticationError):
        stranger.ping()
    with Redis.from_url(cluster.redis_url) as ours:
        assert ours.ping()
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    assert len(family) >= 5
    assert not [one for one in family if password in " ".join(one.cmdline())]
    assert (cluster.logs / REDIS_URL_FILE).stat().st_mode & 0o077 == 0


def test_commands_of_the_same_folder_find_the_password(
    cluster: RunningCluster, keys: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["keys", "usage", f"--file={keys}", f"--redis-url=redis://{cluster.redis_url.rpartition('@')[2]}"]
    monkeypatch.chdir(tmp_path)
    assert tandem(*asked).returncode != 0
    shutil.copytree(cluster.logs, tmp_path / LOGS)
    assert tandem(*asked).returncode == 0


def test_the_doctor_needs_what_every_process_needs(cluster: RunningCluster, within: list[str], key: str) -> None:
    asked = ["doctor", f"--redis-url={cluster.redis_url}", f"--grpc-address={cluster.grpc}"]
    whole = tandem(*asked, f"--api-key={key}", *within)
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert "prefill-0 -> decode-0" in whole.stdout
    for options in ([], within[:1], within[1:]):
        stranger = tandem(*asked, *options)
        assert stranger.returncode == 1
        assert "BROKEN  prefill-0 -> decode-0" in stranger.stdout
