"""The outside world of links: their network, the driver that runs their ends, and random numbers."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from tandem.transfer.runtime.driver import Driver
from tandem.transfer.runtime.threads import Threads
from tandem.transfer.transports.base import Network
from tandem.transfer.transports.tcp import SocketNetwork


def new_nonce() -> int:
    return secrets.randbits(63)


@dataclass(frozen=True)
class LinkRuntime:
    """The runtime of links. new_nonce: returns a number that no other link has."""

    network: Network = field(default_factory=SocketNetwork)
    driver: Driver = field(default_factory=Threads)
    new_nonce: Callable[[], int] = new_nonce
