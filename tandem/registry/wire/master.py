"""Connections to the Redis that takes writes: the address's own, or the master that its sentinels name.

    sentinel ──> where the master is ──> connect there ──> HELLO: it is a master ──> the connection
        └── fails, or names a former master: the next sentinel

If a caller gives up on a sentinel that does not answer, the next connection begins with the sentinel after it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tandem.registry.wire.address import RedisAddress
from tandem.registry.wire.resp import ReplyError, RespConnection


class Master:
    def __init__(self, address: RedisAddress) -> None:
        self._address = address
        self._first = 0  # index of the sentinel to ask first

    async def open(self, on_push: Callable[[], None] = lambda: None) -> RespConnection:
        """Opens a connection to the master.

        Raises:
            ReplyError: user, password or database are refused.
            OSError: the master cannot be reached, or no sentinel knows it.
        """
        sentinels = self._address.sentinels
        if not sentinels:
            return await RespConnection.open(self._address, on_push)
        reasons = []
        for number in [(self._first + turn) % len(sentinels) for turn in range(len(sentinels))]:
            self._first = (number + 1) % len(sentinels)
            try:
                line = await self._named_by(sentinels[number], on_push)
            except (OSError, ReplyError) as error:
                reasons.append(f"{sentinels[number]}: {error}")
            else:
                self._first = number
                return line
        raise OSError("; ".join(reasons))

    async def _named_by(self, sentinel: RedisAddress, on_push: Callable[[], None]) -> RespConnection:
        asking = await RespConnection.open(sentinel)
        try:
            named = await asking.ask(("SENTINEL", "get-master-addr-by-name", self._address.master), binary=False)
        finally:
            asking.end("asked")
        if not named:
            raise OSError(f"knows no master {self._address.master}")
        host, port = named
        line = await RespConnection.open(replace(self._address, host=host, port=int(port)), on_push)
        try:
            # HELLO, unlike ROLE, needs no administrator's rights.
            said = await line.ask(("HELLO", "2"), binary=False)
            if (role := dict(zip(said[::2], said[1::2], strict=True))["role"]) != "master":
                raise OSError(f"names {host}:{port}, which is a {role}")
        except BaseException:
            line.end("no master")
            raise
        return line
