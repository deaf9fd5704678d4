"""A peer that is killed, or frozen and so silent, is found out by the other side long before a deadline."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tandem.transfer import TransferError
from tests.stalls import running_time
from tests.transfer.pair import SOON, Meet, until
from tests.transfer.peer import Role, receive, send_one_layer, warm

START = 60.0
NOTICED_S = 2.0
context = multiprocessing.get_context("forkserver")


@pytest.fixture(autouse=True, scope="module")
def fork_server() -> None:
    """One process that has imported torch already; every worker is forked from it."""
    context.set_forkserver_preload(["tests.transfer.peer"])
    first = context.Process(target=warm)
    first.start()
    first.join(START)


@contextmanager
def worker(role: Role, transport: str, address: str = "") -> Iterator[tuple[int, str]]:
    """A process playing `role`: its pid and what it says first."""
    ours, theirs = context.Pipe()
    process = context.Process(target=role, args=(theirs, transport, address))
    process.start()
    theirs.close()
    try:
        assert process.pid is not None
        yield process.pid, heard(ours)
    finally:
        process.kill()
        process.join(SOON)
        process.close()
        ours.close()


def strike(pid: int, blow: signal.Signals) -> None:
    """Returns once no thread of the process runs any more: a signal takes its time to reach them all."""
    os.kill(pid, blow)
    assert until(lambda: all(state in "TZX" for state in thread_states(pid)), SOON), thread_states(pid)


def thread_states(pid: int) -> list[str]:
    """Those of the threads that are still there: one may go while the others are being looked at."""
    states: list[str] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                states.append((task / "stat").read_text(encoding="utf-8").rpartition(") ")[2][0])
    return states


def heard(pipe: Connection) -> str:
    assert pipe.poll(START), "the worker never spoke"
    return str(pipe.recv())


@pytest.mark.parametrize("transport", ["shm", "tcp", "nccl", "cuda_ipc"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_sender_aborts_its_transfers(meet: Meet, transport: str, blow: signal.Signals) -> None:
    pair = meet(transport)
    outcome = pair.expect("t", [1, 2], seconds=START)
    with worker(send_one_layer, transport, pair.receiver.address) as (pid, _):
        strike(pid, blow)
        with running_time() as clock:
            assert outcome.get()[:2] == ("abort", "UNAVAILABLE")
            assert clock.ran_s < NOTICED_S
    pair.moves("next", [1, 2], [6, 7])


@pytest.mark.parametrize("transport", ["shm", "tcp", "nccl", "cuda_ipc"])
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_the_loss_of_a_receiver_fails_the_commit(meet: Meet, transport: str, blow: signal.Signals) -> None:
    pair = meet(transport)
    with worker(receive, transport) as (pid, address):
        pair.receiver.close()
        link = pair.sender.open_link(pair.receiver.identity, address, timeout_s=SOON).result(SOON)
        push = link.begin("t", first_block=0, num_blocks=2, num_layers=3, timeout_s=START)
        push.push(0, 0, [4, 5], pair.source[0])
        strike(pid, blow)
        with running_time() as clock:
            with pytest.raises(TransferError, match="UNAVAILABLE"):
                pair.finish(push, [4, 5], [1, 2])
            assert clock.ran_s < NOTICED_S
        assert not link.healthy
