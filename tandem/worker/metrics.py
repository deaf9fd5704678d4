"""What a worker is short of, for Prometheus and so for autoscalers: prefill of time to read, decode of blocks.

Read from the engine's last statistics when Prometheus asks; served on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.engine import EngineStats


class WorkerCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        used = stats.num_blocks - stats.free_blocks
        for name, text, value in (
            ("queued_tokens", "Prompt tokens accepted and not yet computed.", stats.queued_tokens),
            ("running_sequences", "Sequences that run or wait.", stats.num_running + stats.num_waiting),
            ("kv_blocks", "KV blocks.", stats.num_blocks),
            ("kv_usage", "Part of the KV blocks that live sequences use, from 0 to 1.", used / stats.num_blocks),
        ):
            yield GaugeMetricFamily(f"tandem_{name}", text, value=value)
        yield CounterMetricFamily("tandem_read_tokens", "Prompt tokens computed.", value=stats.num_read_tokens)
        yield CounterMetricFamily("tandem_written_tokens", "Tokens decoded.", value=stats.num_written_tokens)


@contextmanager
def metrics_served(stats: Callable[[], EngineStats], host: str, port: int | None) -> Iterator[None]:
    """Inside, http://host:port/metrics answers; nothing where there is no port.

    Raises:
        OSError: the address cannot be bound.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(WorkerCollector(stats))
    server, thread = start_http_server(port, host, registry)
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
