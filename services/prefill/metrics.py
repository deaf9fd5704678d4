"""Metrics of the KV that a prefill worker sends; tandem/catalogue/metrics.py describes each series.

Links' threads and the event loop call it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector

from tandem.catalogue.metrics import LINKS, TRANSFERS, CappedValues
from tandem.worker import LinkState, fell_back

MAX_PEERS = 256


@dataclass(frozen=True, slots=True)
class Moved:
    """The transfers to one decode worker. `busy_s`: seconds in pushes, and from commits until decode could start."""

    num_bytes: int = 0
    transfers: int = 0
    busy_s: float = 0.0
    failures: int = 0

    def __add__(self, other: Moved) -> Moved:
        failures = self.failures + other.failures
        transfers, busy_s = self.transfers + other.transfers, self.busy_s + other.busy_s
        return Moved(self.num_bytes + other.num_bytes, transfers, busy_s, failures)


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of one transfer until decode could start: `whole` from its first push, `exposed` from its commit."""

    whole: float
    exposed: float
    pushed: float  # seconds spent in pushes


class TransferMetrics:
    def __init__(self, registry: CollectorRegistry, labels: Sequence[str]) -> None:
        """`labels`: the values of WORKER_LABELS."""
        self._registry, self._labels = registry, tuple(labels)
        self._peer = CappedValues(MAX_PEERS)
        self._seconds = TRANSFERS["tandem_transfer_seconds"].histogram_tally(registry)
        self._exposed = TRANSFERS["tandem_transfer_exposed_seconds"].histogram_tally(registry)
        self._bytes = TRANSFERS["tandem_transfer_bytes"].counter_tally(registry)
        self._failures = TRANSFERS["tandem_transfer_failures"].counter_tally(registry)
        self._moved: dict[str, Moved] = {}
        self._lock = Lock()

    def landed(self, peer: str, transport: str, num_bytes: int, seconds: Seconds) -> None:
        """Counts a transfer whose frames the peer has all verified."""
        with self._lock:
            pair = *self._labels, self._peer(peer), transport
            self._seconds.labels(*pair).observe(seconds.whole)
            self._bytes.labels(*pair).inc(num_bytes)
            self._exposed.labels(*self._labels, transport).observe(seconds.exposed)
            self._add(peer, Moved(num_bytes, 1, seconds.pushed + seconds.exposed))

    def failed(self, peer: str, transport: str, code: str) -> None:
        with self._lock:
            self._failures.labels(*self._labels, self._peer(peer), transport, code).inc()
            self._add(peer, Moved(failures=1))

    def moved_to(self, peer: str) -> Moved:
        """Returns the transfers to a peer since this worker started; for peers beyond MAX_PEERS, of all of them
        together.
        """
        with self._lock:
            return self._moved.get(self._peer(peer), Moved())

    def _add(self, peer: str, moved: Moved) -> None:
        name = self._peer(peer)
        self._moved[name] = self._moved.get(name, Moved()) + moved

    def watch_links(self, links: Callable[[], Sequence[LinkState]]) -> None:
        self._registry.register(_LinkCollector(links, self._labels))


class _LinkCollector(Collector):
    def __init__(self, links: Callable[[], Sequence[LinkState]], labels: tuple[str, ...]) -> None:
        self._links, self._labels = links, labels

    def collect(self) -> Iterator[Metric]:
        up, fallback = (LINKS[name].family() for name in ("tandem_link_up", "tandem_link_fallback"))
        for state in self._links()[:MAX_PEERS]:
            labels = *self._labels, state.peer.worker_id
            up.add_metric(labels, state.link is not None)
            if state.link is not None:
                fallback.add_metric(labels, fell_back(state.link))
        yield from (up, fallback)
