"""A cluster on one machine: its processes, their Redis, word of their deaths. Commands, workers, kvstore may enter."""

from tandem.local.deaths import end_lease_of_dead, report_death, report_page
from tandem.local.launcher import Launcher, LocalLauncher, Service, ServiceFailed, unless_failed, until_set
from tandem.local.ports import check_free, free_ports
from tandem.local.redis_server import RedisServer

__all__ = [
    "Launcher", "LocalLauncher", "RedisServer", "Service", "ServiceFailed", "check_free", "end_lease_of_dead",
    "free_ports", "report_death", "report_page", "unless_failed", "until_set",
]  # fmt: skip
