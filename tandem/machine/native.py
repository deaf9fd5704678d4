"""Compilation of a C source beside its module into a shared library, once per machine.

1 check    the CPU has the instructions
2 find     <cache>/tandem/kernels/<hash of source, headers and flags>.so; <cache>: XDG_CACHE_HOME or ~/.cache
3 compile  with the `ziglang` wheel, gcc or clang, into a name of its own, then rename: concurrent builders do no harm
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence, Set
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path

from tandem.machine.home import cache_folder

_FLAGS = ("-O3", "-shared", "-fPIC")
_TIMEOUT_S = 120.0


class NotCompiled(RuntimeError):
    """The library cannot be made on this machine; the message says why."""


def compiled(
    source: Path,
    instructions: Sequence[str],
    *flags: str,
    also: Sequence[str] = (),
    cache: Path | None = None,
    cpu: Set[str] | None = None,
) -> Path:
    """Returns the library of `source` for a CPU with `instructions` (as /proc/cpuinfo spells them), kept in `cache`.

    `also`: instructions to use if the CPU has them all. `cpu`: the CPU's instructions; default: this CPU's.

    Raises NotCompiled.
    """
    try:
        found = cpu_instructions() if cpu is None else frozenset(cpu)
        if missing := sorted(set(instructions) - found):
            raise NotCompiled(f"this CPU lacks {', '.join(missing)}")
        machine = [machine_flag(name) for name in (*instructions, *(also if found.issuperset(also) else ()))]
        return _found_or_made(source, [*flags, *machine], cache or kernels_folder())
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCompiled(str(error)) from error


def cpu_instructions() -> frozenset[str]:
    """Returns this CPU's instruction sets as /proc/cpuinfo spells them; empty without that file."""
    try:
        return frozenset(
            Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\nflags")[2].partition("\n")[0].split()
        )
    except OSError:
        return frozenset()


def machine_flag(instruction: str) -> str:
    """Returns the compiler's flag for an instruction set: -mavx512bf16, but -mamx-bf16."""
    return "-m" + instruction.replace("_", "-" if instruction.startswith("amx") else "")


def kernels_folder() -> Path:
    return cache_folder("kernels")


def _found_or_made(source: Path, flags: Sequence[str], cache: Path) -> Path:
    digest = blake2b(source.read_bytes() + " ".join(flags).encode(), digest_size=16)
    for header in sorted(source.parent.glob("*.h")):
        digest.update(header.read_bytes())
    target = cache / f"{digest.hexdigest()}.so"
    if not target.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            compile_library(source, flags, Path(folder) / target.name).rename(target)
    return target


def compile_library(source: Path, flags: Sequence[str], output: Path) -> Path:
    """Compiles with the first compiler that succeeds. Raises NotCompiled with the last compiler's error."""
    problem = "no C compiler found: install the ziglang wheel, gcc or clang"
    for compiler in compilers():
        command = [*compiler, *_FLAGS, *flags, str(source), "-o", str(output), "-lm"]
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=_TIMEOUT_S, check=False)
        if done.returncode == 0:
            return output
        problem = f"{compiler[0]}: {done.stderr.strip()[-500:]}"
    raise NotCompiled(problem)


def compilers() -> list[list[str]]:
    """Returns the commands that compile C here, best first."""
    found = [[path] for name in ("gcc", "clang") if (path := shutil.which(name))]
    return [*found, [sys.executable, "-m", "ziglang", "cc"]] if find_spec("ziglang") else found
