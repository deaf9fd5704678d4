"""A prefill worker's side of KV transfer: one Link to each decode worker's incarnation.

open_link   dial -> HELLO/WELCOME -> one probe block there and back -> ready
afterwards  the link lives until close_link, or until its peer dies or falls silent; `link` no longer shows it then
"""

from __future__ import annotations

import secrets
import sys
import threading
from collections.abc import Sequence

from tandem.clock import Clock, SystemClock
from tandem.transfer.copy.copier import load_copier
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.sender import SenderProtocol
from tandem.transfer.runtime.connection import Channel
from tandem.transfer.runtime.link import Link
from tandem.transfer.runtime.sending_end import Outlet
from tandem.transfer.transports.shm import Arena
from tandem.transfer.transports.tcp import Network, SocketNetwork, Stream


class Sender:
    """Thread-safe. `transports`: best first. arena_bytes: memory of each link that frames wait in (back-pressure).

    Little of it is better than much: what the receiver reads should still lie in a cache.
    """

    def __init__(
        self, local: Endpoint, *, transports: Sequence[str] = ("shm", "tcp"), network: Network | None = None,
        clock: Clock | None = None, arena_bytes: int = 8 << 20, frame_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self.local = local
        self._network: Network = network or SocketNetwork()
        self._transports = carried(transports, self._network)
        self._clock: Clock = clock or SystemClock()
        self._arena_bytes, self._frame_bytes = arena_bytes, frame_bytes
        self._copier = load_copier()
        self._lock = threading.Lock()
        self._links: dict[str, Link] = {}
        self._closed = False

    def open_link(self, remote: Endpoint, address: str, *, timeout: float) -> Link:
        """Connects to a receiver, shakes hands and moves one block, within `timeout` seconds.

        An open, healthy link to the same incarnation is returned as it is. Raises TransferError: UNAVAILABLE when
        nobody answers, FAILED_PRECONDITION naming both incarnations or both layout hashes where they differ.
        """
        if remote.layout_hash != self.local.layout_hash:
            ours = f"{self.local} has {self.local.layout_hash}, {remote} has {remote.layout_hash}"
            raise TransferError("FAILED_PRECONDITION", f"layout_hash: {ours}")
        if healthy := self.link(remote.worker_id, remote.incarnation):
            return healthy
        deadline = self._clock.now() + timeout
        stream = self._dial(address, timeout)
        try:
            link = self._new_link(remote, stream)
        except OSError as error:
            stream.close()
            raise TransferError("UNAVAILABLE", f"no memory to send from: {error}") from None
        try:
            link.open(deadline - self._clock.now())
        except BaseException:
            link.close("the link did not open")
            raise
        return self._keep(link)

    def link(self, worker_id: str, incarnation: str) -> Link | None:
        """An open, healthy link to this incarnation."""
        with self._lock:
            link = self._links.get(worker_id)
        return link if link and link.remote.incarnation == incarnation and link.healthy else None

    def close_link(self, worker_id: str, incarnation: str) -> None:
        """Every transfer on it fails. No error where there is no such link."""
        with self._lock:
            link = self._links.get(worker_id)
            if link is None or link.remote.incarnation != incarnation:
                return
            del self._links[worker_id]
        link.close("closed by the sender")

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("the sender is closing")

    def _dial(self, address: str, timeout: float) -> Stream:
        try:
            return self._network.dial(address, timeout)
        except TimeoutError:
            raise TransferError("DEADLINE_EXCEEDED", f"no connection to {address} in {timeout} s") from None
        except OSError as error:
            raise TransferError("UNAVAILABLE", f"cannot connect to {address}: {error}") from None

    def _new_link(self, remote: Endpoint, stream: Stream) -> Link:
        shared = "shm" in self._transports
        arena = Arena.shared(self._arena_bytes) if shared else Arena.private(self._arena_bytes)
        protocol = SenderProtocol(
            self.local, remote, nonce=secrets.randbits(63), transports=self._transports, shm=arena.offer,
            now=self._clock.now(),
        )  # fmt: skip
        outlet = Outlet(protocol, arena, self._copier, self._frame_bytes, self._clock)
        return Link(remote, outlet, Channel(stream, outlet, self._clock, f"kv-to-{remote.worker_id}"), self._clock)

    def _keep(self, link: Link) -> Link:
        """Files a new link; one that another thread opened to the same incarnation meanwhile is used instead."""
        with self._lock:
            old = self._links.get(link.remote.worker_id)
            twin = old is not None and old.healthy and old.remote.incarnation == link.remote.incarnation
            if not twin and not self._closed:
                self._links[link.remote.worker_id] = link
        if self._closed:
            link.close("the sender is closing")
            raise TransferError("UNAVAILABLE", "the sender is closed")
        loser = link if twin else old
        if loser is not None:
            loser.close("another link took its place")
        return old if twin and old else link


def carried(transports: Sequence[str], network: Network) -> list[str]:
    """The transports that can run here, best first. Raises ValueError naming those the network cannot carry."""
    if not transports or set(transports) - network.carries:
        raise ValueError(f"transports: {list(transports)} given, this network carries {sorted(network.carries)}")
    return [name for name in transports if name != "shm" or sys.platform == "linux"]
