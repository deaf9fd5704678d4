"""KV blocks from a prefill worker to a decode worker, layer by layer, over shm, tcp or memory. Workers may enter.

    Sender.open_link -> Link.begin -> Push.push ... -> Push.commit
    Receiver.expect  ->               frames land ...-> on_commit

The parts of a transfer, each known to one side or one layer only:

    Landing   the receiver's record of an expected transfer: its blocks, deadline, fences
    Frame     the sender's unit of work: blocks of one layer that fit one slot, queued until the GPU has computed them
    Slot      a place in memory that both ends know and that holds a frame; each transport has its own kind of memory
    Payload   the protocol's description of a filled slot: its number, length and checksum, without memory or tensors
    Write     the receiver's unit of work: a payload to copy into a landing's blocks and to verify

Frame and Write are separate because only the sender knows a device's rows, and only the receiver knows where blocks
lie. Payload stands between Frame and Slot so that the protocol runs, and is tested, without memory.
A message between the two ends is a LinkMessage of the protocol.

Frames name logical blocks; only the receiver knows where they lie. No block becomes visible before all are verified.
"""

from tandem.transfer.protocol.endpoint import ALL_FAR, LinkPeer, LocalPeer, NearLayers, TransferError
from tandem.transfer.protocol.wire import Fetch, KVSource
from tandem.transfer.runtime.link import Link, Push
from tandem.transfer.runtime.link_runtime import LinkRuntime
from tandem.transfer.runtime.receiver import Receiver
from tandem.transfer.runtime.sender import Sender
from tandem.transfer.runtime.threads import Threads
from tandem.transfer.transports.base import Network
from tandem.transfer.transports.memory import MemoryNetwork
from tandem.transfer.transports.tcp import SocketNetwork

__all__ = [
    "ALL_FAR",
    "Fetch",
    "KVSource",
    "Link",
    "LinkPeer",
    "LinkRuntime",
    "LocalPeer",
    "MemoryNetwork",
    "NearLayers",
    "Network",
    "Push",
    "Receiver",
    "Sender",
    "SocketNetwork",
    "Threads",
    "TransferError",
]
