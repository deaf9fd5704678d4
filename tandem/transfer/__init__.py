"""KV blocks from a prefill worker to a decode worker, layer by layer, over shm, tcp or memory. Workers may enter.

    Sender.open_link -> Link.begin -> Push.push ... -> Push.commit
    Receiver.expect  ->               frames land ...-> on_commit

Things that one transfer is made of, each known to one side or floor of it:

    Landing   the receiver's record of an expected transfer: its blocks, deadline, fences
    Frame     the sender's unit of work: blocks of one layer that fit one slot, in line until the GPU has computed them
    Slot      a place in memory that both ends know, while a frame lies in it; transports differ in where that is
    Payload   the protocol's words for a filled slot: its number, length and checksum. It knows no memory and no tensor
    Write     the receiver's unit of work: a payload to copy into a landing's blocks and to verify

Frame and Write are the two ends' own halves, because only the sender knows rows of a device and only the receiver
where blocks lie. Payload stands between Frame and Slot so that the protocol runs, and is tested, without memory.
A message between them is a LinkMessage of the protos and needs no class of its own.

Frames name logical blocks; only the receiver knows where they lie. Nothing becomes visible before all of it verified.
"""

from tandem.transfer.protocol.endpoint import LinkPeer, LocalPeer, TransferError
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
    "Fetch",
    "KVSource",
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
