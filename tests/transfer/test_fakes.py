"""The fakes have the real ones' signatures, asked of cupy in a process of its own, which needs no GPU."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from typing import Any

import pytest

from tests.transfer.fake_nccl import FakeCommunicator, FakeDevice, FakeNccl, NcclError
from tests.transfer.fake_runtime import FakeRuntime

NCCL = """
import json, cupy.cuda.nccl
from cupy_backends.cuda.libs import nccl
import os
from tandem.transfer.transports.nccl import FEW_CHANNELS, NcclTransport
from tandem.transfer.transports.nccl_communicator import thread_communicators
from tests.transfer.fake_nccl import FakeDevice

def opened():  # descriptors and threads that twenty offers take, beside twenty that are over
    transport = NcclTransport(thread_communicators(nccl, FakeDevice(driven=True)))
    count = lambda: (len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
    before, sides = count(), [transport.offer(64) for _ in range(20)]
    for side in sides:
        side.close()
    sides += [transport.offer(64) for _ in range(20)]
    return [now - then for now, then in zip(count(), before)]

def library():
    path = next(line.split()[-1] for line in open("/proc/self/maps") if "libnccl.so" in line)
    return open(path, "rb").read()

line = lambda what: what.__doc__.splitlines()[0]
made = nccl.NcclCommunicator
methods = ("send", "recv", "abort", "destroy", "check_async_error", "rank_id", "size")
functions = ("get_version", "get_unique_id", "groupStart", "groupEnd")
print(json.dumps({
    "methods": {name: line(getattr(made, name)) for name in methods}, "made": line(made),
    "functions": {name: line(getattr(nccl, name)) for name in functions}, "uint8": nccl.NCCL_UINT8,
    "id_bytes": len(nccl.get_unique_id()), "error": issubclass(nccl.NcclError, RuntimeError), "opened": opened(),
    "unknown": [name for name in FEW_CHANNELS if name.encode() not in library()],
}))
"""
RUNTIME = """
import json
from cupy.cuda import runtime
names = ("malloc", "ipcGetMemHandle", "ipcOpenMemHandle", "ipcCloseMemHandle")
error = issubclass(runtime.CUDARuntimeError, RuntimeError)
print(json.dumps({"functions": {name: getattr(runtime, name).__doc__ for name in names}, "error": error}))
"""


def real(question: str) -> dict[str, Any]:
    found = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", question], capture_output=True, encoding="utf-8", timeout=60
    )
    if "ImportError" in found.stderr or "ModuleNotFoundError" in found.stderr:
        pytest.skip("needs cupy and NCCL's library: pip install 'tandem[gpu]' nvidia-nccl-cu13")
    answer: dict[str, Any] = json.loads(found.stdout)
    return answer


def parameters(described: str) -> list[str]:
    """Names, of a Cython signature such as `f(self, size_t count, Config config=None) -> int`."""
    inside = described.partition("(")[2].partition(")")[0]
    return [part.split("=")[0].split()[-1] for part in inside.split(", ") if part]


def test_nccl() -> None:
    found, fake = real(NCCL), FakeNccl(FakeDevice())
    for name, described in found["methods"].items():
        assert parameters(described) == list(inspect.signature(getattr(FakeCommunicator, name)).parameters), name
    assert parameters(found["made"]) == list(inspect.signature(fake.NcclCommunicator).parameters)
    for name, described in found["functions"].items():
        assert parameters(described) == list(inspect.signature(getattr(fake, name)).parameters) == [], name
    assert found["uint8"] == fake.NCCL_UINT8
    assert found["id_bytes"] == len(fake.get_unique_id())
    assert found["error"]
    assert issubclass(NcclError, RuntimeError)
    assert found["opened"] == [0, 0], "an offer that nobody has taken has a socket or a thread of NCCL"
    assert found["unknown"] == []
    fake.close()


def test_runtime() -> None:
    found, fake = real(RUNTIME), FakeRuntime()
    for name, described in found["functions"].items():
        assert parameters(described) == list(inspect.signature(getattr(fake, name)).parameters), name
    assert found["error"]
