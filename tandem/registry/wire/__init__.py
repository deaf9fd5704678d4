"""Calls to Redis: addresses, connections, scripts, batches, unreadable rows. The registry may enter."""

from tandem.registry.wire.address import RedisAddress
from tandem.registry.wire.batching import CallBatcher
from tandem.registry.wire.connection import Changes, Entry, RedisConnection, RegistryConnection
from tandem.registry.wire.late_releases import LateReleases
from tandem.registry.wire.master import Master
from tandem.registry.wire.memory import RedisMemory
from tandem.registry.wire.milliseconds import milliseconds
from tandem.registry.wire.resp import Argument, ReplyError, Wire
from tandem.registry.wire.scripts import FORMAT
from tandem.registry.wire.unreadable import UnreadableRows

__all__ = [
    "FORMAT",
    "Argument",
    "CallBatcher",
    "Changes",
    "Entry",
    "LateReleases",
    "Master",
    "RedisAddress",
    "RedisConnection",
    "RedisMemory",
    "RegistryConnection",
    "ReplyError",
    "UnreadableRows",
    "Wire",
    "milliseconds",
]
