"""The cluster's shared truth, in Redis: who is alive, how loaded, what is reserved for whom, who holds which KV block.

    register ── heartbeat … ── deregister          a worker's lease; it ends by itself `ttl` after the last heartbeat
    select_and_reserve ── release (tokens) ── release (blocks)        a request's hold on one pair of workers
    publish_blocks ── locate                       prefix caches

Each call is one Lua script, hence atomic, and one round trip; choices and releases that come while one is under way
share the next, and a release waits a few milliseconds for a choice to go with. Time is Redis's own, so skewed clocks
do no harm. What a lease held for others goes with it: a dead incarnation's reservations and blocks are nowhere to be
found.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain, count
from typing import Any, Literal, TypeAlias

from tandem.containment import Death
from tandem.liveness import stretched
from tandem.process import IntegrityReport
from tandem.registry import named
from tandem.registry.answers import Demand, Demands, GatewayAddress, Snapshot, Swept, death_in, demands_of
from tandem.registry.batching import CallBatcher
from tandem.registry.block_feed import BlockFeed
from tandem.registry.connection import Changes, RedisConnection, RegistryConnection
from tandem.registry.errors import REFUSALS, NoWorkers, RegistryUnavailable, StaleIncarnation
from tandem.registry.late_releases import LateReleases
from tandem.registry.limits import Limits, Taken, Usage
from tandem.registry.memory import RedisMemory
from tandem.registry.on_demand import OnDemandModels
from tandem.registry.prefix import PromptPrefix
from tandem.registry.refusals import id_taken, incompatible_layout
from tandem.registry.releases import Releases
from tandem.registry.resp import Argument
from tandem.registry.unreadable import UnreadableRows
from tandem.registry.worker import Fallback, LiveWorker, ModelKey, Place, Route, WorkerInfo, WorkerLoad, encode

PrefillPolicy: TypeAlias = Literal["require", "prefer", "auto", "never"]
# Choices and releases in one call: more would keep other gateways waiting.
MAX_BATCH = 24
Arguments: TypeAlias = tuple[Argument, ...]
# What is asked, and its arguments.
Asked: TypeAlias = tuple[Literal["select", "release"], Arguments]
NO_PREFIX = PromptPrefix.of("", 1, ())


class Registry:
    """A client of the registry. Safe for concurrent use within one event loop.

    Every call may raise RegistryUnavailable, within `timeout` seconds; whether it took effect is then unknown. What
    such a call, or a cancelled one, should have released is released in the background once Redis answers.
    """

    def __init__(self, connection: RegistryConnection, client_lease_s: float | None = None) -> None:
        """`client_lease_s`: what this client reserves is released so long after it or `hold_client_lease` last called;
        without, each reservation ends by its own `ttl` alone."""
        self._client_lease_s = client_lease_s
        self._starvation: Callable[[], float] = lambda: 0.0
        self.unreadable = unreadable = UnreadableRows(connection)
        self.block_feed, self.releases = BlockFeed(connection, unreadable), Releases(connection)
        self.adapters, self.aliases = named.adapters(connection, unreadable), named.aliases(connection, unreadable)
        self.on_demand = OnDemandModels(connection, unreadable)
        self._connection = connection
        self._announced: Callable[[], tuple[GatewayAddress, Demands]] | None = None
        self._others: list[Demands] = []
        self._numbers = count()
        self._memory = RedisMemory(connection)
        self._late = LateReleases(connection)
        # Reservations and takings that may be asked for once more, by what was sent and is late.
        self._doubtful: set[str] = set()
        self._batcher = CallBatcher[Asked](self._ask, MAX_BATCH)
        self._infos: dict[str, WorkerInfo] = {}  # by generation
        self._reading_infos = asyncio.Lock()

    @classmethod
    def connect(
        cls, url: str, *, namespace: str = "tandem", timeout: float = 2.0, client_lease_s: float | None = None
    ) -> Registry:
        """A client of the Redis at `url`, which need not be up yet. Raises ValueError where it or the namespace is
        malformed.
        """
        return cls(RedisConnection(url, namespace, timeout), client_lease_s)

    async def ping(self) -> None:
        """Return if Redis answers."""
        await self._connection.ping()

    async def hold_client_lease(self, starvation: Callable[[], float] = lambda: 0.0) -> None:
        """Renew this client's own lease until cancelled; that of a starved client lasts longer."""
        self._starvation = starvation
        while True:
            with suppress(RegistryUnavailable):
                await self._renew(self._client_ttl)
            await asyncio.sleep((self._client_lease_s or 0.0) / 4)

    @property
    def _client_ttl(self) -> int:
        return 0 if self._client_lease_s is None else _ms(stretched(self._client_lease_s, self._starvation()))

    def announce(self, gateway: Callable[[], tuple[GatewayAddress, Demands]]) -> None:
        """From the next renewal of its lease on, this client is that gateway, until the lease ends."""
        self._announced = gateway

    def other_demands(self, model: ModelKey) -> Sequence[Demand]:
        """Demand of other gateways of a model when this one last renewed its lease."""
        return [demands[model.text] for demands in self._others if model.text in demands]

    async def gateways(self) -> list[GatewayAddress]:
        """Gateways with a live lease."""
        return (await self.measured())[0]

    async def measured(self) -> tuple[list[GatewayAddress], str]:
        """Those, and the address at which Prometheus reads the kvstore, empty if it does not."""
        gateways, keeper = await self._connection.call("gateways")
        return sorted(self.unreadable.read_texts("gateway", gateways, GatewayAddress.of)), keeper

    async def register(self, info: WorkerInfo, load: WorkerLoad, ttl: float) -> None:
        """Take the worker's lease for `ttl` seconds.

        Another incarnation at the same address of the same host must have ended, and loses everything at once. One
        that listens elsewhere may be a worker of another cluster: its lease is not taken over while it lasts.

        A worker that could pair with none is refused: live workers of the other role serve its model and revision,
        and all of them have another KV layout. Other weights are another revision, so they are rolled out side by
        side; for another layout of the same weights, a worker of each role has to come (or those of the other role to
        leave or drain): one that was refused gets in when it registers again within ten minutes.

        Raises:
            WorkerIdTaken: by a worker elsewhere; names it.
            IncompatibleLayout: names both layouts.
            StaleIncarnation: a later registration has replaced this incarnation, or it has deregistered.
        """
        await self._lease("register", info, load, ttl)

    async def heartbeat(self, info: WorkerInfo, load: WorkerLoad, ttl: float) -> bool:
        """Renew the lease. True if it had to be taken anew (Redis lost it, or it had run out): blocks must then be
        published again.

        Raises:
            StaleIncarnation: another incarnation holds the lease, or this one was replaced or has deregistered.
        """
        return await self._lease("heartbeat", info, load, ttl) == "new"

    async def deregister(self, worker_id: str, incarnation: str) -> None:
        """End the lease, if this incarnation has it. It cannot come back."""
        await self._connection.call("deregister", worker_id, incarnation)

    async def workers(self) -> list[LiveWorker]:
        """Workers with a live lease, by id."""
        return (await self.snapshot()).workers

    async def snapshot(self) -> Snapshot:
        return Snapshot.of(await self._connection.call("workers"), self.unreadable)

    async def report_death(self, death: Death) -> None:
        """Report the death of a worker's process. What was said of that incarnation before stays."""
        await self._connection.call("death", death.incarnation, json.dumps([death.cause, dict(death.named)]))

    async def death(self, incarnation: str) -> Death | None:
        """None while nothing is known."""
        said = await self._connection.call("death", incarnation)
        return self.unreadable.read("death", incarnation, partial(death_in, incarnation, said), None)

    def changes(self) -> AbstractAsyncContextManager[Changes]:
        """A subscription to workers coming, going, draining and linking."""
        return self._connection.changes()

    async def select_and_reserve(
        self,
        *,
        request_id: str,
        model: str,
        prompt_tokens: int,
        max_new_tokens: int,
        prefill: PrefillPolicy,
        prefix: PromptPrefix = NO_PREFIX,
        adapted: Collection[str] | None = None,
        ttft_target_s: float = 0.0,
        itl_target_s: float = 0.0,
        ttl: float,
        exclude: Collection[str] = (),
    ) -> Route:
        """Choose the pair of workers for a request and hold room on both, as one atomic step.

        Reserves the uncached prompt tokens on the worker that prefills and blocks for the whole sequence on the one
        that decodes, until released or for `ttl` seconds. `exclude` names worker ids or incarnations.
        `require` takes only a pair, `prefer` falls back to a decode worker alone, `never` takes one alone, and `auto`
        takes what costs less by the rates that the workers have measured. With `itl_target_s`, the most between the
        request's tokens, a prompt costs a decode worker that has room below that no pause of what runs there; with
        `ttft_target_s`, what is left until its first token should come, it costs more to be later than that.

        Workers that hold the beginning of the prompt, by `prefix`, are preferred as far as load allows; from now on
        the chosen ones are expected to hold all of it, until they have reported their blocks. Of a request with a LoRA
        adapter `adapted` are the incarnations of the workers that have it in memory: they are preferred, too.

        Raises:
            NoWorkers: nobody can take it now, or (NoProvenLink) until a link is opened; it says what is missing.
            RequestTooLarge: nobody could take it ever.
        """
        if prompt_tokens < 1 or max_new_tokens < 0:
            raise ValueError(f"prompt_tokens and max_new_tokens must not be {prompt_tokens} and {max_new_tokens}")
        reservation = f"{request_id}/{self._connection.client_id}/{next(self._numbers)}"
        return await self._selected(
            reservation, model, prompt_tokens, max_new_tokens, prefill, _ms(ttl), _listed(exclude),
            prefix.revision, prefix.block_size, prefix.marks, prefix.held,
            "-" if adapted is None else " ".join(adapted), round(1000 * ttft_target_s), round(1000 * itl_target_s),
        )  # fmt: skip

    async def _selected(self, reservation: str, *asked: str | bytes | int) -> Route:
        try:
            status, why, *chosen = await self._batcher.call(("select", (reservation, *asked)))
            if status == "ok":
                places = [await self._place(*chosen[i : i + 3]) for i in range(1, len(chosen), 3)]
                return Route.of(places, reservation, why, Fallback(chosen[0]) if chosen[0] else None)
        except BaseException:
            self._abandon_later(reservation)
            raise
        if reservation in self._doubtful:
            self._abandon_later(reservation)
        raise REFUSALS.get(status, NoWorkers)(why)

    def release(self, reservation_id: str, *, prefill_done_only: bool = False) -> asyncio.Future[bool]:
        """Release a reservation, or only its prompt tokens. Done with True if this call freed anything.

        An empty id, as of a route chosen without Redis, holds nothing. What fails is tried again later.
        """
        if not reservation_id:
            nothing: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
            nothing.set_result(False)
            return nothing
        if reservation_id in self._doubtful and not prefill_done_only:
            return asyncio.ensure_future(self._abandon(reservation_id))
        arguments = (reservation_id, "tokens" if prefill_done_only else "all")
        released = self._batcher.call(("release", arguments), patient=True)
        released.add_done_callback(partial(self._released, arguments))
        return released

    def _released(self, arguments: tuple[str, str], released: asyncio.Future[bool]) -> None:
        if released.cancelled() or isinstance(released.exception(), RegistryUnavailable):
            self._late.add("release", *arguments)

    async def take(
        self, tenant: str, limits: Limits, *, request_id: str, tokens: int, cost: float, ttl: float
    ) -> Taken:
        """Take what a request may come to from its tenant's limits. Where nothing lacks, `settle` follows."""
        request = f"{request_id}/{self._connection.client_id}/{next(self._numbers)}"
        every, lines = limits.arguments(), self._connection.lines
        try:
            lacks, wait, requests, requests_full, left, left_full, day = await self._memory.call(
                "take", tenant, request, _ms(ttl), *every, tokens, repr(cost)
            )
        except BaseException:
            self._late.add("settle", tenant, request, "0", every[1], str(tokens), "0", "0", "0", "1", "0")
            raise
        if self._connection.lines != lines:
            self._doubtful.add(request)
        return Taken(
            request, tenant, limits, tokens, cost, lacks, wait / 1000, requests, requests_full / 1000, left,
            left_full / 1000, day,
        )  # fmt: skip

    async def settle(
        self, taken: Taken, prompt_tokens: int, completion_tokens: int, cost: float, cached_tokens: int = 0
    ) -> None:
        """The request has ended and used so much."""
        unused = max(taken.tokens - prompt_tokens - completion_tokens, 0)
        _, per_minute, _, _ = taken.limits.arguments()
        said = taken.tenant, taken.request, taken.day, per_minute, str(unused), repr(taken.cost - cost)
        doubtful = str(int(taken.request in self._doubtful))
        self._doubtful.discard(taken.request)
        arguments = *said, str(prompt_tokens), str(completion_tokens), doubtful, str(cached_tokens)
        try:
            await self._connection.call("settle", *arguments)
        except (RegistryUnavailable, asyncio.CancelledError):
            self._late.add("settle", *arguments)
            raise

    async def usage(self, tenant: str) -> Usage:
        flat = await self._connection.call("usage", tenant)
        return self.unreadable.read("usage", tenant, partial(Usage.of, flat), Usage.of(()))

    async def publish_blocks(
        self, worker_id: str, incarnation: str, stored: Sequence[bytes], removed: Sequence[bytes]
    ) -> None:
        """Report which KV blocks the worker's prefix cache has gained and lost, net: no hash in both.

        Raises:
            StaleIncarnation: this incarnation holds no lease.
        """
        if await self._connection.call("publish", worker_id, incarnation, len(removed), *removed, *stored) == "stale":
            raise StaleIncarnation(worker_id, incarnation)

    async def locate(self, hashes: Sequence[bytes]) -> list[list[str]]:
        """For each hash, the ids of the live workers that hold the block."""
        return list(await self._connection.call("locate", *hashes))

    async def sweep(self, keeper: str = "") -> Swept:
        """Forget what is past its time; any number of processes may. `keeper`: where Prometheus reads this one."""
        total = Swept(0, 0, 0)
        while True:
            found = Swept(*await self._connection.call("sweep", keeper))
            total = total.then(found)
            if not found.reservations:
                return total

    async def check_integrity(self) -> IntegrityReport:
        """Compare counters with reservations."""
        leases, reservations, clients, wrong = await self._connection.call("check")
        return IntegrityReport({"leases": leases, "reservations": reservations, "clients": clients}, tuple(wrong))

    async def close(self) -> None:
        """Try the releases that are still due once more, end the client's lease and all connections."""
        await self._late.close()
        await self._batcher.close()
        if self._client_ttl:
            with suppress(RegistryUnavailable):
                await self._renew(0)
        await self._connection.close()

    async def _renew(self, ttl: int) -> None:
        client = self._connection.client_id
        if self._announced is None:
            await self._connection.call("renew", client, ttl)
            return
        address, demands = self._announced()
        said = json.dumps(asdict(address)), json.dumps(demands)
        others = await self._connection.call("renew", client, ttl, *said)
        self._others = self.unreadable.read_texts("demands", others, demands_of)

    async def _lease(self, kind: str, info: WorkerInfo, load: WorkerLoad, ttl: float) -> str:
        fields = encode(info) + encode(load)
        owner = info.worker_id, info.incarnation
        status, *other = await self._connection.call("lease", *owner, _ms(ttl), kind, *fields)
        if status == "stale":
            raise StaleIncarnation(info.worker_id, info.incarnation)
        if status == "taken":
            raise id_taken(info, *other)
        if status == "incompatible":
            raise incompatible_layout(info, *other)
        return str(status)

    async def _ask(self, asked: Sequence[Asked]) -> Sequence[Any]:
        """Releases come first, so choices see them."""
        choices, releases = ([arguments for kind, arguments in asked if kind == one] for one in ("select", "release"))
        released, lines = list(chain.from_iterable(releases)), self._connection.lines
        if choices:
            client = self._connection.client_id, self._client_ttl
            called = self._memory.call("select", *client, len(released), *released, *chain.from_iterable(choices))
        else:
            called = self._connection.call("release", *released)
        answers = iter(await called)
        if self._connection.lines != lines:
            self._doubtful.update(str(arguments[0]) for arguments in choices)
        dropped = iter([next(answers) > 0 for _ in releases])
        return [next(answers if kind == "select" else dropped) for kind, _ in asked]

    async def _abandon(self, reservation: str) -> bool:
        """Release it, and see to it that it is not made once more."""
        try:
            dropped: int = await self._connection.call("abandon", reservation)
        except (RegistryUnavailable, asyncio.CancelledError):
            self._abandon_later(reservation)
            raise
        self._doubtful.discard(reservation)
        return dropped > 0

    def _abandon_later(self, reservation: str) -> None:
        self._doubtful.discard(reservation)
        self._late.add("abandon", reservation)

    async def _place(self, worker_id: str, generation: str, cached_tokens: int) -> Place:
        if generation not in self._infos:
            await self._read_infos(generation)
        if generation not in self._infos:
            raise NoWorkers(f"worker {worker_id} has just left")
        return Place(self._infos[generation], cached_tokens)

    async def _read_infos(self, wanted: str) -> None:
        async with self._reading_infos:
            if wanted not in self._infos:
                self._infos = {worker.generation: worker.info for worker in await self.workers()}


def _listed(names: Collection[str]) -> str:
    return json.dumps(sorted(names)) if names else "[]"


def _ms(seconds: float) -> int:
    if seconds <= 0:
        raise ValueError(f"ttl must be above 0 seconds, got {seconds}")
    return max(1, round(seconds * 1000))
