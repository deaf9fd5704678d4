"""Commands in README, CONTRIBUTING and docs are run, but for those whose block says what they need: gpu, cluster, root,
setup (they change this machine), hub (a model that is fetched, or a person at the terminal) or hours.

Commands that ask a cluster find one. `tandem up` is checked up to where it would start; `make check` starts it.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tandem.commands.clusters import SECRET_FILE
from tandem.commands.up import DEMO_MODEL
from tandem.local import free_ports
from tests.e2e.cluster import RunningCluster, running_cluster
from tests.engine.peft_folders import make_adapter

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"text", "json", "yaml", "sh", "python"}
NEEDS = {"", "gpu", "cluster", "root", "setup", "hours", "hub"}
FENCE = re.compile(r"^(?P<indent> *)```(?P<info>.*)\n(?P<text>(?:.*\n)*?) *```$", re.MULTILINE)
# What a shell does for `tandem up` here: all but starting.
UP = """
import os, sys
from tandem.commands.up import UpSettings
from tandem.commands.up.checks import check
from tandem.commands.up.environment import for_services
from tandem.settings import load
settings = load(UpSettings, sys.argv[1:], "tandem up")
check(settings, settings.cluster(for_services(os.environ)))
"""
SHELL = """
tandem() { if [ "$1" = up ]; then shift; "$PYTHON" -c "$UP" "$@"; else "$PYTHON" -m tandem "$@"; fi; }
set -e
"""


@dataclass(frozen=True)
class CodeBlock:
    place: str
    language: str
    needs: str
    text: str


def blocks() -> Iterator[CodeBlock]:
    for page in PAGES:
        content = page.read_text(encoding="utf-8")
        for found in FENCE.finditer(content):
            line = content.count("\n", 0, found.start()) + 1
            language, _, needs = found["info"].partition(" ")
            yield CodeBlock(f"{page.relative_to(ROOT)}:{line}", language, needs, found["text"])


def runnable(language: str) -> list[CodeBlock]:
    return [block for block in blocks() if block.language == language and not block.needs]


def test_each_block_says_what_it_is_and_what_it_needs() -> None:
    assert {block.place: block.language for block in blocks() if block.language not in LANGUAGES} == {}
    assert {block.place: block.needs for block in blocks() if block.needs not in NEEDS} == {}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like a reader's: the repository, a model and an adapter of their own."""
    home = tmp_path_factory.mktemp("reader")
    for name in ("models", "tests", "tandem", "services", "pyproject.toml"):
        (home / name).symlink_to(ROOT / name)
    (home / ".venv").symlink_to(sys.prefix)
    (home / "home" / "models").mkdir(parents=True)
    (home / "home" / "models" / "Qwen2.5-0.5B-Instruct").symlink_to(DEMO_MODEL)
    make_adapter(home / "adapters" / "sql-v2", DEMO_MODEL)
    return home


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    with running_cluster(tmp_path_factory.mktemp("docs"), f"--lora-dir={folder / 'adapters'}") as cluster:
        yield cluster


@pytest.fixture
def environment(folder: Path, cluster: RunningCluster) -> dict[str, str]:
    ports = dict(zip(("HTTP", "GRPC", "REDIS"), map(str, free_ports(3)), strict=True))
    return os.environ | {
        "HOME": str(folder / "home"), "PYTHON": sys.executable, "UP": UP, "TANDEM_ADDRESS": cluster.grpc,
        "TANDEM_GRPC_ADDRESS": cluster.grpc, "TANDEM_GATEWAY_URL": cluster.http,
        **{f"TANDEM_{name}_PORT": port for name, port in ports.items()},
    }  # fmt: skip


def here(text: str, cluster: RunningCluster) -> str:
    """With the addresses that it has here."""
    at = cluster.http.removeprefix("http://")
    return text.replace("127.0.0.1:8000", at).replace("localhost:8000", at).replace("127.0.0.1:50051", cluster.grpc)


@pytest.mark.long
@pytest.mark.parametrize("block", runnable("sh"), ids=lambda block: block.place)
def test_commands_run(block: CodeBlock, folder: Path, cluster: RunningCluster, environment: dict[str, str]) -> None:
    text = SHELL + here(block.text, cluster).replace("curl ", "curl --fail-with-body --silent --show-error ")
    for name in ("doctor", "keys usage"):
        text = text.replace(f"tandem {name}", f"tandem {name} --redis-url={cluster.redis_url}")
    # By another home than that in which its cluster is noted.
    text = text.replace("tandem doctor", f"tandem doctor --cluster-secret={cluster.logs / SECRET_FILE}")
    done = subprocess.run(
        ["bash", "-c", text], cwd=folder, env=environment, capture_output=True, encoding="utf-8", timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.parametrize("block", runnable("python"), ids=lambda block: block.place)
def test_snippets_run(block: CodeBlock, cluster: RunningCluster) -> None:
    code = here(block.text, cluster)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", timeout=90)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def starts() -> list[str]:
    lines = [line.partition("#")[0].strip() for block in runnable("sh") for line in block.text.splitlines()]
    return [line for line in lines if "tandem up" in line]


@pytest.mark.long
@pytest.mark.parametrize("line", starts())
def test_clusters_of_the_docs_start(line: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    before, _, options = line.partition("tandem up")
    given = dict(word.split("=", 1) for word in shlex.split(before))
    (folder / ".run").mkdir(exist_ok=True)
    (folder / ".run" / "keys.json").write_text("{}", encoding="utf-8")
    said = options.replace("~", str(folder / "home"))
    with running_cluster(tmp_path, *shlex.split(said), env=given) as cluster:
        assert cluster.ready()
