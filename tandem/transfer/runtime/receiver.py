"""A decode worker's side of KV transfer: it listens, lands frames in the cache, and tells how each transfer ended.

expect -> (BEGIN, FRAMEs, COMMIT come over some link) -> on_commit | on_abort, once;  cancel: neither
one thread accepts links and watches deadlines; each link has a thread, which lands its frames and runs callbacks
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Sequence

import torch

from tandem.clock import Clock, SystemClock
from tandem.transfer.copy.copier import load_copier
from tandem.transfer.copy.rows import KVCache
from tandem.transfer.protocol.endpoint import Endpoint, TransferError
from tandem.transfer.protocol.landings import Inbound
from tandem.transfer.protocol.wire import Failure, Kind, control
from tandem.transfer.runtime.connection import JOIN_SECONDS, Channel
from tandem.transfer.runtime.inbox import Inbox
from tandem.transfer.runtime.receiving_end import Inlet
from tandem.transfer.runtime.sender import carried
from tandem.transfer.transports.tcp import Network, SocketNetwork, Stream

TICK_SECONDS = 0.05

_log = logging.getLogger(__name__)


class Receiver:
    """Thread-safe. Callbacks run on its threads and must be short: a link reads nothing meanwhile and soon seems dead.

    kv_cache: one contiguous CPU tensor (num_blocks, 2, num_kv_heads, block_size, head_dim) a layer.
    max_frame_bytes: the largest frame a sender may send, and so the memory each tcp link may take.
    max_links: senders beyond these are refused.
    """

    def __init__(
        self, local: Endpoint, kv_cache: Sequence[torch.Tensor], *, host: str, port: int = 0,
        transports: Sequence[str] = ("shm", "tcp"), network: Network | None = None, clock: Clock | None = None,
        max_frame_bytes: int = 4 << 20, max_links: int = 256,
    ) -> None:  # fmt: skip
        self.local = local
        network = network or SocketNetwork()
        self._transports = carried(transports, network)
        self._cache, self._copier = KVCache(kv_cache), load_copier()
        self._clock: Clock = clock or SystemClock()
        self._max_frame_bytes, self._max_links = max_frame_bytes, max_links
        self._inbox = Inbox()
        self._channels: list[Channel] = []
        self._closing = threading.Event()
        self._listener = network.listen(host, port)
        self.address = self._listener.address
        self._thread = threading.Thread(target=self._serve, name=f"kv-into-{local.worker_id}", daemon=True)
        self._thread.start()

    @property
    def healthy(self) -> bool:
        """Whether it still takes links."""
        return self._thread.is_alive() and not self._closing.is_set()

    def expect(
        self, transfer_id: str, *, block_ids: Sequence[int], first_block: int, deadline: float,
        on_commit: Callable[[bytes, int], None], on_abort: Callable[[str, str], None], sender: str = "",
    ) -> None:  # fmt: skip
        """Lets one sender write logical blocks [first_block, len(block_ids)) of the sequence to the cache.

        block_ids: physical id of every logical prompt block. deadline: of this process's clock. sender: the one
        incarnation that may, whose lost link ends the transfer even before it has begun; empty for any.

        Exactly one of on_commit(payload, bytes received) and on_abort(code, reason) is called once, unless `cancel`
        comes first; the blocks may be given to another sequence as soon as either begins. Raises ValueError naming the
        bad argument.
        """
        ids = self._cache.ids(block_ids, first_block)
        with self._inbox.changed:
            if self._closing.is_set():
                raise TransferError("UNAVAILABLE", "the receiver is closed")
            self._inbox.table.expect(Inbound(transfer_id, ids, first_block, deadline, on_commit, on_abort, sender))

    def cancel(self, transfer_id: str) -> None:
        """Fence: when it returns no byte of this transfer will be written any more, and no callback will be called.

        Waits for a write or a callback in progress; hold no lock that a callback takes. An unknown id is no error.
        Raises TransferError(DEADLINE_EXCEEDED) when that takes more than 5 s: the blocks must not be used then.
        """
        self._inbox.cancel(transfer_id)

    def close(self) -> None:
        """Ends every link and transfer; on_abort tells of those still open. Joins all threads."""
        self._closing.set()
        if self._thread is not threading.current_thread():
            self._thread.join(JOIN_SECONDS)

    def _serve(self) -> None:
        try:
            while not self._closing.is_set():
                self._accept()
                with self._inbox.changed:
                    self._inbox.table.tick(self._clock.now())
                self._inbox.tell(self._inbox.table.endings)
        finally:
            self._shut()

    def _accept(self) -> None:
        try:
            stream = self._listener.accept(TICK_SECONDS)
            self._channels = [channel for channel in self._channels if channel.alive]
            if stream and len(self._channels) >= self._max_links:
                self._refuse(stream)
            elif stream:
                self._open(stream)
        except OSError as error:  # one connection's trouble, or no descriptors left: neither ends the others
            _log.warning("a KV link could not be accepted: %s", error)
            self._closing.wait(TICK_SECONDS)

    def _open(self, stream: Stream) -> None:
        inlet = Inlet(
            self.local, self._inbox, self._cache, self._copier, transports=self._transports, nonce=secrets.randbits(63),
            max_frame_bytes=self._max_frame_bytes, clock=self._clock,
        )  # fmt: skip
        channel = Channel(stream, inlet, self._clock, f"kv-link-{self.local.worker_id}")
        self._channels.append(channel)
        channel.start()

    def _refuse(self, stream: Stream) -> None:
        """Says why, if it goes without waiting, and hangs up."""
        text = f"{self.local} has {self._max_links} links, as many as it takes"
        _log.warning("a KV link was refused: %s", text)
        refusal = control(Kind.REFUSE, Failure(code="RESOURCE_EXHAUSTED", message=text).packed())
        try:
            stream.send([refusal.header(), refusal.body])
        finally:
            stream.close()

    def _shut(self) -> None:
        self._closing.set()
        self._listener.close()
        error = TransferError("UNAVAILABLE", f"{self.local} is closing")
        with self._inbox.changed:
            for inbound in list(self._inbox.table.live.values()):
                self._inbox.table.end(inbound, error)
        for channel in self._channels:
            channel.close(error)
        self._inbox.tell(self._inbox.table.endings)
