"""The files of a worker's model that gateways need, for whoever asks by fingerprint: read a part at a time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from tandem import rpc
from tandem.checkpoints import TEXT_FILES, fingerprint_of, text_digests
from tandem.process import WorkThreads
from tandem.v1 import worker_pb2, worker_pb2_grpc

PART = 2**20


class ModelFilesService(worker_pb2_grpc.ModelFilesServiceServicer):
    def __init__(self, folder: Path) -> None:
        """
        Raises:
            OSError, ValueError: a file cannot be read.
        """
        self.digests = text_digests(folder)
        self.fingerprint = fingerprint_of(self.digests)
        self._folder = folder
        self._thread = WorkThreads("model-files", 1)
        self.servicer = rpc.Servicer(
            "tandem.v1.ModelFilesService", self, worker_pb2_grpc.add_ModelFilesServiceServicer_to_server
        )

    async def ReadModelFiles(
        self, request: worker_pb2.ReadModelFilesRequest, context: aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[worker_pb2.ReadModelFilesResponse]:
        if not self.fingerprint or request.fingerprint != self.fingerprint:
            raise rpc.Refused(grpc.StatusCode.NOT_FOUND, f"fingerprint: this worker's is {self.fingerprint or 'none'}")
        for name in TEXT_FILES:
            if (file := self._folder / name).is_file():
                async for part in self._parts(file):
                    yield part

    async def _parts(self, file: Path) -> AsyncIterator[worker_pb2.ReadModelFilesResponse]:
        at, more = 0, True
        while more:
            data = await self._thread.run(_part, file, at)
            yield worker_pb2.ReadModelFilesResponse(name="" if at else file.name, data=data)
            at, more = at + PART, len(data) == PART

    def close(self) -> None:
        self._thread.close()


def _part(file: Path, at: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(at)
        return opened.read(PART)
