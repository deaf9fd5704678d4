"""KV blocks from a prefill worker to a decode worker, layer by layer, over shm, tcp or memory.

    Sender.open_link -> Link.begin -> Push.push ... -> Push.commit
    Receiver.expect  ->               frames land ...-> on_commit

Frames name logical blocks; only the receiver knows where they lie. Nothing becomes visible before all of it verified.
"""

from tandem.transfer.protocol.endpoint import LinkPeer, LocalPeer, TransferError
from tandem.transfer.runtime.link import Link, Push
from tandem.transfer.runtime.link_runtime import LinkRuntime
from tandem.transfer.runtime.receiver import Receiver
from tandem.transfer.runtime.sender import Sender
from tandem.transfer.runtime.threads import Threads
from tandem.transfer.transports.base import Network
from tandem.transfer.transports.memory import MemoryNetwork
from tandem.transfer.transports.tcp import SocketNetwork

__all__ = [
    "Link",
    "LinkPeer",
    "LinkRuntime",
    "LocalPeer",
    "MemoryNetwork",
    "Network",
    "Push",
    "Receiver",
    "Sender",
    "SocketNetwork",
    "Threads",
    "TransferError",
]
