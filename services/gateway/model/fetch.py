"""How a gateway gets a model's files: from its disk by fingerprint, else from one of the model's workers.

What a worker sends is bounded as it arrives, and used only if its fingerprint is right.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import structlog
from grpc import aio

from services.gateway.errors import Unavailable
from tandem.checkpoints import MAX_TEXT_BYTES, TEXT_FILES, TextFiles
from tandem.process import WorkThreads
from tandem.v1 import worker_pb2, worker_pb2_grpc

log = structlog.get_logger(__name__)
FETCH_S = 30.0


class ModelFolders:
    """Folders with the files that a gateway needs, one for each model."""

    def __init__(self, connect: Callable[[str], aio.Channel], kept: TextFiles) -> None:
        self._connect, self._kept = connect, kept
        self._thread = WorkThreads("model-files", 1)

    async def folder(self, fingerprint: str, addresses: Iterable[str]) -> Path:
        """
        Args:
            addresses: of workers that registered the model, asked in turn.

        Raises:
            Unavailable: no worker sent it.
        """
        if (known := await self._thread.run(self._kept.find, fingerprint)) is not None:
            return known
        problem = "no worker has it"
        for address in addresses:
            try:
                files = await self._fetch(address, fingerprint)
                return await self._thread.run(self._kept.keep, files, fingerprint)
            except (aio.AioRpcError, OSError, ValueError, TimeoutError) as error:
                said = error.details() if isinstance(error, aio.AioRpcError) else str(error)
                problem = f"{address}: {said or type(error).__name__}"
                log.warning("model's files not fetched", fingerprint=fingerprint, reason=problem)
        raise Unavailable(f"the files of model {fingerprint} could not be fetched: {problem}", code="no_model_files")

    async def _fetch(self, address: str, fingerprint: str) -> dict[str, bytes]:
        channel = self._connect(address)
        try:
            stub: Any = worker_pb2_grpc.ModelFilesServiceStub(channel)
            async with asyncio.timeout(FETCH_S):
                request = worker_pb2.ReadModelFilesRequest(fingerprint=fingerprint)
                return await gathered(stub.ReadModelFiles(request, timeout=FETCH_S))
        finally:
            await channel.close(None)


async def gathered(parts: AsyncIterator[worker_pb2.ReadModelFilesResponse]) -> dict[str, bytes]:
    """Raises ValueError: an unexpected file, or too many bytes."""
    files: dict[str, bytearray] = {}
    name, left = "", MAX_TEXT_BYTES
    async for part in parts:
        if part.name:
            name = part.name
            if name not in TEXT_FILES or name in files:
                raise ValueError(f"name: {name[:64]!r} is not one of {', '.join(TEXT_FILES)}, or came twice")
            files[name] = bytearray()
        elif not name:
            raise ValueError("name: is missing in the first part of a file")
        left -= len(part.data)
        if left < 0:
            raise ValueError(f"data: more than {MAX_TEXT_BYTES} bytes of files")
        files[name] += part.data
    return {name: bytes(data) for name, data in files.items()}
