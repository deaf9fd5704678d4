"""Programs run by a user that this machine does not know, who has no home: root alone can start them."""

from __future__ import annotations

import os
import shutil

import pytest

UID = 54_321
# It may read what only root can, such as a Python below /root, and write nowhere that others may not.
AS_NAMELESS = (
    "setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--inh-caps=+dac_read_search",
    "--ambient-caps=+dac_read_search", "env", "-u", "HOME", "-u", "USER", "-u", "LOGNAME",
)  # fmt: skip
needs_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("setpriv") is None, reason="root alone can start programs of other users: setpriv"
)
