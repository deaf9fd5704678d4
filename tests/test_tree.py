"""The import rules of the tree, and that generated stubs are what protos/ says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "prefill", "decode", "kvstore")

BLOCKED = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"torch", "cupy", "ray", "transformers"}}:
            raise ImportError("blocked: " + name)
sys.meta_path.insert(0, Refuse())
import importlib, pkgutil
room = importlib.import_module("services.{room}")
for module in pkgutil.walk_packages(room.__path__, "services.{room}."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("room", ROOMS)
def test_no_service_imports_another(room: str) -> None:
    for path in (ROOT / "services" / room).rglob("*.py"):
        others = {f"services.{other}" for other in ROOMS if other != room}
        assert not [n for n in imports_of(path) if any(n.startswith(o) for o in others)], path


def test_the_engine_knows_no_service_and_no_proto() -> None:
    for path in (ROOT / "tandem" / "engine").rglob("*.py"):
        for name in imports_of(path):
            assert not name.startswith(("services", "tandem.v1", "tandem.registry", "grpc", "redis", "fastapi")), path


@pytest.mark.parametrize("room", ["gateway", "kvstore"])
def test_rooms_without_torch(room: str) -> None:
    subprocess.run([sys.executable, "-c", BLOCKED.format(room=room)], check=True, timeout=60)


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    code = "import sys, tandem.cli, tandem.local.cluster, tandem.commands.detached, tandem.commands.up, tandem.worker"
    subprocess.run([sys.executable, "-c", f"{code}; assert 'ray' not in sys.modules"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("redis", ("tandem/registry",)),
        ("cupy", ("tandem/transfer",)),
        ("ray", ("tandem/local/ray/",)),
        ("fastapi", ("services/gateway",)),
        ("llguidance", ("tandem/grammar/",)),
        ("opentelemetry.sdk", ("tandem/telemetry.py",)),
    ],
)
def test_one_third_party_one_place(package: str, homes: tuple[str, ...]) -> None:
    for top in ("tandem", "services"):
        for path in (ROOT / top).rglob("*.py"):
            inside = str(path.relative_to(ROOT)).startswith(homes)
            found = [n for n in imports_of(path) if n == package or n.startswith(f"{package}.")]
            assert inside or not found, f"{path} imports {found}"


def test_stubs_are_generated_from_the_protos(tmp_path: Path) -> None:
    protos = sorted(str(p.relative_to(ROOT / "protos")) for p in (ROOT / "protos").rglob("*.proto"))
    out = str(tmp_path)
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", f"--python_out={out}", f"--pyi_out={out}",
         f"--grpc_python_out={out}", *protos],
        check=True, cwd=ROOT, timeout=60,
    )  # fmt: skip
    for made in (tmp_path / "tandem" / "v1").iterdir():
        assert made.read_text() == (ROOT / "tandem" / "v1" / made.name).read_text(), f"run `make protos`: {made.name}"


# Time, chance, threads and sockets: a simulation replaces what these do, so they are used in these places only.
SHELLS = (
    "tandem/transfer/runtime/", "tandem/transfer/transports/", "tandem/worker/engine_thread.py",
    "tandem/worker/process.py", "tandem/local/", "tandem/commands/", "tandem/rpc.py", "tandem/registry/connection.py",
    "tandem/engine/cores.py", "tandem/engine/kernels/", "tandem/native.py", "tandem/sandbox.py", "tandem/sandboxed.py",
    "services/gateway/http/server.py", "tandem/log_output.py", "tandem/work_threads.py", "tandem/deep_stack.py",
    "tandem/hub.py", "tandem/engine/revision.py", "services/gateway/http/connections.py",
    "services/gateway/http/arrivals.py",
)  # fmt: skip
SHELL_MODULES = {"time", "random", "secrets", "uuid", "socket", "threading", "multiprocessing", "subprocess", "queue"}
# Of those, what everybody may use: types, and what says nothing by itself.
HARMLESS = {"random.Random", "threading.Lock", "threading.Condition"}
ALSO_SHELLS_ONLY = {"concurrent.futures.ThreadPoolExecutor", "os.urandom"}
# What an engine measures with, and what a null one does with its steps' time, unless it is given something else.
EXCEPTIONS = {"tandem/engine/engine.py": {"time.sleep", "time.monotonic"}}


def uses_of(path: Path) -> set[str]:
    """Dotted names of modules' members that a file uses, as they are called where they were defined."""
    tree = ast.parse(path.read_text())
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname or alias.name.partition(".")[0]: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    used = set(known.values())
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            first, _, rest = dotted.partition(".")
            if first in known:
                used.add(f"{known[first]}.{rest}")
    return used


def forbidden_in(path: Path) -> set[str]:
    used = uses_of(path)
    members = {name for name in used if name.partition(".")[0] in SHELL_MODULES and "." in name}
    return (members | used & ALSO_SHELLS_ONLY) - HARMLESS


def test_time_chance_threads_and_sockets_are_used_in_shells_only() -> None:
    offenders = {}
    for top in ("tandem", "services"):
        for path in sorted((ROOT / top).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if not name.startswith(SHELLS) and path.name != "__main__.py":
                offenders[name] = forbidden_in(path) - EXCEPTIONS.get(name, set())
    assert {name: found for name, found in offenders.items() if found} == {}
