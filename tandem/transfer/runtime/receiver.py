"""A decode worker's side of KV transfer: it listens, writes frames to the cache, and reports how each transfer ended.

expect -> (BEGIN, FRAMEs, COMMIT come over some link) -> on_commit | on_abort, once;  cancel: neither
one thread accepts links and watches deadlines; each link has a thread, which writes its frames and runs callbacks
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future

import torch

from tandem.liveness import MOST_S
from tandem.process import IntegrityReport
from tandem.transfer.copy.rows import KVCache
from tandem.transfer.protocol.endpoint import LocalPeer, TransferError
from tandem.transfer.protocol.landings import Landing
from tandem.transfer.protocol.wire import Failure, Kind, control
from tandem.transfer.runtime.connection import Connection, Watched
from tandem.transfer.runtime.link_runtime import LinkRuntime
from tandem.transfer.runtime.receiving_end import OnFetch, ReceivingEnd
from tandem.transfer.runtime.shared_landings import SharedLandings
from tandem.transfer.transports import make_transports
from tandem.transfer.transports.base import ByteStream

# Seconds between two checks of deadlines: while transfers are expected, and while none is.
TICK_SECONDS, QUIET_SECONDS = 0.05, 0.25
# The seconds within which a sender must begin. It begins before it computes, on a link that it opens within 1.5 s; a
# starved sender takes longer. If the gateway loses that worker, it aborts sooner.
BEGIN_SECONDS = MOST_S

_log = logging.getLogger(__name__)


class Receiver:
    """Receives transfers. Thread-safe. Callbacks run on its threads and must be short: a link does not read meanwhile.

    kv_cache: one contiguous tensor (num_blocks, 2, num_kv_heads, block_size, head_dim) a layer.
    max_links: further senders are refused. on_fetch: called when a sender asks for cached blocks.
    """

    def __init__(
        self, local: LocalPeer, kv_cache: Sequence[torch.Tensor], *, host: str, port: int = 0,
        transports: Sequence[str] = ("shm", "tcp"), runtime: LinkRuntime | None = None, max_links: int = 256,
    ) -> None:  # fmt: skip
        self.identity, self._local = local.identity, local
        runtime = runtime or LinkRuntime()
        self._transports = make_transports(transports, runtime.network)
        self._cache = KVCache(kv_cache, local.near)
        self._driver, self._new_nonce, self._max_links = runtime.driver, runtime.new_nonce, max_links
        self._landings = SharedLandings()
        self.on_fetch: OnFetch = lambda peer, fetch: None
        self._connections: dict[Connection, ReceivingEnd] = {}  # connections, the oldest first
        self._closing = False
        self._listener = runtime.network.listen(host, port)
        self.address = self._listener.address
        self.name = f"kv-into-{self.identity.worker_id}"
        self._running = self._driver.start(self)

    @property
    def healthy(self) -> bool:
        """True while the receiver accepts links."""
        return self._running.alive and not self._closing

    def expect(
        self, transfer_id: str, *, block_ids: Sequence[int], first_block: int, timeout_s: float,
        on_commit: Callable[[bytes, int], None], on_abort: Callable[[str, str], None], sender: str = "",
        may_be_less: bool = False, places: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Lets one sender write logical blocks [first_block, len(block_ids)) of the sequence to the cache.

        block_ids: physical id of every logical prompt block. places: its place in layers with a window. timeout_s: the
        time until the commit. sender: the only incarnation that may send, which must begin within BEGIN_SECONDS and
        whose lost link ends the transfer; empty: any. may_be_less: the sender may send only the first of these blocks;
        the bytes received show how many.

        Exactly one of on_commit(payload, bytes received) and on_abort(code, reason) is called once, unless `cancel`
        comes first; the blocks may be given to another sequence as soon as either begins. Raises ValueError naming a
        bad argument, TransferError if the receiver is closed.
        """
        ids = self._cache.ids(block_ids, first_block)
        now = self._driver.now()
        landing = Landing(
            transfer_id, ids, first_block, now + timeout_s, on_commit, on_abort, sender,
            begin_by=now + BEGIN_SECONDS if sender else math.inf, may_be_less=may_be_less,
            places=self._cache.places(places, first_block, len(ids)),
        )  # fmt: skip
        with self._landings.lock:
            if self._closing:
                raise TransferError("UNAVAILABLE", "the receiver is closed")
            self._landings.table.expect(landing)

    def cancel(self, transfer_id: str) -> Future[None]:
        """Cancels a transfer and returns immediately; from now on no write and no callback of the transfer begins.

        The future resolves, usually immediately, once no write or callback is under way. Only then may the blocks be
        used again, so free them in a callback of the future. The future never fails. An unknown id is no error.
        """
        return self._landings.cancel(transfer_id)

    def check_integrity(self, accounted: Container[str]) -> IntegrityReport:
        """Reports links and transfers held and what is wrong. `accounted`: the transfers for which a sequence waits."""
        with self._landings.lock:
            table = self._landings.table
            held = {"transfers": len(table.live) + len(table.ending), "kv_links": self._num_links()}
            return IntegrityReport(held, tuple(table.violations(accounted, self._driver.now())))

    def close(self) -> None:
        """Ends every link and transfer, calling on_abort of open transfers; waits for their end for a bounded time."""
        self._closing = True
        self._running.join()

    # --- the task that accepts links and watches deadlines ---

    def step(self) -> float | None:
        if self._closing:
            self._shut()
            return None
        accepted = self._accept()
        with self._landings.lock:
            self._landings.table.tick(self._driver.now())
            tick_s = TICK_SECONDS if self._landings.table.live else QUIET_SECONDS
        self._landings.report(self._landings.table.ended)
        return 0.0 if accepted else tick_s

    def idle(self) -> bool:
        return True

    def wait(self, timeout: float) -> None:
        self._listener.wait(timeout)

    def watch(self, ready: Callable[[], None]) -> None:
        if not isinstance(self._listener, Watched):
            raise TypeError(f"an event loop cannot watch {self._listener!r}: use a MemoryNetwork")
        self._listener.watch(ready)

    def _accept(self) -> bool:
        try:
            stream = self._listener.accept()
            self._connections = {one: end for one, end in self._connections.items() if one.alive}
            if stream and len(self._connections) >= self._max_links and not self._make_room():
                self._refuse(stream)
            elif stream:
                self._open(stream)
            return stream is not None
        except OSError as error:  # a failed connection, or no free descriptors: other links go on
            _log.warning("a KV link could not be accepted: %s", error)
            return False

    def _open(self, stream: ByteStream) -> None:
        end = ReceivingEnd(
            self._local, self._landings, self._cache, transports=self._transports, nonce=self._new_nonce(),
            now=self._driver.now, on_fetch=lambda peer, fetch: self.on_fetch(peer, fetch),
        )  # fmt: skip
        connection = Connection(lambda: stream, end, self._driver, f"kv-link-{self.identity.worker_id}")
        self._connections[connection] = end
        connection.start()

    def _num_links(self) -> int:
        return sum(connection.alive for connection in list(self._connections))

    def _make_room(self) -> bool:
        """Ends the oldest link that has not said HELLO, so that strangers cannot keep workers out; False if none is."""
        silent = next((connection for connection, end in self._connections.items() if not end.greeted), None)
        if silent:
            silent.close(TransferError("RESOURCE_EXHAUSTED", f"{self.identity} needs the link for another"))
            del self._connections[silent]
        return silent is not None

    def _refuse(self, stream: ByteStream) -> None:
        """Sends a REFUSE with the reason, if that needs no waiting, and closes the stream."""
        text = f"{self.identity} has {self._max_links} links, as many as it takes"
        _log.warning("a KV link was refused: %s", text)
        refusal = control(Kind.REFUSE, Failure(code="RESOURCE_EXHAUSTED", message=text).packed())
        try:
            stream.send([refusal.header(), refusal.body])
        finally:
            stream.close()

    def _shut(self) -> None:
        self._listener.close()
        error = TransferError("UNAVAILABLE", f"{self.identity} is closing")
        with self._landings.lock:
            for landing in list(self._landings.table.live.values()):
                self._landings.table.end(landing, error)
        for connection in self._connections:
            connection.close(error)
        for connection in self._connections:
            connection.join()
        self._landings.report(self._landings.table.ended)
