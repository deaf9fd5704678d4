"""Transports by name. A new one is a file here and a line in TRANSPORTS: see docs/extending.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.transfer.transports.base import Network, Transport
from tandem.transfer.transports.shm import ShmTransport

TRANSPORTS: dict[str, Callable[[], Transport]] = {"shm": ShmTransport}


def make_transports(names: Sequence[str], network: Network) -> list[Transport]:
    """Those named, best first, and that of the network's own streams. Raises ValueError naming what there is."""
    inline = network.inline()
    known = TRANSPORTS | {inline.name: lambda: inline}
    if not names or set(names) - known.keys():
        raise ValueError(f"transports: {list(names)} given, this network carries {sorted(known)}")
    return [known[name]() for name in names]
