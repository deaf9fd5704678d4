"""`tandem top` in a terminal: what a registry says, drawn."""

from __future__ import annotations

import asyncio
import os
import pty
import select
import subprocess
import sys
import time
from dataclasses import replace

from tandem.commands.top import MAX_ROWS, shown_first
from tandem.local import RedisServer
from tandem.process import dying_with_parent
from tandem.registry import LiveWorker, Registry, Role, WorkerInfo, WorkerLoad

WAIT_S = 60.0
LOAD = WorkerLoad(free_blocks=16, num_waiting=3, num_running=5, queued_tokens=777, prefill_tokens_per_s=4321.0)


def info(name: str, role: Role) -> WorkerInfo:
    return WorkerInfo(
        worker_id=name, role=role, incarnation=f"of {name}", grpc_address="127.0.0.1:1", transfer_address="",
        model="tiny", revision="r", layout_hash="h", block_size=16, num_blocks=64, max_num_seqs=8, max_model_len=256,
        transports=("tcp",), host="test",
    )  # fmt: skip


async def register(url: str) -> None:
    registry = Registry.connect(url, namespace="top")
    try:
        await registry.leases.register(info("decode-0", Role.DECODE), LOAD, 600.0)
        shared = replace(info("prefill-0", Role.PREFILL), tensor_parallel=2)
        await registry.leases.register(shared, replace(LOAD, linked=("of decode-0",)), 600.0)
    finally:
        await registry.close()


def drawn(command: list[str], until: str) -> str:
    """Text that a terminal gets of it, until it has got that."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        dying_with_parent(*command), stdout=theirs, stderr=theirs, env=os.environ | {"COLUMNS": "140"}
    )
    os.close(theirs)
    seen, end = "", time.monotonic() + WAIT_S
    try:
        while until not in seen and time.monotonic() < end:
            if select.select([ours], [], [], 1.0)[0]:
                seen += os.read(ours, 65536).decode(errors="replace")
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return seen


def test_a_terminal_shows_workers_their_load_and_links() -> None:
    with RedisServer.start() as server:
        asyncio.run(register(server.url))
        command = [sys.executable, "-m", "tandem", "top", f"--redis-url={server.url}", "--namespace=top"]
        seen = drawn(command, until="1 of 1")
    assert "\x1b[?1049h" in seen  # a screen of its own
    for word in ("decode-0 ", "prefill-0 (TP 2)", "serving", "777", "75%", "4,321", "1 of 1"):
        assert word in seen, word


def test_without_a_registry_it_says_so_and_goes_on() -> None:
    command = [sys.executable, "-m", "tandem", "top", "--redis-url=redis://127.0.0.1:1"]
    assert "the registry does not answer" in drawn(command, until="does not answer")


def test_of_very_many_workers_the_busiest_are_shown() -> None:
    loads = {f"d{number:03}": replace(LOAD, num_running=number) for number in range(100)}
    workers = [LiveWorker(info(name, Role.DECODE), load, 0, 0, "") for name, load in loads.items()]
    assert [worker.info.worker_id for worker in shown_first(workers)] == list(loads)[-MAX_ROWS:]
