"""The receiver's end of a link: between two looks at the protocol it copies payloads to the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.transfer.copy.rows import KVCache
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.receiver import ReceiverProtocol, Write
from tandem.transfer.protocol.wire import Hello, Message
from tandem.transfer.runtime.connection import burst
from tandem.transfer.runtime.shared_landings import SharedLandings
from tandem.transfer.transports.base import ReceiveSide, Transport, Unusable


class ReceivingEnd:
    patience = 100e-6  # the next layer of a chunk that is read from a cache comes sooner; a wake-up costs half as much
    small = True

    def __init__(
        self, local: Endpoint, landings: SharedLandings, cache: KVCache, *, transports: Sequence[Transport],
        max_frame_bytes: int, nonce: int, now: Callable[[], float],
    ) -> None:  # fmt: skip
        self._landings, self._cache, self._now = landings, cache, now
        self._transports = {transport.name: transport for transport in transports}
        self.max_frame_bytes = max(max_frame_bytes, cache.block_bytes)
        self._protocol = ReceiverProtocol(
            local, landings.table, num_layers=cache.num_layers, block_bytes=cache.block_bytes,
            max_frame_bytes=self.max_frame_bytes, nonce=nonce, accept=self._accept, now=now(),
        )  # fmt: skip
        self.liveness = self._protocol.liveness

    def pending(self) -> bool:
        return bool(self._protocol.outbox)

    def take(self) -> list[Message]:
        with self._landings.lock:
            return burst(self._protocol.outbox)

    def sent(self, messages: list[Message]) -> None:
        self._protocol.sent(messages, self._now())

    def receive(self, message: Message) -> None:
        with self._landings.lock:
            write = self._protocol.receive(message, self._now())
        if write:
            self._write(write)
        if self._protocol.read and self._protocol.side:
            self._protocol.side.release(self._protocol.read)
            self._protocol.read.clear()
        self._landings.report(self._protocol.ended)

    def tick(self) -> None:
        with self._landings.lock:
            self._protocol.tick(self._now())
        self._landings.report(self._protocol.ended)

    def closed(self, error: TransferError) -> None:
        with self._landings.lock:
            self._protocol.fail(error)
        self._landings.report(self._protocol.ended)

    def _write(self, write: Write) -> None:
        """Copies and sums the payload, or only sums a probe's; the sum is of what was copied."""
        seen, side, message = -1, self._protocol.side, write.message
        assert side is not None
        try:
            if write.landing:
                seen = side.scatter(message, self._cache.layers[message.layer], write.block_ids)
            else:
                seen = side.checksum(message)
        finally:
            with self._landings.lock:
                self._protocol.written(write, seen)

    def _accept(self, hello: Hello) -> tuple[ReceiveSide | None, dict[str, str]]:
        """The first of the sender's transports that works here, and why those before it do not."""
        refused: dict[str, str] = {}
        for name, offer in hello.offers.items():
            try:
                if name in self._transports:
                    return self._transports[name].accept(offer), refused
                refused[name] = "the receiver does not use it"
            except Unusable as why:
                refused[name] = str(why)
        return None, refused
