"""The kernel's word on a process of this host; of another's it says nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tandem.liveness.same_host import dead_here, gone_here, this_process

CHILD = "from tandem.liveness.same_host import this_process; print(this_process(), flush=True); input()"


def test_a_process_is_seen_to_run_to_stop_and_to_go() -> None:
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, stdin=subprocess.PIPE) as child:
        assert child.stdout
        process = child.stdout.readline().decode().strip()
        assert dead_here(process) == ""
        os.kill(child.pid, signal.SIGSTOP)
        until(process, "it is stopped")
        os.kill(child.pid, signal.SIGCONT)
        until(process, "")
        child.kill()
        until(process, "it is gone")  # a zombie, then none at all
    assert dead_here(process) == "it is gone"
    assert gone_here(process)


def until(process: str, said: str) -> None:
    ends = time.monotonic() + 30
    while dead_here(process) != said:
        assert time.monotonic() < ends
        time.sleep(0.01)


@pytest.mark.parametrize("process", ["", "nonsense", "other-boot/pid:[1] 1 1", "x {own}", "a b c d"])
def test_what_is_not_of_this_host_is_not_judged(process: str) -> None:
    assert dead_here(process.format(own=os.getpid())) == ""


def test_the_next_process_of_a_pid_is_another() -> None:
    host, pid, began = this_process().split()
    assert dead_here(f"{host} {pid} {began}") == ""
    assert dead_here(f"{host} {pid} {int(began) - 1}") == "it is gone"


def test_where_there_is_no_such_kernel_nothing_is_said(tmp_path: Path) -> None:
    assert this_process(tmp_path) == ""
    assert dead_here(this_process(), tmp_path) == ""
