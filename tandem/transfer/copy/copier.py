"""Copying rows to a payload and back; one call, without the GIL, both copies and sums the bytes.

compiled   rows.c: one pass over the bytes, if there are a C compiler and AVX2
numpy      the same in two passes, anywhere
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tandem.machine.native import NotCompiled, compiled
from tandem.transfer.copy.rows import Rows
from tandem.transfer.protocol.wire import checksum

_SOURCE = Path(__file__).with_name("rows.c")
_MIN_BYTES = 256  # rows.c has only the xxh3 of longer payloads

_log = logging.getLogger(__name__)


class Copier:
    """Copies with numpy, or, for rows on a device, with torch through this machine's memory."""

    def gather(self, rows: Rows, ids: NDArray[np.int64], payload: memoryview, past_caches: bool) -> int:
        """Copies rows `ids`, one or more that exist, to `payload`, which starts on a cache line; returns its checksum.

        past_caches: another core will read the payload, and this one will not.
        """
        target = np.frombuffer(payload, np.uint8).reshape(len(ids), -1)
        if not rows.on_host:
            picked = rows.words().index_select(0, torch.from_numpy(ids).to(rows.kv.device))
            torch.from_numpy(target).view(torch.int64).copy_(picked)
            return checksum(payload)
        rows.array().take(ids, axis=0, out=target, mode="clip")  # mode "raise" would copy everything twice
        return checksum(payload)

    def scatter(self, payload: memoryview, rows: Rows, ids: NDArray[np.int64]) -> int:
        """Copies `payload` to rows `ids` and returns the checksum of what was copied.

        The sum is taken after the copy: if the sender overwrites the payload in between, the sum is wrong.
        """
        if not rows.on_host:
            words = torch.frombuffer(payload, dtype=torch.int64).view(len(ids), -1).to(rows.kv.device)
            rows.words().index_copy_(0, torch.from_numpy(ids).to(rows.kv.device), words)
            return checksum(payload)
        rows.array()[ids] = np.frombuffer(payload, np.uint8).reshape(len(ids), -1)
        return checksum(payload)


class CompiledCopier(Copier):
    def __init__(self, library: ctypes.CDLL) -> None:
        address, size = ctypes.c_void_p, ctypes.c_int64
        self._gather, self._scatter = library.tandem_gather, library.tandem_scatter
        self._gather.argtypes = address, size, address, size, address, ctypes.c_int
        self._scatter.argtypes = address, address, size, address, size
        self._gather.restype = self._scatter.restype = ctypes.c_uint64

    def gather(self, rows: Rows, ids: NDArray[np.int64], payload: memoryview, past_caches: bool) -> int:
        if not rows.in_lines or len(payload) < _MIN_BYTES:
            return super().gather(rows, ids, payload, past_caches)
        found: int = self._gather(rows.address, rows.row_bytes, _at(ids), len(ids), _at(payload), past_caches)
        return found

    def scatter(self, payload: memoryview, rows: Rows, ids: NDArray[np.int64]) -> int:
        if not rows.in_lines or len(payload) < _MIN_BYTES:
            return super().scatter(payload, rows, ids)
        found: int = self._scatter(_at(payload), rows.address, rows.row_bytes, _at(ids), len(ids))
        return found


def copier_path(cache: Path | None = None, cpu: Set[str] | None = None) -> Path:
    """Returns the library's path, compiling it if necessary. `cpu`: the target's instructions, by default this CPU's.

    Raises NotCompiled.
    """
    return compiled(_SOURCE, ("avx2",), cache=cache, cpu=cpu)


def load_copier(cache: Path | None = None) -> Copier:
    """Returns the compiled copier, whose library is kept in `cache`; if that fails, logs why and returns numpy's."""
    try:
        return CompiledCopier(ctypes.CDLL(str(copier_path(cache))))
    except (OSError, AttributeError, NotCompiled) as error:
        _log.warning("KV blocks are copied by numpy: %s", error)
        return Copier()


def _at(memory: Any) -> int:
    """Returns the address of a writable buffer."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))
