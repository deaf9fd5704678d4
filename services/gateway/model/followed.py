"""A list of names in the registry, as this gateway knows it, at most POLL_S old.

After Redis lost its memory, this gateway writes the names again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Generic, TypeVar

import structlog

from services.gateway.errors import Unavailable
from tandem.registry import Named, NamedList, RegistryUnavailable

log = structlog.get_logger(__name__)
POLL_S = 1.0
T = TypeVar("T")


class FollowedNames(Generic[T]):
    """`run` follows Redis."""

    def __init__(self, kept: NamedList[T]) -> None:
        self._kept = kept
        self._known: Named[T] = Named("", {})

    @property
    def names(self) -> list[str]:
        return sorted(self._known.by_name)

    def find(self, name: str) -> T | None:
        return self._known.by_name.get(name)

    async def run(self) -> None:
        """Follow Redis until cancelled."""
        while True:
            try:
                await self.refresh()
            except RegistryUnavailable as error:
                log.debug("names not read", error=str(error))
            await asyncio.sleep(POLL_S)

    async def refresh(self) -> None:
        """Raises RegistryUnavailable."""
        found = await self._kept.all()
        if found.epoch != self._known.epoch and self._known.by_name:
            found = await self._kept.restore(self._known.by_name)
        self._known = found

    async def _change(self, changing: Coroutine[None, None, Named[T]]) -> None:
        try:
            self._known = await changing
        except RegistryUnavailable as error:
            raise Unavailable(f"registry unavailable: {error}", code="registry_unavailable") from None
