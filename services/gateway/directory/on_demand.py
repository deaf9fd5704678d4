"""Models that have workers only while clients use them, as a gateway sees them.

    a request for a sleeping model ──> `Asleep` ──> `until_awake`: asks the launcher to start it; the request waits
    the launcher is gone, its start failed, or takes longer than the request has ──> Unavailable, with the seconds

The launcher learns once a second when each model was last used, and so which ones are idle.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from math import ceil

from services.gateway.errors import Unavailable
from tandem.registry import ModelStatus, ModelUse, OnDemandModels, RegistryUnavailable, Wakefulness

POLL_S, WAITING_POLL_S, LEAST_S = 1.0, 0.1, 0.02
# A launcher's report older than this no longer holds.
STALE_S = 5.0
NEVER = float("-inf")


class Asleep(Unavailable):
    """The model sleeps: it has no workers and would get some.

    `model`: its own name; `asked`: the request's name for it; `user`: whose choice it is, if that is an alias;
    `streamed`: whether the answer is to be streamed.
    """

    streamed = False

    def __init__(self, model: str, asked: str, user: str = "") -> None:
        super().__init__(f"model {model!r} is asleep", code="model_asleep")
        self.model, self.asked, self.user = model, asked, user


class StartsLater(Unavailable):
    """The model starts too late for the request's deadline."""

    def __init__(self, message: str, code: str, wait_s: float) -> None:
        super().__init__(message, code=code)
        self.headers = {"retry-after": str(max(1, ceil(wait_s)))}


class Sleepers:
    """The sleeping models. `run` follows the registry; models sleep only if a launcher reports them."""

    def __init__(
        self, models: OnDemandModels, only: Collection[str], running: Callable[[], Iterable[str]],
        is_ready: Callable[[str], bool],
    ) -> None:  # fmt: skip
        """
        Args:
            only: models that this gateway serves; empty: all.
            running: names of models that answer requests now.
            is_ready: True for models that would be served now.
        """
        self._models, self._only, self._running, self._is_ready = models, only, running, is_ready
        self._now = asyncio.get_running_loop().time
        self._known: dict[str, ModelStatus] = {}
        self._known_at = NEVER
        self._ran: dict[str, float] = {}
        self._wanted: dict[str, float] = {}
        self._waiting: Counter[str] = Counter()
        self._asked, self._looked = asyncio.Event(), asyncio.Event()

    @property
    def is_empty(self) -> bool:
        return not self._known

    @property
    def statuses(self) -> list[ModelStatus]:
        return [self._known[name] for name in sorted(self._known)]

    def find(self, name: str) -> ModelStatus | None:
        return self._known.get(name)

    def may_be_woken(self, name: str) -> bool:
        """True if the model sleeps and would start for a request."""
        status = self.find(name)
        return status is not None and status.state not in (Wakefulness.AWAKE, Wakefulness.FAILED)

    def is_asleep(self, name: str) -> bool:
        """True if a request for the model would have to wait, or be refused."""
        status = self.find(name)
        return status is not None and not self._is_up(status)

    def _is_up(self, status: ModelStatus) -> bool:
        return status.state in (Wakefulness.STARTING, Wakefulness.AWAKE) and self._is_ready(status.name)

    def note_use(self, name: str) -> None:
        if name in self._known:
            self._ran[name] = self._now()

    async def until_awake(
        self, name: str, deadline: float, progress: Callable[[ModelStatus], Awaitable[None]]
    ) -> None:  # fmt: skip
        """Wait until the model would be served, calling `progress` now and then.

        Raises:
            Unavailable: it cannot be started, or only after the deadline; it is started in that case, too.
        """
        with self._waits(name):
            self._asked.set()
            while True:
                await self._looked.wait()
                status = self.find(name)
                if status is not None and self._is_up(status):
                    return
                self._check(name, status, deadline)
                assert status is not None
                await progress(status)

    def _check(self, name: str, status: ModelStatus | None, deadline: float) -> None:
        if status is None:
            raise Unavailable(f"model {name!r} is asleep, and nobody is there to start it", code="no_launcher")
        if status.state is Wakefulness.FAILED:
            why = f"model {name!r} could not be started: {status.reason}"
            raise StartsLater(f"{why}; it may be tried again in {ceil(status.left_s)} s", "start_failed", status.left_s)
        left_s = deadline - self._now()
        if status.left_s > left_s or left_s < WAITING_POLL_S:
            waits = f"; it {status.reason}" if status.reason else ""
            raise StartsLater(
                f"model {name!r} is {status.state} and takes about {max(1, ceil(status.left_s))} s more, which the "
                f"request's deadline does not leave{waits}", "model_asleep", status.left_s,
            )  # fmt: skip

    async def run(self) -> None:
        """Follow the registry until cancelled."""
        while True:
            with suppress(RegistryUnavailable):
                await self.refresh()
            if self._now() > self._known_at + STALE_S:
                self._known = {}
            self._looked.set()
            self._looked = asyncio.Event()
            await asyncio.sleep(LEAST_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(WAITING_POLL_S if self._waiting else POLL_S):
                    await self._asked.wait()
            self._asked.clear()

    async def refresh(self) -> None:
        """Raises RegistryUnavailable."""
        now = self._now()
        for name in self._running():
            self.note_use(name)
        self._wanted |= dict.fromkeys(self._waiting, now)
        said = {
            name: ModelUse(now - self._ran.get(name, NEVER), now - self._wanted.get(name, NEVER))
            for name in {*self._known, *self._waiting}
        }
        found = await self._models.ask(said)
        self._known = {name: status for name, status in found.items() if not self._only or name in self._only}
        self._known_at = self._now()
        for times in (self._ran, self._wanted):
            for name in times.keys() - self._known.keys():
                del times[name]

    @contextmanager
    def _waits(self, name: str) -> Iterator[None]:
        self._waiting[name] += 1
        try:
            yield
        finally:
            self._waiting[name] -= 1
            if not self._waiting[name]:
                del self._waiting[name]
