"""Links follow the registry: real Redis, real sockets, real blocks moved. Each pair heals alone."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from uuid import uuid4

import pytest
import structlog
import torch
from prometheus_client import CollectorRegistry

from services.prefill.metrics import TransferMetrics
from tandem.liveness.silence import Liveness
from tandem.local import RedisServer
from tandem.registry import ClusterView, Distance, Location, Registry, Role, WorkerInfo, WorkerLoad
from tandem.transfer import LinkPeer, LocalPeer, Receiver, Sender, TransferError
from tandem.worker.kv.link_keeper import LinkKeeper

LAYOUT = "layout-a"
HEAL_S = 60.0  # by far longer than it takes
GRACE_S, LONG_GRACE_S = 1.0, 6.0
IDLE = WorkerLoad(free_blocks=8, num_waiting=0, num_running=0, queued_tokens=0)


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer.start() as server:
        yield server


@dataclass
class LinkPool:
    """A prefill worker's links, and decode workers that come and go."""

    registry: Registry
    keeper: LinkKeeper
    changes: list[tuple[str, ...]]
    receivers: list[Receiver] = field(default_factory=list)

    def receiver(self, worker_id: str, incarnation: str, port: int = 0, layout: str = LAYOUT) -> Receiver:
        cache = [torch.zeros(8, 2, 1, 4, 8) for _ in range(2)]
        endpoint = LinkPeer(worker_id, incarnation, layout)
        self.receivers.append(Receiver(LocalPeer(endpoint), cache, host="127.0.0.1", port=port))
        return self.receivers[-1]

    async def register(
        self, worker_id: str, incarnation: str, address: str, layout: str = LAYOUT, ttl: float = 30.0,
        role: Role = Role.DECODE, node: str = "",
    ) -> None:  # fmt: skip
        info = WorkerInfo(
            worker_id=worker_id, role=role, node=node, incarnation=incarnation, grpc_address="127.0.0.1:1",
            transfer_address=address, model="m", revision="r", layout_hash=layout, block_size=4, num_blocks=8,
            max_num_seqs=4, max_model_len=64, transports=("shm", "tcp"), host="here",
        )  # fmt: skip
        await self.registry.leases.register(info, IDLE, ttl)

    async def linked(self, *incarnations: str) -> float:
        """Seconds until exactly these are linked."""
        return await within(HEAL_S, lambda: self.keeper.linked() == incarnations)


async def within(seconds: float, check: Callable[[], bool]) -> float:
    start = time.monotonic()
    async with asyncio.timeout(seconds):
        while not check():
            await asyncio.sleep(0.01)
    return time.monotonic() - start


@pytest.fixture
async def pool(request: pytest.FixtureRequest, redis_server: RedisServer) -> AsyncIterator[LinkPool]:
    registry = Registry.connect(redis_server.url, namespace=uuid4().hex, timeout=30.0)
    sender, changes = Sender(LocalPeer(LinkPeer("prefill-0", "p-1", LAYOUT))), list[tuple[str, ...]]()
    view = ClusterView(registry)
    location = Location("here", "", "")
    keeper = LinkKeeper(sender, view, location, LAYOUT, Role.DECODE, lambda: changes.append(keeper.linked()))
    pool = LinkPool(registry, keeper, changes)
    tasks = [
        asyncio.create_task(task) for task in (view.run(), keeper.keep(grace_s=getattr(request, "param", GRACE_S)))
    ]
    yield pool
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sender.close()
    for receiver in pool.receivers:
        receiver.close()
    await registry.close()


def nobody() -> socket.socket:
    """A listener that takes connections and never says a word."""
    return socket.create_server(("127.0.0.1", 0))


async def test_the_distance_to_workers_of_either_role_is_known(pool: LinkPool) -> None:
    await pool.register("prefill-1", "p-2", "127.0.0.1:1", role=Role.PREFILL, node="here")
    await pool.register("decode-0", "d-0", pool.receiver("decode-0", "d-0").address, node="there")
    await pool.linked("d-0")
    found = [pool.keeper.distance_to(name) for name in ("prefill-1", "decode-0", "nobody")]
    assert found == [Distance.NEAR, Distance.ZONE, Distance.FAR]


