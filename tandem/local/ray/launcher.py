"""A launcher that places, watches, drains and ends services as named Ray actors."""

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
# The bound for all actors that end together: longer than a worker's drain time, and than a launcher's bound.
STOP_S = 90.0


def kvstore_on_ray(cluster: Cluster, store_url: str) -> Service:
    """Returns a kvstore that runs a Redis for other nodes, with a password, unless the file names one; so for the
    store.
    """
    store: dict[str, object] = {} if store_url else {"store_port": free_ports(1)[0]}
    here = node_address()
    return cluster.kvstore_service(host=here, redis_password=token_urlsafe(24), **store)


class RayLauncher:
    """The launcher, after `connect`. `detached`: services outlive this process; else they end with it."""

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
        """Returns the kvstore that runs, with the password of its Redis; None without one."""
        if "kvstore" not in self._actors:
            return None
        async with asyncio.timeout(CALL_S):
            service: Service = await self._actors["kvstore"].service.remote()
            return service

    async def start(self, services: Sequence[Service]) -> None:
        """Starts the services that do not run yet. An actor without the resources it needs waits for them."""
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
        """Returns the services that run with other settings, each with the services that share its place."""
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
        """Returns the first problem. Ray starts ended actors again by itself, so a service's first end counts."""
        states = zip(names, await asyncio.gather(*map(self._state, names)), strict=True)
        problems = ((name, state if isinstance(state, str) else state.error) for name, state in states)
        return next((f"{name}: {said}" for name, said in problems if said and not said.startswith("waits")), "")

    async def states(self) -> dict[str, ActorState | str]:
        """Returns the reports of all actors; for an actor that cannot answer, why not."""
        names = list(self._actors)
        return dict(zip(names, await asyncio.gather(*map(self._state, names)), strict=True))

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Drains and ends these services, or all: gateways first, Redis last. Kills what has not ended after STOP_S."""
        wanted = set(self._actors if names is None else names)
        end = asyncio.get_running_loop().time() + STOP_S
        for group in ("gateway", "", "kvstore"):
            now = [name for name in wanted if _group(name) == group]
            await asyncio.gather(*(self._end(name, end) for name in now))
            self._remove_pairs(now)

    def _create(self, service: Service, strategy: Any) -> Any:
        amounts = ray_names(service.resources)
        if not amounts and isinstance(strategy, NodeAffinitySchedulingStrategy):
            amounts = {"memory": 1}  # without any resource Ray would ignore the node
        actor = ray.remote(ServiceActor).options(
            name=service.name, lifetime="detached" if self._detached else None, max_restarts=-1, max_task_retries=0,
            max_concurrency=4, num_cpus=amounts.pop("CPU", 0), num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None), resources=amounts, scheduling_strategy=strategy,
        )  # fmt: skip
        return actor.remote(service)

    async def _look_around(self) -> None:
        """Counts the resources of actors that other processes have started."""
        names = [name for name in self._actors if name not in self._taken]
        for name, state in zip(names, await asyncio.gather(*map(self._state, names)), strict=True):
            if isinstance(state, ActorState):
                self._taken[name] = Placed(state.node, (state.module, state.model), state.resources)

    def _strategies(self, place: Sequence[Service], node: str, here: bool) -> list[Any]:
        """Returns Ray's scheduling strategies.

        A service whose former partner still runs gets its old place beside it.
        """
        if len(place) == 1 and (kept := _pairs_of(place[0].name)):
            index = kept[0].split("+").index(place[0].name)
            return [PlacementGroupSchedulingStrategy(get_placement_group(kept[0]), placement_group_bundle_index=index)]
        if not node and len(place) == 1:
            return ["SPREAD"]
        if len(place) == 1:
            elsewhere = not here and bool(place[0].resources)  # a service without resources always fits its node
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
        """Returns a running service; None if it does not answer."""
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
        """Removes the placement groups of ended services that have no actor any more."""
        for pair in {pair for name in ended for pair in _pairs_of(name)}:
            if not self._actors.keys() & set(pair.split("+")):
                remove_placement_group(get_placement_group(pair))


def _nodes() -> dict[str, dict[str, float]]:
    """Returns the resources of each live node."""
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
