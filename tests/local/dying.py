"""A service that dies of the signal that it is told: in mid-step, or without a crash page as a registered worker."""

import asyncio
import os
import sys
import time
from pathlib import Path
from uuid import uuid4

from tandem.containment.crash_page import CrashPage, page_path
from tandem.liveness.same_host import this_process
from tandem.registry import Registry, Role
from tests.registry.cluster import worker_info, worker_load

LEASE_S = 300.0


async def register(worker_id: str, at: str) -> None:
    registry = Registry.connect(os.environ["TANDEM_REDIS_URL"], timeout=30.0)
    incarnation = uuid4().hex
    info = worker_info(worker_id, Role.DECODE, incarnation, grpc_address=at, process=this_process())
    await registry.leases.register(info, worker_load(), LEASE_S)
    await registry.close()


def enter_steps(path: Path) -> None:
    page = CrashPage.at(path)
    page.begin(uuid4().hex)
    page.enter("a", 4)
    page.enter("b", 0)
    page.stepping()


if __name__ == "__main__":
    said = dict(option.removeprefix("--").split("=", 1) for option in sys.argv[1:])
    if "crash-dir" in said:
        enter_steps(page_path(Path(said["crash-dir"]), "tandem", said["worker-id"]))
    else:
        asyncio.run(register(said["worker-id"], f"another port:{os.getpid()}"))
    os.kill(os.getpid(), int(said["dies"]))
    time.sleep(60)
