"""Tiers below a worker's KV cache, which keep blocks that it evicts. Workers may enter.

a block's bytes, by its name ──> HostBlocks: memory of this process, until it ends
                             ──> BlockFiles: one checked file each, in a folder of one process ──> the next start
                             KeptBlocks: whose they are, and which go; Worth: which of them first
                       KVTier  a tier on a thread of its own: bounded waits, and a pause after a failure
"""

from tandem.tiers.block_files import BlockFiles
from tandem.tiers.host_blocks import HostBlocks
from tandem.tiers.kept import KeepRules, owner_of
from tandem.tiers.tier import BlockStore, KVTier, OwnedBlock, TierHolds, TierStats
from tandem.tiers.worth import Worth

__all__ = [
    "BlockFiles",
    "BlockStore",
    "HostBlocks",
    "KVTier",
    "KeepRules",
    "OwnedBlock",
    "TierHolds",
    "TierStats",
    "Worth",
    "owner_of",
]
