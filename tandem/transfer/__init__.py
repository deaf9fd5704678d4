"""KV blocks from a prefill worker to a decode worker, layer by layer, over shm, tcp or memory.

    Sender.open_link -> Link.begin -> Push.push ... -> Push.commit
    Receiver.expect  ->               frames land ...-> on_commit

Frames name logical blocks; only the receiver knows where they lie. Nothing becomes visible before all of it verified.
"""

from tandem.transfer.endpoint import Endpoint, TransferError
from tandem.transfer.link import Link, Push
from tandem.transfer.memory import MemoryNetwork
from tandem.transfer.receiver import Receiver
from tandem.transfer.sender import Sender
from tandem.transfer.stream import Network, SocketNetwork

__all__ = [
    "Endpoint",
    "Link",
    "MemoryNetwork",
    "Network",
    "Push",
    "Receiver",
    "Sender",
    "SocketNetwork",
    "TransferError",
]
