"""Lists what a cluster still holds: nothing, once the last request has ended.

It looks into the parts themselves, for what they would report of themselves might be wrong in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from services.decode.server import DecodeWorker
from services.gateway.integrity import check_gateway
from services.gateway.server import Gateway
from tandem.registry import Registry
from tandem.worker import KVLinks, Worker
from tests.simulation.cluster import SimulatedCluster
from tests.simulation.world import Process

# Messages that a worker sends while it only waits.
STEADY_CALLS = ("/tandem.v1.WorkerService/Work", "/grpc.health.v1.Health/Watch")


def leftovers(cluster: SimulatedCluster) -> list[str]:
    """One line for each thing that is held and should not be, of the processes that live."""
    found: list[str] = []
    for name, process in cluster.processes.items():
        if not process.alive:
            continue
        if name in cluster.gateways and name[0] == "g":
            found += [f"{name}: {text}" for text in _gateway(cluster.gateways[name])]
        elif name in cluster.workers:
            found += [f"{name}: {text}" for text in _worker(cluster.workers[name])]
        found += [f"{name}: {text}" for text in _calls(cluster, process)]
    return found


async def registry_leftovers(registry: Registry) -> list[str]:
    """Run it in a process that has this registry."""
    await registry.sweep()
    found = [*(await registry.check_integrity()).violations]
    for worker in await registry.workers():
        if worker.reserved_tokens or worker.reserved_blocks:
            held = f"{worker.reserved_tokens} tokens and {worker.reserved_blocks} blocks"
            found.append(f"redis: {held} are reserved of {worker.info.worker_id}")
    return found


def orphans(cluster: SimulatedCluster) -> list[str]:
    """One line for each transfer that could still be written to blocks that its sequence has released."""
    services: list[Any] = [w._service for name, w in cluster.workers.items() if cluster.processes[name].alive]
    found: list[str] = []
    for service in services:
        links: KVLinks = service._kv
        expected = links.fetcher.transfer_ids()
        if isinstance(service, DecodeWorker):
            expected |= service._sequences.transfer_ids()
        outlived = links.receiver._landings.table.live.keys() - expected
        found += [f"transfer {name} outlives its sequence" for name in sorted(outlived)]
    return found


def _worker(worker: Worker) -> Iterator[str]:
    engine, service = worker.context.engine, worker._service
    links: KVLinks = service._kv  # type: ignore[attr-defined]
    try:
        engine.check_integrity()
    except AssertionError as error:
        yield f"engine: {error}"
    stats = engine.stats()
    for what in ("num_waiting", "num_running", "num_reserved", "queued_tokens"):
        if getattr(stats, what):
            yield f"engine: {what} is {getattr(stats, what)}"
    if stats.free_blocks != stats.num_blocks:
        yield f"engine: {stats.num_blocks - stats.free_blocks} of {stats.num_blocks} blocks are not free"
    yield from service.check_integrity().violations
    if service.num_running():
        yield f"{service.num_running()} sequences run"
    landings = links.receiver._landings.table
    if landings.live or landings.ending:
        yield f"transfers expected: {sorted(landings.live)}, ending: {sorted(landings.ending)}"
    if links.lender.num_lending or links.fetcher.transfer_ids():
        yield f"{links.lender.num_lending} fetches are served, {len(links.fetcher.transfer_ids())} under way"


def _gateway(gateway: Gateway) -> Iterator[str]:
    directory, running = gateway.directory, gateway.shared.state.running
    yield from check_gateway(directory, gateway._background).violations
    if running:
        yield f"{len(running)} answers run"
    if admitted := sum(len(llm.admission.admitted) for llm in directory.llms.values()):
        yield f"{admitted} choices are admitted"
    if len(gateway._background):
        yield f"{len(gateway._background)} attempts are being released"
    for connection in directory.connections:
        if connection.running or len(connection.stream):
            held = f"{connection.running} attempts, {len(connection.stream)} mailboxes and replies"
            yield f"connection to {connection.info.worker_id}: {held}"


def _calls(cluster: SimulatedCluster, process: Process) -> Iterator[str]:
    for server in cluster.servers.get(process, ()):
        for call in server.calls:
            if call.method not in STEADY_CALLS:
                yield f"call {call.method} runs"


def sizes(cluster: SimulatedCluster) -> dict[str, tuple[int, int]]:
    """Tasks and connections of each process."""
    ends: dict[Process, int] = {}
    for connection in cluster.network.connections:
        for end in connection.ends:
            ends[end.process] = ends.get(end.process, 0) + 1
    live: dict[str, Any] = {name: p for name, p in cluster.processes.items() if p.alive}
    return {name: (len(process.tasks()), ends.get(process, 0)) for name, process in live.items()}