async def test_a_worker_is_linked_once_a_block_has_moved_and_no_earlier(pool: LinkPool) -> None:
    with nobody() as silent:
        port = silent.getsockname()[1]
        await pool.register("decode-0", "d-1", f"127.0.0.1:{port}")
        await within(HEAL_S, lambda: pool.keeper.peer("decode-0") is not None)
        assert pool.keeper.linked() == ()
        assert [(state.peer.worker_id, state.link) for state in pool.keeper.report()] == [("decode-0", None)]
    pool.receiver("decode-0", "d-1", port)
    await pool.linked("d-1")
    assert pool.changes == [("d-1",)]


async def test_a_worker_restarted_at_its_address_is_linked_anew(pool: LinkPool) -> None:
    old = pool.receiver("decode-0", "d-1")
    await pool.register("decode-0", "d-1", old.address)
    await pool.linked("d-1")
    old.close()
    await pool.linked()
    pool.receiver("decode-0", "d-2", int(old.address.rpartition(":")[2]))
    await pool.register("decode-0", "d-2", old.address)
    await pool.linked("d-2")
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION.*d-1.*d-2"):
        await pool.keeper.link_to(LinkPeer("decode-0", "d-1", LAYOUT), old.address)
    link = await pool.keeper.link_to(LinkPeer("decode-0", "d-2", LAYOUT), old.address)
    assert link.healthy


async def test_a_request_need_not_wait_for_the_registry(pool: LinkPool) -> None:
    receiver = pool.receiver("decode-0", "d-1")
    link = await pool.keeper.link_to(LinkPeer("decode-0", "d-1", LAYOUT), receiver.address)
    assert link.healthy
    assert 0 < link.rtt < HEAL_S


async def test_another_layout_is_refused_with_the_reason(pool: LinkPool) -> None:
    other = pool.receiver("decode-0", "d-1", layout="layout-b")
    with structlog.testing.capture_logs() as logs:
        await pool.register("decode-0", "d-1", other.address, layout="layout-b")
        await within(HEAL_S, lambda: bool(logs))
    assert [(log["event"], log["theirs"], log["ours"]) for log in logs] == [
        ("no link: KV layouts differ", "layout-b", "layout-a")
    ]
    with pytest.raises(TransferError, match=r"FAILED_PRECONDITION: layout_hash.*layout-a.*layout-b"):
        await pool.keeper.link_to(LinkPeer("decode-0", "d-1", "layout-b"), other.address)
    assert pool.keeper.linked() == ()


