"""A prefill worker's side of KV transfer: one Link to each decode worker's incarnation.

open_link   dial -> HELLO/WELCOME -> one probe block there and back -> its future resolves
afterwards  the link lives until close_link, or until its peer dies or falls silent; `link` no longer shows it then
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Container, Sequence
from concurrent.futures import Future
from functools import partial

from tandem.process import IntegrityReport
from tandem.transfer.protocol.endpoint import LinkPeer, LocalPeer, TransferError
from tandem.transfer.protocol.sender import SenderProtocol
from tandem.transfer.runtime.connection import Connection
from tandem.transfer.runtime.link import Link
from tandem.transfer.runtime.link_runtime import LinkRuntime
from tandem.transfer.runtime.sending_end import SendingEnd
from tandem.transfer.transports import make_transports
from tandem.transfer.transports.base import ByteStream, Network, SendSide, Unusable


class Sender:
    """Opens links and owns them. Thread-safe. `transports`: best first. arena_bytes: each link's memory for frames.

    Once that memory is full, pushes wait. Small memory is better: the receiver can then read from the CPU's caches.
    """

    def __init__(
        self, local: LocalPeer, *, transports: Sequence[str] = ("shm", "tcp"), runtime: LinkRuntime | None = None,
        arena_bytes: int = 8 << 20, frame_bytes: int = 1 << 20,
    ) -> None:  # fmt: skip
        self._local, self._runtime = local, runtime or LinkRuntime()
        self._transports = make_transports(transports, self._runtime.network)
        self._arena_bytes, self._frame_bytes = arena_bytes, frame_bytes
        self._lock = threading.Lock()
        self._links: dict[tuple[str, str], Link] = {}
        self._closed = False

    def open_link(self, remote: LinkPeer, address: str, *, timeout_s: float) -> Future[Link]:
        """Connects to a receiver, shakes hands and moves one block, within `timeout_s`.

        Returns an existing healthy or opening link to the same incarnation. The call raises, or its future fails with,
        TransferError: UNAVAILABLE if no worker answers, FAILED_PRECONDITION naming both incarnations or both layout
        hashes if these differ.
        """
        local = self._local.identity
        if remote.layout_hash != local.layout_hash:
            ours = f"{local} has {local.layout_hash}, {remote} has {remote.layout_hash}"
            raise TransferError("FAILED_PRECONDITION", f"layout_hash: {ours}")
        key = remote.worker_id, remote.incarnation
        with self._lock:
            if self._closed:
                raise TransferError("UNAVAILABLE", "the sender is closed")
            link = self._links.get(key)
            if link and (link.healthy or not link.opened.done()):
                return link.opened
            self._links = {other: link for other, link in self._links.items() if link.error is None}
            link = self._links[key] = self._new_link(remote, address, timeout_s)
        link.opened.add_done_callback(lambda _opened: self._replace_older(link))
        link.start()
        return link.opened

    def link(self, worker_id: str, incarnation: str) -> Link | None:
        """Returns the open, healthy link to this incarnation, if any."""
        with self._lock:
            link = self._links.get((worker_id, incarnation))
        return link if link and link.healthy else None

    def close_link(self, worker_id: str, incarnation: str) -> None:
        """Closes the link to this incarnation, if there is one; its transfers fail soon."""
        with self._lock:
            link = self._links.pop((worker_id, incarnation), None)
        if link:
            link.close("closed by the sender")

    def check_integrity(self, accounted: Container[str]) -> IntegrityReport:
        """Reports what links hold and what is wrong. `accounted`: the transfers for which a request pushes."""
        with self._lock:
            links = list(self._links.values())
        held, violations = Counter[str](transfers=0, slots=0, kv_links=len(links)), tuple[str, ...]()
        for link in links:
            report = link.check_integrity(accounted)
            held.update(report.held)
            violations += report.violations
        return IntegrityReport(held, violations)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            links, self._links = list(self._links.values()), {}
        for link in links:
            link.close("the sender is closing")
        for link in links:
            link.join()

    def _new_link(self, remote: LinkPeer, address: str, timeout_s: float) -> Link:
        sides, unusable = self._sides()
        offers, driver = {name: side.offer for name, side in sides.items()}, self._runtime.driver
        nonce = self._runtime.new_nonce()
        protocol = SenderProtocol(self._local, remote, nonce=nonce, offers=offers, now=driver.now())
        end = SendingEnd(protocol, sides, frame_bytes=self._frame_bytes, driver=driver, timeout_s=timeout_s)
        dial = partial(_dialled, self._runtime.network, address, timeout_s)
        return Link(remote, end, Connection(dial, end, driver, f"kv-to-{remote.worker_id}"), unusable)

    def _sides(self) -> tuple[dict[str, SendSide], dict[str, str]]:
        """Returns the transports' sides for a new link, and why other transports are not offered."""
        sides, unusable = dict[str, SendSide](), dict[str, str]()
        for transport in self._transports:
            try:
                sides[transport.name] = transport.offer(self._arena_bytes)
            except Unusable as why:
                unusable[transport.name] = str(why)
        if not sides:
            raise TransferError("UNAVAILABLE", f"no transport can be used here: {unusable}")
        return sides, unusable

    def _replace_older(self, link: Link) -> None:
        """Closes links to dead incarnations of the worker if `link` opened; forgets `link` if it did not open."""
        key = link.remote.worker_id, link.remote.incarnation
        with self._lock:
            if link.opened.exception():
                dead = [key] if self._links.get(key) is link else []
            else:
                dead = [other for other in self._links if other[0] == key[0] and other != key]
            links = [self._links.pop(other) for other in dead]
        for old in links:
            old.close("another incarnation took its place")


def _dialled(network: Network, address: str, timeout_s: float) -> ByteStream:
    try:
        return network.dial(address, timeout_s)
    except TimeoutError:
        raise TransferError("UNAVAILABLE", f"no connection to {address} in {timeout_s} s") from None
    except OSError as error:
        raise TransferError("UNAVAILABLE", f"cannot connect to {address}: {error}") from None
