"""Parts of machines that not every machine has: users without a name, IPv6."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

UID = 54_321
# A user that the machine does not know, who has no home. It may read what only root can, such as a Python below /root,
# and write nowhere that others may not.
AS_NAMELESS = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search", "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME",
)  # fmt: skip
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="root alone can start programs of other users: setpriv"
)


def _has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6(), reason="this machine has no IPv6")
