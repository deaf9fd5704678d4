"""Programs of others against a running cluster, as they come from PyPI and npm. `make check`: they are fetched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.cluster import RunningCluster, running_cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]
MODEL = "tandem-demo"
PROGRAMS = Path(__file__).parent / "programs"
FETCH_S, RUN_S = 1200.0, 600.0
CHECKS = (
    "not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance",
    "unsupported_method", "allow_header_conformance",
)  # fmt: skip


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory.mktemp("cluster"), "--dtype=float32", "--tool-parser=hermes") as cluster:
        yield cluster


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an environment's programs: what others' clients need is not what Tandem needs."""
    folder = tmp_path_factory.mktemp("python")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=FETCH_S)
    pip = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "--requirement", PROGRAMS / "requirements.txt"], check=True, timeout=FETCH_S)
    return folder / "bin"


def run(command: list[Any], **others: Any) -> str:
    done = subprocess.run(
        command, timeout=RUN_S, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        encoding="utf-8", **others,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-8000:]
    return done.stdout


def test_nothing_is_answered_but_as_the_description_says(cluster: RunningCluster, python: Path, tmp_path: Path) -> None:
    """No 5xx, and no status, content type or method that is not in /openapi.json, whatever comes."""
    described = tmp_path / "openapi.json"
    described.write_text(json.dumps(with_real_names(cluster)), encoding="utf-8")
    options = ["--max-examples=50", "--seed=1", "--generation-database=none", "--request-timeout=60", "--no-color"]
    phases = "--phases=coverage,fuzzing"
    run([python / "schemathesis", "run", described, f"--url={cluster.http}", f"--checks={','.join(CHECKS)}", phases,
         *options], cwd=tmp_path)  # fmt: skip


def with_real_names(cluster: RunningCluster) -> Any:
    """The description, with names of what is there: others would end at 404."""
    said = {"model": MODEL, "input": "import os", "max_output_tokens": 8}
    response = httpx.post(f"{cluster.http}/v1/responses", json=said, timeout=60).json()["id"]
    conversation = httpx.post(f"{cluster.http}/v1/conversations", json={}, timeout=60).json()["id"]
    found = httpx.get(f"{cluster.http}/openapi.json", timeout=60).json()
    for described in found["components"]["schemas"].values():
        if "model" in described.get("properties", {}):
            described["properties"]["model"] = {"enum": [MODEL]}
    for path, operations in found["paths"].items():
        names = [name for name in (response, conversation) if path.startswith(f"/v1/{name[:4]}")]
        names += [MODEL] if path.startswith("/v1/models") else []
        for method, operation in operations.items():
            for one in operation.get("parameters", ()):
                if one["name"] == "name" and method != "delete":
                    one["schema"] = {"enum": names}
    return found


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of programs for Node beside what they need."""
    if shutil.which("npm") is None:
        pytest.skip("there is no npm to fetch clients with")
    folder = tmp_path_factory.mktemp("node")
    for path in (PROGRAMS / "package.json", *PROGRAMS.glob("*.mjs")):
        shutil.copy(path, folder)
    run(["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts"], cwd=folder)
    return folder


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("with_*.py")))
def test_a_program_in_python(cluster: RunningCluster, python: Path, tmp_path: Path, program: str) -> None:
    run([python / "python", PROGRAMS / program, cluster.http, MODEL], cwd=tmp_path)


@pytest.mark.parametrize("program", sorted(path.name for path in PROGRAMS.glob("*.mjs")))
def test_a_program_in_javascript(cluster: RunningCluster, node: Path, program: str) -> None:
    run(["node", node / program, cluster.http, MODEL], cwd=node)


def test_llm_in_a_shell(cluster: RunningCluster, python: Path, tmp_path: Path) -> None:
    env = {**os.environ, "PATH": f"{python}{os.pathsep}{os.environ['PATH']}"}
    run(["sh", PROGRAMS / "with_llm.sh", cluster.http, MODEL], cwd=tmp_path, env=env)
