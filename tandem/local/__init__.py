"""A cluster on one machine: its processes and their Redis. Commands and the kvstore may enter."""

from tandem.local.launcher import Launcher, LocalLauncher, ServiceFailed, unless_failed, until_set
from tandem.local.on_demand import OnDemand
from tandem.local.ports import check_free, free_ports
from tandem.local.redis_server import RedisServer
from tandem.local.wake_plan import OnDemandModel, WakeBudget, WakePlan

__all__ = [
    "Launcher", "LocalLauncher", "OnDemand", "OnDemandModel", "RedisServer", "ServiceFailed", "WakeBudget",
    "WakePlan", "check_free", "free_ports", "unless_failed",
    "until_set",
]  # fmt: skip
