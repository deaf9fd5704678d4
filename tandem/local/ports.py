"""TCP ports of this machine."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tandem.hosts import address, listener

NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # the host is not this machine's, at any port
_FIRST, _END = 10_240, 32_768  # Linux gives outgoing connections ports from 32,768 up


def free_ports(count: int) -> list[int]:
    """Returns free ports of 127.0.0.1 for processes that will be started.

    All processes of this user take ports in turn, from below the range of outgoing connections: no other process gets
    a port between this call and the moment it is listened on.

    Raises:
        OSError: every port is taken.
    """
    with (Path(tempfile.gettempdir()) / f"tandem-ports-{os.getuid()}").open("a+", encoding="utf-8") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        turn.seek(0)
        start = int(turn.read() or _FIRST)
        found: list[int] = []
        for offset in range(_END - _FIRST):
            port = _FIRST + (start - _FIRST + offset) % (_END - _FIRST)
            if len(found) == count:
                turn.truncate(0)
                turn.write(str(port))
                return found
            if _is_free(port):
                found.append(port)
    raise OSError(f"no {count} free ports between {_FIRST} and {_END}")


def _is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


def check_free(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Checks that all of these addresses can be listened on together.

    Raises:
        ValueError: an address cannot be listened on; the error has its name in `addresses`.
    """
    with ExitStack() as probes:
        for name, (host, port) in addresses.items():
            try:
                probes.enter_context(listener(host, port))
            except OSError as error:
                if error.errno is None:  # the host is unknown
                    raise ValueError(str(error)) from None
                option = "--host" if error.errno in NOT_HERE else name
                why = os.strerror(error.errno)
                raise ValueError(f"{option}: cannot listen on {address(host, port)}: {why}") from None
