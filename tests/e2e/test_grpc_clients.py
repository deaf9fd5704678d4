"""Clients that a service of yours would carry, against a running cluster: the light wheel, Node and Go."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tandem
from tests.e2e.cluster import BOUND_S, RunningCluster

ROOT = Path(__file__).parents[2]
CLIENT, EXAMPLES = ROOT / "clients" / "python", ROOT / "examples" / "grpc"
# Where Debian keeps the sources of Go's packages.
GO_SOURCES = Path("/usr/share/gocode")
MAKE_S = 600.0


def run(command: list[object], **others: object) -> str:
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
        check=False, **{"timeout": BOUND_S} | others,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel, grpcio, protobuf and what grpcio itself needs."""
    folder = tmp_path_factory.mktemp("bare")
    sources = shutil.copytree(CLIENT, folder / "sources", ignore=shutil.ignore_patterns("*.egg-info", "build"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    run([*pip, "wheel", "--quiet", "--no-deps", "--no-build-isolation", f"--wheel-dir={folder}", sources])
    (wheel,) = folder.glob("*.whl")
    packages = folder / "packages"
    run([*pip, "install", "--quiet", "--no-deps", "--no-index", f"--target={packages}", wheel])
    (packages / "google").mkdir()
    for name in ("grpc", "typing_extensions", "google.protobuf", "google._upb"):
        found = importlib.util.find_spec(name)
        assert found
        place = Path(found.submodule_search_locations[0] if found.submodule_search_locations else found.origin)
        (packages / name.replace(".", "/")).with_suffix(place.suffix).symlink_to(place)
    return packages


@pytest.mark.long
def test_the_wheel_needs_grpcio_and_protobuf_alone(shm_cluster: RunningCluster, bare: Path) -> None:
    program = ROOT / "examples" / "generate.py"
    said = run([sys.executable, "-S", program, shm_cluster.grpc], env={"PYTHONPATH": str(bare)}, cwd=bare)
    assert "first tokens:" in said
    assert "'temperature'" in said
    known = run([sys.executable, "-S", "-c", "import tandem_client, sys; print(*sys.modules)"],
                env={"PYTHONPATH": str(bare)}, cwd=bare).split()  # fmt: skip
    known = [name for name in known if name != "cython_runtime"]
    tops = {name.partition(".")[0] for name in known} - set(sys.stdlib_module_names)
    assert {name for name in tops if not name.startswith("_")} <= {
        "tandem_client",
        "grpc",
        "google",
        "typing_extensions",
    }


@pytest.mark.long
def test_the_wheel_has_tandems_version() -> None:
    assert (
        tomllib.loads((CLIENT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
        == tandem.__version__
    )


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_for_node(shm_cluster: RunningCluster, tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to fetch gRPC with")
    folder = shutil.copytree(EXAMPLES / "node", tmp_path / "node")
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder, timeout=MAKE_S)
    env = os.environ | {"PROTOS": str(ROOT / "protos")}
    check_example(run(["node", folder / "generate.mjs", shm_cluster.grpc], env=env))


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_example_for_go_compiles(tmp_path: Path) -> None:
    """It is not run: Debian's packages of Go are too old for stubs of a proto with optional fields."""
    missing = [name for name in ("go", "protoc-gen-go", "protoc-gen-go-grpc") if shutil.which(name) is None]
    missing += [name for name in ("grpc", "protobuf") if not (GO_SOURCES / "src" / "google.golang.org" / name).exists()]
    if missing:
        packages = "golang-go, golang-google-grpc-dev, golang-google-protobuf-dev, protoc-gen-go, protoc-gen-go-grpc"
        pytest.skip(f"to compile it here takes {packages}: no {', '.join(missing)}")
    folder = shutil.copytree(EXAMPLES / "go", tmp_path / "src" / "tandem.example")
    env = os.environ | {
        "PROTOC": f"{sys.executable} -m grpc_tools.protoc", "PROTOS": str(ROOT / "protos"), "GO111MODULE": "off",
        "GOPATH": f"{tmp_path}:{GO_SOURCES}", "GOCACHE": str(tmp_path / "cache"),
    }  # fmt: skip
    run(["sh", folder / "generate.sh"], env=env)
    run(["go", "build", "-o", tmp_path / "example", "."], cwd=folder, env=env, timeout=MAKE_S)


def check_example(said: str) -> None:
    """Holds what a program in examples/grpc said against what it asks for."""
    lines = said.splitlines()
    assert any("tokens by decode" in line for line in lines), said
    assert any(line.startswith("left: CANCEL") or line == "left: Canceled" for line in lines), said
    assert any(line.startswith("refused: INVALID") and "temperature" in line for line in lines), said
