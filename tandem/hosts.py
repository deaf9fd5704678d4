"""Hosts in operators' notation: names and addresses, IPv6 with or without brackets, and wildcards."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Annotated, Any

from pydantic import AfterValidator

EVERYWHERE = ("0.0.0.0", "::", "")
LOOPBACKS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


def bare(host: str) -> str:
    """Returns a host without brackets; an address in its canonical form."""
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        return str(ip_address(inner))
    except ValueError:
        return inner


Host = Annotated[str, AfterValidator(bare)]


def with_bare_hosts(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with their hosts in the form that services read."""
    hosts = {name: bare(str(settings[name])) for name in ("host", "advertise_host") if name in settings}
    return {**settings, **hosts}


def address(host: str, port: object) -> str:
    """Returns host:port, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def resolved(host: str) -> str:
    """Returns the address to listen on for a host; for a name its first IPv4 address, else its first address.

    Raises:
        OSError: the host is unknown; the message names the option.
    """
    try:
        found = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:  # UnicodeError: a name that no resolver accepts
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise OSError(f"--host: {host!r} is no address, and no name that is known here: {why}") from None
    return str(min(found, key=lambda one: one[0] != socket.AF_INET)[4][0])


def listener(host: str, port: int, backlog: int | None = None) -> socket.socket:
    """Returns a socket that listens there; at :: for IPv4 as well.

    Raises:
        OSError: the host is unknown, or the address is in use.
    """
    at = resolved(host)
    family = socket.AF_INET6 if ":" in at else socket.AF_INET
    both = at == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((at, port), family=family, backlog=backlog, dualstack_ipv6=both)


def reached_from_here(host: str) -> str:
    """Returns the host at which this machine reaches a server that listens at `host`."""
    return LOOPBACKS.get(host, host)


def is_loopback(host: str) -> bool:
    """True if only this machine reaches a server that listens at `host`."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
