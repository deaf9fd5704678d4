"""Loads the models of workers that register, and drops them when their workers have left.

    a worker registers (name, fingerprint) ──> its files are found or fetched ──> an LLM, and its tasks
    its last worker leaves ──> it is not listed; requests are told to try again ── GONE_S ──> dropped

A worker that returns within that time finds everything as it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import structlog

from services.gateway.directory.directory import ModelDirectory
from services.gateway.directory.llm import LLM
from services.gateway.errors import Unavailable
from services.gateway.model import ServedModel
from tandem.checkpoints import is_fingerprint
from tandem.machine.garbage import give_back
from tandem.registry import LiveWorker, ModelKey, RegistryUnavailable

log = structlog.get_logger(__name__)
FOLLOW_S = 0.25
RETRY_S = 1.0
SETTLE_S = 3.0
OTHERS_S = 1.0
# As long as answers wait for a worker that restarts.
GONE_S = 30.0
# Reads a model's files from one of the workers at these addresses.
ReadModel = Callable[[ModelKey, Sequence[str]], Awaitable[ServedModel]]


@dataclass(slots=True)
class _Serving:
    """One served model and its tasks."""

    llm: LLM
    tasks: list[asyncio.Task[None]]
    seen_at: float  # when it last had a worker


@dataclass(slots=True)
class Roster:
    """Follows the view of workers while `run` runs. `close` drops all models."""

    directory: ModelDirectory
    read: ReadModel
    make: Callable[[ModelKey, ServedModel], LLM]
    tasks_of: Callable[[LLM], Sequence[Awaitable[None]]]
    _lives: dict[ModelKey, _Serving] = field(default_factory=dict)
    _loading: dict[ModelKey, asyncio.Task[None]] = field(default_factory=dict)
    _refused: dict[ModelKey, float] = field(default_factory=dict)  # when to try each again; a key identifies its files
    _looked_at: float = 0.0  # when other releases were last searched for

    async def run(self) -> None:
        """Follow the view until cancelled. Raises the error that a model's task died of."""
        while True:
            await self.follow()
            await self._look_for_others()
            await self.directory.shared.view.wait_changed(FOLLOW_S)

    async def follow(self) -> None:
        """Load and drop models by the view. Raises the error that a model's task died of."""
        now, addresses = asyncio.get_running_loop().time(), self._registered()
        self._refused = {key: at for key, at in self._refused.items() if key in addresses}
        for key, found in addresses.items():
            if key in self._lives:
                self._lives[key].seen_at = now
            elif key not in self._loading and now >= self._refused.get(key, 0.0):
                self._loading[key] = asyncio.create_task(self._load(key, found))
        for key, loading in list(self._loading.items()):
            if loading.done():
                del self._loading[key]
                loading.result()
        gone = [key for key, life in self._lives.items() if self._is_over(key, life, now)]
        for key in gone:
            await self._drop(key)
        if gone:
            await asyncio.to_thread(give_back)  # freeing a tokenizer's many small objects takes long

    def _is_over(self, key: ModelKey, life: _Serving, now: float) -> bool:
        """True if the model's workers have left for good. Raises the error that a task of it died of."""
        for task in life.tasks:
            if task.done():
                task.result()
                raise RuntimeError(f"a task of model {key.name} ended by itself")
        return now > life.seen_at + GONE_S and not any(one.running for one in life.llm.pool.connections)

    async def settle(self) -> None:
        """Wait, within a bound, until the models of registered workers are served."""
        await self.follow()
        if self._loading:
            await asyncio.wait(self._loading.values(), timeout=SETTLE_S)

    async def close(self) -> None:
        for loading in self._loading.values():
            loading.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for key in list(self._lives):
            await self._drop(key)

    def _registered(self) -> dict[ModelKey, list[str]]:
        """Returns the registered models with the addresses of their workers."""
        only, found, problems = self.directory.shared.settings.models, dict[ModelKey, list[str]](), dict[str, str]()
        for worker in self.directory.shared.view.workers:
            info = worker.info
            if only and info.model not in only:
                continue
            if is_fingerprint(info.fingerprint):
                found.setdefault(info.key, []).append(info.grpc_address)
            else:
                problems[info.worker_id] = _nothing_to_read(worker)
        others = {name: why for name, why in self.directory.problems.items() if name in {key.text for key in found}}
        self.directory.problems = problems | others
        return found

    async def _look_for_others(self) -> None:
        """Note the releases of other workers in this namespace, if none is of this release."""
        now = asyncio.get_running_loop().time()
        if self.directory.shared.view.workers:
            self.directory.other_releases = ""
        elif now > self._looked_at + OTHERS_S:
            self._looked_at = now
            with suppress(RegistryUnavailable):
                others = await self.directory.shared.view.registry.releases.others()
                self.directory.other_releases = "; ".join(map(str, others))

    async def _load(self, key: ModelKey, addresses: Sequence[str]) -> None:
        try:
            model = await self.read(key, addresses)
        except Exception as error:  # one model's files must not stop others from being served
            why = f"model {key.name}: {_described(error)}"
            if self.directory.problems.get(key.text) != why:
                log.error("model not served", model=key.name, fingerprint=key.fingerprint, reason=why)
            self.directory.problems[key.text] = why
            passing = isinstance(error, Unavailable | OSError | MemoryError)
            self._refused[key] = asyncio.get_running_loop().time() + RETRY_S if passing else inf
            return
        self.directory.problems.pop(key.text, None)
        llm = self.make(key, model)
        tasks = [asyncio.ensure_future(work) for work in self.tasks_of(llm)]
        self._lives[key] = _Serving(llm, tasks, asyncio.get_running_loop().time())
        llm.metrics.begin(llm.admission, llm.pool)
        self.directory.llms[key] = llm
        log.info("model served", model=key.name, fingerprint=key.fingerprint)

    async def _drop(self, key: ModelKey) -> None:
        life = self._lives.pop(key)
        self.directory.llms.pop(key, None)
        life.llm.metrics.end(life.llm.admission, life.llm.pool)
        for task in life.tasks:
            task.cancel()
        await asyncio.gather(*life.tasks, return_exceptions=True)
        await life.llm.pool.close()
        log.info("model no longer served", model=key.name, fingerprint=key.fingerprint)


def _described(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return error.message
    return str(error) if isinstance(error, OSError | ValueError) else repr(error)


def _nothing_to_read(worker: LiveWorker) -> str:
    if worker.info.fingerprint:
        return f"{worker.info.worker_id}: {worker.info.fingerprint[:64]!r} is no fingerprint of a model's files"
    return f"{worker.info.worker_id}: its model has no tokenizer.json, or it is of a version that gives none"
