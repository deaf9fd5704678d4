"""A cluster on one machine: its processes, their Redis, word of their deaths. Commands, workers, kvstore may enter."""

from tandem.local.deaths import end_lease_of_dead, report_death, report_page
from tandem.local.launcher import Launcher, LocalLauncher, Service, ServiceFailed, unless_failed, until_set
from tandem.local.on_demand import OnDemand
from tandem.local.ports import check_free, free_ports
from tandem.local.redis_server import RedisServer
from tandem.local.wake_plan import OnDemandModel, WakeBudget, WakePlan

__all__ = [
    "Launcher", "LocalLauncher", "OnDemand", "OnDemandModel", "RedisServer", "Service", "ServiceFailed", "WakeBudget",
    "WakePlan", "check_free", "end_lease_of_dead", "free_ports", "report_death", "report_page", "unless_failed",
    "until_set",
]  # fmt: skip
