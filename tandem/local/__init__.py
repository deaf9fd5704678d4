"""A cluster on one machine: its processes, their Redis, and the cores they share. Needs the standard library only."""

from tandem.local.cores import Cores
from tandem.local.launcher import Launcher, LocalLauncher, Service, ServiceFailed, unless_failed, until_set
from tandem.local.ports import check_free, free_ports
from tandem.local.redis_server import RedisServer

__all__ = [
    "Cores", "Launcher", "LocalLauncher", "RedisServer", "Service", "ServiceFailed", "check_free",
    "free_ports", "unless_failed", "until_set",
]  # fmt: skip
