"""Asks Redis to hold something for a request.

A call given up may still arrive, so that it was given up is written where it would look. A Redis that has lost its
memory has lost that, too: each such call says which memory it was made for, and another one refuses it.

    select (epoch 1) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> refused: this is epoch 2
    abandon ──> written     emptied     epoch 2 begins as a worker registers
"""

from __future__ import annotations

from typing import Any

from tandem.registry.connection import RegistryConnection
from tandem.registry.resp import Argument


class RedisMemory:
    """The one that Redis has, as far as its client knows."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection
        self._epoch = ""

    async def call(self, script: str, *arguments: Argument) -> list[Any]:
        """Carried out in the memory that there is when Redis answers."""
        while True:
            asked = self._epoch
            self._epoch, *answer = await self._connection.call(script, asked, *arguments)
            if self._epoch == asked:
                return list(answer)
