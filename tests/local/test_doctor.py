"""`tandem doctor` names the ranks of workers that have several."""

from __future__ import annotations

from tandem.commands.doctor import DoctorSettings, examine
from tandem.local import RedisServer
from tandem.registry import Registry, Role
from tests.registry.cluster import TTL, worker_info, worker_load


async def test_workers_and_links_say_how_many_ranks_there_are() -> None:
    with RedisServer.start() as server:
        registry = Registry.connect(server.url, namespace="doctor")
        shared = worker_info("p0", Role.PREFILL, tensor_parallel=2, grpc_address="127.0.0.1:1")
        alone = worker_info("d0", Role.DECODE, grpc_address="127.0.0.1:1")
        for info in (shared, alone):
            await registry.leases.register(info, worker_load(), TTL)
        await registry.close()
        found = await examine(DoctorSettings(redis_url=server.url, namespace="doctor"))
    assert [finding.what for finding in found if not finding.good] == ["d0", "p0 (TP 2)", "p0 (TP 2) -> d0"]
    assert "no block moves" in found[-1].detail
