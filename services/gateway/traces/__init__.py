"""One request's trace, from the memory of this gateway and its workers: no collector is needed."""

from services.gateway.traces.recent import RecentRequests

__all__ = ["RecentRequests"]
