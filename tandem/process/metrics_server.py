"""A process's metrics over HTTP, on a thread of its own. A module by itself, as it imports prometheus_client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest, start_http_server
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.openmetrics import exposition as openmetrics

from tandem.hosts import resolved
from tandem.process.integrity import IntegrityReport


@contextmanager
def serving(
    registry: CollectorRegistry, integrity: Callable[[], IntegrityReport], host: str, port: int | None
) -> Iterator[int]:
    """Serves /metrics and /debug/integrity at http://host:port inside the block. Yields the port; 0 if `port` is None.

    `integrity` is called on the server's thread, as collectors are.

    Args:
        port: 0: a free one; None: no server.

    Raises:
        OSError: the address cannot be bound.
    """
    if port is None:
        yield 0
        return
    server, thread = start_http_server(port, resolved(host), registry)
    server.set_app(_app(registry, integrity))
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the metrics in the format that the header `accept` asks for, and its content type.

    Exemplars: OpenMetrics only.
    """
    kinds = (part.partition(";")[0].strip() for part in accept.split(","))
    if "application/openmetrics-text" in kinds:  # not prometheus_client's own choice, which renames vllm:x to vllm_x
        text: bytes = openmetrics.generate_latest(registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return text, openmetrics.CONTENT_TYPE_LATEST
    return generate_latest(registry), CONTENT_TYPE_PLAIN_0_0_4


def _app(registry: CollectorRegistry, integrity: Callable[[], IntegrityReport]) -> Any:
    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ["PATH_INFO"] == "/debug/integrity":
            body, content_type = json.dumps(integrity().json()).encode(), "application/json"
        else:
            body, content_type = exposition(registry, environ.get("HTTP_ACCEPT", ""))
        start_response("200 OK", [("content-type", content_type)])
        return [body]

    return answer
