"""Runs what `make test` leaves out, in parts of at most 15 minutes: `make check PART=chaos`.

    python -m tests.check            every part, one after another, and which of them failed
    python -m tests.check PART ...   these

A test that is marked long or alone belongs to the part that names its file, else to the one that names its folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BESIDE_OTHERS = ("-n3", "--dist=loadfile", "--no-loadscope-reorder", "--durations=5")
PASSED = {pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED}


@dataclass(frozen=True, slots=True)
class CheckPart:
    """Files of a folder of tests/, or all of the folder that no other part names, and what change needs them."""

    needed_for: str
    folders: str
    names: str = ""

    @property
    def prefixes(self) -> list[str]:
        """Paths under tests/."""
        if not self.names:
            return self.folders.split()
        return [f"{self.folders}/test_{name}.py" for name in self.names.split()]


PARTS = {
    "chart": CheckPart("the Helm chart, `tandem render`, what pods are given", "helm test_render.py"),
    "images": CheckPart("Dockerfile, locks, what is installed", "docker"),
    "ray": CheckPart("the launchers, Ray, autoscaling", "local"),
    "clients": CheckPart(
        "what an API answers, commands, console, docs", "e2e",
        "anthropic_agent by_name chat clients codex commands console docs family_chat grpc_clients programs structured",
    ),
    "failures": CheckPart(
        "deaths, drains, migration, suspicion, starvation, fairness", "e2e",
        "failures fairness full_disk gateways half_dead migration no_memory null_engine poison secured starved",
    ),
    "clusters": CheckPart("a path of a request, KV transfer or tiers, adapters, several models", "e2e"),
    "kernels": CheckPart("the engine, its kernels, a model family", "engine benchmarks"),
    "chaos": CheckPart("what waits, aborts, reserves or releases", "chaos simulation"),
    "rooms": CheckPart("gateway, registry, containment, checkpoints", "."),
    "security": CheckPart("what is parsed, and who is let in: requests, frames, files, rows of Redis", ""),
}  # fmt: skip
# What a stranger, a hostile client or a flood meets, with ten times as many examples as in `make test`.
HOSTILE = (
    "checkpoints/test_model_files", "e2e/test_secured", "engine/test_damaged_gguf", "gateway/test_access",
    "gateway/test_cors", "gateway/test_early_refusal", "gateway/test_fuzz", "gateway/test_hostile",
    "gateway/test_large_numbers", "gateway/test_overload", "gateway/test_refused_bodies",
    "gateway/test_structured_fuzz", "gateway/test_wrong_values", "registry/test_connection", "registry/test_limits",
    "registry/test_resp_fuzz", "registry/test_wrong_values", "test_security", "transfer/test_fuzz",
    "transfer/test_schedules", "worker/test_fuzz",
)  # fmt: skip


def part_of(path: str) -> str:
    """Returns the part of a file under tests/."""
    fitting = [(len(prefix), name) for name, part in PARTS.items() for prefix in part.prefixes if _within(path, prefix)]
    return max(fitting)[1]


def _within(path: str, prefix: str) -> bool:
    return prefix == "." or path == prefix or path.startswith(f"{prefix}/")


def runs(name: str) -> Iterator[Sequence[str]]:
    """Yields pytest's arguments for each run of a part."""
    if name == "security":
        yield *BESIDE_OTHERS, "--hypothesis-profile=guard", "--timeout=1800", *(f"tests/{path}.py" for path in HOSTILE)
        return
    folder = ROOT / "tests"
    paths = (path.relative_to(folder).as_posix() for path in sorted(folder.rglob("test_*.py")))
    files = [f"tests/{path}" for path in paths if part_of(path) == name]
    yield *BESIDE_OTHERS, "-m", "long and not alone", *files
    yield "-n0", "-m", "alone", *files


def main(names: Sequence[str]) -> int:
    """Returns 0 where all tests of these parts passed, of all parts where none is named."""
    if unknown := set(names) - PARTS.keys():
        print(f"no part of make check: {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    lines, status = [], 0
    for name in names or PARTS:
        start = time.monotonic()
        statuses = [_pytest(arguments) for arguments in runs(name)]
        passed = PASSED.issuperset(statuses)
        lines.append(f"{name:9} {'passed' if passed else 'FAILED'} in {(time.monotonic() - start) / 60:.1f} min")
        status |= not passed
    print(*lines, sep="\n")
    return status


def _pytest(arguments: Sequence[str]) -> int:
    environment = {"SCHEDULES": "10000"} | os.environ  # of NCCL links
    command = [sys.executable, "-m", "pytest", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
