"""A worker's load, for Prometheus and so for autoscalers: prefill of prompts that wait, decode of blocks.

Read from the engine's last statistics when Prometheus asks; served on a thread of its own. Beside it, at
/debug/integrity, what the worker holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, Metric, start_http_server
from prometheus_client.registry import Collector

from tandem.engine import EngineStats
from tandem.metrics import WORKER
from tandem.process import IntegrityReport


class WorkerCollector(Collector):
    def __init__(self, stats: Callable[[], EngineStats], labels: Sequence[str]) -> None:
        """`labels`: values of WORKER_LABELS."""
        self._stats, self._labels = stats, labels

    def collect(self) -> Iterator[Metric]:
        for name, value in _values(self._stats()).items():
            family = WORKER[name].family()
            family.add_metric(self._labels, value)
            yield family


def _values(stats: EngineStats) -> dict[str, float]:
    return {
        "tandem_queued_tokens": stats.queued_tokens,
        "tandem_running_sequences": stats.num_running + stats.num_waiting,
        "tandem_kv_blocks": stats.num_blocks,
        "tandem_kv_usage": (stats.num_blocks - stats.free_blocks) / stats.num_blocks,
        "tandem_read_tokens": stats.num_prefilled_tokens,
        "tandem_written_tokens": stats.num_written_tokens,
        "tandem_proposed_tokens": stats.num_proposed_tokens,
        "tandem_accepted_tokens": stats.num_accepted_tokens,
        "vllm:num_preemptions": stats.num_preempted,
        "tandem_swapped_preemptions": stats.num_swapped,
        "tandem_aborted_sequences": stats.num_aborted,
        "tandem_aborted_blocks": stats.num_aborted_blocks,
    }


@contextmanager
def metrics_served(
    collector: WorkerCollector, integrity: Callable[[], IntegrityReport], host: str, port: int | None
) -> Iterator[None]:
    """Inside, http://host:port answers at /metrics and /debug/integrity; nothing where there is no port.

    Both are called on the server's thread.

    Raises:
        OSError: the address cannot be bound.
    """
    if port is None:
        yield
        return
    registry = CollectorRegistry()
    registry.register(collector)
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
