"""The LoRA adapters that this cluster serves, each as a model of its own.

load     every connected worker of the model reads the folder; all agree on what it holds ──> Redis ──> all
         gateways, in POLL_S
request  carries name, folder and revision to its workers: any of them can read the adapter, a new one too
unload   Redis forgets the name; workers let the weights go once no sequence uses them
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import replace

import structlog

from services.gateway.errors import GatewayError, InvalidRequest, ModelNotFound, Unavailable, WorkerLost
from services.gateway.model.followed import FollowedNames
from services.gateway.workers import WorkerConnection
from tandem.adapters import AdapterRef
from tandem.aliases import NAME
from tandem.v1 import worker_pb2

log = structlog.get_logger(__name__)
READ_TIMEOUT_S = 60.0


class ServedAdapters(FollowedNames[AdapterRef]):
    async def load(
        self, name: str, path: str, model: str, taken: Collection[str], workers: Sequence[WorkerConnection]
    ) -> None:
        """
        Args:
            taken: names of models.
            workers: the model's that answer.

        Raises:
            InvalidRequest: naming the field, and what is wrong with the adapter.
            Unavailable: no worker answers, or Redis does not.
        """
        if not NAME.fullmatch(name) or name in taken:
            raise InvalidRequest(f"lora_name: {name!r} is no name for an adapter of {model}", "lora_name")
        request = worker_pb2.ReadAdapterRequest(name=name, path=path)
        tries = (self._read(connection, request) for connection in workers)
        found = {ref for ref in await asyncio.gather(*tries) if ref is not None}
        if not found:
            raise Unavailable("no worker could be asked to read the adapter", code="no_workers")
        if len(found) > 1:
            raise InvalidRequest(f"lora_path: workers find different adapters in {path!r}", "lora_path")
        await self._change(self._kept.put(name, replace(found.pop(), model=model)))
        log.info("adapter loaded", name=name, path=path)

    async def unload(self, name: str, workers: Sequence[WorkerConnection]) -> None:
        """
        Args:
            workers: those that may hold it.

        Raises:
            ModelNotFound
            Unavailable: Redis does not answer.
        """
        ref = self.find(name)
        if ref is None:
            raise ModelNotFound(f"adapter {name!r} is not loaded", "lora_name", "model_not_found")
        await self._change(self._kept.drop(name))
        if not any(other.revision == ref.revision for other in self._known.by_name.values()):
            await asyncio.gather(*(self._drop(connection, ref) for connection in workers))
        log.info("adapter unloaded", name=name)

    async def _read(self, connection: WorkerConnection, request: worker_pb2.ReadAdapterRequest) -> AdapterRef | None:
        """Returns what a worker read; None if it does not answer: it reads the adapter when a request needs it."""
        try:
            response = await connection.call(connection.adapters.ReadAdapter, request, timeout=READ_TIMEOUT_S)
        except WorkerLost:
            return None
        except InvalidRequest as error:
            raise InvalidRequest(f"lora_path: {error.message}", "lora_path") from None
        return AdapterRef(response.adapter.name, response.adapter.path, response.adapter.revision)

    async def _drop(self, connection: WorkerConnection, ref: AdapterRef) -> None:
        try:
            request = worker_pb2.DropAdapterRequest(revision=ref.revision)
            await connection.call(connection.adapters.DropAdapter, request, timeout=READ_TIMEOUT_S)
        except GatewayError as error:
            log.warning("adapter not dropped", worker=connection.info.worker_id, reason=error.message)
