"""Child processes that never outlive their parent, however it ends.

Linux only; elsewhere they are ordinary children.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Before the child executes the program, it asks to be killed with its parent, and exits if its parent has ended
# already.
_SHIM = """
import ctypes, os, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def dying_with_parent(program: str, *arguments: str) -> Sequence[str]:
    """Returns the command line that runs `program` such that it dies with the thread that started it."""
    return [sys.executable, "-ISc", _SHIM, str(os.getpid()), program, *arguments]
