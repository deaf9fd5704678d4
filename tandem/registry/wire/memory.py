"""Calls by which Redis reserves something for a request.

A call that was given up may still arrive, so a note in Redis ("abandoned") makes its script do nothing. A Redis that
has lost its data has lost that note, too: so each call names the epoch that it was made for, and any other epoch
refuses it.

    select (epoch 1) ┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄┄> refused: this is epoch 2
    abandon ──> written     emptied     epoch 2 begins as a worker registers
"""

from __future__ import annotations

from itertools import count
from typing import Any

from tandem.registry.wire.connection import RegistryConnection
from tandem.registry.wire.resp import Argument


class RedisMemory:
    """The present epoch of Redis's data, as far as its client knows."""

    def __init__(self, connection: RegistryConnection) -> None:
        self._connection = connection
        self._epoch = ""
        self._numbers = count()

    def name_for(self, request_id: str) -> str:
        """Returns a name for a reservation, unique among all clients and calls."""
        return f"{request_id}/{self._connection.client_id}/{next(self._numbers)}"

    async def call(self, script: str, *arguments: Argument) -> list[Any]:
        """Runs a script in the present epoch; again if it has changed meanwhile. Returns the script's answer."""
        while True:
            asked = self._epoch
            self._epoch, *answer = await self._connection.call(script, asked, *arguments)
            if self._epoch == asked:
                return list(answer)
