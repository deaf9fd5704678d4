"""Metrics of a kvstore for Prometheus; tandem/catalogue/metrics.py says what each series means."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from tandem.catalogue.metrics import KVSTORE
from tandem.registry import Swept


class KeeperMetrics:
    """The kvstore's metrics: exactly those of the catalogue."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.up = KVSTORE["tandem_registry_up"].gauge(self.registry)
        self.redis_deaths = KVSTORE["tandem_redis_deaths"].counter(self.registry)
        self._seconds = KVSTORE["tandem_sweep_seconds"].histogram(self.registry)
        self._ended = KVSTORE["tandem_registry_expired"].counter(self.registry)
        self._leases = KVSTORE["tandem_registry_workers"].gauge(self.registry)
        self._reservations = KVSTORE["tandem_registry_reservations"].gauge(self.registry)
        for kind in ("lease", "reservation", "block"):
            self._ended.labels(kind)

    def swept(self, swept: Swept, seconds: float) -> None:
        """Note a sweep and how long Redis took."""
        self.up.set(1)
        self._seconds.observe(seconds)
        self._leases.set(swept.live_leases)
        self._reservations.set(swept.live_reservations)
        for kind, count in (("lease", swept.leases), ("reservation", swept.reservations), ("block", swept.blocks)):
            self._ended.labels(kind).inc(count)
