"""Memory that the ranks share, and their meetings there: a rank writes its part, meets the others, and reads the whole.

lines      a counter a rank for meetings, one for messages, one a rank that shows it is alive (exchange.c)
message    what the leader says to the other ranks
places     each for one thing that ranks compute together: a rank writes there again only after a later meeting, at
           which no other rank can still read what was there before
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from tandem.engine.parallel.rooms import Rooms
from tandem.machine.native import NotCompiled, compiled
from tandem.machine.resources import usable_cpus

SOURCE = Path(__file__).with_name("exchange.c")
LINE = 64  # bytes
# The time after which a rank that waits for others looks whether they are alive, and after which an idle one does.
PATIENCE_US, IDLE_US = 20_000, 200_000
# How often a rank looks before it sleeps: about 0.3 ms, as waking it takes long; little where ranks share cores.
SPINS, FEW_SPINS = 8192, 64

_LENGTH = 8
_LOOK = ctypes.CFUNCTYPE(ctypes.c_int64)


class _Meetings(ctypes.Structure):
    """`struct meetings` of exchange.c."""

    _fields_ = [
        ("lines", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("ranks", "rank", "spins", "patience_us")),
        ("look", _LOOK),
    ]


class SharedMemory:
    """Zeroed memory that processes share: a file without a name, which ends with its last user."""

    def __init__(self, fd: int, size: int) -> None:
        """Maps a file of another process, or of this one."""
        self.fd, self.size = fd, size
        self._map = mmap.mmap(fd, size)
        self.view = memoryview(self._map)

    @classmethod
    def new(cls, size: int) -> SharedMemory:
        fd = os.memfd_create("tandem-ranks")
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def of_process(cls, pid: int, fd: int, size: int) -> SharedMemory:
        """Maps the file `fd` of the process `pid`."""
        return cls(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR), size)

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if not (count := math.prod(shape)):
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=count, offset=offset).view(shape)

    def close(self) -> None:
        """Closes the file. The memory stays until nothing of this process uses it."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class RankExchange:
    """A rank's part in the meetings. `look` is called while another rank is late; it raises if that rank has died."""

    def __init__(self, memory: SharedMemory, rooms: Rooms, rank: int, ranks: int, look: Callable[[], None]) -> None:
        self.rank, self.ranks, self.rooms = rank, ranks, rooms
        self._memory, self._look, self._library = memory, look, _library()
        spins = SPINS if ranks <= usable_cpus() else FEW_SPINS
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
        self._lines = base + rooms.at["lines"]
        self._said, self._heard, self._met = self._lines + ranks * LINE, 0, ctypes.c_uint32()
        self._meetings = _Meetings(self._lines, ranks, rank, spins, PATIENCE_US, _LOOK(self._is_in_vain))
        self._error: BaseException | None = None
        self._flat: dict[tuple[str, torch.dtype], Tensor] = {}
        self._beats = memory.view[(ranks + 1) * LINE :][: ranks * LINE].cast("I")

    def place(self, name: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns the place (rows, width), which all ranks read and write."""
        if rows > self.rooms.max_rows:
            raise ValueError(f"a step of {rows} tokens, where there is room for {self.rooms.max_rows}")
        if (flat := self._flat.get((name, dtype))) is None:
            room = self.rooms.bytes_of[name] // dtype.itemsize
            flat = self._flat[name, dtype] = self._memory.tensor(self.rooms.at[name], (room,), dtype)
        return flat[: rows * width].view(rows, width)

    def gathered(self, name: str, own: Tensor, first: int, width: int) -> Tensor:
        """Returns (rows, width) of all ranks; `own` (rows, columns) are this rank's from column `first` on."""
        whole = self.place(name, len(own), width, own.dtype)
        whole[:, first : first + own.shape[1]] = own
        self.meet()
        return whole

    def meet(self) -> None:
        """Waits until all ranks have come as far as this one."""
        self._met.value += 1
        self._library.tandem_arrive(ctypes.byref(self._meetings))
        if self._library.tandem_wait_for_all(ctypes.byref(self._meetings), self._met):
            self.fail()

    def native(self) -> tuple[int, int, int, int]:
        """Returns what compiled code meets with: the addresses of the meetings, of the functions to arrive and to wait,
        and of the number of meetings so far, which it counts up. After a wait in vain call `fail`."""
        functions = self._library.tandem_arrive, self._library.tandem_wait_for_all
        arrive, wait = (ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions)
        return ctypes.addressof(self._meetings), arrive, wait, ctypes.addressof(self._met)

    def fail(self) -> NoReturn:
        """Raises what `look` has raised."""
        assert self._error is not None
        raise self._error

    def say(self, message: bytes) -> None:
        """Gives the other ranks a message; all must have met since the one before."""
        if len(message) + _LENGTH > (room := self.rooms.bytes_of["message"]):
            raise ValueError(f"a message of {len(message)} bytes, where there is room for {room - _LENGTH}")
        at = self.rooms.at["message"]
        self._memory.view[at : at + _LENGTH] = len(message).to_bytes(_LENGTH, "little")
        self._memory.view[at + _LENGTH : at + _LENGTH + len(message)] = message
        self._library.tandem_count_up(self._said)

    def hear(self) -> memoryview:
        """Waits for the leader's next message."""
        self._heard = self._heard + 1 & 0xFFFFFFFF
        while self._library.tandem_wait(self._said, self._heard, FEW_SPINS, IDLE_US):
            self._look()
        at = self.rooms.at["message"]
        length = int.from_bytes(self._memory.view[at : at + _LENGTH], "little")
        return self._memory.view[at + _LENGTH : at + _LENGTH + length]

    def _is_in_vain(self) -> int:
        try:
            self._look()
        except BaseException as error:  # C code cannot raise it: `fail` does
            self._error = error
        return int(self._error is not None)

    def beat(self) -> None:
        """Shows the leader that this rank is alive."""
        self._beats[self.rank * LINE // 4] = (self._beats[self.rank * LINE // 4] + 1) & 0xFFFFFFFF

    def beats(self, rank: int) -> int:
        """Returns a number that changes as long as a rank is alive."""
        return self._beats[rank * LINE // 4]


def library_path(cache: Path | None = None) -> Path:
    """Compiles the library if necessary. Raises NotCompiled."""
    return compiled(SOURCE, (), cache=cache)


@cache
def _library() -> ctypes.CDLL:
    """Raises ValueError if this machine cannot have the library."""
    try:
        library = ctypes.CDLL(str(library_path()))
    except (OSError, NotCompiled) as error:
        raise ValueError(f"tensor_parallel: ranks meet in compiled code, and {error}") from None
    line, count = ctypes.c_void_p, ctypes.c_uint32
    library.tandem_wait.argtypes = line, count, ctypes.c_int64, ctypes.c_int64
    library.tandem_count_up.argtypes, library.tandem_count_up.restype = (line,), count
    library.tandem_arrive.argtypes, library.tandem_arrive.restype = (ctypes.c_void_p,), None
    library.tandem_wait_for_all.argtypes = ctypes.c_void_p, count
    library.tandem_wait.restype = library.tandem_wait_for_all.restype = ctypes.c_int64
    return library
