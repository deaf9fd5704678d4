"""The import rules of the tree, and that generated stubs are what protos/ says."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from functools import cache
from itertools import chain
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


# From the ground up: a module imports what is on its floor or below. Modules that are in none of these rooms and lie
# directly in `tandem/` are the ground, and the commands of `tandem` are above all.
FLOORS = (
    ("tandem.catalogue", "tandem.machine", "tandem.security"),
    ("tandem.process", "tandem.liveness", "tandem.containment", "tandem.checkpoints", "tandem.vocabulary"),
    ("tandem.service_settings",),
    ("tandem.registry.errors",),
    ("tandem.registry.wire",),
    ("tandem.registry.blocks",),
    (
        "tandem.rpc",
        "tandem.registry",
        "tandem.store",
        "tandem.tiers",
        "tandem.transfer",
        "tandem.grammar",
        "tandem.cluster",
    ),
    ("tandem.engine.types", "tandem.engine.step_cost", "tandem.engine.step_time", "tandem.engine.device"),
    ("tandem.engine.scheduling", "tandem.engine.quantization", "tandem.engine.float32"),
    ("tandem.engine.kv", "tandem.engine.models"),
    ("tandem.engine.lora", "tandem.engine.weights"),
    ("tandem.engine.forward", "tandem.engine.sampling"),
    ("tandem.engine.speculation", "tandem.engine.kernels", "tandem.engine.parallel"),
    ("tandem.engine.loading",),
    ("tandem.engine",),
    ("tandem.local",),
    ("tandem.worker.settings", "tandem.worker.errors"),
    ("tandem.worker.engine",),
    ("tandem.worker.context",),
    ("tandem.worker.kv", "tandem.worker.serving"),
    ("tandem.worker",),
    ("tandem.local.ray", "services"),
    ("services.gateway.errors", "services.gateway.returns", "services.gateway.settings", "services.gateway.untrusted"),
    ("services.gateway.deadlines",),
    ("services.gateway.admission", "services.gateway.routing", "services.gateway.text", "services.gateway.tools"),
    ("services.gateway.workers",),
    ("services.gateway.access", "services.gateway.bodies"),
    ("services.gateway.model", "services.gateway.telemetry"),
    ("services.gateway.generation",),
    ("services.gateway.shared",),
    ("services.gateway.directory",),
    ("services.gateway.chat", "services.gateway.door", "services.gateway.console"),
    ("services.gateway.apis", "services.gateway.grpc"),
    ("services.gateway",),
    ("tandem.commands",),
)
# What is made for others than the rooms, such as the program that compiles C into images.
OUTSIDE = {"tandem.precompile", "tandem.cli", "tandem.__main__"}


@cache
def parsed(path: Path) -> ast.Module:
    """A file's tree, made once for all tests here."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    tree = parsed(path)
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules() -> Iterator[tuple[str, Path]]:
    for top in ("tandem", "services"):
        for path in sorted((ROOT / top).rglob("*.py")):
            yield ".".join(path.relative_to(ROOT).with_suffix("").parts), path


@cache
def imports_at_run_time(path: Path) -> Sequence[ast.ImportFrom]:
    """A file's imports of names, without those for types alone."""
    tree = parsed(path)
    types = [node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    unused = {id(node) for block in types for statement in block.body for node in ast.walk(statement)}
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and id(node) not in unused]


def modules_imported(path: Path) -> set[str]:
    """Modules that a file imports names from while it runs."""
    return {node.module for node in imports_at_run_time(path) if node.module}


def test_rooms_are_entered_by_their_doors() -> None:
    doors = {
        name.removesuffix(".__init__") for name, path in modules() if "__all__ = [" in path.read_text(encoding="utf-8")
    }
    beside = [
        f"{name} imports {module}"
        for name, path in modules()
        if name not in OUTSIDE
        for module in modules_imported(path) - doors
        for door in doors
        if module.startswith(f"{door}.") and not f"{name}.".startswith(f"{door}.")
    ]
    assert beside == []


