"""The receiver's end of a link: it runs the protocol under a lock and copies payloads to the cache without it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence

from tandem.transfer.copy.rows import KVCache
from tandem.transfer.protocol.endpoint import FrameShape, LinkPeer, LocalPeer, TransferError
from tandem.transfer.protocol.receiver import ReceiverProtocol, Write
from tandem.transfer.protocol.wire import PAYLOAD_KINDS, Fetch, Hello, Kind, LinkMessage
from tandem.transfer.runtime.connection import POLL_SECONDS, burst
from tandem.transfer.runtime.shared_landings import SharedLandings
from tandem.transfer.transports.base import ReceiveSide, Transport, Unusable

OnFetch = Callable[[LinkPeer, Fetch], None]
# The largest frame that a sender may send, unless one block is larger; a tcp link may take as much memory.
MAX_FRAME_BYTES = 4 << 20


class ReceivingEnd:
    patience = 100e-6  # a chunk's next layer from a cache comes sooner; a wake-up costs half as much
    small = True

    def __init__(
        self, local: LocalPeer, landings: SharedLandings, cache: KVCache, *, transports: Sequence[Transport],
        nonce: int, now: Callable[[], float], on_fetch: OnFetch,
    ) -> None:  # fmt: skip
        self._on_fetch = on_fetch
        self._landings, self._cache, self._now = landings, cache, now
        self._transports = {transport.name: transport for transport in transports}
        self.max_frame_bytes = max(MAX_FRAME_BYTES, cache.block_bytes)
        shape = FrameShape(cache.num_layers, cache.block_bytes, self.max_frame_bytes)
        self._protocol = ReceiverProtocol(
            local, landings.table, shape, nonce=nonce, accept=self._accept, now=now()
        )  # fmt: skip
        self.liveness = self._protocol.liveness
        self._waiting: Write | None = None
        self._later: deque[LinkMessage] = deque()

    @property
    def greeted(self) -> bool:
        return self._protocol.hello is not None

    @property
    def under_way(self) -> bool:
        return self._protocol.side is None or self._protocol.num_bound > 0

    def pending(self) -> bool:
        return bool(self._protocol.outbox)

    def take(self) -> list[LinkMessage]:
        with self._landings.lock:
            return burst(self._protocol.outbox)

    def sent(self, messages: list[LinkMessage]) -> None:
        self._protocol.sent(messages)

    @property
    def poll_s(self) -> float:
        return POLL_SECONDS if self._waiting else math.inf

    def receive(self, message: LinkMessage) -> None:
        if message.kind in PAYLOAD_KINDS and self._protocol.side:
            self._protocol.side.announced(message)
        if self._waiting and message.kind not in (Kind.PING, Kind.PONG):
            message.body = bytes(message.body)  # keep the body: the reader reuses its memory
            self._later.append(message)
        else:
            self._take(message)

    def resume(self) -> bool:
        """Carries out the waiting write once its payload has arrived, and then the messages that came after it."""
        moved = False
        while self._waiting and self._arrived(self._waiting):
            write, self._waiting, moved = self._waiting, None, True
            self._write(write)
            while self._later and not self._waiting:
                self._take(self._later.popleft())
        return moved

    def tick(self) -> None:
        if self._protocol.side:
            self._protocol.side.check()
        with self._landings.lock:
            self._protocol.tick(self._now())
        self._landings.report(self._protocol.ended)

    def closed(self, error: TransferError) -> None:
        with self._landings.lock:
            self._protocol.fail(error)
        self._landings.report(self._protocol.ended)

    def _take(self, message: LinkMessage) -> None:
        with self._landings.lock:
            write = self._protocol.receive(message, self._now())
        if write and self._arrived(write):
            self._write(write)
            return
        self._waiting = write or self._waiting
        self._report()

    def _arrived(self, write: Write) -> bool:
        return self._protocol.side is not None and self._protocol.side.arrived(write.message)

    def _write(self, write: Write) -> None:
        """Copies and sums the payload, or only sums a probe's. The sum is taken of the copied bytes."""
        seen, side, message = -1, self._protocol.side, write.message
        assert side is not None
        with self._landings.lock:
            wanted = self._protocol.start(write)
        try:
            if wanted and write.landing:
                seen = side.scatter(message, self._cache.layers[message.layer], write.block_ids)
            elif wanted:
                seen = side.checksum(message)
        finally:
            if wanted:
                with self._landings.lock:
                    self._protocol.written(write, seen)
        self._report()

    def _report(self) -> None:
        if self._protocol.read and self._protocol.side:
            self._protocol.side.release(self._protocol.read)
            self._protocol.read.clear()
        self._landings.report(self._protocol.ended)
        while self._protocol.fetches and self._protocol.hello:
            self._on_fetch(self._protocol.hello.sender, self._protocol.fetches.popleft())

    def _accept(self, hello: Hello) -> tuple[ReceiveSide | None, dict[str, str]]:
        """Returns a side of the sender's first transport that works here, and why those before it do not."""
        refused: dict[str, str] = {}
        for name, offer in hello.offers.items():
            try:
                if name in self._transports:
                    return self._transports[name].accept(offer, self.max_frame_bytes), refused
                refused[name] = "the receiver does not use it"
            except Unusable as why:
                refused[name] = str(why)
        return None, refused
