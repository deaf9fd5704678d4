"""The cluster's members, their load and the routes of requests, in Redis. Anyone but the engine may enter."""

from tandem.registry.answers import Demand, Demands, GatewayAddress, Snapshot, Swept
from tandem.registry.blocks import BlockReplica, PromptPrefix
from tandem.registry.deaths import end_lease_of_dead, report_death, report_page
from tandem.registry.errors import (
    IncompatibleLayout,
    NoProvenLink,
    NoWorkers,
    RegistryError,
    RegistryUnavailable,
    RequestTooLarge,
    StaleIncarnation,
    WorkerIdTaken,
)
from tandem.registry.limits import Limits, Taken, TenantLimits, Usage
from tandem.registry.location import Distance, Location
from tandem.registry.named import Named, NamedList
from tandem.registry.on_demand import ModelStatus, ModelUse, OnDemandModels, Wakefulness
from tandem.registry.registry import Registry
from tandem.registry.releases import THIS_RELEASE, OtherRelease
from tandem.registry.reservations import PrefillPolicy, Reservations
from tandem.registry.view import ClusterView
from tandem.registry.wire import Argument, Master, RedisAddress, ReplyError, Wire
from tandem.registry.worker import Fallback, LiveWorker, ModelKey, Place, Role, Route, WorkerInfo, WorkerLoad
from tandem.registry.worker_leases import WorkerLeases

__all__ = [
    "THIS_RELEASE",
    "Argument",
    "BlockReplica",
    "ClusterView",
    "Demand",
    "Demands",
    "Distance",
    "Fallback",
    "GatewayAddress",
    "IncompatibleLayout",
    "Limits",
    "LiveWorker",
    "Location",
    "Master",
    "ModelKey",
    "ModelStatus",
    "ModelUse",
    "Named",
    "NamedList",
    "NoProvenLink",
    "NoWorkers",
    "OnDemandModels",
    "OtherRelease",
    "Place",
    "PrefillPolicy",
    "PromptPrefix",
    "RedisAddress",
    "Registry",
    "RegistryError",
    "RegistryUnavailable",
    "ReplyError",
    "RequestTooLarge",
    "Reservations",
    "Role",
    "Route",
    "Snapshot",
    "StaleIncarnation",
    "Swept",
    "Taken",
    "TenantLimits",
    "Usage",
    "Wakefulness",
    "Wire",
    "WorkerIdTaken",
    "WorkerInfo",
    "WorkerLeases",
    "WorkerLoad",
    "end_lease_of_dead",
    "report_death",
    "report_page",
]