def doors() -> Iterator[Path]:
    """Files that list the names that others may use, and those of rooms that have a floor."""
    floors = {ROOT / room.replace(".", "/") for rooms in FLOORS for room in rooms if room.startswith("tandem.")}
    for path in chain.from_iterable(map(sources, ("tandem", "services", "benchmarks"))):
        if path.name == "__init__.py" and ("__all__ = [" in path.read_text(encoding="utf-8") or path.parent in floors):
            yield path


def test_each_door_says_first_what_is_behind_it_and_who_may_enter() -> None:
    first_lines = {str(door): (ast.get_docstring(parsed(door)) or "-").splitlines()[0] for door in doors()}
    assert {door: line for door, line in first_lines.items() if " may enter" not in line} == {}


def floor_of(name: str) -> int:
    """The floor of its innermost room; -1 is the ground."""
    rooms = [(room, floor) for floor, rooms in enumerate(FLOORS) for room in rooms]
    around = [(len(room), floor) for room, floor in rooms if f"{name}.".startswith(f"{room}.")]
    return max(around, default=(0, -1))[1]


def test_no_import_leads_upstairs() -> None:
    upwards = [
        f"{name} imports {module}"
        for name, path in modules()
        if name not in OUTSIDE
        for module in modules_imported(path)
        if floor_of(module) > floor_of(name)
    ]
    assert upwards == []


@cache
def graph() -> dict[str, set[str]]:
    """Modules, and those of ours that each imports while it runs."""
    paths = {name.removesuffix(".__init__"): path for name, path in modules()}
    return {name: {*targets_of(path, paths.keys())} - {name} for name, path in paths.items()}


def targets_of(path: Path, known: Set[str]) -> Iterator[str]:
    """Yields modules: `from a import b` imports a.b where that is a module, else a."""
    for node in imports_at_run_time(path):
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            if (target := inner if inner in known else node.module) in known:
                yield target


def reached_from(start: str) -> set[str]:
    reached: set[str] = set()
    seen = [start]
    while seen:
        for name in graph()[seen.pop()] - reached:
            reached.add(name)
            seen.append(name)
    return reached


def test_no_modules_import_one_another() -> None:
    reached = {name: reached_from(name) for name in graph()}
    assert [name for name, found in reached.items() if name in found] == []


MAX_FILES = 15


def test_a_folder_is_read_at_one_glance() -> None:
    folders: dict[str, int] = {}
    for _, path in modules():
        folder = str(path.parent.relative_to(ROOT))
        folders[folder] = folders.get(folder, 0) + 1
    assert {folder: files for folder, files in folders.items() if files > MAX_FILES} == {}


def test_places_that_are_named_here_are_there() -> None:
    named = {*SHELLS, *EXCEPTIONS, *(name.replace(".", "/") for floor in FLOORS for name in floor)}
    assert [name for name in sorted(named) if not (ROOT / name).exists() and not (ROOT / f"{name}.py").exists()] == []


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


@pytest.mark.parametrize("line", ["import tandem.engine.scheduling", "from tandem.worker import WorkerSettings"])
def test_the_scheduler_and_settings_need_no_torch(line: str) -> None:
    code = BLOCKED.partition("import importlib")[0].format() + line
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_ray_is_imported_only_where_it_is_asked_for() -> None:
    code = (
        "import sys, tandem.cli, tandem.cluster, tandem.commands.clusters.detached, tandem.commands.up, tandem.worker"
    )
    subprocess.run([sys.executable, "-c", f"{code}; assert 'ray' not in sys.modules"], check=True, timeout=60)


