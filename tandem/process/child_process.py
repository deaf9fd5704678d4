"""Child processes that never outlive their parent, however it ends. Linux only; elsewhere they are ordinary ones."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# The child asks for its own death before it becomes the program, and is gone already if its parent was quicker.
_SHIM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(program: str, *arguments: str) -> Sequence[str]:
    """The command line that runs `program` so; it dies with the thread that started it."""
    return [sys.executable, "-ISc", _SHIM, str(os.getpid()), program, *arguments]
