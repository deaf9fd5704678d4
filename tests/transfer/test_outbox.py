"""Two threads use a link's outbox at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tandem.transfer import LocalPeer
from tandem.transfer.protocol.sender import SenderProtocol
from tandem.transfer.protocol.wire import LinkMessage
from tandem.transfer.runtime.sending_end import SendingEnd
from tandem.transfer.runtime.threads import Threads
from tests.transfer.pair import DECODE, PREFILL


class WatchedOutbox(deque[LinkMessage]):
    """Calls `looked` once, when somebody has seen that there is something in it."""

    looked: Callable[[], None] | None = None

    def __bool__(self) -> bool:
        found = len(self) > 0
        if found and (looked := self.looked):
            self.looked = None
            looked()
        return found


def test_a_message_is_looked_at_while_another_thread_takes_it() -> None:
    """The engine's thread and the link's both write: neither may find the outbox empty that it has just seen full."""
    for look in (SendingEnd.pending, SendingEnd.poll_s.fget):  # type: ignore[attr-defined]
        protocol = SenderProtocol(LocalPeer(PREFILL), DECODE, nonce=1, offers={}, now=0.0)
        end = SendingEnd(protocol, {}, frame_bytes=1024, driver=Threads(), timeout_s=1.0)
        taking = threading.Thread(target=end.take)

        def take(taking: threading.Thread = taking) -> None:
            taking.start()
            taking.join(0.2)

        outbox = protocol.outbox = WatchedOutbox(protocol.outbox)
        outbox.looked = take
        look(end)
        taking.join()
        assert not outbox
