"""What a worker is short of, for Prometheus and so for autoscalers: prefill of time to read, decode of blocks.

Read from the engine's last statistics when Prometheus asks; served on a thread of its own. Beside it, at
/debug/integrity, what the worker holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from tandem.engine import EngineStats
from tandem.process import IntegrityReport


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
        preempted, swapped = "Sequences that had to leave their blocks.", "Of these, those with KV in host memory."
        yield CounterMetricFamily("vllm:num_preemptions", preempted, value=stats.num_preempted)
        yield CounterMetricFamily("tandem_swapped_preemptions", swapped, value=stats.num_swapped)
        released = "KV blocks that aborted sequences released."
        yield CounterMetricFamily("tandem_aborted_sequences", "Sequences aborted.", value=stats.num_aborted)
        yield CounterMetricFamily("tandem_aborted_blocks", released, value=stats.num_aborted_blocks)


@contextmanager
def metrics_served(
    stats: Callable[[], EngineStats], integrity: Callable[[], IntegrityReport], host: str, port: int | None
) -> Iterator[None]:
    """Inside, http://host:port answers at /metrics and /debug/integrity; nothing where there is no port.

    `integrity` is called on the server's thread.

    Raises:
        OSError: the address cannot be bound.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(WorkerCollector(stats))
    server, thread = start_http_server(port, host, registry)
    server.set_app(_with_integrity(server.get_app(), integrity))
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def _with_integrity(metrics: Any, integrity: Callable[[], IntegrityReport]) -> Any:
    """Two WSGI apps as one."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] != "/debug/integrity":
            answered: Iterable[bytes] = metrics(environ, start_response)
            return answered
        body = json.dumps(integrity().json()).encode()
        start_response("200 OK", [("content-type", "application/json")])
        return [body]

    return answer
