"""Look-up of KV blocks at gateways: a replica of all prefix caches, and a prompt's prefix. The registry may enter."""

from tandem.registry.blocks.feed import BlockFeed
from tandem.registry.blocks.prefix import PromptPrefix
from tandem.registry.blocks.replica import BlockReplica

__all__ = ["BlockFeed", "BlockReplica", "PromptPrefix"]
