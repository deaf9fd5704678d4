"""A request's reservation on a pair of workers: chosen and made in one atomic step, released in two.

    select_and_reserve ── release (tokens) ── release (blocks)

Choices and releases that come while a call is under way share the next call, and a release waits a few milliseconds for
a choice whose call it can share.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Sequence
from functools import partial
from itertools import chain
from typing import Any, Literal, TypeAlias

from tandem.registry.blocks import PromptPrefix
from tandem.registry.errors import REFUSALS, NoWorkers, RegistryUnavailable
from tandem.registry.wire import (
    Argument,
    CallBatcher,
    LateReleases,
    RedisMemory,
    RegistryConnection,
    milliseconds,
)
from tandem.registry.worker import Fallback, LiveWorker, Place, Route, WorkerInfo

PrefillPolicy: TypeAlias = Literal["require", "prefer", "auto", "never"]
# The most choices and releases in one call: more would keep other gateways waiting.
MAX_BATCH = 24
Arguments: TypeAlias = tuple[Argument, ...]
# The name of a script, and its arguments.
Asked: TypeAlias = tuple[Literal["select", "release"], Arguments]
NO_PREFIX = PromptPrefix.of("", 1, ())


class Reservations:
    """Room on workers that this client reserves for requests."""

    def __init__(
        self,
        connection: RegistryConnection,
        memory: RedisMemory,
        late: LateReleases,
        client_ttl: Callable[[], int],
        workers: Callable[[], Awaitable[Sequence[LiveWorker]]],
    ) -> None:
        """`client_ttl`: returns the milliseconds that this client's lease lasts from now on; 0 without a lease."""
        self._connection, self._memory, self._late = connection, memory, late
        self._client_ttl, self._workers = client_ttl, workers
        # Reservations that may be made a second time, as a late copy of the call is still on its way.
        self._doubtful: set[str] = set()
        self._batcher = CallBatcher[Asked](self._ask, MAX_BATCH)
        self._infos: dict[str, WorkerInfo] = {}  # generation: its worker
        self._reading_infos = asyncio.Lock()

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
        """Chooses the pair of workers for a request and reserves room on both, as one atomic step.

        Reserves the uncached prompt tokens on the worker that prefills and blocks for the whole sequence on the one
        that decodes, until released or for `ttl` seconds. `exclude` names worker ids or incarnations.
        `require` takes only a pair, `prefer` falls back to a decode worker alone, `never` takes a decode worker alone,
        and `auto` takes what costs less by the workers' measured rates. `itl_target_s`: the longest gap between the
        request's tokens; a decode worker with room below it prefills at no cost in pauses. `ttft_target_s`: the time
        left until the first token is due; a route that would be later costs more. 0: no target.

        Workers that hold the beginning of the prompt, by `prefix`, are preferred as far as load allows. The
        chosen ones are then expected to hold the whole prompt, until they report their blocks. `adapted`: for a
        request with a LoRA adapter, the generations of the workers that have it in memory: they are preferred, too.

        Raises:
            NoWorkers: no worker can take it now, or (NoProvenLink) until a link is opened; it says what is missing.
            RequestTooLarge: no worker could ever take it.
        """
        if prompt_tokens < 1 or max_new_tokens < 0:
            raise ValueError(f"prompt_tokens and max_new_tokens must not be {prompt_tokens} and {max_new_tokens}")
        reservation = self._memory.name_for(request_id)
        return await self._selected(
            reservation, model, prompt_tokens, max_new_tokens, prefill, milliseconds(ttl), _listed(exclude),
            prefix.revision, prefix.block_size, prefix.marks, prefix.held,
            "-" if adapted is None else " ".join(adapted), round(1000 * ttft_target_s), round(1000 * itl_target_s),
        )  # fmt: skip

    async def _selected(self, reservation: str, *asked: str | bytes | int) -> Route:
        try:
            status, why, *chosen = await self._batcher.call(("select", (reservation, *asked)))
            if status == "ok":
                decode, prefill, holder = [await self._place(*chosen[i : i + 3]) for i in (1, 4, 7)]
                assert decode is not None
                return Route.of(decode, prefill, holder, reservation, why, Fallback(chosen[0]) if chosen[0] else None)
        except BaseException:
            self._abandon_later(reservation)
            raise
        if reservation in self._doubtful:
            self._abandon_later(reservation)
        raise REFUSALS.get(status, NoWorkers)(why)

    def release(self, reservation_id: str, *, prefill_done_only: bool = False) -> asyncio.Future[bool]:
        """Releases a reservation, or only its prompt tokens.

        The future's result is True if this call released anything.

        The id is empty, and nothing is released, for a route chosen without Redis. A failed release is tried again.
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

    async def close(self) -> None:
        """Cancels the calls that are under way."""
        await self._batcher.close()

    async def _ask(self, asked: Sequence[Asked]) -> Sequence[Any]:
        """Runs releases and choices as one call, releases first, so that choices see them. Returns answers in order."""
        choices, releases = ([arguments for kind, arguments in asked if kind == one] for one in ("select", "release"))
        released, lines = list(chain.from_iterable(releases)), self._connection.lines
        if choices:
            client = self._connection.client_id, self._client_ttl()
            called = self._memory.call("select", *client, len(released), *released, *chain.from_iterable(choices))
        else:
            called = self._connection.call("release", *released)
        answers = iter(await called)
        if self._connection.lines != lines:
            self._doubtful.update(str(arguments[0]) for arguments in choices)
        dropped = iter([next(answers) > 0 for _ in releases])
        return [next(answers if kind == "select" else dropped) for kind, _ in asked]

    async def _abandon(self, reservation: str) -> bool:
        """Releases a reservation, and prevents that a late copy of the call makes it again."""
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

    async def _place(self, worker_id: str, generation: str, cached_tokens: int) -> Place | None:
        if not generation:
            return None
        if generation not in self._infos:
            await self._read_infos(generation)
        if generation not in self._infos:
            raise NoWorkers(f"worker {worker_id} has just left")
        return Place(self._infos[generation], cached_tokens)

    async def _read_infos(self, wanted: str) -> None:
        async with self._reading_infos:
            if wanted not in self._infos:
                self._infos = {worker.generation: worker.info for worker in await self._workers()}


def _listed(names: Collection[str]) -> str:
    return json.dumps(sorted(names)) if names else "[]"