async def test_a_silent_worker_holds_up_no_other(pool: LinkPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.worker.kv.link_keeper.OPEN_TIMEOUT_S", 2 * HEAL_S)
    with nobody() as silent:
        await pool.register("decode-0", "d-0", f"127.0.0.1:{silent.getsockname()[1]}")
        await within(HEAL_S, lambda: pool.keeper.peer("decode-0") is not None)
        for number in range(1, 4):
            receiver = pool.receiver(f"decode-{number}", f"d-{number}")
            await pool.register(f"decode-{number}", f"d-{number}", receiver.address)
            await within(HEAL_S, lambda: len(pool.keeper.linked()) == number)  # noqa: B023


async def test_a_worker_that_does_not_answer_is_gone_and_no_deadline_has_passed(
    pool: LinkPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a request would end with it, where it should go on elsewhere."""
    monkeypatch.setattr("tandem.worker.kv.link_keeper.OPEN_TIMEOUT_S", 0.3)
    with nobody() as silent:
        for address in (f"127.0.0.1:{silent.getsockname()[1]}", "192.0.2.1:9"):  # the latter is routed nowhere
            with pytest.raises(TransferError) as failed:
                await pool.keeper.link_to(LinkPeer("decode-0", "d-0", LAYOUT), address)
            assert failed.value.code == "UNAVAILABLE"


async def test_links_are_reported_with_their_transport_or_why_there_is_none(pool: LinkPool) -> None:
    await pool.register("decode-0", "d-0", pool.receiver("decode-0", "d-0").address)
    with nobody() as silent:
        await pool.register("decode-1", "d-1", f"127.0.0.1:{silent.getsockname()[1]}")
        await pool.linked("d-0")
        await within(HEAL_S, lambda: any(state.refused for state in pool.keeper.report()))
        up, down = pool.keeper.report()
    assert (up.peer.worker_id, up.link is not None and up.link.transport, up.refused) == ("decode-0", "shm", "")
    assert (down.peer.worker_id, down.link) == ("decode-1", None)
    assert "decode-1" in down.refused or "127.0.0.1" in down.refused


async def test_a_worker_that_leaves_is_unlinked(pool: LinkPool) -> None:
    for name in ("0", "1"):
        await pool.register(f"decode-{name}", f"d-{name}", pool.receiver(f"decode-{name}", f"d-{name}").address)
    await pool.linked("d-0", "d-1")
    await pool.registry.leases.deregister("decode-0", "d-0")
    await pool.linked("d-1")


@pytest.mark.parametrize("pool", [LONG_GRACE_S], indirect=True)
async def test_a_lease_that_runs_out_costs_no_transfer_on_a_link_that_works(
    pool: LinkPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beats came late, or Redis has lost its memory: the worker registers again, and is linked all along."""
    monkeypatch.setattr(Liveness, "lost", lambda self, now: False)  # should this machine stand still
    receiver = pool.receiver("decode-0", "d-1")
    await pool.register("decode-0", "d-1", receiver.address)
    await pool.linked("d-1")
    await pool.register("decode-0", "d-1", receiver.address, ttl=0.5)
    link = await pool.keeper.link_to(LinkPeer("decode-0", "d-1", LAYOUT), receiver.address)
    async with asyncio.timeout(HEAL_S):
        while await pool.registry.workers():
            await asyncio.sleep(0.01)
    await asyncio.sleep(LONG_GRACE_S / 6)
    assert link.healthy
    await pool.register("decode-0", "d-1", receiver.address, ttl=1.0)
    assert await pool.keeper.link_to(LinkPeer("decode-0", "d-1", LAYOUT), receiver.address) is link
    assert pool.changes == [("d-1",)]
    other = pool.receiver("decode-1", "d-2")
    await pool.register("decode-1", "d-2", other.address)  # or else nobody could take its place
    await within(HEAL_S, lambda: not link.healthy)
    await pool.linked("d-2")  # said once the link has been closed, on another thread


async def test_falling_back_from_a_preferred_transport_is_a_warning_and_a_metric(pool: LinkPool) -> None:
    """NCCL does not start on a machine without a GPU."""
    peer = LinkPeer("prefill-1", "p-2", LAYOUT)
    sender, registry = Sender(LocalPeer(peer), transports=("nccl", "tcp")), CollectorRegistry()
    view = ClusterView(pool.registry)
    keeper = LinkKeeper(sender, view, Location("here", "", ""), LAYOUT, Role.DECODE, lambda: None)
    TransferMetrics(registry, ("demo", "prefill", "prefill-1")).watch_links(keeper.report)
    labels = {"model_name": "demo", "role": "prefill", "worker": "prefill-1", "peer": "decode-0"}
    with structlog.testing.capture_logs() as logs:
        tasks = [asyncio.create_task(task) for task in (view.run(), keeper.keep())]
        await pool.register("decode-0", "d-0", pool.receiver("decode-0", "d-0").address)
        await within(HEAL_S, lambda: keeper.linked() == ("d-0",))
    (line,) = (line for line in logs if line["event"] == "linked" and "nccl" in line["refused"])
    assert (line["log_level"], line["transport"]) == ("warning", "tcp")
    assert registry.get_sample_value("tandem_link_fallback", labels) == 1
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    sender.close()