@pytest.mark.parametrize(
    ("package", "homes"),
    [
        ("redis", ("tandem/registry",)),
        ("cupy", ("tandem/transfer",)),
        ("ray", ("tandem/local/ray/",)),
        ("fastapi", ("services/gateway",)),
        ("llguidance", ("tandem/grammar/",)),
        ("opentelemetry.sdk", ("tandem/process/telemetry.py", "tandem/process/recent_spans.py")),
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
        assert made.read_text(encoding="utf-8") == (ROOT / "tandem" / "v1" / made.name).read_text(encoding="utf-8"), (
            f"run `make protos`: {made.name}"
        )
    for name in ("llm_pb2.py", "llm_pb2.pyi"):
        of_client = ROOT / "clients" / "python" / "tandem_client" / "stubs" / "tandem" / "v1" / name
        assert of_client.read_text(encoding="utf-8") == (ROOT / "tandem" / "v1" / name).read_text(encoding="utf-8"), (
            f"run `make protos`: {of_client}"
        )


# Time, chance, threads and sockets: a simulation replaces what these do, so they are used in these places only.
SHELLS = (
    "services/gateway/door/arrivals.py", "services/gateway/door/connections.py", "services/gateway/door/server.py",
    "tandem/checkpoints/hub.py", "tandem/cluster/cluster.py", "tandem/commands/", "tandem/containment/deep_stack.py",
    "tandem/containment/sandbox.py", "tandem/containment/sandboxed.py", "tandem/engine/cores.py",
    "tandem/engine/kernels/", "tandem/engine/loading/rank.py", "tandem/engine/parallel/ranks.py",
    "tandem/engine/weights/revision.py", "tandem/hosts.py", "tandem/ids.py", "tandem/local/",
    "tandem/machine/native.py",
    "tandem/process/log_output.py", "tandem/process/profile.py", "tandem/process/recent_spans.py",
    "tandem/process/telemetry.py",
    "tandem/process/work_threads.py", "tandem/registry/wire/connection.py",
    "tandem/rpc/endpoints.py", "tandem/transfer/runtime/", "tandem/transfer/transports/",
    "tandem/worker/engine/thread.py", "tandem/worker/life/process.py",
)  # fmt: skip
SHELL_MODULES = {"time", "random", "secrets", "uuid", "socket", "threading", "multiprocessing", "subprocess", "queue"}
# Of those, what everybody may use: types, and what says nothing by itself.
HARMLESS = {"random.Random", "threading.Lock", "threading.Condition"}
ALSO_SHELLS_ONLY = {"concurrent.futures.ThreadPoolExecutor", "os.urandom"}
# What an engine measures with, and what a null one does with its steps' time, unless it is given something else.
EXCEPTIONS = {"tandem/engine/engine.py": {"time.sleep", "time.monotonic"}}


def uses_of(path: Path) -> set[str]:
    """Dotted names of modules' members that a file uses, as they are called where they were defined."""
    tree = parsed(path)
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


# What makes a client, and where alone: a machine's proxy variables would lead others out of the cluster.
CLIENTS = {
    "insecure_channel(": "tandem/rpc/endpoints.py", "secure_channel(": "tandem/rpc/endpoints.py",
    "httpx.AsyncClient(": "tandem/commands/clusters/gateways.py", "DefaultHttpxClient(": "tandem/commands/chat.py",
    "httpx.Client(": "", "httpx.get(": "", "httpx.post(": "", "urlopen(": "", "build_opener(": "",
}  # fmt: skip


def test_clients_of_a_cluster_pass_by_proxies() -> None:
    texts = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for _, path in modules()}
    made = [(name, call) for name, text in texts.items() for call in CLIENTS if call in text]
    assert [(name, call) for name, call in made if name != CLIENTS[call]] == []


def is_of_the_locale(call: ast.Call) -> bool:
    """True for text whose encoding this machine's locale would choose, as far as ruff does not see it."""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    is_file = method == ("write_text" if call.args else "read_text")
    return "encoding" not in named and (is_file or ("text" in named and ast.unparse(named["text"]) == "True"))


def test_text_of_files_and_programs_is_utf_8() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in chain.from_iterable(map(sources, TOPS))
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Call) and is_of_the_locale(node)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("home", "uses"),
    [
        (
            "tandem.machine.resources",
            {"os.cpu_count", "os.sched_getaffinity", "multiprocessing.cpu_count", "psutil.cpu_count"},
        ),
        ("tandem.machine.home", {"pathlib.Path.home"}),
    ],
)
def test_a_machine_is_asked_in_one_place(home: str, uses: set[str]) -> None:
    assert [name for name, path in modules() if uses_of(path) & uses] == [home]


