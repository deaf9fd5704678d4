"""A service that sends the model files that gateways need, by fingerprint, in parts."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
from grpc import aio

from tandem import rpc
from tandem.checkpoints import TEXT_FILES, text_file, text_fingerprint
from tandem.process import WorkThreads
from tandem.v1 import worker_pb2, worker_pb2_grpc

PART = 2**20


class ModelFilesService(worker_pb2_grpc.ModelFilesServiceServicer):
    def __init__(self, folder: Path) -> None:
        """Reads the fingerprint of the model's files.

        Raises:
            OSError, ValueError: a file cannot be read.
        """
        self.fingerprint = text_fingerprint(folder)
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
            if (data := await self._thread.run(text_file, self._folder, name)) is None:
                continue
            for at in range(0, max(len(data), 1), PART):
                yield worker_pb2.ReadModelFilesResponse(name="" if at else name, data=data[at : at + PART])

    def close(self) -> None:
        self._thread.close()
