"""The receiver's half of a link at work: it lands frames in the cache between two looks at the protocol."""

from __future__ import annotations

from collections.abc import Sequence

from tandem.clock import Clock
from tandem.transfer.copy.copier import Copier
from tandem.transfer.copy.rows import KVCache
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.receiver import Landing, ReceiverProtocol
from tandem.transfer.protocol.wire import INLINE, Hello, Message, checksum
from tandem.transfer.runtime.connection import burst
from tandem.transfer.runtime.inbox import Inbox
from tandem.transfer.transports.shm import Arena


class Inlet:
    patience = 100e-6  # the next layer of a chunk that is read from a cache comes sooner; a wake-up costs half as much

    def __init__(
        self, local: Endpoint, inbox: Inbox, cache: KVCache, copier: Copier, *, transports: Sequence[str],
        max_frame_bytes: int, nonce: int, clock: Clock,
    ) -> None:  # fmt: skip
        self._inbox, self._cache, self._copier = inbox, cache, copier
        self._clock, self._transports = clock, transports
        self._arena: Arena | None = None
        self.max_frame_bytes = max(max_frame_bytes, cache.block_bytes)
        self._protocol = ReceiverProtocol(
            local, inbox.table, num_layers=cache.num_layers, block_bytes=cache.block_bytes,
            max_frame_bytes=self.max_frame_bytes, nonce=nonce, choose=self._choose, now=clock.now(),
        )  # fmt: skip
        self.liveness = self._protocol.liveness

    @property
    def small(self) -> bool:
        return True

    def pending(self) -> bool:
        return bool(self._protocol.outbox)

    def take(self) -> list[Message]:
        with self._inbox.changed:
            return burst(self._protocol.outbox)

    def sent(self, messages: list[Message]) -> None:
        self._protocol.sent(messages, self._clock.now())

    def receive(self, message: Message) -> None:
        with self._inbox.changed:
            landing = self._protocol.receive(message, self._clock.now())
        if landing:
            self._land(landing)
        if self._protocol.read and self._arena:
            self._arena.post(self._protocol.read)
            self._protocol.read.clear()
        self._inbox.tell(self._protocol.endings)

    def tick(self) -> None:
        with self._inbox.changed:
            self._protocol.tick(self._clock.now())
        self._inbox.tell(self._protocol.endings)

    def closed(self, error: TransferError) -> None:
        with self._inbox.changed:
            self._protocol.fail(error)
        self._inbox.tell(self._protocol.endings)
        self._arena = None

    def _land(self, landing: Landing) -> None:
        """Copies and sums the payload, or a probe's only sums; what the sum vouches for is what was copied."""
        seen = -1
        try:
            payload = self._payload(landing.message)
            if landing.inbound:
                seen = self._copier.scatter(payload, self._cache.layers[landing.message.layer], landing.block_ids)
            else:
                seen = checksum(payload)
        finally:
            with self._inbox.changed:
                self._protocol.landed(landing, seen)
                self._inbox.changed.notify_all()

    def _payload(self, message: Message) -> memoryview:
        if message.offset == INLINE or self._arena is None:
            return memoryview(message.body)
        return self._arena.view[message.offset : message.offset + message.length]

    def _choose(self, hello: Hello) -> str:
        """The first transport of the sender's list that works here."""
        for name in hello.transports:
            if name == "shm" and hello.shm and name in self._transports:
                self._arena = Arena.attach(hello.shm)
            if name in self._transports and (name != "shm" or self._arena):
                return name
        return ""
