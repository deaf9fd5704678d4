"""Metrics of the KV that a prefill worker sends; tandem/metrics.py says what each series means.

Called by links' threads as well as by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from tandem.metrics import LINKS, TRANSFERS, CappedValues

MAX_PEERS = 256


class TransferMetrics:
    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        """`labels`: values of WORKER_LABELS."""
        self._registry, self._labels = registry, tuple(labels)
        self._peer = CappedValues(MAX_PEERS)
        self._seconds = TRANSFERS["tandem_transfer_seconds"].histogram(registry)
        self._exposed = TRANSFERS["tandem_transfer_exposed_seconds"].histogram(registry)
        self._bytes = TRANSFERS["tandem_transfer_bytes"].counter(registry)
        self._failures = TRANSFERS["tandem_transfer_failures"].counter(registry)

    def landed(self, peer: str, transport: str, num_bytes: int, seconds: float, exposed_s: float) -> None:
        """The peer has verified all of a transfer's frames."""
        pair = *self._labels, self._peer(peer), transport
        self._seconds.labels(*pair).observe(seconds)
        self._bytes.labels(*pair).inc(num_bytes)
        self._exposed.labels(*self._labels, transport).observe(exposed_s)

    def failed(self, peer: str, transport: str, code: str) -> None:
        self._failures.labels(*self._labels, self._peer(peer), transport, code).inc()

    def watch_links(self, links: Callable[[], Mapping[str, bool]]) -> None:
        """`links`: decode workers by id, and if there is a healthy link to each."""
        self._registry.register(_LinkCollector(links, self._labels))


class _LinkCollector(Collector):
    def __init__(self, links: Callable[[], Mapping[str, bool]], labels: tuple[str, ...]) -> None:
        self._links, self._labels = links, labels

    def collect(self) -> Iterator[Metric]:
        family = LINKS["tandem_link_up"].family()
        for peer, healthy in sorted(self._links().items())[:MAX_PEERS]:
            family.add_metric((*self._labels, peer), healthy)
        yield family
