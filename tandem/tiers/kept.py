"""The blocks that a store keeps: whose they are, when they were used, and which go.

A tenant may fill a share of the store; beyond it, its own block of least worth goes, and nobody else's. Where all
together fill it, the block of least worth goes, but none of a pinned tenant, as long as pinned ones are at most half.
Blocks that nobody has used for the time to live are no longer there, and go when there is an occasion.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from tandem.tiers.worth import Worth

OWNER_BYTES = 8
# The most expired blocks that go whenever a block is written.
EXPIRED_AT_ONCE = 4


def owner_of(tenant: str) -> bytes:
    """Returns a tenant's name for tiers, from which nobody reads the tenant's own."""
    return blake2b(tenant.encode(), digest_size=OWNER_BYTES).digest()


class KeptBlock(NamedTuple):
    owner: bytes
    name: bytes


@dataclass(frozen=True, slots=True)
class KeepRules:
    """`tenant_share`: the part of a store that one tenant may fill. `ttl_s`: the time to live unused; 0: no end.
    `now`: seconds since 1970.
    """

    tenant_share: float = 1.0
    ttl_s: float = 0.0
    now: Callable[[], float] = lambda: 0.0


ALL_ALIKE = KeepRules()


class KeptBlocks:
    """Up to `size` blocks. Used by one thread; `in`, `len`, `counts` and iteration by any."""

    def __init__(self, size: int, rules: KeepRules = ALL_ALIKE) -> None:
        self.size, self._rules, self._now = size, rules, rules.now
        self._most = max(1, int(size * rules.tenant_share))
        self._worth = Worth(size)
        self._owner: dict[bytes, bytes] = {}
        self._used_at: OrderedDict[bytes, float] = OrderedDict()  # the longest unused first
        self._counts: dict[bytes, int] = {}
        self._pinned: dict[bytes, float] = {}  # until when
        self.gone: deque[bytes] = deque()  # what was forgotten, until somebody takes it out; on any thread

    def __len__(self) -> int:
        return len(self._owner)

    def __iter__(self) -> Iterator[bytes]:
        return iter(list(self._owner))  # on any thread

    def __contains__(self, name: bytes) -> bool:
        used_at = self._used_at.get(name)
        return used_at is not None and not self._has_expired(used_at)

    @property
    def counts(self) -> Mapping[bytes, int]:
        """Returns how many blocks each owner has."""
        return dict(self._counts)

    def owner(self, name: bytes) -> bytes | None:
        return self._owner.get(name)

    def make_room(self, name: bytes, owner: bytes) -> list[KeptBlock]:
        """Forgets and returns the blocks that go before `name` comes."""
        gone = self.expire(EXPIRED_AT_ONCE)
        if name in self._owner:
            if self._owner[name] == owner:
                return gone
            gone.append(self.discard(name))
        while self._counts.get(owner, 0) >= self._most:
            gone.append(self.discard(self._worth.pop(owner)))
        while len(self._owner) >= self.size:
            gone.append(self.discard(self._worth.pop(spared=self._spared())))
        return gone

    def use(self, name: bytes, owner: bytes, at: float | None = None) -> None:
        """Adds a block, for which there is room, or counts another use of it, now or `at`."""
        if name not in self._owner:
            self._owner[name] = owner
            self._counts[owner] = self._counts.get(owner, 0) + 1
        self._worth.use(name, owner)
        self._used_at[name] = self._now() if at is None else at
        self._used_at.move_to_end(name)

    def discard(self, name: bytes) -> KeptBlock:
        """Forgets a block."""
        owner = self._owner.pop(name)
        self.gone.append(name)
        del self._used_at[name]
        self._worth.discard(name)
        self._counts[owner] -= 1
        if not self._counts[owner]:
            del self._counts[owner]
            self._worth.leave(owner)
        return KeptBlock(owner, name)

    def expire(self, most: int) -> list[KeptBlock]:
        """Forgets and returns up to `most` blocks that nobody has used for the time to live."""
        gone: list[KeptBlock] = []
        while self._used_at and len(gone) < most:
            name, used_at = next(iter(self._used_at.items()))
            if not self._has_expired(used_at):
                break
            gone.append(self.discard(name))
        return gone

    def drop(self, owner: bytes | None) -> list[KeptBlock]:
        """Forgets and returns an owner's blocks; None: all."""
        return [self.discard(name) for name, own in list(self._owner.items()) if owner in (None, own)]

    def pin(self, owner: bytes, seconds: float) -> None:
        """Has an owner's blocks go by nobody else's pressure for so long; 0: no longer."""
        self._pinned[owner] = self._now() + seconds
        self._spared()

    def _spared(self) -> set[bytes]:
        self._pinned = {owner: until for owner, until in self._pinned.items() if until > self._now()}
        num_pinned = sum(self._counts.get(owner, 0) for owner in self._pinned)
        return set(self._pinned) if num_pinned <= self.size // 2 else set()

    def _has_expired(self, used_at: float) -> bool:
        return bool(self._rules.ttl_s) and used_at + self._rules.ttl_s <= self._now()
