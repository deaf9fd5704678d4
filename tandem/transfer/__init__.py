"""KV blocks from a prefill worker to a decode worker, layer by layer, over shm, tcp or memory.

    Sender.open_link -> Link.begin -> Push.push ... -> Push.commit
    Receiver.expect  ->               frames land ...-> on_commit

Frames name logical blocks; only the receiver knows where they lie. Nothing becomes visible before all of it verified.
"""

from tandem.transfer.protocol.endpoint import LinkPeer, TransferError
from tandem.transfer.runtime.driver import Driver
from tandem.transfer.runtime.link import Link, Push
from tandem.transfer.runtime.receiver import Receiver
from tandem.transfer.runtime.sender import Sender, new_nonce
from tandem.transfer.runtime.threads import Threads
from tandem.transfer.transports.base import Network
from tandem.transfer.transports.memory import MemoryNetwork
from tandem.transfer.transports.tcp import SocketNetwork

__all__ = [
    "Driver",
    "Link",
    "LinkPeer",
    "MemoryNetwork",
    "Network",
    "Push",
    "Receiver",
    "Sender",
    "SocketNetwork",
    "Threads",
    "TransferError",
    "new_nonce",
]
