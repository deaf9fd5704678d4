"""A cluster on one machine: its processes, their Redis, and the cores they share. Needs the standard library only."""

from tandem.local.cores import Cores
from tandem.local.launcher import Cluster, Process, ProcessFailed
from tandem.local.redis_server import RedisServer

__all__ = ["Cluster", "Cores", "Process", "ProcessFailed", "RedisServer"]
