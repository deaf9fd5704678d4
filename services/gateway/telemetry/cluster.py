"""Metrics of the cluster as a gateway sees it when Prometheus scrapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.registry import Collector

from tandem.catalogue.metrics import GATEWAY
from tandem.registry import LiveWorker, Role


class ClusterCollector(Collector):
    def __init__(self, workers: Callable[[], list[LiveWorker]], model: str, prices: Mapping[Role, float]) -> None:
        """`workers`: returns the model's workers as last seen. `prices`: of a worker's hour."""
        self._workers, self._model, self._prices = workers, model, prices
        self._seen: set[str] | None = None
        self._starts: Counter[Role] = Counter(dict.fromkeys(Role, 0))

    def collect(self) -> Iterator[Metric]:
        workers = self._workers()
        live = Counter(worker.info.role for worker in workers)
        self._note(workers)
        by_role: dict[str, Mapping[Role, float]] = {
            "tandem_live_workers": {role: live[role] for role in Role},
            "tandem_worker_starts": self._starts,
            "tandem_price_per_worker_hour": {role: self._prices.get(role, 0.0) for role in Role},
        }
        for name, values in by_role.items():
            family = GATEWAY[name].family()
            for role, value in values.items():
                family.add_metric((self._model, role), value)
            yield family

    def _note(self, workers: list[LiveWorker]) -> None:
        """Count workers that were not there at the last scrape."""
        now = {worker.info.incarnation: worker.info.role for worker in workers}
        if self._seen is not None:
            self._starts.update(role for incarnation, role in now.items() if incarnation not in self._seen)
        self._seen = set(now)
