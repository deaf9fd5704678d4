"""A process's metrics over HTTP, on a thread of its own. A module by itself: it brings prometheus_client."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from prometheus_client import CollectorRegistry, start_http_server

from tandem.process.integrity import IntegrityReport


@contextmanager
def metrics_served(
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
    server, thread = start_http_server(port, host, registry)
    server.set_app(_with_integrity(server.get_app(), integrity))
    try:
        yield server.server_port
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
