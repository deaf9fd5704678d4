"""Services as named actors: placed, watched, drained and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from secrets import token_urlsafe
from typing import Any

import ray
from ray.exceptions import RayActorError, RuntimeEnvSetupError
from ray.util import list_named_actors, placement_group, remove_placement_group
from ray.util.placement_group import get_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from tandem.cluster import Cluster
from tandem.local.launcher import Service, ServiceFailed
from tandem.local.ports import free_ports
from tandem.local.ray.actor import ROLES, ActorState, ServiceActor, node_address
from tandem.local.ray.places import places, ray_names, shortage

WATCH_S = 1.0
CALL_S = 5.0
# A worker ends by its own drain time, a process by its launcher's bound; this is beyond both.
STOP_S = 90.0


def connect(address: str, namespace: str, runtime_env: Mapping[str, Any] | None = None) -> None:
    """To the Ray cluster at `address`; "auto": this machine's; "local": one that is started here and ends with this.

    Actors that are then started have `runtime_env`.

    Raises:
        ConnectionError: there is none.
        ValueError: Ray does not take the runtime_env.
    """
    try:
        ray.init(
            address=address, namespace=namespace, runtime_env=dict(runtime_env or {}), ignore_reinit_error=True,
            log_to_driver=False, configure_logging=False,
        )  # fmt: skip
    except (TypeError, ValueError, RuntimeEnvSetupError) as error:
        raise ValueError(f"ray.runtime_env: {error}") from None


def kvstore_on_ray(cluster: Cluster, store_url: str) -> Service:
    """With a Redis that other nodes reach, with a password, where the file names none; and likewise with a store."""
    store: dict[str, object] = {} if store_url else {"store_port": free_ports(1)[0]}
    here = node_address()
    return cluster.kvstore_service(host=here, redis_host=here, redis_password=token_urlsafe(24), **store)


class RayLauncher:
    """After `connect`. `detached`: services outlive this process; else they end with it."""

    def __init__(self, report: Callable[[str], None], *, detached: bool) -> None:
        self._report = report
        self._detached = detached
        self._said: dict[str, str] = {}
        self._resources: dict[str, Mapping[str, float]] = {}
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
        for place in places([service for service in services if service.name not in self._actors]):
            for service, strategy in zip(place, self._strategies(place), strict=True):
                self._actors[service.name] = self._create(service, strategy)
                self._resources[service.name] = service.resources

    async def watch(self, *, restart: bool) -> None:
        while True:
            await asyncio.gather(*(self._look_at(name, restart) for name in self._actors))
            await asyncio.sleep(WATCH_S)

    def loading(self) -> Mapping[str, tuple[int, int]]:
        return dict.fromkeys(self._actors, (0, 0))

    async def states(self) -> dict[str, ActorState | str]:
        """Reports of all actors; of one that cannot answer, why not."""
        names = list(self._actors)
        return dict(zip(names, await asyncio.gather(*map(self._state, names)), strict=True))

    async def stop(self, names: Iterable[str] | None = None) -> None:
        """Drain and end these, or all: gateways first, Redis last."""
        wanted = set(self._actors if names is None else names)
        for group in ("gateway", "", "kvstore"):
            now = [name for name in wanted if _group(name) == group]
            await asyncio.gather(*map(self._end, now))
            self._remove_pairs(now)

    def _create(self, service: Service, strategy: Any) -> Any:
        amounts = ray_names(service.resources)
        actor = ray.remote(ServiceActor).options(
            name=service.name, lifetime="detached" if self._detached else None, max_restarts=-1, max_task_retries=0,
            max_concurrency=4, num_cpus=amounts.pop("CPU", 0), num_gpus=amounts.pop("GPU", 0),
            memory=amounts.pop("memory", None), resources=amounts, scheduling_strategy=strategy,
        )  # fmt: skip
        return actor.remote(service)

    def _strategies(self, place: Sequence[Service]) -> list[Any]:
        if len(place) == 1:
            here = place[0].module not in ROLES
            node = ray.get_runtime_context().get_node_id()
            return [NodeAffinitySchedulingStrategy(node, soft=False) if here else "SPREAD"]
        bundles = [ray_names(service.resources) or {"CPU": 0.001} for service in place]
        group = placement_group(
            bundles, strategy="STRICT_PACK", name=_pair_name(place),
            lifetime="detached" if self._detached else None,
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
        try:
            async with asyncio.timeout(CALL_S):
                state: ActorState = await self._actors[name].state.remote()
                return state
        except TimeoutError:
            return f"waits for its start: {shortage(self._resources.get(name, {}))}"
        except RayActorError as error:
            return f"does not run: {error}".strip()

    async def _end(self, name: str) -> None:
        runs = isinstance(await self._state(name), ActorState)
        actor = self._actors.pop(name)
        try:
            if runs:
                async with asyncio.timeout(STOP_S):
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


def _names() -> list[str]:
    return [str(name) for name in list_named_actors()]


def _group(name: str) -> str:
    return next((group for group in ("gateway", "kvstore") if name.startswith(group)), "")


def _pair_name(pair: Sequence[Service]) -> str:
    return "+".join(service.name for service in pair)


def _pairs_of(name: str) -> list[str]:
    table = ray.util.placement_group_table().values()
    return [row["name"] for row in table if name in row["name"].split("+") and row["state"] != "REMOVED"]
