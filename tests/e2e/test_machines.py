"""`tandem up` on machines unlike its developers': with proxies, other locales and hosts, few CPUs, nameless users."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
import psutil
import pytest

from tandem.commands.up import DEMO_MODEL
from tests.e2e.cluster import BOUND_S, RunningCluster, eventually, running_cluster
from tests.machines import AS_NAMELESS, UID, needs_ipv6, needs_root

# Nothing listens there; a client that speaks SOCKS lacks a package for it.
NOWHERE = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")} | {"all_proxy": "socks5://127.0.0.1:9"}
PROXIES = {**NOWHERE, **{name.upper(): url for name, url in NOWHERE.items()}, "no_proxy": "", "NO_PROXY": ""}
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


def answers(cluster: RunningCluster) -> bool:
    model = httpx.get(f"{cluster.http}/v1/models", timeout=BOUND_S).json()["data"][0]["id"]
    body = {"model": model, "prompt": "import ", "max_tokens": 2}
    return httpx.post(f"{cluster.http}/v1/completions", json=body, timeout=BOUND_S).status_code == 200


def tandem(*arguments: str, env: dict[str, str], before: Sequence[str] = ()) -> str:
    command = [*before, sys.executable, "-m", "tandem", *arguments]
    done = subprocess.run(
        command, env=os.environ | env, timeout=BOUND_S,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout.decode("ascii")


def test_behind_a_proxy_in_an_ascii_locale_by_name_on_one_cpu(tmp_path: Path) -> None:
    env = PROXIES | ASCII | {"XDG_STATE_HOME": str(tmp_path / "état")}
    (tmp_path / "modèle").symlink_to(DEMO_MODEL)
    options = (str(tmp_path / "modèle"), "--model-name=modèle", "--prefill=0", "--host=localhost", "--sample=# é")
    one_cpu = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    with running_cluster(tmp_path, *options, env=env, host="localhost", before=one_cpu) as cluster:
        assert answers(cluster)
        (decode,) = cluster.pids("decode")
        assert "--threads=1" in psutil.Process(decode).cmdline()
        eventually(lambda: "mod\\xe8le" in tandem("ps", env=env), BOUND_S, "noted, which is after its sample")
        assert "\\xe9" in tandem("generate", "# é", f"--address={cluster.grpc}", "--max-tokens=1", env=env)
        addresses = (f"--redis-url={cluster.redis_url}", f"--gateway-url={cluster.http}", "--integrity")
        found = tandem("doctor", f"--grpc-address={cluster.grpc}", *addresses[1:], env=env)
        assert "BROKEN" not in found
        assert "mod\\xe8le" in tandem("top", "--looks=1", addresses[0], env=env)
        assert "mod\\xe8le" in tandem("chat", f"--url={cluster.http}", env=env)


@pytest.mark.long
@needs_root
@needs_ipv6
def test_for_a_user_without_name_and_home_at_an_ipv6_address(tmp_path: Path) -> None:
    os.chown(tmp_path, UID, UID)
    env = {"TMPDIR": str(tmp_path)}
    before = (*AS_NAMELESS, "-u", "XDG_CACHE_HOME", "-u", "XDG_STATE_HOME")
    options = ("--engine=null", "--prefill=0", "--host=[::1]", "--store-url=redis://127.0.0.1:1")
    with running_cluster(tmp_path, *options, env=env, host="::1", before=before) as cluster:
        assert answers(cluster)
        assert cluster.http in tandem("ps", env=env, before=before)
        redis = f"--redis-url={cluster.redis_url}"
        tandem("set", "log_level=debug", redis, env=env, before=before)
        assert f'"by":"uid-{UID} at ' in (cluster.logs / "decode-0.log").read_text(encoding="utf-8").replace(": ", ":")
        assert "stopped" in tandem("down", env=env, before=before)
    assert (tmp_path / f"tandem-{UID}" / ".local" / "state" / "tandem" / "running").is_dir()
