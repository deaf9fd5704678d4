"""Places below a worker's KV cache where blocks outlive it. Workers may enter.

a block's bytes, by its name ──> HostBlocks: memory of this process, while it lives
                             ──> BlockFiles: one checked file each, in a folder of one process ──> the next start
                             Worth: which of them goes first where they are full
                       KVTier  one of them on a thread of its own: bounded waits, and a pause where it fails
"""

from tandem.tiers.block_files import BlockFiles
from tandem.tiers.host_blocks import HostBlocks
from tandem.tiers.tier import BlockStore, KVTier, TierStats
from tandem.tiers.worth import Worth

__all__ = ["BlockFiles", "BlockStore", "HostBlocks", "KVTier", "TierStats", "Worth"]
