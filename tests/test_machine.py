"""CPUs and memory that a process may use, on machines that are made of files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tandem.machine.resources import usable_cpus, usable_memory

MANY = 64
NO_LIMIT_V1 = "9223372036854771712"


@pytest.fixture(autouse=True)
def many_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(MANY)))


class MachineOfFiles:
    """Files of a /proc, and of the cgroups that it says are mounted."""

    def __init__(self, folder: Path) -> None:
        self.proc, self._mounts = folder / "proc", folder / "cgroup"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text("MemTotal:  1000 kB\nMemFree: 5 kB\n", encoding="utf-8")

    def lies_in(self, *lines: str) -> None:
        (self.proc / "self" / "cgroup").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    def mount(self, point: str, kind: str, options: str = "rw", root: str = "/") -> None:
        line = f"31 23 0:28 {root} {self._mounts / point} rw,relatime shared:9 - {kind} cgroup {options}\n"
        with (self.proc / "self" / "mountinfo").open("a", encoding="utf-8") as file:
            file.write(line)

    def write(self, file: str, text: str) -> None:
        (self._mounts / file).parent.mkdir(parents=True, exist_ok=True)
        (self._mounts / file).write_text(f"{text}\n", encoding="utf-8")

    def hold(self, folder: str, quota: int, period: int = 100_000) -> None:
        """As v1 does it."""
        self.write(f"{folder}/cpu.cfs_quota_us", str(quota))
        self.write(f"{folder}/cpu.cfs_period_us", str(period))


@pytest.fixture
def machine(tmp_path: Path) -> MachineOfFiles:
    return MachineOfFiles(tmp_path)


@pytest.fixture
def v2(machine: MachineOfFiles) -> MachineOfFiles:
    machine.lies_in("0::/pod/worker")
    machine.mount("", "cgroup2")
    return machine


@pytest.fixture
def v1(machine: MachineOfFiles) -> MachineOfFiles:
    """With v2's tree beside it, as many machines have it."""
    machine.lies_in("9:name=systemd:/", "4:memory:/pod", "1:cpu,cpuacct:/pod/worker", "0::/")
    machine.mount("unified", "cgroup2")
    machine.mount("cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
    machine.mount("memory", "cgroup", "rw,memory")
    return machine


def test_without_limits_there_is_the_machine(machine: MachineOfFiles) -> None:
    assert usable_cpus(machine.proc) == MANY
    assert usable_memory(machine.proc) == 1000 * 1024


@pytest.mark.parametrize(
    ("said", "cpus"), [("150000 100000", 2), ("20000 100000", 1), ("9900000 100000", MANY), ("max 100000", MANY)]
)
def test_a_quota_of_v2_is_rounded_up(v2: MachineOfFiles, said: str, cpus: int) -> None:
    v2.write("pod/worker/cpu.max", said)
    assert usable_cpus(v2.proc) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [(150_000, 2), (20_000, 1), (-1, MANY)])
def test_a_quota_of_v1_is_rounded_up(v1: MachineOfFiles, quota: int, cpus: int) -> None:
    v1.hold("cpu,cpuacct/pod/worker", quota)
    assert usable_cpus(v1.proc) == cpus


def test_the_smallest_on_the_way_to_the_root_counts(v2: MachineOfFiles) -> None:
    for folder, cpus, memory in (("pod/worker/", 8, "max"), ("pod/", 3, "5000"), ("", 16, "6000"), ("other/", 1, "9")):
        v2.write(f"{folder}cpu.max", f"{cpus}00000 100000")
        v2.write(f"{folder}memory.max", memory)
    assert usable_cpus(v2.proc) == 3
    assert usable_memory(v2.proc) == 5000


def test_v1_has_a_tree_for_each_controller(v1: MachineOfFiles) -> None:
    v1.hold("cpu,cpuacct/pod/worker", 800_000)
    v1.hold("cpu,cpuacct/pod", 400_000, 200_000)
    v1.write("memory/pod/memory.limit_in_bytes", NO_LIMIT_V1)
    assert usable_cpus(v1.proc) == 2
    assert usable_memory(v1.proc) == 1000 * 1024
    v1.write("memory/memory.limit_in_bytes", "7000")
    assert usable_memory(v1.proc) == 7000


@pytest.mark.parametrize("own", ["/docker/abc", "/docker/abc/inner", "/../elsewhere"])
def test_a_container_sees_its_cgroup_as_the_root(machine: MachineOfFiles, own: str) -> None:
    machine.lies_in(f"1:cpu:{own}")
    machine.mount("cpu", "cgroup", "rw,cpu", root="/docker/abc")
    machine.hold("cpu", 250_000)
    assert usable_cpus(machine.proc) == 3


def test_affinity_counts() -> None:
    code = "import os; os.sched_setaffinity(0, [min(os.sched_getaffinity(0))]); "
    code += "from tandem.machine.resources import usable_cpus; print(usable_cpus())"
    assert subprocess.check_output([sys.executable, "-c", code], timeout=60) == b"1\n"
