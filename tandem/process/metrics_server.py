"""A process's metrics over HTTP, on a thread of its own. A module by itself: it brings prometheus_client."""

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
    """Inside, http://host:port answers at /metrics and /debug/integrity; the port is 0 where there is to be none.

    `integrity` is called on the server's thread, as collectors are.

    Args:
        port: 0 takes a free one.

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
    """As the header `accept` asks for it, and its content type. Only OpenMetrics has exemplars."""
    kinds = (part.partition(";")[0].strip() for part in accept.split(","))
    if "application/openmetrics-text" in kinds:  # not by prometheus_client's own choice: there vllm:x becomes vllm_x
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
