"""Asks Redis to hold something for a request.

A call given up may still arrive, so that it was given up is written where it would look. A Redis that has lost its
memory has lost that, too: each such call says which memory it was made for, and another one refuses it.

    select (epoch 1) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> refused: this is epoch 2
    abandon ──> written     emptied     epoch 2 begins as a worker registers
"""

from __future__ import annotations

from itertools import count
from typing import Any

from tandem.registry.wire.connection import RegistryConnection
from tandem.registry.wire.resp import Argument


class RedisMemory:
    """The memory that Redis has now, as far as its client knows."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection
        self._epoch = ""
        self._numbers = count()

    def name_for(self, request_id: str) -> str:
        """Returns the name of what is asked for: unique among all clients and calls."""
        return f"{request_id}/{self._connection.client_id}/{next(self._numbers)}"

    async def call(self, script: str, *arguments: Argument) -> list[Any]:
        """Runs a script in the memory that there is when Redis answers."""
        while True:
            asked = self._epoch
            self._epoch, *answer = await self._connection.call(script, asked, *arguments)
            if self._epoch == asked:
                return list(answer)
