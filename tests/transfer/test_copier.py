"""Rows are copied and summed alike with and without a compiler."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem.machine import native
from tandem.transfer.copy.copier import CompiledCopier, Copier, load_copier
from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.wire import checksum
from tests.transfer.pair import Meet

NUM_ROWS = 48


def can_compile() -> bool:
    """Asked of the machine, not of the code under test."""
    return "avx2" in Path("/proc/cpuinfo").read_text(encoding="utf-8") and bool(native.compilers())


@pytest.fixture(scope="module")
def copier(tmp_path_factory: pytest.TempPathFactory) -> Copier:
    """The compiled one wherever this machine can have it."""
    copier = load_copier(tmp_path_factory.mktemp("kernels"))
    assert isinstance(copier, CompiledCopier) == can_compile()
    return copier


def cache(row_bytes: int, shift: int, seed: int) -> torch.Tensor:
    """Rows of bytes that begin `shift` bytes behind a cache line."""
    memory = torch.zeros(NUM_ROWS * row_bytes + 128, dtype=torch.uint8)
    start = -memory.data_ptr() % 64 + shift
    found = memory[start : start + NUM_ROWS * row_bytes].view(NUM_ROWS, row_bytes)
    if seed:
        found.copy_(torch.from_numpy(np.random.default_rng(seed).integers(0, 256, found.shape, np.uint8)))
    return found


@given(
    row_bytes=st.sampled_from([1, 32, 64, 192, 256, 512, 960, 1000, 1024, 1088, 2112, 8192]),
    shift=st.sampled_from([0, 8]), ids=st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, unique=True),
    seed=st.integers(1, 99), past_caches=st.booleans(),
)  # fmt: skip
@settings(max_examples=250, deadline=None)
def test_rows_go_out_and_in_bit_for_bit_under_the_same_sum(
    copier: Copier, row_bytes: int, shift: int, ids: list[int], seed: int, past_caches: bool
) -> None:
    here, there = cache(row_bytes, shift, seed), cache(row_bytes, shift, 0)
    order, payload = np.array(ids, np.int64), cache(row_bytes, 0, 0)[: len(ids)].view(-1).numpy().data
    found = copier.gather(Rows(here), order, payload, past_caches)
    assert bytes(payload) == here[ids].numpy().tobytes()
    assert found == checksum(payload)
    assert copier.scatter(payload, Rows(there), order) == found
    assert torch.equal(there[ids], here[ids])
    assert not there[[row for row in range(NUM_ROWS) if row not in ids]].any()


@given(ids=st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, unique=True), seed=st.integers(1, 99))
@settings(deadline=None)
def test_rows_of_a_device_go_through_this_machines_memory(copier: Copier, ids: list[int], seed: int) -> None:
    """As on a GPU, but for the place: what is no host memory is never touched by address."""
    here, there = Rows(cache(512, 0, seed)), Rows(cache(512, 0, 0))
    for rows in (here, there):
        rows.on_host, rows.in_lines, rows.address = False, False, 0
    order, payload = np.array(ids, np.int64), cache(512, 0, 0)[: len(ids)].view(-1).numpy().data
    found = copier.gather(here, order, payload, past_caches=True)
    assert found == checksum(payload) == copier.scatter(payload, there, order)
    assert torch.equal(there.kv[ids], here.kv[ids])
    assert not there.kv[[row for row in range(NUM_ROWS) if row not in ids]].any()


@pytest.mark.skipif(not can_compile(), reason="no C compiler, or no AVX2")
def test_the_source_compiles_without_a_warning(tmp_path: Path) -> None:
    source = Path(native.__file__).parents[1] / "transfer" / "copy" / "rows.c"
    assert native.compiled(source, ("avx2",), "-Wall", "-Wextra", "-Werror", cache=tmp_path).exists()


SANITIZED = """
import ctypes, gc, sys
gc.disable()  # imports are slow enough
from tandem.transfer.copy.copier import CompiledCopier
from tests.transfer import test_copier
copier = CompiledCopier(ctypes.CDLL(sys.argv[1]))
"""
SANITIZE = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
AS_IT_IS = "test_copier.test_rows_go_out_and_in_bit_for_bit_under_the_same_sum(copier)"
PAST_THE_END = """
import numpy as np
rows, payload, ids = np.zeros(1 << 20, np.uint8), np.zeros(1 << 12, np.uint8), np.array([255, 256], np.int64)
copier._gather(rows.ctypes.data, 4096, ids.ctypes.data, 2, payload.ctypes.data, 0)  # row 256 of 256; room for one
"""


@pytest.mark.long
@pytest.mark.skipif(not can_compile() or shutil.which("gcc") is None, reason="no AVX2, or no gcc")
@pytest.mark.parametrize(("code", "problem"), [(AS_IT_IS, ""), (PAST_THE_END, "AddressSanitizer: ")])
def test_sanitizers_find_nothing_and_would_find_an_overrun(code: str, problem: str, tmp_path: Path) -> None:
    named = (
        subprocess.check_output(["gcc", f"-print-file-name=lib{name}.so"], encoding="utf-8")
        for name in ("asan", "ubsan")
    )
    preloaded = " ".join(line.strip() for line in named)
    environment = os.environ | {"LD_PRELOAD": preloaded, "ASAN_OPTIONS": "detect_leaks=0"}
    source = Path(native.__file__).parents[1] / "transfer" / "copy" / "rows.c"
    library = native.compiled(source, ("avx2",), *SANITIZE, cache=tmp_path)  # here, where the compiler is not watched
    command = [sys.executable, "-c", SANITIZED + code, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, encoding="utf-8", timeout=110, check=False)
    assert (done.returncode == 0) is not bool(problem), done.stderr[-4000:]
    assert problem in done.stderr


def test_without_a_compiler_numpy_copies_and_meets_the_compiled_side(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, meet: Meet, transport: str
) -> None:
    pair = meet(transport)
    with monkeypatch.context() as bare, caplog.at_level(logging.WARNING):
        bare.setenv("XDG_CACHE_HOME", str(tmp_path))
        bare.setattr(native, "compilers", list)
        other = meet(transport, network=pair.network)
    assert {record.message.partition(":")[0] for record in caplog.records} == {"KV blocks are copied by numpy"}
    assert not list(tmp_path.rglob("*.so"))
    pair.receiver, other.receiver = other.receiver, pair.receiver
    pair.cache, other.cache = other.cache, pair.cache
    pair.moves("t", [5, 1, 9], [2, 0, 7])
    other.moves("t", [5, 1, 9], [2, 0, 7])
