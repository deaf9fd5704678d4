"""Whose the cached blocks are: a request says whose its chain's root is, and each block is its parent's owner's."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection

# The most roots whose tenants are known; beyond that the one goes whose last request is longest ago.
MAX_ROOTS = 1 << 14


class BlockOwners:
    """Tenants by root, and by block as long as it is cached. A block whose root was forgotten has no known tenant.

    The worker's event loop calls `enter`, `hold_off` and `let_in`, the engine's thread the rest; reads by any.
    """

    def __init__(self) -> None:
        self._roots: OrderedDict[bytes, str] = OrderedDict()
        self._of: dict[bytes, str] = {}
        self._held_off: Counter[str | None] = Counter()

    def __len__(self) -> int:
        return len(self._of)

    def enter(self, root: bytes, tenant: str) -> None:
        """Learns a root's tenant. Where several tenants share a root, it is the first one's."""
        self._roots.setdefault(root, tenant)
        self._roots.move_to_end(root)
        while len(self._roots) > MAX_ROOTS:
            self._roots.popitem(last=False)

    def of(self, name: bytes) -> str | None:
        """Returns the tenant of a root or of a cached block; None: it is not known."""
        return self._of.get(name, self._roots.get(name))

    def tenants(self) -> set[str]:
        """Returns the tenants that are known."""
        return {*list(self._roots.values()), *list(self._of.values())}

    def counts(self, names: Collection[bytes]) -> Counter[str | None]:
        """Returns how many of these blocks each tenant has."""
        return Counter(map(self.of, names))

    def stored(self, name: bytes, parent: bytes, root: bytes) -> None:
        """Learns that a block is cached: its parent's owner's, or where that is not known its root's."""
        tenant = self.of(parent)
        if tenant is None:
            tenant = self.of(root)
        if tenant is not None:
            self._of[name] = tenant

    def removed(self, name: bytes) -> None:
        self._of.pop(name, None)

    def is_owned(self, name: bytes, tenant: str | None) -> bool:
        """True if the block is the tenant's (None: anybody's), or may be, as its owner is not known."""
        return tenant is None or self.of(name) in (None, tenant)

    def hold_off(self, tenant: str | None) -> None:
        """Has no block of the tenant (None: of anybody) brought from elsewhere, until `let_in` as many times."""
        self._held_off[tenant] += 1

    def let_in(self, tenant: str | None) -> None:
        self._held_off -= Counter({tenant: 1})

    def is_held_off(self, root: bytes) -> bool:
        return any(self.is_owned(root, tenant) for tenant in list(self._held_off))
