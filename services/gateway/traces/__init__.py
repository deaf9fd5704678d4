"""One request's trace, from the memory of this gateway and its workers, without a collector. The gateway may enter."""

from services.gateway.traces.recent import RecentRequests

__all__ = ["RecentRequests"]
