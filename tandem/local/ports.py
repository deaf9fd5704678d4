"""TCP ports of this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import ExitStack


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def check_free(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Whether all of these could be listened on at once.

    Raises:
        ValueError: one cannot; by its name in `addresses`.
    """
    with ExitStack() as probes:
        for name, (host, port) in addresses.items():
            try:
                family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
                probes.enter_context(socket.create_server((host, port), family=family))
            except OSError as error:
                raise ValueError(f"{name}: cannot listen on {host}:{port}: {error.strerror}") from None
