"""Each image's steps are carried out in a clean folder, and its service starts from there."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tandem.local import RedisServer, free_ports
from tests.docker.imports import OURS, ROOT, file_of, imported_by
from tests.docker.replay import DOCKERFILE, Replay, stages
from tests.e2e.cluster import BOUND_S, eventually

EXTRAS = {"gateway": ("gateway", "tools"), "kvstore": (), "prefill": ("worker",), "decode": ("worker",)}
SERVICES = tuple(EXTRAS)


def test_the_dockerfile_lints() -> None:
    done = subprocess.run(
        [Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True, check=False
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


def brought_by(extras: tuple[str, ...]) -> set[str]:
    """Modules of the distributions that an image installs, and of those that these name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(p for extra in extras for p in project["optional-dependencies"][extra])]
    named = {re.split(r"[^\w-]", n)[0].lower() for line in wanted for n in (line, *(requires(line) or ()))}
    named = {name.replace("_", "-") for name in named}
    found = packages_distributions().items()
    return {module for module, names in found if named & {name.lower().replace("_", "-") for name in names}}


@pytest.fixture(scope="module")
def replay(tmp_path_factory: pytest.TempPathFactory) -> Replay:
    return Replay(tmp_path_factory.mktemp("images"))


def live(port: int) -> bool:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            request = health_pb2.HealthCheckRequest(service="live")
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_starts_from_its_image_alone(service: str, replay: Replay, tmp_path: Path) -> None:
    stage = replay.build(service)
    ports = free_ports(3)
    with RedisServer.start() as redis:
        environment = {"TANDEM_REDIS_URL": redis.url, "TANDEM_HOST": "127.0.0.1", "TANDEM_GRPC_PORT": str(ports[0])}
        environment |= {"TANDEM_HEALTH_PORT": str(ports[1])}
        if service in ("prefill", "decode"):
            environment["TANDEM_MODEL_PATH"] = str(stage.root / "app/models/demo/target")
        if service == "gateway":
            environment["TANDEM_HTTP_PORT"] = str(ports[2])
        process = replay.start(stage, environment, tmp_path / "log")
        try:
            eventually(lambda: live(ports[1]) or process.poll() is not None, BOUND_S, "live")
            assert process.poll() is None, (tmp_path / "log").read_text()[-3000:]
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            process.kill()
            process.wait()
    text = (tmp_path / "log").read_text()
    assert str(stage.root) not in text or "Traceback" not in text
    if service in ("prefill", "decode"):
        # Compiled when the image was built: nothing was compiled by starting it.
        assert len(list(stage.root.glob("app/cache/tandem/kernels/*.so"))) == 3


@pytest.mark.long
def test_an_image_with_torch_in_the_gateway_is_refused(replay: Replay) -> None:
    stage = replay.build("gateway")
    fake = stage.root / "app" / "torch.py"
    fake.write_text("")
    try:
        checks = [s for s in stages()[0]["gateway"].steps if s.cmd.upper() == "RUN"]
        with pytest.raises(AssertionError, match="torch is in the image"):
            replay._run(stage, checks[0])
    finally:
        fake.unlink()
