"""Neighbours: processes that compute and never sleep, as other pods and programs of a machine do."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SPIN = "while True: pass"
# Linux may weigh sessions instead of threads, as it does pods: then each weighs half as much as the server's, as a pod
# that asked for one core does beside one that asked for two.
HALF = "3"


@contextmanager
def beside(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """`count` of them run until the block ends."""
    neighbours = [subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True) for _ in range(count)]
    try:
        for neighbour in neighbours:
            weight = Path(f"/proc/{neighbour.pid}/autogroup")
            if weight.exists():
                weight.write_text(HALF, encoding="utf-8")
        yield neighbours
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()
