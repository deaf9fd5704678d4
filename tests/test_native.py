"""Kernels where no C compiler is installed, only a wheel that holds one."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tandem import precompile
from tandem.engine.parallel.exchange import library_path as ranks_library_path
from tandem.machine import native

SOURCE = "#include <math.h>\ndouble tandem_root(double x) { return sqrt(x); }\n"


@pytest.mark.long
def test_the_wheel_compiles_what_gcc_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    source = tmp_path / "root.c"
    source.write_text(SOURCE, encoding="utf-8")
    (compiler,) = native.compilers()
    assert compiler[1:] == ["-m", "ziglang", "cc"]
    root = ctypes.CDLL(str(native.compiled(source, (), cache=tmp_path / "cache"))).tandem_root
    root.argtypes, root.restype = [ctypes.c_double], ctypes.c_double
    assert root(2.25) == 1.5


def test_an_image_for_arm64_caches_only_what_ranks_meet_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    precompile.main()
    assert [*native.kernels_folder().iterdir()] == [ranks_library_path()]
