"""Helpers of tests of the compiled kernels: how a source is compiled, and watched."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tandem.machine import native

SANITIZE = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


def check_no_warning(
    monkeypatch: pytest.MonkeyPatch, compiler: list[str], source: Path, cpus: Sequence[Sequence[str]], folder: Path
) -> None:
    """Compiles it by that compiler for each of these CPUs."""
    monkeypatch.setattr(native, "compilers", lambda: [compiler])
    for cpu in cpus:
        flags = ["-O1", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", *map(native.machine_flag, cpu)]
        native.compile_library(source, flags, folder / "kernels.so")


def watched(gcc: str) -> dict[str, str]:
    """Returns the environment of a process in which libraries compiled with SANITIZE are watched."""
    named = (
        subprocess.check_output([gcc, f"-print-file-name=lib{name}.so"], encoding="utf-8") for name in ("asan", "ubsan")
    )
    preloaded = " ".join(line.strip() for line in named)
    return os.environ | {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
