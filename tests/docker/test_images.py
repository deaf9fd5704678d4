"""Each image is built by buildah, is small enough, and its service starts from it, as any user."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deploy.docker.lock import IMAGES, LOCKS
from tandem.local import RedisServer, free_ports
from tests.docker import build
from tests.docker.imports import OURS, ROOT, file_of, imported_by
from tests.docker.steps import DOCKERFILE, stages
from tests.e2e.cluster import BOUND_S, eventually

EXTRAS = {"gateway": ("gateway", "tools"), "kvstore": (), "prefill": ("worker",), "decode": ("worker",)}
SERVICES = tuple(EXTRAS)


def test_the_dockerfile_lints() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, encoding="utf-8", check=False
    )
    assert done.returncode == 0, done.stdout


def steps(name: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The steps of a target, its parents' first."""
    known, _ = stages()
    stage = known.get(name)
    while stage:
        yield from ((step.cmd.upper(), step.value) for step in reversed(stage.steps))
        stage = known.get(stage.parent)


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_not_roots_and_has_an_init(service: str) -> None:
    last = dict(reversed(list(steps(service))))
    assert last["USER"] == ("10001:10001",)
    assert last["ENTRYPOINT"] == ("tini", "--")
    assert last["CMD"] == ("python", "-m", f"services.{service}")


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_no_other_service_and_no_tests(service: str) -> None:
    copied = {source for command, value in steps(service) if command == "COPY" for source in value[:-1]}
    assert {c for c in copied if c.startswith("services/")} == {"services/__init__.py", f"services/{service}"}
    of_workers = {"tandem/engine", "tandem/worker", "tandem/transfer"}
    assert bool(copied & of_workers) is (service in ("prefill", "decode"))


@pytest.mark.parametrize("service", SERVICES)
def test_an_image_holds_what_its_service_imports(service: str) -> None:
    copied = [s for c, value in steps(service) if c == "COPY" for s in value[:-1]]
    found = imported_by(f"services.{service}.__main__")
    files = [file_of(name).relative_to(ROOT) for name in sorted(found) if name.startswith(OURS)]
    assert [file for file in files if not any(file.is_relative_to(c) or file.match(c) for c in copied)] == []
    assert {name for name in found if not name.startswith(OURS)} <= brought_by(EXTRAS[service])


def test_every_room_is_in_an_image() -> None:
    """Also one that is imported only when it is asked for, which the test above does not see."""
    copied = {s for service in SERVICES for c, value in steps(service) if c == "COPY" for s in value[:-1]}
    rooms = {str(path.relative_to(ROOT)) for path in ROOT.glob("tandem/*") if list(path.glob("**/*.py"))}
    assert rooms - copied == set()


def brought_by(extras: tuple[str, ...]) -> set[str]:
    """Modules of the distributions that an image installs, and of those that these name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *(p for extra in extras for p in project["optional-dependencies"][extra])]
    named = {re.split(r"[^\w-]", n)[0].lower() for line in wanted for n in (line, *(requires(line) or ()))}
    named = {name.replace("_", "-") for name in named}
    found = packages_distributions().items()
    return {module for module, names in found if named & {name.lower().replace("_", "-") for name in names}}


def live(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service="live")
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


MOST_MB = {"gateway": 200, "kvstore": 200, "prefill": 600, "decode": 600}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not shutil.which("buildah") or os.geteuid() != 0:
        pytest.skip("images are built by buildah as root")
    return build.base(tmp_path_factory.mktemp("base"))


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("service", SERVICES)
def test_an_image_is_built_and_anybody_starts_its_service_on_a_read_only_root(
    service: str, base: str, tmp_path: Path
) -> None:
    image = build.build(service, base, tmp_path)
    size_mb = build.compressed_bytes(image, tmp_path) / 1e6
    container = build.run("buildah", "from", "--pull-never", image).strip()
    try:
        print(f"{service}: {size_mb:.0f} MB")
        assert size_mb < MOST_MB[service]
        held = build.run(
            "buildah", "run", "--isolation=chroot", container, "--", "cat", "/app/.venv/share/tandem/sbom.cdx.json"
        )
        components = {one["name"].lower() for one in json.loads(held)["components"]}
        assert {"grpcio", "libc6"} <= components
        assert ("torch" in components) is (service in ("prefill", "decode"))
        starts_and_ends(service, container, tmp_path / "log")
    finally:
        build.run("buildah", "rm", container)


def starts_and_ends(service: str, container: str, log: Path) -> None:
    ports = free_ports(3)
    with RedisServer.start() as redis, log.open("wb") as output:
        variables = {"TANDEM_REDIS_URL": redis.url, "TANDEM_HOST": "127.0.0.1"}
        variables |= {"TANDEM_GRPC_PORT": str(ports[0]), "TANDEM_HEALTH_PORT": str(ports[1])}
        if service in ("prefill", "decode"):
            variables["TANDEM_MODEL_PATH"] = "/app/models/demo/target"
        if service == "gateway":
            variables["TANDEM_HTTP_PORT"] = str(ports[2])
        command = build.command_of(container, variables)
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: live(ports[1]) or process.poll() is not None, BOUND_S, "live")
            assert process.poll() is None, log.read_text(encoding="utf-8")[-3000:]
            process.terminate()
            assert process.wait(40) == 0, log.read_text(encoding="utf-8")[-3000:]
        finally:
            for one in psutil.Process(process.pid).children(recursive=True) if process.poll() is None else ():
                one.kill()
            process.kill()
            process.wait()
    assert "Traceback" not in log.read_text(encoding="utf-8")


@pytest.mark.parametrize("lock", sorted(LOCKS.glob("*.txt")), ids=lambda path: path.stem)
def test_a_lock_names_each_wheel_by_its_hash_in_the_version_that_tests_run(lock: Path) -> None:
    ours = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line
    )
    versions = {name.lower().replace("_", "-"): version for name, version in ours.items()}
    for line in lock.read_text(encoding="utf-8").splitlines():
        found = re.fullmatch(r"(\S+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert found, line
        known = versions.get(found[1].replace("_", "-"))
        assert known is None or found[2].partition("+")[0] == known, line
    requirements = subprocess.run(
        [sys.executable, LOCKS.with_name("requirements.py"), *IMAGES[lock.stem.rpartition("-")[0]]],
        cwd=ROOT, capture_output=True, encoding="utf-8", check=True,
    ).stdout.split()  # fmt: skip
    locked = {line.partition("==")[0].replace("_", "-") for line in lock.read_text(encoding="utf-8").splitlines()}
    assert {name.lower().replace("_", "-") for name in requirements} <= locked, "run `make lock`"