def test_what_lands_is_held_to_lint_and_the_tests_alone() -> None:
    """A gate that takes long is passed by nothing: the rest is `make check`."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert [line for line in script if line.startswith("make ")] == ["make lint", "make test"]


MAX_LINES, MAX_PARAMETERS, MAX_FILE_LINES = 40, 7, 400
TOPS = ("tandem", "services", "clients", "benchmarks", "tests", "deploy", "examples", "models")
# A docstring begins with the noun or verb of what it describes, that of a function with no preposition or pronoun.
NO_FIRST_WORDS = {"What", "Of", "Whether", "Where", "Which"}
NO_FIRST_WORDS_OF_FUNCTIONS = NO_FIRST_WORDS | {
    "All", "As", "At", "Before", "Behind", "By", "For", "From", "How", "In", "It", "Its", "No", "None", "Nothing", "On",
    "One", "So", "That", "They", "Those", "To", "Until", "Who", "With",
}  # fmt: skip
Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def sources(top: str) -> list[Path]:
    """Without what benchmarks fetch."""
    return [path for path in sorted((ROOT / top).rglob("*.py")) if not path.is_relative_to(ROOT / "benchmarks" / "out")]


@cache
def definitions(tops: tuple[str, ...] = ("tandem", "services")) -> Sequence[tuple[str, Definition]]:
    paths = chain.from_iterable(map(sources, tops))
    names = {str(path.relative_to(ROOT)): path for path in paths}
    return [
        (name, node)
        for name, path in names.items()
        if not name.startswith("tandem/v1/")
        for node in ast.walk(parsed(path))
        if isinstance(node, Definition)
    ]


def by_file(found: Iterable[tuple[str, str]]) -> dict[str, set[str]]:
    grouped: dict[str, set[str]] = {}
    for name, definition in found:
        grouped.setdefault(name, set()).add(definition)
    return grouped


def test_no_two_classes_have_one_name() -> None:
    homes: dict[str, list[str]] = {}
    for name, node in definitions(TOPS):
        if isinstance(node, ast.ClassDef):
            homes.setdefault(node.name, []).append(name)
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}


def test_functions_fit_a_screen() -> None:
    functions = ((n, node) for n, node in definitions(TOPS) if not isinstance(node, ast.ClassDef))
    long = ((n, node.name) for n, node in functions if (node.end_lineno or 0) - node.lineno >= MAX_LINES)
    assert by_file(long) == {}


def test_files_are_a_few_screens() -> None:
    sizes = {
        name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules() if "tandem.v1." not in name
    }
    assert {name: size for name, size in sizes.items() if size > MAX_FILE_LINES} == {}


def test_constructors_need_few_things() -> None:
    wide = []
    for name, node in definitions(TOPS):
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(member, ast.FunctionDef) and member.name == "__init__":
                parameters = len(member.args.args) + len(member.args.kwonlyargs) - 1
                wide += [(name, node.name)] * (parameters > MAX_PARAMETERS)
    assert by_file(wide) == {}


def test_docstrings_begin_with_what_a_thing_is_or_does() -> None:
    documented = [(name, ast.get_docstring(node)) for name, node in definitions(TOPS)]
    for top in TOPS:
        for path in sources(top):
            documented.append((str(path.relative_to(ROOT)), ast.get_docstring(parsed(path))))
    found = [(name, text.splitlines()[0]) for name, text in documented if text and text.split()[0] in NO_FIRST_WORDS]
    assert found == []


def test_docstrings_of_functions_begin_with_a_verb_or_a_noun() -> None:
    functions = ((name, node) for name, node in definitions() if not isinstance(node, ast.ClassDef))
    documented = ((f"{name}:{node.lineno}", ast.get_docstring(node)) for name, node in functions)
    found = [(place, text.splitlines()[0]) for place, text in documented if text]
    assert [one for one in found if one[1].split()[0].strip(":,.") in NO_FIRST_WORDS_OF_FUNCTIONS] == []
