"""A Redis that may evict: its memory is bounded, and every key expires some time after its last write.

record    the fields of one key, written together and evicted together
list      a first entry and appended entries, evicted as a whole, so that an entry always follows all earlier ones
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.registry import Argument, Master, RedisAddress, ReplyError, Wire


class StoreUnavailable(Exception):
    """The store did not answer in time, or refused. A write may still have taken effect."""


class Store:
    """A client of the store. Each call ends within `timeout` seconds and may raise StoreUnavailable. `close` it."""

    def __init__(self, url: str, namespace: str, timeout: float) -> None:
        """Makes a client that connects at first use.

        Raises:
            ValueError: the URL is malformed.
        """
        self._wire = Wire(Master(RedisAddress.parse(url)).open)
        self._prefix, self._timeout = f"{namespace}:kept:", timeout

    async def write(self, key: str, fields: Mapping[str, bytes], ttl_s: int) -> None:
        flat = [part for pair in fields.items() for part in pair]
        await self._ask(("HSET", self._prefix + key, *flat), ("EXPIRE", self._prefix + key, ttl_s))

    async def read(self, key: str, *fields: str) -> list[bytes] | None:
        """Returns the fields of a record; None if any of them is missing."""
        (found,) = await self._ask(("HMGET", self._prefix + key, *fields))
        return None if None in found else list(found)

    async def delete(self, *keys: str) -> int:
        """Deletes keys. Returns the number that existed."""
        (count,) = await self._ask(("DEL", *(self._prefix + key for key in keys)))
        return int(count)

    async def begin(self, key: str, entries: Sequence[bytes], ttl_s: int) -> None:
        """Begins a list under an unused key."""
        await self._ask(("RPUSH", self._prefix + key, *entries), ("EXPIRE", self._prefix + key, ttl_s))

    async def append(self, key: str, entries: Sequence[bytes], ttl_s: int) -> bool:
        """Appends entries to a list. Returns False if the list is gone."""
        length, _ = await self._ask(
            ("RPUSHX", self._prefix + key, *entries), ("EXPIRE", self._prefix + key, ttl_s)
        )  # fmt: skip
        return bool(length)

    async def entries(self, key: str, start: int = 0) -> list[bytes]:
        """Returns a list's entries from `start` on; none without the list.

        An entry that was sent twice is returned once.
        """
        (found,) = await self._ask(("LRANGE", self._prefix + key, start, -1))
        return list(dict.fromkeys(found))

    async def replace_first(self, key: str, entry: bytes) -> None:
        await self._ask(("LSET", self._prefix + key, 0, entry))

    async def remove(self, key: str, entry: bytes) -> None:
        await self._ask(("LREM", self._prefix + key, 0, entry))

    def close(self) -> None:
        self._wire.close()

    async def _ask(self, *commands: tuple[Argument, ...]) -> list[Any]:
        since = asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(self._timeout):
                asked = [asyncio.ensure_future(self._wire.ask(*command, binary=True)) for command in commands]
                try:
                    return await asyncio.gather(*asked)
                finally:
                    for one in asked:
                        one.cancel()
        except TimeoutError:
            self._wire.doubt(since)
            raise StoreUnavailable(f"no answer within {self._timeout:g} s") from None
        except (OSError, ReplyError) as error:
            raise StoreUnavailable(str(error)) from error
