"""Services as named actors: placed, watched, drained and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_urlsafe
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util import list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.cluster import Cluster, Service
from tandem.hosts import bare
from tandem.local.launcher import ServiceFailed
from tandem.local.ports import free_ports
from tandem.local.ray.actor import ActorState, ServiceActor, node_address
from tandem.local.ray.places import Placed, node_for, places, ray_names, shortage, stays_with_starter

WATCH_S = 1.0
CALL_S = 5.0
# Of all that end together. A worker ends by its own drain time, a process by its launcher's bound; this is beyond both.
STOP_S = 90.0


def kvstore_on_ray(cluster: Cluster, store_url: str) -> Service:
    """With a Redis that other nodes reach, with a password, where the file names none; and likewise with a store."""
    store: dict[str, object] = {} if store_url else {"store_port": free_ports(1)[0]}
    here = node_address()
    return cluster.kvstore_service(host=here, redis_password=token_urlsafe(24), **store)


class RayLauncher:
    """After `connect`. `detached`: services outlive this process; else they end with it."""

    def __init__(self, report: Callable[[str], None], *, detached: bool) -> None:
        self._report = report
        self._detached = detached
        self._said: dict[str, str] = {}
        self._taken: dict[str, Placed] = {}
        self._own_node: str = ray.get_runtime_context().get_node_id()
        self._actors: dict[str, Any] = {name: ray.get_actor(name) for name in _names()}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._actors)

    async def kvstore(self) -> Service | None:
        """The one that runs, with the password of its Redis."""
        if "kvstore" not in self._actors:
            return None
        async with asyncio.timeout(CALL_S):
            service: Service = await self._actors["kvstore"].service.remote()
            return service

    async def start(self, services: Sequence[Service]) -> None:
        """Those that do not run yet. Without the resources for one, it waits for them."""
        new = [service for service in services if service.name not in self._actors]
        if not new:
            return
        await self._look_around()
        for place in places(new):
            here = stays_with_starter(place[0])
            node = self._own_node if here else node_for(place, _nodes(), self._taken.values())
            for service, strategy in zip(place, self._strategies(place, node, here), strict=True):
                self._actors[service.name] = self._create(service, strategy)
                self._taken[service.name] = Placed.by(service, node)

    async def changed(self, services: Sequence[Service]) -> list[tuple[Service, ...]]:
        """Picks those that run with other settings, and who shares a place with one."""
        there = [service for service in services if service.name in self._actors]
        running = await asyncio.gather(*(self._service(service.name) for service in there))
        differ = {new.name for old, new in zip(running, there, strict=True) if old not in (None, new)}
        return [place for place in places(services) if differ & {service.name for service in place}]

    async def are_ready(self, names: Iterable[str]) -> bool:
        states = await asyncio.gather(*map(self._state, names))
        return all(isinstance(state, ActorState) and state.ready for state in states)

    async def hosts(self) -> dict[str, str]:
        gateways = [name for name in self._actors if _group(name) == "gateway"]
        states = zip(gateways, await asyncio.gather(*map(self._state, gateways)), strict=True)
        return {name: bare(state.address.rpartition(":")[0]) for name, state in states if isinstance(state, ActorState)}

    async def watch(self, *, restart: bool) -> None:
        while True:
            await asyncio.gather(*(self._look_at(name, restart) for name in self._actors))
            await asyncio.sleep(WATCH_S)

    def loading(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(self._actors, (0, 0))

    async def given_up(self, names: Iterable[str]) -> str:
        """Ray starts what has ended again by itself; the first end is told."""
        states = zip(names, await asyncio.gather(*map(self._state, names)), strict=True)
        problems = ((name, state if isinstance(state, str) else state.error) for name, state in states)
        return next((f"{name}: {said}" for name, said in problems if said and not said.startswith("waits")), "")

    async def states(self) -> dict[str, ActorState | str]:
        """Reports of all actors; of one that cannot answer, why not."""
        names = list(self._actors)
        return dict(zip(names, await asyncio.gather(*map(self._state, names)), strict=True))

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Drain and end these, or all: gateways first, Redis last. What has not ended after STOP_S is killed."""
        wanted = set(self._actors if names is None else names)
        end = asyncio.get_running_loop().time() + STOP_S
        for group in ("gateway", "", "kvstore"):
            now = [name for name in wanted if _group(name) == group]
            await asyncio.gather(*(self._end(name, end) for name in now))
            self._remove_pairs(now)

    def _create(self, service: Service, strategy: Any) -> Any:
        amounts = ray_names(service.resources)
        if not amounts and isinstance(strategy, NodeAffinitySchedulingStrategy):
            amounts = {"memory": 1}  # what asks for nothing Ray places anywhere
        actor = ray.remote(ServiceActor).options(
            name=service.name, lifetime="detached" if self._detached else None, max_restarts=-1, max_task_retries=0,
            max_concurrency=4, num_cpus=amounts.pop("CPU", 0), num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None), resources=amounts, scheduling_strategy=strategy,
        )  # fmt: skip
        return actor.remote(service)

    async def _look_around(self) -> None:
        """Counts what others have started."""
        names = [name for name in self._actors if name not in self._taken]
        for name, state in zip(names, await asyncio.gather(*map(self._state, names)), strict=True):
            if isinstance(state, ActorState):
                self._taken[name] = Placed(state.node, (state.module, state.model), state.resources)

    def _strategies(self, place: Sequence[Service], node: str, here: bool) -> list[Any]:
        """One whose partner of old still runs takes its own place beside it again."""
        if len(place) == 1 and (kept := _pairs_of(place[0].name)):
            index = kept[0].split("+").index(place[0].name)
            return [PlacementGroupSchedulingStrategy(get_placement_group(kept[0]), placement_group_bundle_index=index)]
        if not node and len(place) == 1:
            return ["SPREAD"]
        if len(place) == 1:
            elsewhere = not here and bool(place[0].resources)  # what needs nothing finds its place free
            return [NodeAffinitySchedulingStrategy(node, soft=not here, _spill_on_unavailable=elsewhere)]
        bundles = [ray_names(service.resources) or {"CPU": 0.001} for service in place]
        group = placement_group(
            bundles, strategy="STRICT_PACK", name=_pair_name(place),
            lifetime="detached" if self._detached else None, _soft_target_node_id=node or None,
        )  # fmt: skip
        return [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=i) for i in range(len(place))]

    async def _look_at(self, name: str, restart: bool) -> None:
        state = await self._state(name)
        problem = state if isinstance(state, str) else state.error
        if problem and not restart and not problem.startswith("waits"):
            raise ServiceFailed(f"{name}: {problem}")
        said = problem or (
            f"runs as {state.incarnation}" if isinstance(state, ActorState) and state.incarnation else ""
        )
        if said and self._said.get(name, "" if problem else said) != said:
            self._report(f"{name} {said}")
        if said:
            self._said[name] = said

    async def _state(self, name: str) -> ActorState | str:
        if (actor := self._actors.get(name)) is None:
            return "has been stopped"
        try:
            async with asyncio.timeout(CALL_S):
                state: ActorState = await actor.state.remote()
                return state
        except TimeoutError:
            return f"waits for its start: {shortage(self._taken[name].resources if name in self._taken else {})}"
        except RayActorError as error:
            return f"does not run: {error}".strip()

    async def _service(self, name: str) -> Service | None:
        """As it runs; None where it does not answer."""
        try:
            async with asyncio.timeout(CALL_S):
                service: Service = await self._actors[name].service.remote()
                return service
        except (TimeoutError, RayActorError):
            return None

    async def _end(self, name: str, end: float) -> None:
        runs = isinstance(await self._state(name), ActorState)
        actor = self._actors.pop(name)
        self._taken.pop(name, None)
        try:
            if runs:
                async with asyncio.timeout_at(end):
                    await actor.stop.remote()
        except TimeoutError:
            self._report(f"killing {name}, which did not stop in time")
        except RayActorError:
            self._report(f"{name} ended before it was drained")
        ray.kill(actor, no_restart=True)

    def _remove_pairs(self, ended: Iterable[str]) -> None:
        """Placement groups of these that hold no actor any more."""
        for pair in {pair for name in ended for pair in _pairs_of(name)}:
            if not self._actors.keys() & set(pair.split("+")):
                remove_placement_group(get_placement_group(pair))


def _nodes() -> dict[str, dict[str, float]]:
    """Resources of each node that is there."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["Resources"] for node in found if node["Alive"]}


def _names() -> list[str]:
    return [str(name) for name in list_named_actors()]


def _group(name: str) -> str:
    return next((group for group in ("gateway", "kvstore") if name.startswith(group)), "")


def _pair_name(pair: Sequence[Service]) -> str:
    return "+".join(service.name for service in pair)


def _pairs_of(name: str) -> list[str]:
    table = ray.util.placement_group_table().values()
    return [row["name"] for row in table if name in row["name"].split("+") and row["state"] != "REMOVED"]
