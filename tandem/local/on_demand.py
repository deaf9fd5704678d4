"""Starts and stops models' workers on gateways' demand, with any launcher.

Without the registry nothing is decided, as a model without reports may be busy. A status told to gateways expires after
TOLD_S, so they notice this process's death; gateways' wishes expire likewise.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress

from tandem.local.launcher import Launcher, ServiceFailed
from tandem.local.wake_plan import OnDemandModel, WakePlan
from tandem.registry import LiveWorker, Registry, RegistryUnavailable, Role

LOOK_S = 0.2
TOLD_S = 4.0


class OnDemand:
    """Starts and stops models on demand. `run` it beside the launcher's `watch`."""

    def __init__(
        self, launcher: Launcher, registry: Registry, plan: WakePlan, report: Callable[[str], None],
        start_bound_s: float,
    ) -> None:  # fmt: skip
        """`start_bound_s`: a start that takes longer has failed."""
        self._launcher, self._registry, self._plan, self._report = launcher, registry, plan, report
        self._start_bound_s = start_bound_s
        self._now = asyncio.get_running_loop().time
        self._work: set[asyncio.Task[None]] = set()

    async def tell(self, ttl: float) -> None:
        """Reports models' statuses to gateways and reads their use. Raises RegistryUnavailable."""
        self._plan.hear(await self._registry.on_demand.tell(self._plan.statuses(self._now()), ttl), self._now())

    async def run(self) -> None:
        """Starts and stops models until cancelled. Raises the error of a start or stop that failed unexpectedly."""
        try:
            while True:
                with suppress(RegistryUnavailable):
                    await self.tell(TOLD_S)
                    self._begin()
                await asyncio.sleep(LOOK_S)
                for done in [task for task in self._work if task.done()]:
                    self._work.discard(done)
                    done.result()
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

    def _begin(self) -> None:
        starting, stopping = self._plan.decide(self._now())
        work = [self._start(model) for model in starting] + [self._stop(model) for model in stopping]
        self._work |= {asyncio.create_task(one) for one in work}

    async def _start(self, model: OnDemandModel) -> None:
        self._report(f"starts {model.name}, which was asked for")
        names, began = [service.name for service in model.services], self._now()
        try:
            async with asyncio.timeout(self._start_bound_s):
                await self._launcher.start(model.services)
                while not await self._is_awake(model):
                    if why := await self._launcher.given_up(names):
                        raise ServiceFailed(why)
                    await asyncio.sleep(LOOK_S)
        except (OSError, ServiceFailed, TimeoutError) as error:  # a TimeoutError is an OSError without a message
            why = str(error) or f"it was not ready after {self._start_bound_s:g} s"
            self._report(f"{model.name} could not be started: {why}")
            await self._launcher.stop(names)
            self._plan.failed(model.name, self._now(), why)
        else:
            self._report(f"{model.name} is awake after {self._now() - began:.1f} s")
            self._plan.awake(model.name, self._now())

    async def _stop(self, model: OnDemandModel) -> None:
        self._report(f"stops {model.name} until it is asked for")
        await self._launcher.stop([service.name for service in model.services])
        self._plan.asleep(model.name, self._now())

    async def _is_awake(self, model: OnDemandModel) -> bool:
        """True once all of the model's workers are registered and each pair of them has moved a block."""
        try:
            workers = await self._registry.workers()
        except RegistryUnavailable:
            return False
        names = {service.name for service in model.services}
        there = [worker for worker in workers if worker.info.worker_id in names]
        return {worker.info.worker_id for worker in there} == names and _are_linked(there)


def _are_linked(workers: Sequence[LiveWorker]) -> bool:
    decodes = {worker.info.incarnation for worker in workers if worker.info.role is Role.DECODE}
    return all(decodes <= {*worker.load.linked} for worker in workers if worker.info.role is Role.PREFILL)
