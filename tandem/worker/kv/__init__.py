"""A worker's KV beyond its engine: links to its peers, fetched blocks, tiers, published blocks. Workers may enter."""

from tandem.worker.kv.cache_service import CacheService
from tandem.worker.kv.fetching import Holder, KVFetcher, LinkTo
from tandem.worker.kv.link_keeper import LinkState, fell_back
from tandem.worker.kv.links import KVLinks
from tandem.worker.kv.publisher import BlockPublisher
from tandem.worker.kv.tiers import KVTiers

__all__ = [
    "BlockPublisher",
    "CacheService",
    "Holder",
    "KVFetcher",
    "KVLinks",
    "KVTiers",
    "LinkState",
    "LinkTo",
    "fell_back",
]
