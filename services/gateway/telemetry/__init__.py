"""Metrics, records and recent traces of requests. All rooms of the gateway may enter."""

from services.gateway.telemetry.metrics import NUM_GAPS, PATHS, FrontMetrics, Meter, Metrics, Totals
from services.gateway.telemetry.recent import RecentRequests
from services.gateway.telemetry.records import Ending, Fields, RequestRecords, record_refused, rounded
from services.gateway.telemetry.tenants import RequestEnd

__all__ = [
    "NUM_GAPS",
    "PATHS",
    "Ending",
    "Fields",
    "FrontMetrics",
    "Meter",
    "Metrics",
    "RecentRequests",
    "RequestEnd",
    "RequestRecords",
    "Totals",
    "record_refused",
    "rounded",
]
